"""The one list of shapes: what is measured, tested and tuned, by name.

A suite is a list of problems, each as fields of a case, with tags:

  published  part of `--suite=all`: its configs are frozen into the shipped
             table
  ladder, ci remarks: for the rungs, for tests

Random problems are drawn by a seed: `dense_cases.draw`.
"""

from collections.abc import Iterable, Mapping
import re
from typing import Any, NamedTuple

Problem = dict[str, Any]


class Shape(NamedTuple):
  """A product [m, k] x [k, n]."""

  m: int
  n: int
  k: int

  def __str__(self) -> str:
    return f"{self.m}x{self.n}x{self.k}"


class Suite(NamedTuple):
  """Problems that belong together, and what they are for."""

  problems: list[Problem]
  tags: frozenset[str]


Suites = Mapping[str, Suite]


def parse(text: str) -> Shape:
  """The shape of "MxNxK".

  Raises:
    ValueError: anything else, or a dimension that is not positive.
  """
  if not (match := re.fullmatch(r"(\d+)[xX](\d+)[xX](\d+)", text.strip())):
    raise ValueError(f"want MxNxK, such as 4096x8192x4096, got {text!r}")
  shape = Shape(*(int(group) for group in match.groups()))
  if min(shape) < 1:
    raise ValueError(f"every dimension must be at least 1, got {text!r}")
  return shape


def tagged(suites: Suites, tag: str) -> dict[str, list[Problem]]:
  """The problems of the suites that have a tag, by name."""
  return {name: x.problems for name, x in suites.items() if tag in x.tags}


def problems(suites: Suites, name: str) -> list[Problem]:
  """The problems of a suite, each with its `suite`; "all" is all published.

  Raises:
    ValueError: no suite has that name.
  """
  if name == "all":
    found = tagged(suites, "published")
  elif name in suites:
    found = {name: suites[name].problems}
  else:
    raise ValueError(f"no suite {name!r}; there are {', '.join(suites)}, all")
  return [{"suite": of, **x} for of, listed in found.items() for x in listed]


def suite(name: str) -> tuple[Shape, ...]:
  """The products of a dense suite, each once.

  Raises:
    ValueError: no suite has that name.
  """
  found = (Shape(x["m"], x["n"], x["k"]) for x in problems(DENSE, name))
  return tuple(dict.fromkeys(found))


def _suite(tags: str, *parts: Problem | Iterable[Problem]) -> Suite:
  found: list[Problem] = []
  for part in parts:
    found += [part] if isinstance(part, dict) else part
  return Suite(found, frozenset(tags.split()))


def _p(m: int, n: int, k: int, **fields: Any) -> Problem:
  return {"m": m, "n": n, "k": k, **fields}


def _plain(text: str) -> list[Problem]:
  """The problems of "MxNxK MxNxK"."""
  return [parse(part)._asdict() for part in text.split()]


def _square(*sizes: int) -> list[Problem]:
  return [_p(size, size, size) for size in sizes]


def _weights(*matrices: tuple[int, int]) -> list[Problem]:
  """Token batches of 1 to 8192 times each weight matrix, given as (n, k)."""
  tokens = (1, 8, 16, 64, 128, 512, 2048, 8192)
  return [_p(m, n, k) for m in tokens for n, k in matrices]


def _every(text: str, field: str, values: str) -> list[Problem]:
  """The problems of a text, each with every value of a field."""
  return [x | {field: v} for x in _plain(text) for v in values.split()]


