"""Products of equal shapes and the persistent cache, on eight CPU devices.

  python -m tests.support.cached_products FOLDER [--same-digest] NAME..

Prints a line a product: whether its program came from the cache ("hit") or was
added to it ("miss"), and whether its result is "right" or "wrong".
"""

import contextlib
import sys
from unittest import mock

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import pallas_gemm
from pallas_gemm.ops import sharding
from tests.support import stand_in
from tests.support.products import normal

ACTIVATIONS = {
  "relu": jax.nn.relu,
  "silu": jax.nn.silu,
  "twice": lambda z: z * 2,
  "three times": lambda z: z * 3,
}


def main() -> None:
  """Runs the products that are named, in order."""
  folder, *names = sys.argv[1:]
  # The key leaves out the pointer to the call that XLA partitions, which
  # differs between processes.
  jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
  jax.config.update("jax_compilation_cache_dir", folder)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  events: list[str] = []
  jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
  with contextlib.ExitStack() as stack:
    stack.enter_context(stand_in.installed())
    if "--same-digest" in names:
      names.remove("--same-digest")
      same = lambda spec: np.zeros(4, np.int32)  # noqa: E731
      stack.enter_context(mock.patch.object(sharding, "digest", same))
    for name in names:
      print(_run(ACTIVATIONS[name], events))


def _run(activation, events: list[str]) -> str:
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

  def product(a, b):
    return pallas_gemm.matmul(
      a, b, activation=activation, implementation="sm90"
    )

  a = jax.device_put(normal(16, 32), NamedSharding(mesh, P("x")))
  b = jax.device_put(normal(32, 24), NamedSharding(mesh, P()))
  want = np.asarray(activation(normal(16, 32) @ normal(32, 24)))
  events.clear()
  out = jax.jit(product)(a, b)
  found = [
    {"cache_hits": "hit", "cache_misses": "miss"}[word]
    for name in events
    if (word := name.rpartition("/")[2]) in ("cache_hits", "cache_misses")
  ]
  right = np.allclose(out, want, rtol=1e-5, atol=1e-5)
  return f"{','.join(found)} {'right' if right else 'wrong'}"


if __name__ == "__main__":
  main()
