"""Compares products of float32 on tensor cores with XLA's, by precision.

  python -m experiments.float32                        all suites
  python -m experiments.float32 --suites=dense,errors

  dense    large products at HIGHEST, in each layout; of few rows, of another
           precision, or by bfloat16
  unseen   drawn sizes, a third of them odd, a third with few rows
  sizes    smaller and narrower ones, by the kernel where XLA is chosen, too:
           what tuning/constants knows of XLA's product is held to these
  grouped  products of groups of rows, and sums over the rows of each group
  layer    forward and backward passes of an MLP of two layers; a step of
           Newton and Schulz for an inverse square root
  errors   of the sums, relative to float64's

What makes planes of the operands is counted, but in arms of which B is split
beforehand. The first result is checked against float64 on a sample of rows and
columns, within the bound that correct arithmetic obeys. Then all arms are
timed, interleaved (CUPTI, kernels of a call, cold L2). Rows go to
experiments/results/<device>/float32.jsonl.

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

from examples import newton_schulz
from experiments.harness import case as case_lib
from experiments.harness import cli, inputs, suites
from experiments.harness import sum_errors as errors
from experiments.harness.case import Arm, only
import pallas_gemm
from pallas_gemm import compat, numerics

EXPERIMENT = "float32"
SUITES = "dense", "unseen", "sizes", "grouped", "layer", errors.SUITE
LARGE = (2048, 2048, 2048), (4096, 4096, 4096), (4096, 14336, 4096)
LARGEST = (8192, 8192, 8192)
FEW_ROWS = (64, 14336, 4096), (128, 8192, 8192)
# Rows, groups, K, N.
GROUPED = (8192, 8, 4096, 4096), (8192, 64, 2048, 4096)
DRAWN, SMALLER, SAMPLE = 30, 32, 128
_NAMED = "kernel", "m", "n", "k", "pass", "layout", "epilogue"
# By what rows call a precision.
PRECISIONS = {
  "HIGHEST": (lax.Precision.HIGHEST, 3),
  "x3": (errors.X3, 2),
  "x9": (errors.X9, 3),
}
_XLA_X6, _DOTS = "xla x6", "a dot a group"
_KEPT = f"{case_lib.OURS}, B split"
_KERNEL = case_lib.Claim("^sm90_", "it needs the Hopper kernel")
CLAIMS = dict.fromkeys(("xla", _XLA_X6, _DOTS), case_lib.XLA)
CLAIMS[_KEPT] = _KERNEL

for _name in ("suites", "seed", "output_dir"):
  flags.declare_key_flag(_name)


@dataclasses.dataclass(frozen=True)
class Product(case_lib.Case):
  """A @ B, of which A is float32.

  Attributes:
    suite: the list that it is of.
    m, n, k: the product's dimensions.
    layout: how A and B are stored.
    precision: a name of `PRECISIONS`.
    dtype_b: of B.
  """

  suite: str
  m: int
  n: int
  k: int
  layout: str = "NN"
  precision: str = "HIGHEST"
  dtype_b: str = "float32"

  may_skip, baseline, claims = True, "xla", CLAIMS

  def fields(self) -> dict[str, Any]:
    found = {"kernel": "matmul", "suite": self.suite, "dtype": "float32"}
    found |= {"m": self.m, "n": self.n, "k": self.k, "layout": self.layout}
    by_b = "" if self.dtype_b == "float32" else f" by {self.dtype_b}"
    return found | {"epilogue": self.precision + by_b}

  def draw(self, seed: int) -> dict[str, Any]:
    a, b = (self.m, self.k), (self.k, self.n)
    a = a[::-1] if self.layout[0] == "T" else a
    b = b[::-1] if self.layout[1] == "T" else b
    a = inputs.normal(seed, 0, a, dtype="float32")
    b = inputs.normal(seed, 1, b, dtype=self.dtype_b)
    split = {"w": pallas_gemm.split(b)} if self.has_more_arms else {}
    return {"a": a, "b": b} | split

  @property
  def has_more_arms(self) -> bool:
    """Large, at HIGHEST, stored as it is multiplied."""
    return self == Product("dense", self.m, self.n, self.k)

  def op(self, a: Any, b: Any) -> jax.Array:
    """By this package."""
    return pallas_gemm.matmul(
      a,
      b,
      transpose_a=self.layout[0] == "T",
      transpose_b=self.layout[1] == "T",
      precision=PRECISIONS[self.precision][0],
      implementation="sm90" if self.suite == "sizes" else None,
    )

  def dot(self, a: Any, b: Any, precision: Any) -> jax.Array:
    """By XLA."""
    a = a.T if self.layout[0] == "T" else a
    b = b.T if self.layout[1] == "T" else b
    return jnp.dot(a, b, precision=precision)

  def arms(self, implementation: str | None = None) -> dict[str, Arm]:
    """The op; XLA's at the same precision, and its preset of six products.

    And the op with planes of B that are kept.
    """
    del implementation
    how = PRECISIONS[self.precision][0]
    found = {case_lib.OURS: self.op}
    found["xla"] = functools.partial(self.dot, precision=how)
    if not self.has_more_arms:
      return {name: only(jax.jit(fn)) for name, fn in found.items()}
    found[_XLA_X6] = functools.partial(self.dot, precision=errors.X6)
    arms = {
      name: only(jax.jit(lambda a, b, w, fn=fn: fn(a, b)))
      for name, fn in found.items()
    }
    return arms | {_KEPT: only(jax.jit(lambda a, b, w: self.op(a, w)))}

  def flops(self, seed: int = 0) -> int:
    return 2 * self.m * self.n * self.k

  def least_bytes(self, seed: int = 0) -> int:
    of_b = jnp.dtype(self.dtype_b).itemsize * self.k * self.n
    return 4 * self.m * (self.k + self.n) + of_b

  def check(self, results, operands, seed: int = 0) -> numerics.Check:
    a, b = operands["a"], operands["b"]
    a = a.T if self.layout[0] == "T" else a
    b = b.T if self.layout[1] == "T" else b
    planes = PRECISIONS[self.precision][1] if compat.targets_gpu() else None
    return numerics.check(
      results, a, b, sample=SAMPLE, seed=seed, planes=planes
    )


_OF_ROWS = lax.RaggedDotDimensionNumbers(
  (((0,), (0,)), ((), ())),
  lhs_ragged_dimensions=(0,),
  rhs_group_dimensions=(),
)


@dataclasses.dataclass(frozen=True)
class Grouped(case_lib.Case):
  """Groups of as many rows each, times a matrix each, at HIGHEST.

  Attributes:
    m, groups: rows of all, and groups.
    k, n: of each matrix [K, N].
    pass_: "forward", "dx", or "dw": the sums over the rows of each group.
  """

  m: int
  groups: int
  k: int
  n: int
  pass_: str

  suite, may_skip, baseline, claims = "grouped", True, _DOTS, CLAIMS

  def fields(self) -> dict[str, Any]:
    found = {"kernel": "ragged_dot", "suite": self.suite, "dtype": "float32"}
    found |= {"m": self.m, "n": self.n, "k": self.k, "groups": self.groups}
    return found | {"pass": self.pass_, "epilogue": "HIGHEST"}

  def draw(self, seed: int) -> dict[str, Any]:
    draw = functools.partial(inputs.normal, seed, dtype="float32")
    x, w = (self.m, self.k), (self.groups, self.k, self.n)
    shapes = {
      "forward": (x, w),
      "dx": ((self.m, self.n), w),
      "dw": (x, (self.m, self.n)),
    }[self.pass_]
    sizes = np.full(self.groups, self.m // self.groups, np.int32)
    a, b = (draw(i, shape) for i, shape in enumerate(shapes))
    split = {} if self.pass_ == "dw" else {"w": pallas_gemm.split(b)}
    return {"a": a, "b": b, "sizes": jnp.asarray(sizes)} | split

  def op(self, a: Any, b: Any, sizes: Any, w: Any = None) -> jax.Array:
    """By this package."""
    how: dict[str, Any] = {"precision": "highest"}
    if self.pass_ == "dw":
      return pallas_gemm.ragged_dot_general(a, b, sizes, _OF_ROWS, **how)
    how |= {"transpose_rhs": self.pass_ == "dx"}
    return pallas_gemm.ragged_dot(a, b, sizes, **how)

  def kept(self, a: Any, b: Any, sizes: Any, w: Any) -> jax.Array:
    """The same, with planes of B that are kept."""
    return self.op(a, w, sizes)

  def dots(self, a: Any, b: Any, sizes: Any, w: Any = None) -> jax.Array:
    """A product of XLA's for each group, of a size that it knows."""
    del sizes
    of_rows = a.reshape(self.groups, -1, a.shape[-1])
    how = {"precision": lax.Precision.HIGHEST}
    if self.pass_ == "dw":
      b = b.reshape(self.groups, -1, self.n)
      return jnp.einsum("gmk,gmn->gkn", of_rows, b, **how)
    words = "gmk,gkn->gmn" if self.pass_ == "forward" else "gmn,gkn->gmk"
    return jnp.einsum(words, of_rows, b, **how).reshape(self.m, -1)

  def arms(self, implementation: str | None = None) -> dict[str, Arm]:
    del implementation
    found = {case_lib.OURS: self.op, _DOTS: self.dots}
    found |= {} if self.pass_ == "dw" else {_KEPT: self.kept}
    return {name: only(jax.jit(fn)) for name, fn in found.items()}

  def flops(self, seed: int = 0) -> int:
    return 2 * self.m * self.n * self.k

  def least_bytes(self, seed: int = 0) -> int:
    rows = self.m * (self.k + self.n)
    return 4 * (rows + self.groups * self.k * self.n)

  def check(self, results, operands, seed: int = 0) -> numerics.Check:
    """Of a group in the middle."""
    group, size = self.groups // 2, self.m // self.groups
    rows = slice(group * size, group * size + size)
    a, b = operands["a"][rows], operands["b"]
    if self.pass_ == "dw":
      a, b, out = a.T, b[rows], results[group]
    else:
      b, out = b[group], results[rows]
      b = b.T if self.pass_ == "dx" else b
    how = {"planes": 3 if compat.targets_gpu() else None, "sample": SAMPLE}
    return numerics.check(out, a, b, seed=seed, **how)


