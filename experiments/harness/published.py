"""What published ladders reached, as data, to set beside our own rows.

Figures only, each with its source. A published step is put beside the rung
whose idea it added last; steps that have no rung of their own (autotuning, a
larger tile) are left out. GPUs, sizes and clocks differ from ours, so what
compares is the ratio to cuBLAS on the same GPU.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Ladder:
  """One published sequence.

  Attributes:
    key: short name for a column.
    source: who published it, and where.
    gpu: what it was measured on.
    problem: sizes and dtype.
    tflops: throughput by rung number, in TFLOP/s; empty if only ratios were
      published.
    cublas_tflops: cuBLAS on the same GPU; None if not given.
    ratios: throughput / cuBLAS by rung number where only that was published.
  """

  key: str
  source: str
  gpu: str
  problem: str
  tflops: dict[int, float] = dataclasses.field(default_factory=dict)
  cublas_tflops: float | None = None
  ratios: dict[int, float] = dataclasses.field(default_factory=dict)

  def of_cublas(self, number: int) -> float | None:
    """The rung's published throughput as a part of cuBLAS's."""
    if number in self.ratios:
      return self.ratios[number]
    if number in self.tflops and self.cublas_tflops:
      return self.tflops[number] / self.cublas_tflops
    return None

  def gain(self, number: int) -> float | None:
    """The rung's published throughput over that of the rung before."""
    values = self.tflops or self.ratios
    if number in values and number - 1 in values:
      return values[number] / values[number - 1]
    return None


LADDERS = (
    Ladder(
        key="Boehm",
        source="Simon Boehm, https://siboehm.com/articles/22/CUDA-MMM",
        gpu="RTX A6000",
        problem="fp32 4096^3",
        tflops={
            1: 0.309, 2: 1.987, 3: 2.980, 4: 8.475,
            5: 15.972, 6: 18.237, 7: 21.779,
        },
        cublas_tflops=23.250,
    ),
    Ladder(
        key="Mao",
        source=(
            "Lei Mao, https://leimao.github.io/article/"
            "CUDA-Matrix-Multiplication-Optimization/"
        ),
        gpu="RTX 3090",
        problem="fp32 4096^3",
        tflops={1: 0.28, 2: 1.72, 3: 2.66, 4: 8.9, 5: 13.0, 6: 19.7, 7: 20.2},
        cublas_tflops=24.6,
    ),
    Ladder(
        key="fast.cu",
        source="fast.cu, https://github.com/pranjalssh/fast.cu",
        gpu="H100",
        problem="bf16 4096^3",
        # 9: wgmma and TMA; 10: two consumers, 128x256; 11: persistent
        # schedule; 12: clusters with multicast.
        tflops={9: 317.0, 10: 610.0, 11: 660.0, 12: 734.0},
        cublas_tflops=716.0,
    ),
    Ladder(
        key="tilus",
        source="tilus, https://github.com/NVIDIA/tilus",
        gpu="H200 NVL",
        problem="fp16 8192^3",
        ratios={9: 0.737, 10: 0.831},
    ),
)  # fmt: skip


def beside(number: int) -> Ladder | None:
  """The ladder whose column stands beside a rung's own numbers."""
  for ladder in LADDERS:
    if ladder.of_cublas(number) is not None:
      return ladder
  return None
