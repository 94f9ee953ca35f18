"""The dense ops and what a JAX user writes instead: cases, by suite.

A case is one expression on one shape, written twice: with `pallas_gemm`, and
with `jax.numpy` alone. Where `jnp.dot` gives 16 bits, the baseline rounds the
product before a bias, C or an activation sees it (XLA may fuse them and skip
that); the ops round once, at the end.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import case as case_lib
from experiments.harness import case_check, inputs, shapes
import pallas_gemm
from pallas_gemm import numerics, sampling

BASELINE, TUNED = "jnp", "tuned"
CLAIMS = {BASELINE: case_lib.XLA}

ACTIVATIONS = {
  "relu": jax.nn.relu,
  "gelu": jax.nn.gelu,  # the tanh form
  "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
  "silu": jax.nn.silu,
}
# The products that an op computes in one call.
_PRODUCTS = {"matmul": 1, "gated_matmul": 2, "matmul_vjp": 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(case_lib.Case):
  """One expression on one shape; A is [M, K] and B [K, N] unless transposed.

  Attributes:
    suite: the list that it is of.
    m, n, k: of each product.
    dtype: of the operands.
    kernel: "matmul"; "gated_matmul", silu(A @ B) * (A @ B2); or "matmul_vjp",
      A @ B with both derivatives for a given cotangent.
    layout: how A and B are stored: "N" as they are, "T" transposed.
    epilogue: what follows the product: "none", or parts of "bias",
      "residual" (+ C) and an activation, with "+" between them.
    batch: products of as many A and B; 1 has no batch dimension.
    out_dtype: of the result; None is `dtype`.
  """

  suite: str
  m: int
  n: int
  k: int
  dtype: str = "bfloat16"
  kernel: str = "matmul"
  layout: str = "NN"
  epilogue: str = "none"
  batch: int = 1
  out_dtype: str | None = None
  baseline, claims = BASELINE, CLAIMS

  @property
  def products(self) -> int:
    """Products of a call, each of a whole batch."""
    return _PRODUCTS[self.kernel]

  @property
  def parts(self) -> tuple[str, ...]:
    """Parts of the epilogue, in order."""
    return tuple(self.epilogue.split("+"))

  @property
  def activation(self) -> str | None:
    """The activation's name."""
    if self.kernel == "gated_matmul":
      return "silu"
    return next((part for part in self.parts if part in ACTIVATIONS), None)

  @property
  def result_dtype(self) -> str:
    """Dtype of the results."""
    return self.out_dtype or self.dtype

  def fields(self) -> dict[str, Any]:
    """What a row says of the case."""
    found = dataclasses.asdict(self) | {"out_dtype": self.result_dtype}
    return found | {"alpha": 1.0, "beta": float("residual" in self.parts)}

  def operands(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the arguments, by name."""
    m, n, k = self.m, self.n, self.k
    b = (n, k) if self.layout[1] == "T" else (k, n)
    found = {"a": (k, m) if self.layout[0] == "T" else (m, k), "b": b}
    if self.kernel == "gated_matmul":
      found["b2"] = b
    if self.kernel == "matmul_vjp":
      found["ct"] = (m, n)
    if "residual" in self.parts:
      found["c"] = (m, n)
    if self.batch > 1:
      found = {name: (self.batch, *shape) for name, shape in found.items()}
    if "bias" in self.parts:
      found["bias"] = (n,)
    return {
      name: jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))
      for name, shape in found.items()
    }

  def draw(self, seed: int) -> dict[str, jax.Array]:
    """The arguments, N(0, 1), on the device."""
    return {
      name: inputs.normal(seed, i, x.shape, x.dtype.name)
      for i, (name, x) in enumerate(self.operands().items())
    }

  def arms(self, implementation: str | None = None) -> dict[str, case_lib.Arm]:
    """The op, and the same expression in `jax.numpy`."""
    mine, theirs = ours(self, implementation), baseline(self)
    return {
      case_lib.OURS: case_lib.only(mine),
      BASELINE: case_lib.only(theirs),
    }

  def flops(self, seed: int = 0) -> int:
    """2*M*N*K for each product."""
    return 2 * self.products * self.batch * self.m * self.n * self.k

  def least_bytes(self, seed: int = 0) -> int:
    """Bytes if each operand is read once and each result written once."""
    operands = self.operands()
    read = sum(x.size * x.dtype.itemsize for x in operands.values())
    written = self.batch * self.m * self.n
    if self.kernel == "matmul_vjp":  # also the derivatives of A and B
      written += operands["a"].size + operands["b"].size
    return read + written * jnp.dtype(self.result_dtype).itemsize

  def check(
    self,
    results: jax.Array | tuple[jax.Array, ...],
    operands: dict[str, jax.Array],
    seed: int = 0,
  ) -> numerics.Check:
    """Compares samples of each product with float64; see `case_check`."""
    rng = np.random.default_rng(seed)
    activation = ACTIVATIONS.get(self.activation)
    found = []
    for out, x, layout in self._products(results, operands):
      parts = sampling.of_batch(out.shape, *case_check.BATCH, rng)
      found += case_check.of_parts(out, x, parts, layout, activation)
    return case_check.worst_of(found, results)

  def _products(self, results, operands) -> Iterator[tuple[Any, Any, str]]:
    """(result, operands, layout) of each product."""
    if self.kernel != "matmul_vjp":
      names = {"b2": "b_up"}
      x = {names.get(name, name): value for name, value in operands.items()}
      yield results, x, self.layout
      return
    a, b, ct = (operands[name] for name in ("a", "b", "ct"))
    out, da, db = results
    yield out, {"a": a, "b": b}, "NN"
    yield da, {"a": ct, "b": b}, "NT"
    yield db, {"a": a, "b": ct}, "TN"


def ours(case: Case, implementation: str | None = None) -> case_lib.Call:
  """The case with `pallas_gemm`: a function of the case's operands."""
  how = {
    "activation": ACTIVATIONS.get(case.activation),
    "implementation": implementation,
  }
  matmul = functools.partial(
    pallas_gemm.matmul,
    transpose_a=case.layout[0] == "T",
    transpose_b=case.layout[1] == "T",
    out_dtype=case.out_dtype,
    **how,
  )

  def gated(a, b, b2):
    return pallas_gemm.gated_matmul(a, b, b2, out_dtype=case.out_dtype, **how)

  return _by_kernel(case, matmul, gated)


def baseline(case: Case) -> case_lib.Call:
  """The case as written without `pallas_gemm`."""
  activation = ACTIVATIONS.get(case.activation, lambda x: x)

  def stored(x, how):
    return jnp.swapaxes(x, -1, -2) if how == "T" else x

  def matmul(a, b, bias=None, c=None):
    out = jnp.matmul(
      stored(a, case.layout[0]),
      stored(b, case.layout[1]),
      preferred_element_type=case.out_dtype,
    )
    if c is not None:
      out = out + c
    if bias is not None:
      out = out + bias
    return activation(out)

  def gated(a, b, b2):
    gate, up = (
      jnp.matmul(a, x, preferred_element_type=case.out_dtype) for x in (b, b2)
    )
    return activation(gate) * up

  return _by_kernel(case, matmul, gated)


def _by_kernel(case: Case, matmul, gated):
  """The function that the case is about."""

  def matmul_vjp(a, b, ct):
    out, vjp = jax.vjp(matmul, a, b)
    return out, *vjp(ct)

  return {
    "matmul": matmul,
    "gated_matmul": gated,
    "matmul_vjp": matmul_vjp,
  }[case.kernel]


NAMES = (*shapes.DENSE, "all")


def suite(name: str, dtype: str = "bfloat16") -> list[Case]:
  """The cases of a suite; of "all", those of every published suite.

  Raises:
    ValueError: no suite has that name.
  """
  return [Case(dtype=dtype, **x) for x in shapes.problems(shapes.DENSE, name)]


def plain(found: Sequence[shapes.Shape], dtype: str) -> list[Case]:
  """Products of the shapes that a user named."""
  return [Case(suite="shapes", dtype=dtype, **x._asdict()) for x in found]


# Random problems, to see how the cost model fares where nothing was fitted:
# sizes of models' layers and of numbers of tokens, or any; with every layout,
# batches, and epilogues.
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
_DRAWN_EPILOGUES = (
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
    "epilogue": rng.choice(_DRAWN_EPILOGUES),
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
