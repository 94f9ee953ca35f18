"""Weights of groups of rows, [G, K, N], whose rows TMA can't address.

TMA wants row strides that are multiples of 16 bytes; rows may start at any
element. So where N is no multiple of 8, `fold` rows of B are given to it as
one: B[g] is, as it lies in memory, a matrix [K / fold, fold * N], whose row q
holds rows fold * q + r of B side by side, and all rows of one r are a window of
it. A slab is `fold` such windows, one above the other, so that its rows lie in
another order than those of B:

    fold 2, slabs of 8 rows    0 2 4 6 1 3 5 7    8 10 12 14 9 11 13 15 ...

Sums over K are the same if A has its columns in that order (`in_slab_order`).
XLA permutes them: it copies A, where padded rows of B would have it copy the
weights of all groups.

Each window is one copy by TMA, but atom by atom where it hangs over the edge of
what rows are folded to (`compat.allow_ragged_copies`). Columns of a window past
N are the next row's first ones: what is summed of them is not stored.
"""

import functools
import math

import jax

from pallas_gemm.problem import Problem

_STRIDE_BITS = 128


@functools.lru_cache(maxsize=1024)
def fold(problem: Problem) -> int:
  """Rows of B that TMA is given as one; 1 if it addresses B, or a padded one.

  More where there are groups of rows, B is stored [K, N] and K is a multiple.
  How many rows A has does not count: in which order a row is summed must not
  depend on the others.

  Example:
    >>> from pallas_gemm.kernels.sm90.folding import fold
    >>> from pallas_gemm.problem import Problem
    >>> problem = Problem.flat(
    ...   m=8192, n=4100, k=4096, ragged="m", groups=16, dtype="bfloat16",
    ...   out_dtype="bfloat16")
    >>> fold(problem), fold(problem.changed(n=1407))
    (2, 8)
    >>> fold(problem.changed(n=4096)), fold(problem.changed(k=4095))
    (1, 1)
  """
  p = problem
  if p.along != "m" or p.b.k_last:
    return 1
  rows = _STRIDE_BITS // math.gcd(_STRIDE_BITS, p.n * p.b.bits)
  return rows if p.k % rows == 0 else 1


def in_slab_order(a: jax.Array, fold: int, block_k: int) -> jax.Array:
  """A, [M, K], with its columns in the order of a folded B's rows.

  Args:
    a: of whole slabs; filled up with zeros.
    fold: of B.
    block_k: columns of a slab.
  """
  rows, columns = a.shape
  slabs = a.reshape(rows, columns // block_k, block_k // fold, fold)
  return slabs.swapaxes(-1, -2).reshape(rows, columns)
