"""Grouped products and what a JAX user writes instead: cases, by suite.

A case is one pass (forward, a derivative, a gated product, a whole layer) on
one shape with one distribution of group sizes. It is written several times:
with `pallas_gemm`, with `jax.lax.ragged_dot`, with grouped products from
elsewhere, and as a dense product of the same FLOPs, which a grouped one can't
be expected to beat where TMA can address the rows.
"""

import dataclasses
import functools
import inspect
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import moe
from experiments.harness import case as case_lib
from experiments.harness import case_check, inputs, ragged_peers, shapes
from experiments.harness.case import OURS, Call, only
from experiments.harness.shapes import LAYERS, TRAINING
import pallas_gemm
from pallas_gemm import numerics, sampling

Operands = dict[str, Any]

LAX, DENSE, TWO = "lax.ragged_dot", "jnp.dot", "two ragged_dot"
# XLA's own fusion of it, an option; JAX's examples, the second along K.
FUSED = "lax.ragged_dot fused"
EXAMPLE = "jax_ragged_dot_mgpu"
EXAMPLE_DW = "jax_transposed_ragged_dot_mgpu"
# Of cuequivariance_ops_jax.
INDEXED = "indexed_linear"
TOKAMAX = {f"tokamax {how}": how for how in ("mosaic", "triton")}
# The same, each after its own tuner.
TUNED = {name: f"{name} tuned" for name in TOKAMAX}
CLAIMS = {
  **dict.fromkeys((LAX, DENSE), case_lib.XLA),
  FUSED: ragged_peers.FUSED,
  **dict.fromkeys((EXAMPLE, EXAMPLE_DW), ragged_peers.EXAMPLE),
  INDEXED: ragged_peers.INDEXED,
  **{x: ragged_peers.TOKAMAX[how] for x, how in TOKAMAX.items()},
  **{TUNED[x]: ragged_peers.TOKAMAX[how] for x, how in TOKAMAX.items()},
}
# What others have for grouped products.
PEERS = (LAX, FUSED, EXAMPLE, EXAMPLE_DW, INDEXED, *TOKAMAX, *TUNED.values())
# What can be measured next to an op; what is tuned, as an option.
BESIDE = (DENSE, TWO, LAX, FUSED, EXAMPLE, EXAMPLE_DW, INDEXED, *TOKAMAX)

