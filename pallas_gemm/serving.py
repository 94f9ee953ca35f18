"""Serving: an exported function of some numbers of rows that keeps its kernels.

A kernel is compiled for sizes that are numbers. Exported with a symbolic M, a
product is XLA's. Exported once for each of some sizes, it is the kernel's: a
call pads its rows to the next of them, and takes that program.
"""

from collections.abc import Callable, Sequence
import dataclasses
import io
import operator
import reprlib
from typing import Any
import zipfile

import jax
from jax import export
import jax.numpy as jnp
import numpy as np

from pallas_gemm import dtypes
from pallas_gemm.ops import arguments

# Up to 16 rows a product takes as long as it takes to read the weights; from
# there on at most half of the rows are padding.
SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True)
class Buckets:
  """An exported function for some numbers of rows; call it, or serialize it.

  Attributes:
    sizes: the numbers of rows, rising.
    exported: the `jax.export.Exported` of each.
  """

  sizes: tuple[int, ...]
  exported: tuple[export.Exported, ...]

  def __call__(self, x: jax.Array, *rest: Any) -> Any:
    """The function of `x` [M, ..] and the rest; results have M rows.

    M is known where the call is traced, and so is which program runs. Rows that
    pad `x` are zeros, and what is computed of them is dropped.

    Raises:
      TypeError: x is no array.
      ValueError: it is a scalar, has rows of another shape or dtype, or too
        many; or the rest are others than were exported.
    """
    x = jnp.asarray(arguments.array("x", x))
    arguments.check(x.ndim > 0, "x must have rows", "shape ()")
    rows, (_, *rest_of_shape) = x.shape[0], self.exported[0].in_avals[0].shape
    wanted = f"x must have rows of shape {tuple(rest_of_shape)}"
    arguments.check([*x.shape[1:]] == rest_of_shape, wanted, x.shape[1:])
    size = next((size for size in self.sizes if size >= rows), None)
    if size is None:
      raise ValueError(f"x must have at most {self.sizes[-1]} rows, got {rows}")
    call = self.exported[self.sizes.index(size)].call
    if size == rows:
      return call(x, *rest)
    x = jnp.pad(x, [(0, size - rows), *[(0, 0)] * (x.ndim - 1)])
    return jax.tree.map(lambda out: out[:rows], call(x, *rest))

  def serialize(self) -> bytes:
    """One artifact, a ZIP file with what JAX serializes for each size."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
      for size, exported in zip(self.sizes, self.exported):
        file.writestr(str(size), bytes(exported.serialize()))
    return data.getvalue()

  @classmethod
  def deserialize(cls, data: bytes) -> "Buckets":
    """What `serialize` gave.

    Raises:
      TypeError: data are no bytes.
      ValueError: they are others, or damaged, or JAX can't read them.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
      raise TypeError(f"data must be bytes, got {type(data).__name__}")
    try:
      with zipfile.ZipFile(io.BytesIO(data)) as file:
        sizes = _sizes([int(name) for name in file.namelist()])
        artifacts = [bytearray(file.read(str(size))) for size in sizes]
      return cls(sizes, tuple(map(export.deserialize, artifacts)))
    except Exception as error:  # of whatever reads what
      raise ValueError(
        "data must be what Buckets.serialize gave, got"
        f" {memoryview(data).nbytes} bytes that are not: {error}"
      ) from error


