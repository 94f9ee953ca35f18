"""Compares products of 8 bits with XLA's, and with those of 16 bits.

  python -m experiments.eight_bits                     all suites
  python -m experiments.eight_bits --suites=dense,layer

  dense    products of matrices stored along K, by kind of scale
  stored   the same with B stored [K, N], which is transposed first
  small    1 to 128 rows
  grouped  products of groups of rows, and sums over the rows of each group
  layer    forward and backward passes of a gated MLP and of a layer of experts,
           quantising counted
  errors   of float32 sums, promoted, fast and XLA's, relative to float64's

Kinds of scales: none; tensor: one of each operand; row: of each row of A and
column of B; block: of each 128 of a row of A, and of 128 x 128 of B; line: of
each 128 of a row of A and of a column of B. Sums of floats are promoted; those
of kinds that end in "fast" are not. "in slabs" are sums over rows whose
operands lie as the derivative by a recipe has them, transposed and in whole
slabs; those of other sums over rows XLA brings into that order.

The first result is checked against float64 on a sample of rows and columns,
within the bound that correct arithmetic obeys; a layer's must be finite. Then
all arms are timed, interleaved (CUPTI, kernels of a call, cold L2). Rows go to
experiments/results/<device>/eight_bits.jsonl.

Exit status: 0; 1 if a case FAILED or could not run; 2 for a command that can't
be carried out; 130 after Ctrl-C.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any

from absl import flags
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from examples import moe
from experiments.harness import case as case_lib
from experiments.harness import cli, inputs, suites
from experiments.harness import eight_bit_peers as peers
from experiments.harness import sum_errors as errors
from experiments.harness.case import Arm, only
import pallas_gemm
from pallas_gemm import Quantized, Recipe, numerics, quantize
from pallas_gemm.ops import scales
from pallas_gemm.ops.product import product
from pallas_gemm.ops.spec import Operands, Spec

EXPERIMENT = "eight_bits"
SUITES = "dense", "stored", "small", "grouped", "layer", errors.SUITE
F8 = "float8_e4m3fn"
# Blocks of A, and of B stored [N, K].
BLOCKS = {
  "tensor": ((None, None), (None, None)),
  "row": ((1, None), (1, None)),
  "block": ((1, 128), (128, 128)),
  "line": ((1, 128), (1, 128)),
}
LARGE = (4096, 4096, 4096), (8192, 8192, 8192), (2048, 14336, 4096)
SMALL = [
  (m, n, k) for n, k in ((8192, 28672), (14336, 4096)) for m in (1, 16, 64, 128)
]
# Rows, groups, K, N.
GROUPED = (8192, 8, 4096, 14336), (32768, 64, 7168, 2048)
IN_SLABS = "in slabs"
TOP_K = 2
SAMPLE = 128
_NAMED = "kernel", "m", "n", "k", "pass", "layout", "dtype", "epilogue"

for _name in ("suites", "seed", "output_dir"):
  flags.declare_key_flag(_name)


def _bf16(x: Any) -> Any:
  """What a `Quantized` or an array stands for, in bfloat16."""
  if isinstance(x, Quantized):
    return x.dequantized(jnp.bfloat16)
  return x.astype(jnp.bfloat16)


def _values(x: Any) -> jax.Array:
  return x.values if isinstance(x, Quantized) else x


@dataclasses.dataclass(frozen=True)
class Product(case_lib.Case):
  """A @ B of 8 bits, or for each group of rows; a result in bfloat16.

  Attributes:
    suite: the list that it is of.
    m, n, k: rows of A, columns of B, and what is summed over.
    kind: of scales, and "fast"; or "in slabs", of sums over rows whose operands
      lie as a `Recipe`'s derivative has them: transposed, in whole slabs.
    dtype: of the values.
    groups: 0 of a dense product.
    pass_: "dw": the sums over the rows of each group, [K, N] each.
    k_last: whether B is stored [N, K].
  """

  suite: str
  m: int
  n: int
  k: int
  kind: str
  dtype: str = F8
  groups: int = 0
  pass_: str = "forward"
  k_last: bool = True

  may_skip, baseline, claims = True, "jnp.dot bf16", peers.CLAIMS

  @property
  def scales(self) -> str:
    return self.kind.removesuffix("fast").removesuffix(IN_SLABS).strip()

  @property
  def in_slabs(self) -> bool:
    return self.kind.endswith(IN_SLABS)

  def fields(self) -> dict[str, Any]:
    found = {"kernel": "matmul", "suite": self.suite, "dtype": self.dtype}
    found |= {"m": self.m, "n": self.n, "k": self.k, "epilogue": self.kind}
    if self.groups:
      found |= {"kernel": "ragged_dot", "groups": self.groups}
      found["pass"] = self.pass_
    return found | {"layout": "NT" if self.k_last else "NN"}

  def draw(self, seed: int) -> dict[str, Any]:
    draw = functools.partial(inputs.normal, seed, dtype="bfloat16")
    shape_b = (self.m, self.n) if self.pass_ == "dw" else (self.n, self.k)
    lead = (self.groups,) if self.groups and self.pass_ != "dw" else ()
    a, b = draw(0, (self.m, self.k)), draw(1, (*lead, *shape_b))
    blocks = BLOCKS.get(self.scales)
    if blocks is None:
      a, b = (x.astype(self.dtype) for x in (a, b))
    else:
      of_a, of_b = blocks
      if self.pass_ == "dw":  # summed over rows
        of_a, of_b = of_a[::-1], of_b[::-1]
      make = jax.jit(quantize, static_argnums=1, static_argnames="block")
      a = make(a, self.dtype, block=of_a)
      b = make(b, self.dtype, block=(1,) * len(lead) + of_b)
    if not self.k_last:
      b = jax.jit(lambda b: b.T)(b)
    if self.in_slabs:
      a, b = jax.jit(lambda *x: [v.T for v in x])(a, b)
    found = {"a": a, "b": b}
    if self.groups:
      sizes = np.full(self.groups, self.m // self.groups, np.int32)
      found["sizes"] = jnp.asarray(sizes)
    return found

  def op(self, a: Any, b: Any, sizes: Any = None, **how: Any) -> jax.Array:
    """By this package."""
    if self.pass_ == "dw":
      return self.sums_of_groups(a, b, sizes, **how)
    if self.groups:
      how |= {"transpose_rhs": True}
      how |= {"preferred_element_type": jnp.bfloat16}
      return pallas_gemm.ragged_dot(a, b, sizes, **how)
    how |= {"transpose_b": self.k_last, "out_dtype": jnp.bfloat16}
    return pallas_gemm.matmul(a, b, **how)

  def sums_of_groups(self, a: Any, b: Any, sizes: Any, **how) -> jax.Array:
    """A.T @ B of the rows of each group."""
    if self.in_slabs:
      a, b = a.T, b.T
      (scale_a, of_a), (scale_b, of_b) = (
        scales.named(x.scale, word, x.shape)
        for x, word in ((a, "km"), (b, "kn"))
      )
      of_groups = Spec(
        words=Operands("km", "kn", offsets="o", scale_a=of_a, scale_b=of_b),
        out="gmn", out_dtype=jnp.dtype("bfloat16"), ragged="k",
        leading_rows=False, whole_slabs=True,
      )  # fmt: skip
      offsets = jnp.append(0, jnp.cumsum(sizes)).astype(jnp.int32)
      numbers = {"scale_a": scale_a, "scale_b": scale_b}
      x = Operands(a.values, b.values, offsets=offsets, **numbers)
      return product(x, of_groups)[0]
    how |= {"preferred_element_type": jnp.bfloat16}
    return pallas_gemm.ragged_dot_general(a, b, sizes, peers.OF_ROWS, **how)

  def dot(self, a: Any, b: Any, precision: Any = None) -> jax.Array:
    """XLA's product of the values, times the scales."""
    dims = ((1,), (1 if self.k_last else 0,)), ((), ())
    wide = jnp.int32 if self.dtype == "int8" else jnp.float32
    wide = wide if self.scales else jnp.bfloat16  # what nothing is applied to
    z = lax.dot_general(
      _values(a), _values(b), dims, precision, preferred_element_type=wide
    ).astype(jnp.float32)
    if self.scales:
      of_b = b.scale.T if self.k_last else b.scale
      z = z * a.scale * of_b
    return z.astype(jnp.bfloat16)

  def arms(self, implementation: str | None = None) -> dict[str, Arm]:
    """The op, XLA's product, and those from elsewhere, which take scales."""
    del implementation
    fast = {"precision": errors.FAST} if self.kind.endswith("fast") else {}
    found = {case_lib.OURS: functools.partial(self.op, **fast)}
    blocks = self.scales in ("block", "line")
    if not self.groups and not blocks:
      precision = None if fast or self.dtype == "int8" else "highest"
      found["xla"] = functools.partial(self.dot, precision=precision)
    elif not self.groups:
      found["xla dequantised"] = lambda a, b: jnp.dot(_bf16(a), _bf16(b).T)
    found = {name: only(jax.jit(fn)) for name, fn in found.items()}
    return found | (peers.arms(self) if self.scales and not fast else {})

  def flops(self, seed: int = 0) -> int:
    return 2 * self.m * self.n * self.k

  def least_bytes(self, seed: int = 0) -> int:
    matrices = max(1, self.groups)
    if self.pass_ == "dw":
      return self.m * (self.k + self.n) + 2 * matrices * self.k * self.n
    return self.m * self.k + matrices * self.k * self.n + 2 * self.m * self.n

  def check(self, results, operands, seed: int = 0) -> numerics.Check:
    """Compares a sample: of a group of rows, or of sums over one."""
    rng = np.random.default_rng(seed)
    pick = lambda n: np.sort(rng.permutation(n)[:SAMPLE])  # noqa: E731
    a, b, out = operands["a"], operands["b"], results
    a, b = (a.T, b.T) if self.in_slabs else (a, b)
    group = self.groups // 2
    size = self.m // max(1, self.groups)
    rows = np.arange(group * size, group * size + size)
    columns = pick(self.n)
    if self.pass_ == "dw":
      at, out = pick(self.k), out[group]
      a, b = _float64(a, rows, at).T, _float64(b, rows, columns)
    else:
      at, every = rows[pick(size)], np.arange(self.k)
      b = b[group] if self.groups else b
      sides = (columns, every) if self.k_last else (every, columns)
      a, b = _float64(a, at, every), _float64(b, *sides)
      b = b.T if self.k_last else b
    dtype = jnp.dtype(self.dtype)
    bound = numerics.bound_of_sum(
      a, b, dtypes=(dtype, dtype), fast=self.kind.endswith("fast"), more=4
    )
    out = np.asarray(out[at][:, columns])
    return numerics.compare(out, a @ b, bound)


