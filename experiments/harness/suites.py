"""Named lists of shapes: the one place that tests, benches and tuning use."""

from collections.abc import Mapping, Sequence
import re
from typing import NamedTuple


class Shape(NamedTuple):
  """A product [m, k] x [k, n]."""

  m: int
  n: int
  k: int

  def __str__(self) -> str:
    return f"{self.m}x{self.n}x{self.k}"


def square(*sizes: int) -> tuple[Shape, ...]:
  """m = n = k for each size."""
  return tuple(Shape(size, size, size) for size in sizes)


def weights(*matrices: tuple[int, int]) -> tuple[Shape, ...]:
  """Token batches of 1 to 8192 times each weight matrix, given as (n, k)."""
  return tuple(
    Shape(m, n, k)
    for m in (1, 8, 16, 64, 128, 512, 2048, 8192)
    for n, k in matrices
  )


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


def shapes(text: str) -> tuple[Shape, ...]:
  """The shapes of "MxNxK MxNxK"."""
  return tuple(map(parse, text.split()))


SUITES: dict[str, tuple[Shape, ...]] = {
  # What the runner does when no shape is named.
  "ladder": square(4096),
  # Small enough for the interpreter, no dimension a multiple of a tile.
  "interpret": shapes("48x40x24"),
  # The worked example of the textbooks: 16^3, drawn in 4x4 blocks.
  "textbook": square(16),
  # Throughput over size, for every rung.
  "sweep": square(128, 256, 512, 1024, 2048, 4096, 8192),
  "square": square(512, 1024, 2048, 4096, 8192, 16384),
  # Where the tensor-core rungs are compared with cuBLAS.
  "large": shapes("4096x8192x4096 8192x8192x8192"),
  # A row, a column, one element, just past a tile.
  "edges": shapes("1x1x1 1x33x17 33x1x17 5x7x1 129x257x65 127x63x31"),
  "primes": shapes("2x3x5 17x29x13 61x67x71 131x113x37"),
  # Row strides that TMA refuses (no multiple of 16 bytes).
  "unaligned": shapes("4095x4095x4095 4096x4096x4095 1023x4097x2049"),
  "long_k": shapes("128x128x65536 512x512x16384"),
  "tall_skinny": shapes("65536x128x512 128x65536x512"),
  # Low-rank adapters of rank 16 and 64: down to the rank, and up again.
  "lora": shapes("4096x16x4096 4096x4096x16 8192x64x8192 8192x8192x64"),
  # A column, routers of mixtures of experts, and the first layers of a ResNet.
  "narrow": shapes(
    "4096x1x4096 8192x64x2048 1024x256x7168 2048x256x4096 12544x128x576 "
    "10000x64x64"
  ),
  # Few slabs of K.
  "short": shapes(
    "4096x2048x64 32768x256x64 4096x1024x128 8192x4096x128 8192x8192x256"
  ),
  # Where float32 results take as long to store as to compute, and where less.
  "wide": shapes(
    "8192x4096x256 4096x4096x512 16384x1024x1024 2048x2048x2048 4096x4096x4096"
  ),
  # Layers of models from 1B to 3B at 8192 and 16384 tokens.
  "small_llm": shapes("16384x2048x2048 8192x2560x2560 8192x6912x2560"),
  # Larger than "edges" and "primes": mostly odd, so TMA refuses the rows too,
  # and no dimension a multiple of a tile.
  "uneven": shapes(
    "4097x4097x4097 1000x3000x2000 2047x2049x2051 511x513x1027 8191x1021x3001 "
    "1009x2003x3001"
  ),
  # A token batch times the weights of a Llama: [n, k] of the fused QKV, the
  # output, the fused gate and up, and the down projection.
  "llama_8b": weights((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
  "llama_70b": weights(
    (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)
  ),
  # Hidden states to logits: Llama 3, Llama 2 and GPT-2 vocabularies.
  "vocabulary": tuple(
    Shape(m, n, 4096) for m in (2048, 8192) for n in (128256, 32000, 50257)
  ),
  # The MLP of an 8B Llama at 4096 tokens.
  "mlp": shapes("4096x14336x4096"),
  # What its derivatives multiply, and a square product beside them.
  "backward": shapes("4096x14336x4096 4096x4096x14336 4096x4096x4096"),
  "training": shapes("4096x14336x4096 8192x4096x4096"),
}


def suite(name: str) -> tuple[Shape, ...]:
  """The shapes of a named suite.

  Raises:
    ValueError: no suite has that name.
  """
  if name not in SUITES:
    raise ValueError(f"no suite {name!r}; there are {', '.join(SUITES)}")
  return SUITES[name]


def choose[T](
  name: str,
  suites: Mapping[str, Sequence[T]],
  special: Mapping[str, Sequence[T]],
) -> list[tuple[str, T]]:
  """(suite, element) of each element of a suite; "all" has no special ones.

  Raises:
    ValueError: no suite has that name.
  """
  if name == "all":
    return [(each, x) for each, found in suites.items() for x in found]
  there = {**special, **suites}
  if name not in there:
    raise ValueError(f"no suite {name!r}; there are {', '.join(there)}, all")
  return [(name, x) for x in there[name]]
