"""Whether a kernel writes outside of its result, or other bits, on a GPU."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.support import problems


def assert_same_bits(compute: Callable[..., Any], *args: Any) -> Any:
  """Computes it 101 times; returns what comes each time."""
  first = compute(*args)
  for _ in range(100):
    for got, want in zip(
      jax.tree.leaves(compute(*args)), jax.tree.leaves(first)
    ):
      np.testing.assert_array_equal(problems.bits(got), problems.bits(want))
  return first


def assert_written_inside(
  compute: Callable[..., jax.Array],
  *args: Any,
  check: Callable[[jax.Array], None],
) -> None:
  """What lies right before and behind results in memory stays as it is.

  Skips if the allocator put no result between two arrays of the test.

  Args:
    compute: compiled; its result is a whole multiple of 256 bytes, which is
      what JAX's allocator cuts memory into: nothing lies between one and the
      next.
    *args: its arguments.
    check: raises if a result is wrong.
  """
  size = jax.block_until_ready(compute(*args)).nbytes
  assert size % 256 == 0
  words = np.arange(size // 4, dtype=np.uint32)
  canaries = [jax.device_put(words + i) for i in range(33)]
  jax.block_until_ready(canaries)
  # Holes between those that stay, of just the result's size.
  kept = {i: canaries[i] for i in range(0, 33, 2)}
  del canaries
  where = {canary.unsafe_buffer_pointer() for canary in kept.values()}
  outs = [jax.block_until_ready(compute(*args)) for _ in range(16)]
  between = 0
  for out in outs:
    at = out.unsafe_buffer_pointer()
    between += {at - size, at + size} <= where
    check(out)
  for i, canary in kept.items():
    np.testing.assert_array_equal(np.asarray(canary), words + i)
  if not between:
    pytest.skip("the allocator put no result between two canaries")
