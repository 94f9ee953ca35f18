"""Random problems, to see how the cost model fares where nothing was fitted.

Sizes are those of models' layers and of numbers of tokens, or any; with every
layout, batches, and epilogues. The same seed gives the same problems.
"""

import math
import random
from typing import Any

from experiments.harness.dense_cases import Case

# Widths of the layers of language and vision models.
_WIDTHS = (
    128, 256, 320, 384, 512, 576, 640, 768, 896, 1024, 1152, 1280, 1536, 1600,
    1792, 2048, 2304, 2560, 2816, 2880, 3072, 3584, 4096, 4544, 5120, 5376,
    5760, 6144, 6400, 6656, 7168, 8192, 8640, 9216, 10240, 11008, 12288, 13824,
    14336, 16384, 17920, 18944, 24576, 27648, 28672, 32000, 32768,
)  # fmt: skip
_TOKENS = (
    1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 100, 128, 160, 192, 200, 256,
    320, 384, 500, 512, 640, 768, 1000, 1024, 1536, 2048, 2560, 3000, 4096,
    5000, 6144, 8192, 12288, 16384,
)  # fmt: skip
_BATCHES = (2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_BATCHED = (
    32, 48, 64, 80, 96, 128, 192, 196, 256, 384, 512, 768, 1024, 2048,
)  # fmt: skip
_SHORT = (16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256)
_SQUARE = (
    384, 640, 768, 896, 1280, 1536, 1792, 2304, 2560, 3072, 3584, 5120, 6144,
    7168, 10240, 12288,
)  # fmt: skip
# The frequent ones stand in here several times.
_KINDS = (
  *["layer"] * 6,
  *["odd"] * 2,
  *["batched"] * 2,
  "short",
  "gated",
  "square",
)
_LAYOUTS = (*["NN"] * 3, *["NT"] * 3, *["TN"] * 2, "TT")
_EPILOGUES = (
  *["none"] * 6,
  "bias",
  "bias+gelu",
  "silu",
  "residual",
  "residual+bias",
  "relu",
  "bias+gelu_erf",
)
_OUT_DTYPES = (*[None] * 6, "float32")
_BATCHED_EPILOGUES = (*["none"] * 5, "relu")
# Larger ones are left out: 1.6 ms at 800 TFLOP/s; elements of the operands.
_MOST_FLOPS = 1.3e12
_MOST_ELEMENTS = 6e8


def draw(seed: int, count: int, dtype: str) -> list[Case]:
  """Random cases, those of a kind (the suite) one after the other.

  Args:
    seed: of the problems.
    count: how many; the first of more with the same seed.
    dtype: of the operands.
  """
  rng = random.Random(seed)
  found: list[Case] = []
  while len(found) < count:
    case = Case(dtype=dtype, **_fields(rng))
    elements = sum(math.prod(x.shape) for x in case.operands().values())
    if case.flops() <= _MOST_FLOPS and elements <= _MOST_ELEMENTS:
      found.append(case)
  return sorted(found, key=lambda case: case.suite)


def _fields(rng: random.Random) -> dict[str, Any]:
  kind = rng.choice(_KINDS)
  found: dict[str, Any] = {
    "suite": kind,
    "layout": rng.choice(_LAYOUTS),
    "epilogue": rng.choice(_EPILOGUES),
    "out_dtype": rng.choice(_OUT_DTYPES),
  }
  if kind == "layer":
    sizes = rng.choice(_TOKENS), rng.choice(_WIDTHS), rng.choice(_WIDTHS)
  elif kind == "odd":
    sizes = _odd(rng)
  elif kind == "batched":
    found["batch"] = rng.choice(_BATCHES)
    sizes = tuple(rng.choice(_BATCHED) for _ in range(3))
    found["epilogue"] = rng.choice(_BATCHED_EPILOGUES)
  elif kind == "short":
    sizes = rng.choice(_TOKENS[20:]), rng.choice(_WIDTHS), rng.choice(_SHORT)
  elif kind == "gated":
    sizes = (
      rng.choice(_TOKENS),
      rng.choice(_WIDTHS[8:]),
      rng.choice(_WIDTHS[8:40]),
    )
    plain = {"layout": "NN", "epilogue": "none", "out_dtype": None}
    found |= {"kernel": "gated_matmul"} | plain
  else:
    sizes = (rng.choice(_SQUARE),) * 3
  return found | dict(zip("mnk", sizes))


def _odd(rng: random.Random) -> tuple[int, ...]:
  """Any sizes, evenly on a logarithmic scale; most are multiples of 8."""
  sizes = [
    int(math.exp(rng.uniform(math.log(16), math.log(most))))
    for most in (12000, 12000, 8000)
  ]
  if rng.random() < 0.7:
    sizes = [-(-size // 8) * 8 for size in sizes]
  return tuple(sizes)