@dataclasses.dataclass(frozen=True)
class Layer(case_lib.Case):
  """An MLP of two layers at HIGHEST, its derivatives by input and weights.

  Attributes:
    m, n, k: tokens, hidden features, features.
  """

  m: int
  n: int
  k: int

  suite, may_skip, baseline = "layer", True, "jnp.dot"

  def fields(self) -> dict[str, Any]:
    found = {"kernel": "mlp", "suite": self.suite, "dtype": "float32"}
    return found | {
      "m": self.m,
      "n": self.n,
      "k": self.k,
      "epilogue": "HIGHEST",
    }

  def draw(self, seed: int) -> dict[str, Any]:
    draw = functools.partial(inputs.normal, seed, dtype="float32")
    shapes = {"up": (self.k, self.n), "down": (self.n, self.k)}
    found = {
      name: draw(i, shape) * shape[0] ** -0.5
      for i, (name, shape) in enumerate(shapes.items())
    }
    return found | {
      x: draw(2 + i, (self.m, self.k)) for i, x in enumerate("xy")
    }

  def arms(self, implementation: str | None = None) -> dict[str, Arm]:
    del implementation

    def grads(matmul):
      def forward(x):
        hidden = matmul(x["x"], x["up"], activation=jax.nn.gelu)
        return matmul(hidden, x["down"], activation=None)

      def run(y, **x):
        out, transposed = jax.vjp(forward, x)
        return out, transposed(y)

      return only(jax.jit(run))

    def plain(a, b, activation):
      z = jnp.dot(a, b, precision="highest")
      return z if activation is None else activation(z)

    ours = functools.partial(pallas_gemm.matmul, precision="highest")
    return {case_lib.OURS: grads(ours), "jnp.dot": grads(plain)}

  def flops(self, seed: int = 0) -> int:
    return 12 * self.m * self.n * self.k

  def least_bytes(self, seed: int = 0) -> int:
    return 0

  def check(self, results, operands, seed: int = 0) -> numerics.Check:
    """Not judged, the products alone are."""
    return suites.finite(results)


