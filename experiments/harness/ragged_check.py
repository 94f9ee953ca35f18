"""Is a grouped product right? Sampled groups, rows, columns, in float64.

Each group is a dense product and held to the same bounds (see `dense_check`).
Of a layer some tokens are followed through all of it: the bound of the first
products is carried through the last one and the weighted sum. Its derivatives
are only scanned for NaN: the products that they are made of are checked by
themselves, as the passes "dx" and "dw".
"""

from collections.abc import Iterator
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import moe
from experiments.harness import dense_cases, dense_check, ragged_cases
from pallas_gemm import numerics

GROUPS = 8
TOKENS = 8
_U_FLOAT32 = 2.0**-24


def check(
  case: ragged_cases.Case,
  results: Any,
  operands: ragged_cases.Operands,
  seed: int = 0,
) -> numerics.Check:
  """Compares the results of a case with float64, against their error bounds.

  Rows of no group must be zero. All of the results is scanned for NaN, and for
  infinities where their dtype has room for any result.

  Args:
    case: what was computed.
    results: one array, or of a "layer_grad" the layer and its derivatives.
    operands: as `case.draw` gives them.
    seed: picks what is sampled.

  Returns:
    What was found at the worst element of all.
  """
  rng = np.random.default_rng(seed)
  if case.is_layer:
    out = jax.tree.leaves(results)[0]
    checks = [_layer(case, out, operands, rng)]
  else:
    sizes = np.asarray(operands["group_sizes"])
    samples = _weights if case.pass_ == "dw" else _rows
    checks = [
      dense_check.compare(_dense(case), sample)
      for sample in samples(case, results, operands, sizes, rng)
    ]
    if case.pass_ != "dw" and sizes.sum() < case.m:
      checks.append(_zeros(results, sizes.sum()))
  return dense_check.worst_of(checks, results)


def _dense(case: ragged_cases.Case) -> dense_cases.Case:
  """What a group of a case computes; its sizes say nothing."""
  gated = case.pass_ == "gated" or case.is_layer
  kernel = "gated_matmul" if gated else "matmul"
  return dense_cases.Case(
    suite="", m=case.m, n=case.n, k=case.k, dtype=case.dtype, kernel=kernel
  )


def _groups(sizes: np.ndarray, rng) -> np.ndarray:
  """Groups to check: the first, the last, the largest, the smallest, some."""
  filled = np.flatnonzero(sizes)
  picked = dense_check.some(len(filled), GROUPS, rng)
  extremes = filled[[sizes[filled].argmin(), sizes[filled].argmax()]]
  return np.unique([*filled[picked], *extremes])


def _rows(case, out, operands, sizes, rng) -> Iterator[dict[str, np.ndarray]]:
  """Rows and columns of some groups, where a group multiplies rows."""
  starts = np.cumsum(sizes) - sizes
  columns = dense_check.some(out.shape[1], dense_check.SAMPLE, rng)
  for group in _groups(sizes, rng):
    rows = dense_check.some(sizes[group], dense_check.SAMPLE, rng)
    # Of one length for all groups, so that what picks them is compiled once.
    rows = starts[group] + np.resize(rows, dense_check.SAMPLE)
    arrays = {
      "out": out,
      "a": operands["dout" if case.pass_ == "dx" else "lhs"],
      "b": operands["rhs"],
      "b2": operands.get("rhs_up"),
    }
    found = _pick(arrays, group, rows, columns, case.pass_ == "dx")
    yield jax.device_get(found)


@functools.partial(jax.jit, static_argnums=4)
def _pick(arrays, group, rows, columns, transposed):
  # Indexed where the arrays are: only what is checked travels to the host.
  found = {
    "out": arrays["out"][rows[:, None], columns],
    "a": arrays["a"][rows],
  }
  for name in ("b", "b2"):
    if arrays[name] is not None:
      weight = arrays[name][group]
      found[name] = weight[columns].T if transposed else weight[:, columns]
  return found


def _weights(
  case, out, operands, sizes, rng
) -> Iterator[dict[str, np.ndarray]]:
  """Rows and columns of the derivatives of some groups' weights."""
  del case
  starts = np.cumsum(sizes) - sizes
  rows, columns = (
    dense_check.some(size, dense_check.SAMPLE, rng) for size in out.shape[1:]
  )
  lhs, dout = jax.device_get(
    (operands["lhs"][:, rows], operands["dout"][:, columns])
  )
  # One that is empty has a derivative too: zeros.
  empty = np.flatnonzero(sizes == 0)[:1]
  for group in [*_groups(sizes, rng), *empty]:
    at = slice(starts[group], starts[group] + sizes[group])
    picked = out[group][rows[:, None], columns]
    yield {"out": np.asarray(picked), "a": lhs[at].T, "b": dout[at]}


def _zeros(out: jax.Array, start: int) -> numerics.Check:
  """Are the rows from `start` on zeros?"""
  largest = float(_largest_from(out, start))
  return numerics.Check(
    passed=largest == 0,
    max_error=largest,
    error_bound=0.0,
    worst_ratio=0.0 if largest == 0 else np.inf,
    checked=(out.shape[0] - start) * out.shape[1],
  )


@jax.jit
def _largest_from(out, start):
  outside = jnp.arange(out.shape[0])[:, None] >= start
  return jnp.max(jnp.where(outside, jnp.abs(out), 0))


def _layer(case, out, operands, rng) -> numerics.Check:
  """Some tokens of a layer that go to the same experts."""
  params, x = operands["params"], operands["x"]
  route = jax.jit(moe.route, static_argnums=2)
  weights, experts = map(np.asarray, route(params.router, x, case.top_k))
  # Of many experts the weights would have to be fetched.
  chosen = experts[rng.integers(len(experts))]
  same = (np.sort(experts) == np.sort(chosen)).all(axis=1)
  tokens = np.flatnonzero(same)[:TOKENS]
  columns = dense_check.some(out.shape[1], dense_check.SAMPLE, rng)
  rows = np.asarray(x[tokens])
  want = np.zeros((len(tokens), len(columns)))
  size, bound = want.copy(), want.copy()
  for expert in chosen:
    share = weights[tokens] * (experts[tokens] == expert)
    share = share.sum(axis=1, keepdims=True, dtype=np.float64)
    y, off = _expert(case, params, rows, expert, columns)
    want += share * y
    size += share * (np.abs(y) + off)
    bound += share * off
  # One rounding for each factor and for each sum.
  bound += (case.top_k + 1) * _U_FLOAT32 * size
  bound = dense_check.rounded(want, bound, out.dtype)
  got = np.asarray(out[tokens[:, None], columns])
  return dense_check.verdict(got, want, bound)


def _expert(
  case, params, rows, expert, columns
) -> tuple[np.ndarray, np.ndarray]:
  """Columns of an expert's result in float64, and how far off it may be."""
  gate, up = (np.asarray(w[expert]) for w in (params.gate, params.up))
  sample = {"a": rows, "b": gate, "b2": up}
  hidden, off = dense_check.expected(_dense(case), sample)
  down = np.asarray(params.down[expert][:, columns])
  y = numerics.reference(hidden, down)
  largest, size = np.abs(hidden) + off, np.abs(down)
  # Twice that of float32: products of 16 bits are truncated as they are added.
  added = 2 * numerics.error_bound(largest, size, out_dtype=jnp.float32)
  bound = off @ size.astype(np.float64) + added
  return y, dense_check.rounded(y, bound, jnp.dtype(case.dtype))
