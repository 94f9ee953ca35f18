"""Random calls of the ops: one generator for the interpreter and for GPUs."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

import pallas_gemm
from tests.support import products
from tests.support.products import normal

Arrays = dict[str, jax.Array]
Choose = Callable[[Sequence[Any]], Any]

DTYPES = ("bfloat16", "float16")
OUT_DTYPES = ("bfloat16", "float16", "float32")
# Batch dimensions of A and B; each with a dimension that the other lacks, too.
BATCHES = (
  ((), ()),
  ((3,), ()),
  ((), (3,)),
  ((2,), (2,)),
  ((2, 1), (2,)),
  ((2,), (2, 1)),
)
# Rows and columns of a large result that are checked.
_SAMPLE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """A call of `matmul` or, if `gated`, of `gated_matmul`; no arrays.

  Its repr makes it again.
  """

  m: int
  n: int
  k: int
  dtype: str = "bfloat16"
  out_dtype: str | None = None
  transpose_a: bool = False
  transpose_b: bool = False
  batch_a: tuple[int, ...] = ()
  batch_b: tuple[int, ...] = ()
  bias: str | None = None
  bias_dtype: str = "float32"
  c_dtype: str | None = None
  activation: Callable[[jax.Array], jax.Array] | None = None
  alpha: float = 1.0
  beta: float = 1.0
  gated: bool = False

  def operands(self, seed: int = 0) -> Arrays:
    """The arrays, N(0, 1), as they are stored.

    What an activation is applied to has that spread as well: then B is
    N(0, 1/K), as weights are. (And float16 has room for a gated product.)
    """
    shape_a = (self.k, self.m) if self.transpose_a else (self.m, self.k)
    shape_b = (self.n, self.k) if self.transpose_b else (self.k, self.n)
    x = {"a": normal(*self.batch_a, *shape_a, dtype=self.dtype, seed=seed)}
    names = ("b", "b_up") if self.gated else ("b",)
    scale = 1.0 if self.activation is None else max(1, self.k) ** -0.5
    for i, name in enumerate(names):
      b = scale * normal(*self.batch_b, *shape_b, seed=seed + 1 + i)
      x[name] = b.astype(self.dtype)
    if self.bias is not None:
      shape = (self.n,) if self.bias == "n" else (self.m, 1)
      x["bias"] = normal(*shape, dtype=self.bias_dtype, seed=seed + 3)
    if self.c_dtype is not None:
      x["c"] = normal(*self.shape, dtype=self.c_dtype, seed=seed + 4)
    return x

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the result."""
    batch = np.broadcast_shapes(self.batch_a, self.batch_b)
    return (*batch, self.m, self.n)

  def __call__(self, x: Arrays, **options: Any) -> jax.Array:
    """The op on `operands`; `options` are passed on."""
    options |= {"activation": self.activation, "out_dtype": self.out_dtype}
    if self.gated:
      return pallas_gemm.gated_matmul(x["a"], x["b"], x["b_up"], **options)
    return pallas_gemm.matmul(
      **x,
      alpha=self.alpha,
      beta=self.beta,
      transpose_a=self.transpose_a,
      transpose_b=self.transpose_b,
      **options,
    )

  def assert_right(self, out: jax.Array, x: Arrays) -> None:
    """Shape, dtype and values; of a large result, some rows and columns."""
    assert out.shape == self.shape, self
    assert out.dtype == (self.out_dtype or self.dtype), self
    assert np.isfinite(np.asarray(out, np.float32)).all(), self
    rows, columns = _some(self.m), _some(self.n)
    a = np.asarray(x["a"])
    a = (a.swapaxes(-1, -2) if self.transpose_a else a)[..., rows, :]
    of_b = (np.asarray(x[name]) for name in ("b", "b_up") if name in x)
    b, *up = (
      (b.swapaxes(-1, -2) if self.transpose_b else b)[..., columns]
      for b in of_b
    )
    out = np.asarray(out)[..., rows, :][..., columns]
    try:
      if self.gated:
        products.assert_gated(out, a, b, *up, self.activation)
        return
      bias, c = x.get("bias"), x.get("c")
      if bias is not None:
        bias = bias[columns] if self.bias == "n" else bias[rows]
      products.assert_product(
        out,
        a,
        b,
        bias=bias,
        c=None if c is None else np.asarray(c)[..., rows, :][..., columns],
        alpha=self.alpha,
        beta=self.beta,
        activation=self.activation,
      )
    except AssertionError as error:
      raise AssertionError(f"{self}: {error}") from error


def draw(choose: Choose, sizes: Sequence[int]) -> Call:
  """A random call.

  Args:
    choose: picks one of a sequence; the simplest is always the first.
    sizes: what M, N and K are of.
  """
  fields = {name: choose(sizes) for name in ("m", "n", "k")}
  fields["dtype"] = choose(DTYPES)
  fields["out_dtype"] = choose((None, *OUT_DTYPES))
  fields["batch_a"], fields["batch_b"] = choose((BATCHES[0], *BATCHES))
  activations = products.ACTIVATIONS
  if choose((False, False, False, False, True)):
    return Call(gated=True, activation=choose(activations), **fields)
  fields["transpose_a"] = choose((False, True))
  fields["transpose_b"] = choose((False, True))
  fields["activation"] = choose((None, None, *activations))
  fields["alpha"] = choose((1.0, 1.0, -0.5, 0.0))
  fields["bias"] = choose((None, "n", "m"))
  if fields["bias"] is not None:
    fields["bias_dtype"] = choose((fields["dtype"], "float32"))
  fields["c_dtype"] = choose((None, None, None, *OUT_DTYPES))
  if fields["c_dtype"] is not None:
    fields["beta"] = choose((1.0, 2.5, 0.0))
  return Call(**fields)


def _some(size: int) -> np.ndarray:
  """All indices, or of many the first, the last, and others in between."""
  if size <= 8 * _SAMPLE:
    return np.arange(size)
  inner = np.random.default_rng(size).choice(size, _SAMPLE, replace=False)
  return np.unique([0, *inner, size - 1])