def _float64(x: Any, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
  """Some rows and columns of what an operand stands for."""
  values = np.asarray(_values(x)[rows][:, columns].astype(jnp.float32))
  found = values.astype(np.float64)
  if not isinstance(x, Quantized):
    return found
  scale = np.asarray(x.scale, np.float64)
  at = []
  for chosen, have, size in zip((rows, columns), scale.shape, x.shape):
    index = np.zeros_like(chosen) if have == 1 else chosen
    at.append(index // 128 if have not in (1, size) else index)
  return found * scale[np.ix_(*at)]


@dataclasses.dataclass(frozen=True)
class In16Bits(Product):
  """The same product of bfloat16, as a peer with a row of its own."""

  def fields(self) -> dict[str, Any]:
    return super().fields() | {"dtype": "bfloat16", "epilogue": ""}

  def draw(self, seed: int) -> dict[str, Any]:
    found = super().draw(seed)
    return found | {name: _bf16(found[name]) for name in "ab"}

  def arms(self, implementation: str | None = None) -> dict[str, Arm]:
    found = {case_lib.OURS: self.op}
    if not self.groups:
      found["jnp.dot bf16"] = lambda a, b: jnp.dot(a, b.T if self.k_last else b)
    return {name: only(jax.jit(fn)) for name, fn in found.items()}

  def check(self, results, operands, seed: int = 0) -> numerics.Check:
    found = dataclasses.replace(self, kind="", dtype="bfloat16")
    return Product.check(found, results, operands, seed)


@dataclasses.dataclass(frozen=True)
class Layer(case_lib.Case):
  """A gated MLP of bfloat16, its derivatives by input and weights.

  Attributes:
    m: tokens.
    n: hidden features.
    k: features.
  """

  m: int
  n: int
  k: int

  suite, may_skip, baseline = "layer", True, "jnp.dot"

  def fields(self) -> dict[str, Any]:
    found = {"kernel": "mlp", "suite": self.suite, "dtype": "bfloat16"}
    return found | {"m": self.m, "n": self.n, "k": self.k, "epilogue": "row"}

  def draw(self, seed: int) -> dict[str, Any]:
    draw = functools.partial(inputs.normal, seed, dtype="bfloat16")
    shapes = {"gate": (self.k, self.n), "up": (self.k, self.n)}
    shapes |= {"down": (self.n, self.k)}
    found = {
      name: draw(i, shape) * shape[0] ** -0.5
      for i, (name, shape) in enumerate(shapes.items())
    }
    found |= {
      name: draw(3 + i, (self.m, self.k)) for i, name in enumerate("xy")
    }
    return found

  def ours(self, x: dict[str, Any], **how: Any) -> jax.Array:
    """By this package."""
    hidden = pallas_gemm.gated_matmul(x["x"], x["gate"], x["up"], **how)
    return pallas_gemm.matmul(hidden, x["down"], **how)

  def plain(self, x: dict[str, Any]) -> jax.Array:
    """By XLA alone."""
    hidden = jax.nn.silu(x["x"] @ x["gate"]) * (x["x"] @ x["up"])
    return hidden @ x["down"]

  def arms(self, implementation: str | None = None) -> dict[str, Arm]:
    def grads(forward):
      def run(y, **x):
        out, transposed = jax.vjp(forward, x)
        return out, transposed(y)

      return only(jax.jit(run))

    recipes = {x: Recipe(scaling=x) for x in ("row", "block", "tensor")}
    recipes["row fast"] = Recipe(scaling="row", fast_accumulation=True)
    found = {
      f"{case_lib.OURS} {name}": functools.partial(self.ours, quantize=recipe)
      for name, recipe in recipes.items()
    }
    found |= {f"{case_lib.OURS} bf16": self.ours, self.baseline: self.plain}
    return {name: grads(fn) for name, fn in found.items()}

  def flops(self, seed: int = 0) -> int:
    return 18 * self.m * self.n * self.k

  def least_bytes(self, seed: int = 0) -> int:
    return 0

  def check(self, results, operands, seed: int = 0) -> numerics.Check:
    """Not judged: 8 bits are what is asked for."""
    return suites.finite(results)


@dataclasses.dataclass(frozen=True)
class Experts(Layer):
  """A layer of experts, each a gated MLP; m counts a token `TOP_K` times."""

  groups: int

  baseline = "lax.ragged_dot"

  def fields(self) -> dict[str, Any]:
    return super().fields() | {"kernel": "moe", "groups": self.groups}

  def draw(self, seed: int) -> dict[str, Any]:
    params = moe.init(
      jax.random.key(seed),
      features=self.k, hidden=self.n, experts=self.groups,
      dtype=jnp.bfloat16,
    )  # fmt: skip
    shape = self.m // TOP_K, self.k
    x, y = (inputs.normal(seed, i, shape, dtype="bfloat16") for i in (3, 4))
    return {"params": params, "x": x, "y": y}

  def ours(self, x: dict[str, Any], **how: Any) -> jax.Array:
    ops = pallas_gemm.ragged_dot, pallas_gemm.gated_ragged_dot
    return self._layer(x, *(functools.partial(op, **how) for op in ops))

  def plain(self, x: dict[str, Any]) -> jax.Array:
    return self._layer(x, lax.ragged_dot, moe.gated(lax.ragged_dot))

  def _layer(self, x: dict[str, Any], dot: Any, gated_dot: Any) -> jax.Array:
    how = {"top_k": TOP_K, "dot": dot, "gated_dot": gated_dot}
    return moe.layer(x["params"], x["x"], **how)


def cases(chosen: Sequence[str], seed: int = 0) -> Iterator[case_lib.Case]:
  """Of suites, one after the other."""
  del seed  # nothing is drawn
  kinds = "", "fast", "tensor", "row", "row fast", "block", "line"
  for suite, shapes in (
    ("dense", LARGE),
    ("stored", LARGE[:2]),
    ("small", SMALL),
  ):
    if suite not in chosen:
      continue
    for shape in shapes:
      of = {"dense": kinds, "stored": ("row",), "small": ("row", "block")}[
        suite
      ]
      how = {"k_last": suite != "stored"}
      for kind in of:
        yield Product(suite, *shape, kind, **how)
      if suite == "dense":
        yield Product(suite, *shape, "row", "int8")
      yield In16Bits(suite, *shape, "row", **how)
  if "grouped" in chosen:
    for m, groups, k, n in GROUPED:
      slabs = f"row {IN_SLABS}", f"line {IN_SLABS}"
      for pass_, of in (("forward", ("block",)), ("dw", slabs)):
        for kind in ("row", "row fast", *of):
          yield Product("grouped", m, n, k, kind, F8, groups, pass_)
        yield In16Bits("grouped", m, n, k, "row", F8, groups, pass_)
  if "layer" in chosen:
    yield Layer(4096, 14336, 4096)
    yield Experts(8192, 14336, 4096, groups=8)


def main(argv: Sequence[str]) -> int:
  """Measures what the flags say; returns the exit status."""
  del argv
  return suites.measure(EXPERIMENT, SUITES, cases, _NAMED, F8)


if __name__ == "__main__":
  cli.run(main)
