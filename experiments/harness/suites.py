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


SUITES: dict[str, tuple[Shape, ...]] = {
  # What the runner does when no shape is named.
  "ladder": square(4096),
  # Small enough for the interpreter, no dimension a multiple of a tile.
  "interpret": (Shape(48, 40, 24),),
  # The worked example of the textbooks: 16^3, drawn in 4x4 blocks.
  "textbook": square(16),
  # Throughput over size, for every rung.
  "sweep": square(128, 256, 512, 1024, 2048, 4096, 8192),
  "square": square(512, 1024, 2048, 4096, 8192, 16384),
  # Where the tensor-core rungs are compared with cuBLAS.
  "large": (Shape(4096, 8192, 4096), Shape(8192, 8192, 8192)),
  # A row, a column, one element, just past a tile.
  "edges": (
    Shape(1, 1, 1),
    Shape(1, 33, 17),
    Shape(33, 1, 17),
    Shape(5, 7, 1),
    Shape(129, 257, 65),
    Shape(127, 63, 31),
  ),
  "primes": (
    Shape(2, 3, 5),
    Shape(17, 29, 13),
    Shape(61, 67, 71),
    Shape(131, 113, 37),
  ),
  # Row strides that TMA refuses (no multiple of 16 bytes).
  "unaligned": (
    *square(4095),
    Shape(4096, 4096, 4095),
    Shape(1023, 4097, 2049),
  ),
  "long_k": (Shape(128, 128, 65536), Shape(512, 512, 16384)),
  "tall_skinny": (Shape(65536, 128, 512), Shape(128, 65536, 512)),
  # Low-rank adapters of rank 16 and 64: down to the rank, and up again.
  "lora": (
    Shape(4096, 16, 4096),
    Shape(4096, 4096, 16),
    Shape(8192, 64, 8192),
    Shape(8192, 8192, 64),
  ),
  # A column, routers of mixtures of experts, and the first layers of a ResNet.
  "narrow": (
    Shape(4096, 1, 4096),
    Shape(8192, 64, 2048),
    Shape(1024, 256, 7168),
    Shape(2048, 256, 4096),
    Shape(12544, 128, 576),
    Shape(10000, 64, 64),
  ),
  # Few slabs of K.
  "short": (
    Shape(4096, 2048, 64),
    Shape(32768, 256, 64),
    Shape(4096, 1024, 128),
    Shape(8192, 4096, 128),
    Shape(8192, 8192, 256),
  ),
  # Where float32 results take as long to store as to compute, and where less.
  "wide": (
    Shape(8192, 4096, 256),
    Shape(4096, 4096, 512),
    Shape(16384, 1024, 1024),
    Shape(2048, 2048, 2048),
    Shape(4096, 4096, 4096),
  ),
  # Layers of models from 1B to 3B at 8192 and 16384 tokens.
  "small_llm": (
    Shape(16384, 2048, 2048),
    Shape(8192, 2560, 2560),
    Shape(8192, 6912, 2560),
  ),
  # Larger than "edges" and "primes": mostly odd, so TMA refuses the rows too,
  # and no dimension a multiple of a tile.
  "uneven": (
    *square(4097),
    Shape(1000, 3000, 2000),
    Shape(2047, 2049, 2051),
    Shape(511, 513, 1027),
    Shape(8191, 1021, 3001),
    Shape(1009, 2003, 3001),
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
  "mlp": (Shape(4096, 14336, 4096),),
  # What its derivatives multiply, and a square product beside them.
  "backward": (
    Shape(4096, 14336, 4096),
    Shape(4096, 4096, 14336),
    Shape(4096, 4096, 4096),
  ),
  "training": (Shape(4096, 14336, 4096), Shape(8192, 4096, 4096)),
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
