"""Programs that measure pallas_gemm against what JAX has already."""

import os
import signal
import sys


def _stop(*_) -> None:
  os.write(2, b"interrupted\n")
  os._exit(130)


# Python says so while it looks for the program that `-m` names: what follows
# is a program's imports, until harness.cli takes over.
if sys.argv[0] == "-m":
  signal.signal(signal.SIGINT, _stop)