# 2*M*K*N FLOP, so many times.
_PRODUCTS = {"gated": 2, "layer": 3, "layer_grad": 9}
_KERNELS = {"gated": "gated_ragged_dot", "layer": "moe", "layer_grad": "moe"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(case_lib.Case):
  """One pass over groups of rows; lhs is [M, K], rhs [G, K, N].

  Attributes:
    suite: the list that it is of.
    m, n, k: of the product; of a layer, `m` counts a token `top_k` times, `n`
      is the width of an expert, `k` that of a token.
    groups: G.
    pass_: "forward"; "dx" or "dw", its derivative for lhs or rhs alone;
      "gated", silu(lhs @ rhs) * (lhs @ rhs_up); "layer" or "layer_grad", the
      layer of examples/moe.py without and with all derivatives.
    sizes: how rows are shared out, a key of `DISTRIBUTIONS`; "routed" in a
      layer, whose router decides.
    dtype: of operands and results.
    top_k: experts of a token in a layer.
    tune_tokamax: whether tokamax is measured tuned besides.
  """

  suite: str
  m: int
  n: int
  k: int
  groups: int
  pass_: str = "forward"
  sizes: str = "even"
  dtype: str = "bfloat16"
  top_k: int = 1
  tune_tokamax: bool = False
  baseline, may_skip, claims = LAX, True, CLAIMS

  @property
  def program(self) -> "Case":
    """What the compiled program depends on: sizes are its input."""
    return dataclasses.replace(self, suite="", sizes="")

  @property
  def products(self) -> int:
    """Grouped products of a call."""
    return _PRODUCTS.get(self.pass_, 1)

  @property
  def is_layer(self) -> bool:
    """Whether it is a whole layer, whose router shares out the rows."""
    return self.pass_ in LAYERS

  def fields(self) -> dict[str, Any]:
    """What a row says of the case."""
    found = dataclasses.asdict(self)
    del found["tune_tokamax"]  # the names of arms say so
    found["pass"] = found.pop("pass_")
    found["group_sizes"] = found.pop("sizes")
    found["top_k"] = self.top_k if self.is_layer else None
    found["kernel"] = _KERNELS.get(self.pass_, "ragged_dot")
    return found

  def group_sizes(self, seed: int) -> np.ndarray | None:
    """Rows of each group, int32 [G]; None in a layer."""
    if self.is_layer:
      return None
    return group_sizes(self.sizes, self.m, self.groups, seed)

  def draw(self, seed: int) -> Operands:
    """The arguments, N(0, 1), on the device; a layer's weights are smaller."""
    normal = functools.partial(inputs.normal, seed, dtype=self.dtype)
    if self.is_layer:
      return self._draw_layer(normal, seed)
    found = {"group_sizes": jnp.asarray(self.group_sizes(seed))}
    if self.pass_ != "dx":
      found["lhs"] = normal(0, (self.m, self.k))
    if self.pass_ in ("dx", "dw"):
      found["dout"] = normal(1, (self.m, self.n))
    if self.pass_ != "dw":
      names = ("rhs", "rhs_up") if self.pass_ == "gated" else ("rhs",)
      for i, name in enumerate(names):
        found[name] = inputs.normals(
          seed, 2 + i, self.groups, (self.k, self.n), self.dtype
        )
      width = len(names) * self.n
      found["weight"] = normal(4, (self.k, width))
    return found

  def _draw_layer(self, normal: Call, seed: int) -> Operands:
    tokens = self.m // self.top_k
    params = _init(
      jax.random.key(seed),
      features=self.k,
      hidden=self.n,
      experts=self.groups,
      dtype=self.dtype,
    )
    found = {"x": normal(0, (tokens, self.k)), "params": params}
    # One expert that takes all rows.
    found["expert"] = tuple(w[0] for w in found["params"][1:])
    found["dense_x"] = normal(1, (self.m, self.k))
    if self.pass_ == "layer_grad":
      found["dout"] = normal(2, (tokens, self.k))
      found["dense_dout"] = normal(3, (self.m, self.k))
    return found

  def rows(self, seed: int) -> int:
    """Rows in groups."""
    sizes = self.group_sizes(seed)
    return self.m if sizes is None else int(sizes.sum())

  def flops(self, seed: int) -> int:
    """2*rows*K*N for each product, of the rows in groups alone."""
    return 2 * self.products * self.rows(seed) * self.k * self.n

  def least_bytes(self, seed: int) -> int:
    """Bytes if each operand is read once and each result written once.

    Weights of empty groups are not read; derivatives of them are written.
    """
    itemsize = jnp.dtype(self.dtype).itemsize
    weight, rows = self.k * self.n, self.rows(seed)
    if self.is_layer:
      tokens = self.m // self.top_k
      elements = 3 * self.groups * weight + 2 * tokens * self.k
      # The derivatives of weights and tokens, and the result's.
      return itemsize * elements * (2 if self.pass_ == "layer_grad" else 1)
    groups = self.groups
    if self.pass_ != "dw":
      groups = np.count_nonzero(self.group_sizes(seed))
    weights = (2 if self.pass_ == "gated" else 1) * groups * weight
    return int(itemsize * (weights + rows * (self.k + self.n)))

  def arms(self, implementation: str | None = None) -> dict[str, case_lib.Arm]:
    """The op, XLA's, a dense product; two calls of a gate; other peers."""
    fn = lax(self)
    found = {
      OURS: only(ours(self, implementation)),
      LAX: functools.partial(ragged_peers.lax_ragged_dot, self, fn),
      DENSE: only(dense(self)),
    }
    if self.pass_ == "gated":
      found[TWO] = only(two_calls(self, implementation))
    found[FUSED] = functools.partial(ragged_peers.lax_fused, fn)
    if self.pass_ in TRAINING:
      example = EXAMPLE_DW if self.pass_ == "dw" else EXAMPLE
      found[example] = functools.partial(ragged_peers.jax_example, self)
      found[INDEXED] = functools.partial(ragged_peers.indexed_linear, self)
      for name, how in TOKAMAX.items():
        written = functools.partial(_written, self)
        arm = functools.partial(ragged_peers.tokamax, how, written)
        found[name] = arm
        if self.tune_tokamax:
          found[TUNED[name]] = functools.partial(arm, self.operands())
    return found

  def check(
    self, results: Any, operands: Operands, seed: int = 0
  ) -> numerics.Check:
    """Compares samples of a product or a layer with float64; see `case_check`.

    Rows of no group must be zero. A layer's derivatives are only searched for
    NaN: the products that they are made of are checked by themselves, as the
    passes "dx" and "dw".
    """
    rng = np.random.default_rng(seed)
    if self.is_layer:
      out, params = jax.tree.leaves(results)[0], operands["params"]
      found = [case_check.layer(out, params, operands["x"], self.top_k, rng)]
      return case_check.worst_of(found, results)
    sizes = np.asarray(operands["group_sizes"])
    a, b, layout = {
      "dx": ("dout", "rhs", "NT"),
      "dw": ("lhs", "dout", "TN"),
    }.get(self.pass_, ("lhs", "rhs", "NN"))
    x = {"a": operands[a], "b": operands[b]}
    if self.pass_ == "gated":
      x["b_up"] = operands["rhs_up"]
    activation = jax.nn.silu if self.pass_ == "gated" else None
    parts = sampling.of_groups(results.shape, sizes, *case_check.GROUPS, rng)
    # XLA cuts float32 to TF32 where nobody asks for more.
    tf32 = self.dtype == "float32"
    found = [*case_check.of_parts(results, x, parts, layout, activation, tf32)]
    if self.pass_ != "dw" and sizes.sum() < self.m:
      found.append(case_check.zeros(results, sizes.sum()))
    return case_check.worst_of(found, results)


_init = jax.jit(
  moe.init, static_argnames=("features", "hidden", "experts", "dtype")
)


# The case, written with what multiplies groups: a function of its operands.


def ours(case: Case, implementation: str | None = None) -> Call:
  """With `pallas_gemm`."""
  dot, gated_dot = (
    functools.partial(op, implementation=implementation)
    for op in (pallas_gemm.ragged_dot, pallas_gemm.gated_ragged_dot)
  )
  return _written(case, dot, gated_dot)


def two_calls(case: Case, implementation: str | None = None) -> Call:
  """With `pallas_gemm.ragged_dot` alone, called twice for a gate."""
  dot = functools.partial(pallas_gemm.ragged_dot, implementation=implementation)
  return _written(case, dot)


def lax(case: Case) -> Call:
  """With `jax.lax.ragged_dot`."""
  return _written(case, jax.lax.ragged_dot)


def _written(case: Case, dot: Call, gated_dot: Call | None = None) -> Call:
  """The pass of the case. What only a trace needs is never computed."""
  gated_dot = gated_dot or moe.gated(dot)

  def dx(dout, rhs, group_sizes):
    lhs = jnp.zeros((case.m, case.k), case.dtype)
    _, vjp = jax.vjp(lambda lhs: dot(lhs, rhs, group_sizes), lhs)
    return vjp(dout)[0]

  def dw(lhs, dout, group_sizes):
    rhs = jnp.zeros((case.groups, case.k, case.n), case.dtype)
    _, vjp = jax.vjp(lambda rhs: dot(lhs, rhs, group_sizes), rhs)
    return vjp(dout)[0]

  layer = functools.partial(
    moe.layer, top_k=case.top_k, dot=dot, gated_dot=gated_dot
  )

  def layer_grad(params, x, dout):
    out, vjp = jax.vjp(layer, params, x)
    return out, *vjp(dout)

  by_pass = {
    "forward": lambda lhs, rhs, group_sizes: dot(lhs, rhs, group_sizes),
    "dx": dx,
    "dw": dw,
    "gated": lambda lhs, rhs, rhs_up, group_sizes: gated_dot(
      lhs, rhs, rhs_up, group_sizes
    ),
    "layer": lambda params, x: layer(params, x),
    "layer_grad": layer_grad,
  }
  return _taking_all(by_pass[case.pass_])


def dense(case: Case) -> Call:
  """One product of the same FLOPs, as if all rows were of one group.

  The same pass for the derivatives; for a gate, both weights side by side; for
  a layer, the MLP of one expert.
  """

  def mlp(x, gate, up, down):
    return jnp.dot(jax.nn.silu(jnp.dot(x, gate)) * jnp.dot(x, up), down)

  def layer_grad(expert, dense_x, dense_dout):
    out, vjp = jax.vjp(mlp, dense_x, *expert)
    return out, *vjp(dense_dout)

  by_pass = {
    "forward": lambda lhs, weight: jnp.dot(lhs, weight),
    "dx": lambda dout, weight: jnp.dot(dout, weight.T),
    "dw": lambda lhs, dout: jnp.dot(lhs.T, dout),
    "gated": lambda lhs, weight: jnp.dot(lhs, weight),
    "layer": lambda expert, dense_x: mlp(dense_x, *expert),
    "layer_grad": layer_grad,
  }
  return _taking_all(by_pass[case.pass_])


def _taking_all(fn: Call) -> Call:
  """A function of all operands of a case; it gets those that it names."""
  names = inspect.signature(fn).parameters

  def call(**operands):
    return fn(**{name: operands[name] for name in names})

  return call


NAMES = (*shapes.GROUPED, "all")


def suite(name: str, dtype: str = "bfloat16") -> list[Case]:
  """The cases of a suite; of "all", those of every published suite.

  Raises:
    ValueError: no suite has that name.
  """
  return [Case(dtype=dtype, **x) for x in shapes.problems(shapes.GROUPED, name)]


# Of what is drawn: elements that `lax.ragged_dot` makes of A, and of weights.
_MOST_EXPANDED, _MOST_WEIGHTS = 4e9, 6e8


def draw(seed: int, count: int) -> list[Case]:
  """Random products of 2 to 256 groups of 1 to 1,024 rows, one after the other.

  Args:
    seed: of the problems.
    count: how many; the first of more with the same seed.
  """
  rng = random.Random(seed)
  log_uniform = lambda low, high: round(2 ** rng.uniform(low, high))  # noqa: E731
  found: list[Case] = []
  while len(found) < count:
    groups = log_uniform(1, 8)
    m = groups * log_uniform(0, 10)
    n, k = (8 * log_uniform(4, 10) for _ in range(2))
    how = {
      "pass_": rng.choice(TRAINING),
      "sizes": rng.choice(["even", "random", "zipf"]),
      "dtype": rng.choice(["bfloat16", "float32"]),
    }
    if (
      groups * m * max(n, k) < _MOST_EXPANDED and groups * n * k < _MOST_WEIGHTS
    ):
      found.append(Case(suite="unseen", m=m, n=n, k=k, groups=groups, **how))
  return found


def group_sizes(how: str, m: int, groups: int, seed: int) -> np.ndarray:
  """How M rows are shared out among groups: int [groups].

  Args:
    how: a name of `DISTRIBUTIONS`. "padded" leaves the last quarter of the rows
      to no group; "odd" leaves a row over if the parities say so.
    m: rows.
    groups: how many.
    seed: of what is drawn.
  """
  rng = np.random.default_rng(seed)
  return DISTRIBUTIONS[how](m, groups, rng).astype(np.int32)


def _even(m: int, groups: int, rng) -> np.ndarray:
  del rng
  return m // groups + (np.arange(groups) < m % groups)


def _random(m: int, groups: int, rng) -> np.ndarray:
  return rng.multinomial(m, np.full(groups, 1 / groups))


def _zipf(m: int, groups: int, rng) -> np.ndarray:
  shares = 1 / np.arange(1, groups + 1)
  return rng.permutation(rng.multinomial(m, shares / shares.sum()))


def _one_hot(m: int, groups: int, rng) -> np.ndarray:
  return m * (np.arange(groups) == rng.integers(groups))


def _half_empty(m: int, groups: int, rng) -> np.ndarray:
  full = rng.permutation(np.arange(groups) < math.ceil(groups / 2))
  sizes = np.zeros(groups, int)
  sizes[full] = _even(m, int(full.sum()), rng)
  return sizes


DISTRIBUTIONS = {
  "even": _even,
  "random": _random,
  "zipf": _zipf,
  "one_hot": _one_hot,
  "half_empty": _half_empty,
  "odd": lambda m, groups, rng: (
    2 * _random(max(0, m - groups) // 2, groups, rng) + 1
  ),
  "padded": lambda m, groups, rng: _random(m - m // 4, groups, rng),
}