# The MLP of an 8B Llama at 4096 tokens, and what its derivatives multiply.
_MLP = "4096x14336x4096"
_BACKWARD = f"{_MLP} 4096x4096x14336 4096x4096x4096"
_EPILOGUES = (
  "bias relu gelu silu residual residual+bias bias+gelu bias+gelu_erf"
)
_GATED = _every(_MLP, "kernel", "gated_matmul")
DENSE: dict[str, Suite] = {
  "square": _suite("published", _square(512, 1024, 2048, 4096, 8192, 16384)),
  # A token batch times the weights of a Llama: (n, k) of the fused QKV, the
  # output, the fused gate and up, and the down projection.
  "llama_8b": _suite(
    "published",
    _weights((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
  ),
  "llama_70b": _suite(
    "published",
    _weights((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
  ),
  # Row strides that TMA refuses (no multiple of 16 bytes); no dimension a
  # multiple of a tile.
  "unaligned": _suite(
    "published ci",
    _plain(
      "4095x4095x4095 4096x4096x4095 1023x4097x2049 4097x4097x4097"
      " 1000x3000x2000 2047x2049x2051 511x513x1027 8191x1021x3001"
      " 1009x2003x3001"
    ),
  ),
  # And long sums.
  "tall_skinny": _suite(
    "published",
    _plain("65536x128x512 128x65536x512 128x128x65536 512x512x16384"),
  ),
  # Low-rank adapters of rank 16 and 64: down to the rank, up again, and the
  # derivatives of both matrices.
  "lora": _suite(
    "published",
    _plain("4096x16x4096 4096x4096x16 8192x64x8192 8192x8192x64"),
    _p(4096, 16, 4096, layout="TN"),
    _p(16, 4096, 4096, layout="TN"),
    _p(64, 8192, 8192, layout="TN"),
  ),
  # A column, routers of mixtures of experts, and the first layers of a ResNet.
  "narrow": _suite(
    "published",
    _plain(
      "4096x1x4096 8192x64x2048 1024x256x7168 2048x256x4096 12544x128x576"
      " 10000x64x64"
    ),
  ),
  # Layers of models from 1B to 3B at 8192 and 16384 tokens, of a ViT-B at 64
  # images, of a diffusion model and a classifier.
  "models": _suite(
    "published",
    _plain("16384x2048x2048 8192x2560x2560 8192x6912x2560"),
    _p(2048, 8192, 16384, layout="TN"),
    _p(12608, 2304, 768, epilogue="bias"),
    _p(12608, 3072, 768, epilogue="bias+gelu"),
    _p(12608, 768, 3072, epilogue="bias"),
    _p(4096, 320, 320),
    _p(4096, 1280, 320, epilogue="bias+gelu"),
    _p(256, 512, 784, epilogue="bias+relu"),
    _p(256, 10, 512, epilogue="bias"),
  ),
  # Sums up to 256: adapters added to a layer's results, narrow layers, heads.
  "short": _suite(
    "published",
    _p(8192, 4096, 64, epilogue="residual"),
    _p(2048, 8192, 64, epilogue="residual"),
    _p(4096, 11008, 128, epilogue="residual"),
    _p(4096, 4096, 256, epilogue="residual"),
    _p(8192, 4096, 64, epilogue="bias+gelu"),
    _p(8192, 2048, 128, epilogue="bias+gelu"),
    _plain(
      "4096x2048x64 32768x256x64 4096x1024x128 8192x4096x128 8192x8192x256"
    ),
    _p(8192, 8192, 64, out_dtype="float32"),
    _p(512, 512, 64, batch=64, layout="NT"),
    _p(256, 256, 128, batch=96),
    _p(64, 64, 64, batch=2048),
    _p(128, 128, 64, batch=256, out_dtype="float32"),
  ),
  # Where float32 results take as long to store as to compute, and where less.
  "float32": _suite(
    "published",
    _every(
      "8192x4096x256 4096x4096x512 16384x1024x1024 2048x2048x2048"
      " 4096x4096x4096",
      "out_dtype",
      "float32",
    ),
  ),
  # Hidden states to logits: Llama 3, Llama 2 and GPT-2 vocabularies.
  "vocabulary": _suite(
    "published",
    [_p(m, n, 4096) for m in (2048, 8192) for n in (128256, 32000, 50257)],
  ),
  "layouts": _suite("published", _every(_BACKWARD, "layout", "NN NT TN TT")),
  "epilogues": _suite(
    "published",
    _every(_MLP, "epilogue", _EPILOGUES),
    _every(_MLP, "out_dtype", "float32"),
  ),
  "gated": _suite("published", _GATED),
  "training": _suite(
    "published", _every(f"{_MLP} 8192x4096x4096", "kernel", "matmul_vjp")
  ),
  "batched": _suite(
    "published",
    _p(1024, 1024, 128, batch=32, layout="NT"),
    _p(1024, 1024, 128, batch=32),
    _p(1024, 128, 1024, batch=32),
    _p(512, 64, 512, batch=64),
    _p(128, 128, 128, batch=128),
    _p(2048, 2048, 2048, batch=8),
    _p(1000, 1000, 1000, batch=8),
    # Decoding with 8 queries a head, and tiny products.
    _p(8, 4096, 128, batch=64, layout="NT"),
    _p(8, 128, 4096, batch=64),
    _p(197, 197, 64, batch=192, layout="NT"),
    _p(64, 64, 64, batch=1024),
    _p(1792, 832, 256, batch=3, layout="NT"),
  ),
  # Parts of the suites above.
  "quick": _suite(
    "",
    _square(1024, 4096, 4095),
    _p(16, 8192, 8192),
    _every(_MLP, "epilogue", "bias+gelu"),
    _GATED,
    _p(1024, 1024, 128, batch=32),
  ),
  # What the ladder's program measures when no shape is named; where its tensor
  # cores are compared with cuBLAS; throughput over size.
  "ladder": _suite("ladder ci", _square(4096)),
  "large": _suite("ladder ci", _plain("4096x8192x4096 8192x8192x8192")),
  "sweep": _suite("ladder", _square(128, 256, 512, 1024, 2048, 4096, 8192)),
  # One for what does not depend on the shape; the first rungs' blocks are
  # small, and the interpreter needs a second for every few of them.
  "one": _suite("ci", _plain("48x40x24")),
  "one_small": _suite("ci", _plain("20x24x12")),
  "odd": _suite("ci", _plain("129x257x65")),
  "odd_small": _suite("ci", _plain("35x67x33")),
  # The worked example of the textbooks: 16^3, drawn in 4x4 blocks.
  "textbook": _suite("ci", _square(16)),
  # A row, a column, one element, just past a tile.
  "edges": _suite(
    "ci", _plain("1x1x1 1x33x17 33x1x17 5x7x1 129x257x65 127x63x31")
  ),
  "primes": _suite("ci", _plain("2x3x5 17x29x13 61x67x71 131x113x37")),
  # Run on a GPU only; 200x128x72 is as wide as a consumer of rung 8.
  "past_tiles": _suite(
    "",
    _plain("1023x513x257 1024x1024x1024 1x4095x511 200x128x72 4095x1x511"),
  ),
  "interpret": _suite(
    "ci",
    _plain("48x40x24"),
    _p(33, 24, 40, layout="TT", epilogue="residual+bias"),
    _p(16, 32, 48, epilogue="bias+gelu"),
    _p(16, 32, 48, kernel="gated_matmul"),
    _p(16, 32, 48, kernel="matmul_vjp"),
    _p(16, 24, 32, batch=2, out_dtype="float32"),
  ),
}

# Passes over groups of rows: those that train a product, and all.
LAYERS = ("layer", "layer_grad")
TRAINING = ("forward", "dx", "dw")
PASSES = (*TRAINING, "gated", *LAYERS)


def _groups(
  passes: Iterable[str], sizes: str, text: str, **fields: Any
) -> list[Problem]:
  """The problems of "MxNxK/G": each distribution of rows, in every pass."""
  found = []
  for part in text.split():
    shape, groups = part.split("/")
    each = parse(shape)._asdict() | {"groups": int(groups)} | fields
    for how in sizes.split():
      found += [each | {"sizes": how, "pass_": pass_} for pass_ in passes]
  return found


_MIXTRAL = "8192x14336x4096/8"
_SMALL = "32x24x16/4"
_ROWS_A_GROUP = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
GROUPED: dict[str, Suite] = {
  "mixtral": _suite(
    "published", _groups(TRAINING, "even zipf one_hot", _MIXTRAL)
  ),
  "deepseek": _suite(
    "published",
    _groups(TRAINING, "even zipf", "131072x1024x7168/256 131072x7168x1024/256"),
  ),
  "qwen": _suite(
    "published",
    _groups(TRAINING, "even zipf", "65536x1536x4096/128 65536x4096x1536/128"),
  ),
  # 8, 32 and 128 rows a group.
  "decode": _suite(
    "published",
    _groups(
      ["forward"],
      "random",
      "64x14336x4096/8 256x14336x4096/8 1024x14336x4096/8"
      " 512x14336x4096/64 2048x14336x4096/64 8192x14336x4096/64",
    ),
  ),
  "distributions": _suite(
    "published",
    _groups(
      TRAINING,
      "even random zipf one_hot half_empty odd",
      "16384x4096x4096/32",
    ),
  ),
  # The sums of Qwen3-30B-A3B are half as long as Mixtral's, so two results that
  # are written and read again weigh twice as much.
  "gated": _suite(
    "published",
    _groups(["gated"], "even zipf one_hot", _MIXTRAL),
    _groups(["gated"], "even zipf", "65536x768x2048/128"),
    _groups(["gated"], "random", "2048x14336x4096/64"),
  ),
  "moe": _suite("published", _groups(LAYERS, "routed", _MIXTRAL, top_k=2)),
  # Parts of the suites above.
  "quick": _suite(
    "",
    _groups(TRAINING, "even", _MIXTRAL),
    _groups(["forward", "gated"], "zipf", _MIXTRAL),
  ),
  "interpret": _suite(
    "ci",
    _groups(TRAINING, "odd", _SMALL),
    _groups(["forward"], "even half_empty padded", _SMALL),
    _groups(["gated"], "zipf", _SMALL),
    _groups(LAYERS, "routed", _SMALL, top_k=2),
  ),
  # Time over rows a group of an expert's projection. 32 groups have 512 MiB of
  # weights, ten times an L2, so that reading them binds with few rows; 32768
  # rows are 0.55 TFLOP, under a millisecond of a dense product. 64 and 128 are
  # a tile's rows, 96, 192 and 384 are not.
  "sizes": _suite(
    "",
    _groups(
      TRAINING,
      "even random zipf",
      " ".join(f"{32 * rows}x2048x4096/32" for rows in _ROWS_A_GROUP),
    ),
  ),
  # Weights and results that are no whole number of swizzle atoms, and the next
  # multiple of 64 for comparison: N = 1407 and 4100, whose rows TMA can't
  # address, N = 1400 and K = 1407.
  "odd": _suite(
    "",
    _groups(
      TRAINING,
      "random",
      "8191x1400x4096/60 8191x1407x4096/60 8191x1408x4096/60"
      " 8192x4100x4096/16 8192x4160x4096/16"
      " 8192x4096x1407/60 8192x4096x1408/60",
    ),
  ),
  # Layers of expert models with 8 to 1024 rows a group, with which other
  # grouped products have been compared.
  "experts": _suite(
    "",
    _groups(TRAINING, "even", "512x2048x7168/64 8192x2048x7168/64"),
    _groups(TRAINING, "zipf", "8192x1536x2048/60 16384x768x2048/128"),
    _groups(TRAINING, "random", "32768x1536x5120/160 8192x14336x4096/8"),
  ),
}
