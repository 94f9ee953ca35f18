"""Is the result of a case right? Parts of it, against float64.

Which parts says `pallas_gemm.sampling`, what an element of them may be off
`pallas_gemm.check`. Of a layer some tokens are followed through all of it: the
bound of the first products is carried through the last one and the weighted
sum.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import moe
from pallas_gemm import check as check_lib
from pallas_gemm import numerics, sampling

# Rows, and columns, that are checked of each matrix; matrices of a batch,
# groups, and tokens of a layer.
LINES, TOKENS = 64, 8
BATCH, GROUPS = (LINES, 3), (LINES, 8)
_U_FLOAT32 = 2.0**-24

Activation = Callable[[jax.Array], jax.Array] | None


def of_parts(
  out: jax.Array,
  arrays: dict[str, jax.Array],
  parts: Iterable[sampling.Part],
  layout: str = "NN",
  activation: Activation = None,
  tf32: bool = False,
) -> Iterator[numerics.Check]:
  """Compares parts of a result with what they must be.

  Args:
    out: the result.
    arrays: what it is made of; see `sampling.Part.operands`.
    parts: what is checked.
    layout: how A and B are stored.
    activation, tf32: see `check.expected`.
  """
  for part in parts:
    want, *_ = check_lib.expected(
      **part.operands(arrays, layout),
      activation=activation,
      out_dtype=out.dtype,
      tf32=tf32,
    )
    yield want.check(part.of(out))


def worst_of(found: Sequence[numerics.Check], results: Any) -> numerics.Check:
  """One of all: the worst, failed if anything in `results` is not finite."""
  worst = max(found, key=lambda check: check.worst_ratio)
  checked = sum(check.checked for check in found)
  if all(bool(_no_stray(x)) for x in jax.tree.leaves(results)):
    return dataclasses.replace(worst, checked=checked)
  return numerics.Check(False, np.inf, worst.error_bound, np.inf, checked)


@jax.jit
def _no_stray(out: jax.Array) -> jax.Array:
  """Whether nothing but float16, whose range is small, holds infinities."""
  allowed = out.dtype == jnp.float16
  return ~jnp.any(jnp.isnan(out) if allowed else ~jnp.isfinite(out))


def zeros(out: jax.Array, start: int) -> numerics.Check:
  """Are the rows from `start` on zeros?"""
  largest = float(_largest_from(out, start))
  ratio = 0.0 if largest == 0 else np.inf
  count = (out.shape[0] - start) * out.shape[1]
  return numerics.Check(largest == 0, largest, 0.0, ratio, count)


@jax.jit
def _largest_from(out, start):
  outside = jnp.arange(out.shape[0])[:, None] >= start
  return jnp.max(jnp.where(outside, jnp.abs(out), 0))


def layer(
  out: jax.Array,
  params: moe.Params,
  x: jax.Array,
  top_k: int,
  rng: np.random.Generator,
) -> numerics.Check:
  """Compares some tokens of `moe.layer` that go to the same experts."""
  route = jax.jit(moe.route, static_argnums=2)
  weights, experts = map(np.asarray, route(params.router, x, top_k))
  # Of many experts the weights would have to be fetched.
  chosen = experts[rng.integers(len(experts))]
  same = (np.sort(experts) == np.sort(chosen)).all(axis=1)
  tokens = np.flatnonzero(same)[:TOKENS]
  columns = sampling.stratified(out.shape[1], LINES, rng)
  rows = np.asarray(x[tokens])
  want = np.zeros((len(tokens), len(columns)))
  size, bound = want.copy(), want.copy()
  for expert in chosen:
    share = weights[tokens] * (experts[tokens] == expert)
    share = share.sum(axis=1, keepdims=True, dtype=np.float64)
    y, off = _expert(params, rows, expert, columns)
    want += share * y
    size += share * (np.abs(y) + off)
    bound += share * off
  # One rounding for each factor and for each sum.
  bound += (top_k + 1) * _U_FLOAT32 * size
  got = np.asarray(out[tokens[:, None], columns])
  return numerics.compare(got, want, bound)


def _expert(
  params: moe.Params, rows: np.ndarray, expert: int, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Columns of an expert's result in float64, and how far off it may be."""
  gate, up = (np.asarray(w[expert]) for w in (params.gate, params.up))
  (hidden, off), *_ = check_lib.expected(rows, gate, up, activation=jax.nn.silu)
  off = numerics.after_rounding(off, hidden, rows.dtype)
  down = np.asarray(params.down[expert][:, columns])
  y = numerics.reference(hidden, down)
  largest, size = np.abs(hidden) + off, np.abs(down)
  # Twice that of float32: products of 16 bits are truncated as they are added.
  added = 2 * numerics.bound_of_sum(largest, size)
  bound = off @ size.astype(np.float64) + added
  return y, numerics.after_rounding(bound, y, rows.dtype)
