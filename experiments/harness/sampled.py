"""Is the result of a case right? Rows and columns of it, against float64.

Of a batch some matrices are checked, of groups some, and of each some rows and
columns, with K in full; what each element may be off says `pallas_gemm.check`.
Of a layer some tokens are followed through all of it: the bound of the first
products is carried through the last one and the weighted sum.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples import moe
from pallas_gemm import check as check_lib
from pallas_gemm import numerics

# Rows, and columns, of a matrix; matrices of a batch; groups; tokens.
SAMPLE, MATRICES, GROUPS, TOKENS = 64, 3, 8, 8
_U_FLOAT32 = 2.0**-24

Activation = Callable[[jax.Array], jax.Array] | None


class Part(NamedTuple):
  """What is checked of a result.

  Attributes:
    matrix: index of the matrix, where there are several.
    rows, columns: which of it.
    k: the part of the operands' K that is summed up.
  """

  matrix: int
  rows: np.ndarray
  columns: np.ndarray
  k: slice = slice(None)


def of_batch(out: jax.Array, rng: np.random.Generator) -> Iterator[Part]:
  """Parts of some matrices of [batch, M, N], or of one matrix."""
  rows, columns = (some(size, SAMPLE, rng) for size in out.shape[-2:])
  batch = out.shape[0] if out.ndim == 3 else 1
  for matrix in some(batch, MATRICES, rng):
    yield Part(matrix, rows, columns)


def of_rows(
  out: jax.Array, sizes: np.ndarray, rng: np.random.Generator
) -> Iterator[Part]:
  """Parts of [M, N], whose rows are those of one group after the other."""
  starts = np.cumsum(sizes) - sizes
  columns = some(out.shape[1], SAMPLE, rng)
  for group in _groups(sizes, rng):
    rows = some(sizes[group], SAMPLE, rng)
    # Of one length for all groups, so that what picks them is compiled once.
    yield Part(group, starts[group] + np.resize(rows, SAMPLE), columns)


def of_sums(
  out: jax.Array, sizes: np.ndarray, rng: np.random.Generator
) -> Iterator[Part]:
  """Parts of [G, M, N], each the sum over the rows of a group.

  One that is empty has a sum too: zeros.
  """
  starts = np.cumsum(sizes) - sizes
  rows, columns = (some(size, SAMPLE, rng) for size in out.shape[1:])
  empty = np.flatnonzero(sizes == 0)[:1]
  for group in [*_groups(sizes, rng), *empty]:
    k = slice(starts[group], starts[group] + sizes[group])
    yield Part(group, rows, columns, k)


def _groups(sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Groups to check: the first, the last, the largest, the smallest, some."""
  filled = np.flatnonzero(sizes)
  picked = some(len(filled), GROUPS, rng)
  extremes = filled[[sizes[filled].argmin(), sizes[filled].argmax()]]
  return np.unique([*filled[picked], *extremes])


def some(size: int, count: int, rng: np.random.Generator) -> np.ndarray:
  """Up to `count` indices: the first, the last, and others at random."""
  if count >= size:
    return np.arange(size)
  inner = rng.choice(np.arange(1, size - 1), count - 2, replace=False)
  return np.sort([0, *inner, size - 1])


def checks(
  out: jax.Array,
  operands: dict[str, jax.Array],
  parts: Iterable[Part],
  layout: str = "NN",
  activation: Activation = None,
) -> Iterator[numerics.Check]:
  """Compares parts of a result with float64.

  Args:
    out: the result.
    operands: "a" and "b", and what else `check.expected` takes, on the device.
    parts: what is checked.
    layout: how A and B are stored: "N" as they are, "T" transposed.
    activation: see `check.expected`.
  """
  for matrix, rows, columns, k in parts:
    arrays = {"out": out, **operands}
    x = jax.device_get(_pick(arrays, matrix, rows, columns, layout))
    got, x["a"], x["b"] = x.pop("out"), x["a"][:, k], x["b"][k]
    want, *_ = check_lib.expected(
      **x, activation=activation, out_dtype=got.dtype
    )
    yield want.check(got)


@functools.partial(jax.jit, static_argnums=4)
def _pick(arrays, matrix, rows, columns, layout):
  # Indexed where the arrays are: only what is checked travels to the host.
  found = {}
  for name, x in arrays.items():
    x = x[matrix] if x.ndim == 3 else x
    if name == "a":
      found[name] = x[rows] if layout[0] == "N" else x[:, rows].T
    elif name in ("b", "b_up"):
      found[name] = x[:, columns] if layout[1] == "N" else x[columns].T
    else:
      found[name] = x[columns] if name == "bias" else x[rows[:, None], columns]
  return found


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
  columns = some(out.shape[1], SAMPLE, rng)
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
