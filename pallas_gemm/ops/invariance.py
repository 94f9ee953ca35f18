"""Results whose rows do not depend on how many other rows there are."""

from collections.abc import Iterator
import contextlib

import jax

# A value that belongs to the thread and that JAX keeps in the keys of its
# caches: a function that was compiled outside is compiled again inside.
_state = jax.make_user_context(False)


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
  """Context (or decorator): a row's bits do not depend on M or other rows.

  The order in which a kernel adds along K depends on its config, which is
  usually chosen for M too: the same token may get other bits in a batch of 8
  than in a batch of 4096. Inside this context the products of one N, K,
  dtypes, layout and epilogue all have the same config and the same order along
  K. It holds for the calling thread, for functions that are traced inside it,
  and may be nested.

  XLA's own products do not promise that. On a Hopper GPU, products that the
  kernel does not take raise NotImplementedError in this context instead of
  falling back, and so do sums over devices (K sharded). Elsewhere XLA's product
  runs, with one warning, so that a program can be developed on any machine.

  Example:
    >>> import pallas_gemm
    >>> @pallas_gemm.batch_invariant()
    ... def layer(x, w):
    ...   return pallas_gemm.matmul(x, w)
  """
  with _state(True):
    yield


def is_batch_invariant() -> bool:
  """Whether this thread is inside `batch_invariant`."""
  return _state.value
