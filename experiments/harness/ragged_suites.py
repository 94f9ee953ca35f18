"""Which grouped products are measured: shapes, group sizes, passes.

Three suites are no part of "all":

sizes: time over rows a group, 8 to 1024 on average, of one weight matrix that
models have, 4096 x 2048 (an expert's projection). There are 32 groups
throughout: 512 MiB of weights, ten times an L2, so that with few rows reading
them binds, by design; and 32768 rows at most, 0.55 TFLOP, which a dense product
computes in under a millisecond. Between lie the sizes at which tiles are part
empty: 64 and 128 are a tile's rows, 96, 192 and 384 are not.

odd: weights and results that are no whole number of swizzle atoms. N = 1407 and
4100, whose rows TMA can't address, N = 1400 and K = 1407, beside the next
multiple of 64. What the two differ by is what such sizes cost.

experts: layers of expert models with 8 to 1024 rows a group, with which other
grouped products have been compared.
"""

from typing import Any

from experiments.harness.group_sizes import DISTRIBUTIONS

LAYERS = ("layer", "layer_grad")
TRAINING = ("forward", "dx", "dw")
PASSES = (*TRAINING, "gated", *LAYERS)

# Each suite as keyword arguments of its cases.
Kwargs = dict[str, Any]


def _each(passes, sizes, *shapes: Kwargs) -> list[Kwargs]:
  return [
    shape | {"sizes": how, "pass_": pass_}
    for shape in shapes
    for how in sizes
    for pass_ in passes
  ]


def _shape(m: int, n: int, k: int, groups: int, **kwargs) -> Kwargs:
  return {"m": m, "n": n, "k": k, "groups": groups, **kwargs}


def _moe(*shapes: Kwargs) -> list[Kwargs]:
  return _each(LAYERS, ("routed",), *shapes)


# All but "padded": every row is in a group.
_FULL = tuple(DISTRIBUTIONS)[:-1]
_MIXTRAL = _shape(8192, 14336, 4096, 8)
SUITES: dict[str, list[Kwargs]] = {
  "mixtral": _each(TRAINING, ("even", "zipf", "one_hot"), _MIXTRAL),
  "deepseek": _each(
    TRAINING,
    ("even", "zipf"),
    _shape(131072, 1024, 7168, 256),
    _shape(131072, 7168, 1024, 256),
  ),
  "qwen": _each(
    TRAINING,
    ("even", "zipf"),
    _shape(65536, 1536, 4096, 128),
    _shape(65536, 4096, 1536, 128),
  ),
  "decode": _each(
    ("forward",),
    ("random",),
    *(
      _shape(rows * groups, 14336, 4096, groups)
      for groups in (8, 64)
      for rows in (8, 32, 128)
    ),
  ),
  "distributions": _each(TRAINING, _FULL, _shape(16384, 4096, 4096, 32)),
  "gated": [
    *_each(("gated",), ("even", "zipf", "one_hot"), _MIXTRAL),
    # The sums of Qwen3-30B-A3B are half as long, so two results that are
    # written and read again weigh twice as much.
    *_each(("gated",), ("even", "zipf"), _shape(65536, 768, 2048, 128)),
    *_each(("gated",), ("random",), _shape(2048, 14336, 4096, 64)),
  ],
  "moe": _moe(_MIXTRAL | {"top_k": 2}),
}
ROWS_A_GROUP = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
SIZES = _each(
  TRAINING,
  ("even", "random", "zipf"),
  *(_shape(32 * rows, 2048, 4096, 32) for rows in ROWS_A_GROUP),
)
ODD = _each(
  TRAINING,
  ("random",),
  *(_shape(8191, n, 4096, 60) for n in (1400, 1407, 1408)),
  *(_shape(8192, n, 4096, 16) for n in (4100, 4160)),
  *(_shape(8192, 4096, k, 60) for k in (1407, 1408)),
)
EXPERTS = [
  *_each(TRAINING, ("even",), _shape(512, 2048, 7168, 64)),
  *_each(TRAINING, ("even",), _shape(8192, 2048, 7168, 64)),
  *_each(TRAINING, ("zipf",), _shape(8192, 1536, 2048, 60)),
  *_each(TRAINING, ("zipf",), _shape(16384, 768, 2048, 128)),
  *_each(TRAINING, ("random",), _shape(32768, 1536, 5120, 160)),
  *_each(TRAINING, ("random",), _shape(8192, 14336, 4096, 8)),
]
QUICK = [
  *_each(TRAINING, ("even",), _MIXTRAL),
  *_each(("forward",), ("zipf",), _MIXTRAL),
  *_each(("gated",), ("zipf",), _MIXTRAL),
]
_SMALL = _shape(32, 24, 16, 4)
INTERPRET = [
  *_each(TRAINING, ("odd",), _SMALL),
  *_each(("forward",), ("even", "half_empty", "padded"), _SMALL),
  *_each(("gated",), ("zipf",), _SMALL),
  *_moe(_SMALL | {"top_k": 2}),
]
# The suites that no "all" holds: parts of others, for the interpreter, curves.
SPECIAL: dict[str, list[Kwargs]] = {
  "quick": QUICK,
  "interpret": INTERPRET,
  "sizes": SIZES,
  "odd": ODD,
  "experts": EXPERTS,
}
