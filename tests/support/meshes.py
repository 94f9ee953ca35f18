"""Every op under every kind of mesh, against JAX's own product; a program.

  python -m tests.support.meshes [--filter=TEXT] [--arms=default,kernel]
    [--shard=I/N] [--table]

Needs eight devices. Prints a line a check and exits with 1 if one fails.

Arms: "default" is the op as it is (XLA's product on CPU); in "kernel" a
stand-in takes the Hopper kernel's place, which XLA must not partition, and
what it is given must be one device's share. `--table` adds the collectives of
JAX's own product.

What a check compares: values, types and shardings of all results, and how many
arrays each kind of collective takes in the compiled program. A difference of
those is an entry in `mesh_checks.DIFFERENCES`, with its reason.
"""

import argparse
import functools
import sys
import time
import traceback

import jax

from tests.support import (
  mesh_calls,
  mesh_checks,
  mesh_edges,  # noqa: F401
  mesh_eight_bits,  # noqa: F401
  mesh_errors,  # noqa: F401
  mesh_extras,  # noqa: F401
  mesh_reduce,  # noqa: F401
)


def main() -> int:
  """Runs what the flags choose."""
  flags = _flags()
  if jax.device_count() < 8:
    print("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    return 1
  checks = [
    *mesh_checks.CHECKS,
    *(
      (unit.key, arms, functools.partial(mesh_checks.check, unit))
      for unit, arms in mesh_calls.units()
    ),
  ]
  index, count = map(int, flags.shard.split("/"))
  # Checks of a case go to one shard, where they share what they compare with.
  cases = dict.fromkeys(key.partition(" | ")[0] for key, *_ in checks)
  mine = {x for i, x in enumerate(cases) if i % count == index}
  done = failed = 0
  for name in flags.arms.split(","):
    found = [
      (key, check)
      for key, arms, check in checks
      if name in arms
      and flags.filter in key
      and key.partition(" | ")[0] in mine
    ]
    arm = mesh_checks.Arm(name)
    with arm.installed():
      for key, check in found:
        done += 1
        start = time.monotonic()
        try:
          own = check(arm)
        except Exception as error:  # whatever a broken op raises
          failed += 1
          print(f"FAIL  {key} [{name}] {type(error).__name__}: {error!s:.400}")
          traceback.print_exc()
          continue
        own = f"  {own or ''}" if flags.table else ""
        seconds = time.monotonic() - start
        print(f"ok    {key} [{name}] {seconds:.1f}s{own}", flush=True)
  print(f"{failed} of {done} checks failed")
  return 1 if failed or not done else 0


def _flags():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--filter", default="", help="text in a check's line")
  parser.add_argument("--arms", default="default,kernel")
  parser.add_argument(
    "--shard", default="0/1", help="every N-th case from the I-th"
  )
  parser.add_argument("--table", action="store_true")
  return parser.parse_args()


if __name__ == "__main__":
  sys.exit(main())
