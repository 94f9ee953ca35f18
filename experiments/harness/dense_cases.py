"""The dense ops beside what a JAX user writes instead: cases, by suite.

A case is one expression on one shape, written twice: with `pallas_gemm`, and
with `jax.numpy` alone. Where `jnp.dot` gives 16 bits, the baseline rounds the
product before a bias, C or an activation sees it (XLA may fuse them and skip
that); the ops round once, at the end.
"""

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import case as case_lib
from experiments.harness import case_check, inputs, suites
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


# Each suite as keyword arguments of its cases.
def _plain(*names: str) -> list[dict[str, Any]]:
  return [shape._asdict() for name in names for shape in suites.suite(name)]


def _every(name: str, field: str, values) -> list[dict[str, Any]]:
  """The shapes of a suite, each with every value of a field."""
  return [shape | {field: value} for shape in _plain(name) for value in values]


def _batched(batch: int, m: int, n: int, k: int, **kwargs) -> dict[str, Any]:
  return {"batch": batch, "m": m, "n": n, "k": k, **kwargs}


_EPILOGUES = (
  "bias", "relu", "gelu", "silu", "residual", "residual+bias", "bias+gelu",
  "bias+gelu_erf",
)  # fmt: skip
SUITES: dict[str, list[dict[str, Any]]] = {
  "square": _plain("square"),
  "llama_8b": _plain("llama_8b"),
  "llama_70b": _plain("llama_70b"),
  "unaligned": _plain("unaligned", "uneven"),
  "tall_skinny": _plain("tall_skinny", "long_k"),
  # And the derivatives of both matrices.
  "lora": [
    *_plain("lora"),
    {"m": 4096, "n": 16, "k": 4096, "layout": "TN"},
    {"m": 16, "n": 4096, "k": 4096, "layout": "TN"},
    {"m": 64, "n": 8192, "k": 8192, "layout": "TN"},
  ],
  "narrow": _plain("narrow"),
  # Besides: a ViT-B's layers at 64 images, a diffusion model's, a classifier's.
  "models": [
    *_plain("small_llm"),
    {"m": 2048, "n": 8192, "k": 16384, "layout": "TN"},
    {"m": 12608, "n": 2304, "k": 768, "epilogue": "bias"},
    {"m": 12608, "n": 3072, "k": 768, "epilogue": "bias+gelu"},
    {"m": 12608, "n": 768, "k": 3072, "epilogue": "bias"},
    {"m": 4096, "n": 320, "k": 320},
    {"m": 4096, "n": 1280, "k": 320, "epilogue": "bias+gelu"},
    {"m": 256, "n": 512, "k": 784, "epilogue": "bias+relu"},
    {"m": 256, "n": 10, "k": 512, "epilogue": "bias"},
  ],
  # Sums up to 256: adapters added to a layer's results, narrow layers, heads.
  "short": [
    {"m": 8192, "n": 4096, "k": 64, "epilogue": "residual"},
    {"m": 2048, "n": 8192, "k": 64, "epilogue": "residual"},
    {"m": 4096, "n": 11008, "k": 128, "epilogue": "residual"},
    {"m": 4096, "n": 4096, "k": 256, "epilogue": "residual"},
    {"m": 8192, "n": 4096, "k": 64, "epilogue": "bias+gelu"},
    {"m": 8192, "n": 2048, "k": 128, "epilogue": "bias+gelu"},
    *_plain("short"),
    {"m": 8192, "n": 8192, "k": 64, "out_dtype": "float32"},
    _batched(64, 512, 512, 64, layout="NT"),
    _batched(96, 256, 256, 128),
    _batched(2048, 64, 64, 64),
    _batched(256, 128, 128, 64, out_dtype="float32"),
  ],
  "float32": _every("wide", "out_dtype", ("float32",)),
  "vocabulary": _plain("vocabulary"),
  "layouts": _every("backward", "layout", ("NN", "NT", "TN", "TT")),
  "epilogues": _every("mlp", "epilogue", _EPILOGUES)
  + _every("mlp", "out_dtype", ("float32",)),
  "gated": _every("mlp", "kernel", ("gated_matmul",)),
  "training": _every("training", "kernel", ("matmul_vjp",)),
  "batched": [
    _batched(32, 1024, 1024, 128, layout="NT"),
    _batched(32, 1024, 1024, 128),
    _batched(32, 1024, 128, 1024),
    _batched(64, 512, 64, 512),
    _batched(128, 128, 128, 128),
    _batched(8, 2048, 2048, 2048),
    _batched(8, 1000, 1000, 1000),
    # Decoding with 8 queries a head, and tiny products.
    _batched(64, 8, 4096, 128, layout="NT"),
    _batched(64, 8, 128, 4096),
    _batched(192, 197, 197, 64, layout="NT"),
    _batched(1024, 64, 64, 64),
    _batched(3, 1792, 832, 256, layout="NT"),
  ],
}
QUICK = [
  *(shape._asdict() for shape in suites.square(1024, 4096, 4095)),
  {"m": 16, "n": 8192, "k": 8192},
  *_every("mlp", "epilogue", ("bias+gelu",)),
  *SUITES["gated"],
  _batched(32, 1024, 1024, 128),
]
INTERPRET = [
  *_plain("interpret"),
  {"m": 33, "n": 24, "k": 40, "layout": "TT", "epilogue": "residual+bias"},
  {"m": 16, "n": 32, "k": 48, "epilogue": "bias+gelu"},
  {"m": 16, "n": 32, "k": 48, "kernel": "gated_matmul"},
  {"m": 16, "n": 32, "k": 48, "kernel": "matmul_vjp"},
  _batched(2, 16, 24, 32, out_dtype="float32"),
]
# The suites that no "all" holds: parts of others, or for the interpreter.
SPECIAL = {"quick": QUICK, "interpret": INTERPRET}
NAMES = (*SPECIAL, *SUITES, "all")


def suite(name: str, dtype: str = "bfloat16") -> list[Case]:
  """The cases of a suite; of "all", those of every suite but the special.

  Raises:
    ValueError: no suite has that name.
  """
  found = suites.choose(name, SUITES, SPECIAL)
  return [Case(suite=of, dtype=dtype, **kwargs) for of, kwargs in found]


def plain(shapes: tuple[suites.Shape, ...], dtype: str) -> list[Case]:
  """Products of the shapes that a user named."""
  return [
    Case(suite="shapes", dtype=dtype, **shape._asdict()) for shape in shapes
  ]
