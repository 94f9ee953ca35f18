#!/bin/sh
# Exits 0 if this machine has an NVIDIA GPU that a program could use.
[ -e /dev/nvidia0 ] && exit 0
if command -v nvidia-smi >/dev/null 2>&1; then
  nvidia-smi -L 2>/dev/null | grep -q '^GPU' && exit 0
fi
# Neither a device node nor nvidia-smi (some containers): ask the driver.
exec python3 - <<'PYTHON' 2>/dev/null
import ctypes
import sys

try:
  cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
  sys.exit(1)
count = ctypes.c_int(0)
found = cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
sys.exit(0 if found and count.value > 0 else 1)
PYTHON