@dataclasses.dataclass(frozen=True)
class Step(Layer):
  """A step of examples/newton_schulz.py: three products of square matrices."""

  def fields(self) -> dict[str, Any]:
    return super().fields() | {"kernel": "newton_schulz"}

  def draw(self, seed: int) -> dict[str, Any]:
    draw = functools.partial(inputs.normal, seed, dtype="float32")
    return {x: draw(i, (self.n, self.n)) for i, x in enumerate("yz")}

  def arms(self, implementation: str | None = None) -> dict[str, Arm]:
    del implementation
    arms = {case_lib.OURS: None, "jnp.dot": "xla"}
    return {
      name: only(
        jax.jit(functools.partial(newton_schulz.step, implementation=x))
      )
      for name, x in arms.items()
    }

  def flops(self, seed: int = 0) -> int:
    return 6 * self.m * self.n * self.k


def drawn(seed: int, count: int) -> list[tuple[int, int, int]]:
  """Sizes: a third with odd ones, a third of few rows."""
  rng = np.random.default_rng(seed)
  found = []
  for i in range(count):
    m, n, k = (int(2 ** rng.uniform(8, 13)) for _ in range(3))
    if i % 3 == 0:
      m, n, k = (x | 1 for x in (m, n, k))
    else:
      m, n, k = (-(-x // 64) * 64 for x in (m, n, k))
    found.append((int(rng.integers(1, 257)) if i % 3 == 1 else m, n, k))
  return found


def smaller(seed: int, count: int) -> list[tuple[int, int, int]]:
  """Sizes of 1 or 16 to 8192, a third of them odd, of no large products."""
  rng = np.random.default_rng(77 + seed)
  found: list[tuple[int, int, int]] = []
  while len(found) < count:
    m, n, k = (int(2 ** rng.uniform(low, 13)) for low in (0, 4, 4))
    if not 2e5 <= m * n * k <= 1.5e11:
      continue
    if len(found) % 3 == 0:
      m, n, k = (x | 1 for x in (m, n, k))
    else:
      n, k = (-(-x // 16) * 16 for x in (n, k))
      m = m if m < 64 else -(-m // 64) * 64
    found.append((m, n, k))
  return found


def cases(chosen: Sequence[str], seed: int) -> Iterator[case_lib.Case]:
  """Of suites that are timed, one after the other."""
  if "dense" in chosen:
    for shape in (*LARGE, LARGEST):
      for layout in ("NN", "NT", "TN") if shape != LARGEST else ("NN",):
        yield Product("dense", *shape, layout)
      yield Product("dense", *shape, precision="x3")
    for shape in FEW_ROWS:
      yield Product("dense", *shape)
    yield Product("dense", *LARGE[1], dtype_b="bfloat16")
    yield Product("dense", *LARGE[1], precision="x9")
  if "unseen" in chosen:
    for shape in drawn(seed, DRAWN):
      yield Product("unseen", *shape)
  if "sizes" in chosen:
    for shape in smaller(seed, SMALLER):
      yield Product("sizes", *shape)
  if "grouped" in chosen:
    for shape in GROUPED:
      for pass_ in ("forward", "dx", "dw"):
        yield Grouped(*shape, pass_)
  if "layer" in chosen:
    yield Layer(4096, 8192, 4096)
    yield Step(*LARGE[1])


def main(argv: Sequence[str]) -> int:
  """Measures what the flags say; returns the exit status."""
  del argv
  return suites.measure(EXPERIMENT, SUITES, cases, _NAMED, "float32")


if __name__ == "__main__":
  cli.run(main)