def export_buckets(
  fn: Callable[..., Any],
  x: jax.ShapeDtypeStruct | jax.Array,
  *rest: Any,
  sizes: Sequence[int] = SIZES,
  platforms: Sequence[str] | None = None,
) -> Buckets:
  """Exports fn(x, *rest) for some numbers of rows of `x`, kernels and all.

  Each row of the results must depend on that row of `x` alone (and on the
  rest), as in a layer of a model: shorter inputs are padded with rows of zeros.

  Args:
    fn: a function whose results all have M rows, as `x` has, and nothing else
      that depends on M.
    x: [M, ..]; only what follows M and the dtype count.
    *rest: its other arguments, or their shapes.
    sizes: the numbers of rows to export for.
    platforms: as of `jax.export.export`; None is the one at hand.

  Returns:
    `Buckets`, to be called with any number of rows up to the largest size; if
    rows are sharded over Explicit axes, with one of the sizes.

  Raises:
    TypeError: x is no array; sizes are no integers; platforms are a string.
    ValueError: sizes are not positive, or there are none; x is a scalar; a
      result has not M rows, or depends on M otherwise.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> import pallas_gemm
    >>> x = jax.ShapeDtypeStruct((1, 4), jnp.float32)
    >>> w = jnp.ones((4, 2))
    >>> served = pallas_gemm.export_buckets(
    ...   pallas_gemm.matmul, x, w, sizes=(1, 8)
    ... )
    >>> served(jnp.ones((3, 4)), w).shape
    (3, 2)
  """
  if not (hasattr(x, "shape") and hasattr(x, "dtype")):
    raise TypeError(
      "x, the first argument of fn, must be an array of rows or its shape, got"
      f" {type(x).__name__}; wrap fn so that the array comes first"
    )
  if not x.shape:
    raise ValueError("x must have rows, got a scalar")
  is_string = isinstance(platforms, str)
  wanted = "platforms must be a sequence of strings"
  arguments.check(not is_string, wanted, repr(platforms), TypeError)
  sizes = _sizes(sizes)
  jitted = jax.jit(lambda *args: fn(*args))
  are_numbers = isinstance(x.dtype, np.dtype) and (
    dtypes.kind(x.dtype) != "other"
  )
  arguments.check(are_numbers, "x must hold numbers", x.dtype, TypeError)
  shapes = jax.tree.map(_shape_of, rest)
  rows = lambda m: jax.ShapeDtypeStruct((m, *x.shape[1:]), x.dtype)  # noqa: E731
  exported, found = [], {}
  for size in sizes:
    one = export.export(jitted, platforms=platforms)(rows(size), *shapes)
    for out in one.out_avals:
      if out.shape[:1] != (size,):
        raise ValueError(
          "results of fn must all have M rows, got one of shape"
          f" {out.shape} for M = {size}"
        )
    exported.append(one)
    found[size] = _without_rows(one.out_tree.unflatten(one.out_avals))
  # Rows alone are cut off. A shape that is the same for the fewest and the most
  # rows is so in between, unless it goes up and down.
  for m in {1, sizes[-1] + 1}.difference(sizes):
    try:
      found[m] = _without_rows(jax.eval_shape(jitted, rows(m), *shapes))
    except Exception:  # fn may take those sizes alone
      continue
  for m, types in found.items():
    if types != found[sizes[0]]:
      raise ValueError(
        "results of fn must depend on M in their first dimension alone, got"
        f" {reprlib.repr(found[sizes[0]][1])} behind it for M = {sizes[0]},"
        f" {reprlib.repr(types[1])} for M = {m}"
      )
  return Buckets(sizes, tuple(exported))


def _without_rows(out: Any) -> tuple[Any, list[str]]:
  """What results are, but for their first dimensions."""
  leaves, tree = jax.tree.flatten(out)
  return tree, [f"{v.dtype}{list(v.shape[1:])}" for v in leaves]


def _sizes(sizes: Any) -> tuple[int, ...]:
  """Different numbers of rows, rising."""
  try:
    if isinstance(sizes, str) or any(isinstance(n, bool) for n in sizes):
      raise TypeError
    found = tuple(sorted({operator.index(size) for size in sizes}))
  except TypeError as error:
    raise TypeError(
      f"sizes must be a sequence of integers, got {sizes!r}"
    ) from error
  if not found or found[0] < 1:
    raise ValueError(f"sizes must be positive numbers, got {found}")
  return found


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
  try:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
  except TypeError as error:
    raise TypeError(
      f"arguments behind x must be arrays or their shapes, got {x!r}"
    ) from error
