"""What published ladders reached, as data, to set beside our own rows.

Figures only, each with its source. A published step is put beside the rung
whose idea it added last; steps that have no rung of their own (autotuning, a
larger tile) have none here. GPUs, sizes and clocks differ from ours, so what
compares is the ratio to cuBLAS on the same GPU.
"""

import dataclasses

MS, PERCENT = "ms", "% of cuBLAS"


@dataclasses.dataclass(frozen=True)
class Ladder:
  """One published sequence.

  Attributes:
    source: who published it.
    url: where; None where there is no address to give.
    gpu: what it was measured on; None if that is not said.
    problem: dtype and sizes.
    unit: of the figures.
    steps: (name, figure, the number of the rung beside which it stands).
    cublas: cuBLAS on the same GPU, in the same unit; None if not given.
    note: what else the source says.
  """

  source: str
  url: str | None
  gpu: str | None
  problem: str
  unit: str
  steps: tuple[tuple[str, float, int | None], ...] = ()
  cublas: float | None = None
  note: str = ""

  def of_cublas(self, number: int) -> float | None:
    """The rung's published speed as a part of cuBLAS's."""
    found = [x for _, x, rung in self.steps if rung == number]
    if found and self.unit == PERCENT:
      return found[-1] / 100
    if not found or self.cublas is None:
      return None
    ratio = found[-1] / self.cublas
    return 1 / ratio if self.unit == MS else ratio


LADDERS = (
  Ladder(
    "S. Boehm", "https://siboehm.com/articles/22/CUDA-MMM", "RTX A6000",
    "fp32 4096³", "GFLOP/s",
    (
      ("naive", 309, 1), ("coalesced", 1987, 2), ("shared memory", 2980, 3),
      ("1-D", 8475, 4), ("2-D", 15972, 5), ("vectorised", 18237, 6),
      ("tuned", 19721, None), ("warptile", 21779, 7),
    ),
    cublas=23250,
  ),
  Ladder(
    "L. Mao",
    "https://leimao.github.io/article/CUDA-Matrix-Multiplication-Optimization/",
    "RTX 3090", "fp32 4096³", "TFLOP/s",
    (
      ("naive", 0.28, 1), ("coalesced", 1.72, 2), ("shared memory", 2.66, 3),
      ("1-D", 8.9, 4), ("2-D", 13.0, 5), ("vectorised", 19.7, 6),
      ("warptile", 20.2, 7),
    ),
    cublas=24.6,
  ),
  Ladder(
    "a study worklog", None, "RTX 5090", "fp32, alpha·A@B + beta·C", MS,
    (
      ("naive", 3.94, 1), ("DRAM-coalesced", 0.518, 2),
      ("SRAM (shared memory)", 0.249, 3), ("1-D", 0.249, 4),
    ),
    cublas=0.045,
    note="coalescing alone took the DRAM rate from 2.4 to 18.1 GB/s",
  ),
  Ladder(
    "a six-step series", None, None, "fp32 1024³", "GFLOP/s",
    (
      ("naive", 22.3, 1), ("coalesced", 318, 2), ("tiled", 396, 3),
      ("1-D", 847, 4), ("2-D", 985, 5), ("vectorised", 1348, 6),
    ),
    note="14.3x by coalescing, 2.1x by 1-D tiles, 60.56x in all",
  ),
  Ladder(
    "fast.cu", "https://github.com/pranjalssh/fast.cu", "H100", "bf16 4096³",
    "TFLOP/s",
    (
      ("CUDA cores", 32, None), ("wgmma and TMA", 317, 9),
      ("larger tile", 423, None), ("warp-specialised", 498, None),
      ("two consumers", 610, 10), ("persistent", 660, 11),
      ("barriers", 704, None), ("clusters", 734, 12),
      ("micro-optimisations", 747, None), ("asynchronous stores", 758, None),
      ("Hilbert order", 764, None),
    ),
    cublas=716,
  ),
  Ladder(
    "tilus", "https://github.com/NVIDIA/tilus", "H200 NVL", "fp16 8192³",
    PERCENT,
    (
      ("first", 41.6, None), ("wgmma", 73.7, 9), ("stages", 75.6, None),
      ("warp-specialised", 83.1, 10), ("L2 order", 81.8, None),
      ("two consumers", 91.8, None),
    ),
  ),
  Ladder(
    "JAX documentation",
    "https://docs.jax.dev/en/latest/pallas/gpu/blackwell_matmul.html", "B200",
    "fp16", PERCENT,
    (
      ("basic", 59, None), ("warp-specialised", 72, None),
      ("tiled epilogue", 88, None), ("2-CTA", 94, None),
      ("persistent", 97, None), ("epilogue warpgroup", 100, None),
      ("grid tiling", 110, None),
    ),
  ),
  Ladder(
    "an LLM-oriented series", None, "H100", "4096³", "% of peak",
    note="from under 1 to about 90 with tensor cores",
  ),
)  # fmt: skip


def beside(number: int) -> Ladder | None:
  """The ladder whose column stands beside a rung's own numbers."""
  for ladder in LADDERS:
    if ladder.of_cublas(number) is not None:
      return ladder
  return None


def cells() -> list[list[str]]:
  """The figures as a table: source; GPU, problem, unit; steps."""
  found = []
  for ladder in LADDERS:
    source = f"[{ladder.source}]({ladder.url})" if ladder.url else ladder.source
    steps = ", ".join(f"{name} {figure:g}" for name, figure, _ in ladder.steps)
    cublas = "" if ladder.cublas is None else f"cuBLAS {ladder.cublas:g}"
    what = [ladder.gpu or "GPU not named", ladder.problem, ladder.unit]
    said = "; ".join(filter(None, (steps, cublas, ladder.note)))
    found.append([source, ", ".join(what), said])
  return found
