"""Products by Triton's interpreter: a program, with TRITON_INTERPRET=1."""

import json

import numpy as np

from pallas_gemm import numerics
from pallas_gemm.kernels import triton_kernel


class Buffer:
  """A NumPy array, with as much of a tensor as Triton asks of it."""

  def __init__(self, array):
    self.array = array
    self.dtype = array.dtype.name

  def data_ptr(self):
    return self.array.ctypes.data

  def untyped_storage(self):
    return self

  cpu = untyped_storage

  def storage_offset(self):
    return 0

  def size(self):
    return ()

  stride = size

  def new_empty(self, *_, **__):
    return Buffer(self.array)

  def copy_(self, *_):
    pass

  set_ = copy_


def run(cases) -> None:
  """Prints each case, whether it is right, and its worst error."""
  # Triton's interpreter finds functions among globals alone.
  triton_kernel.raster = triton_kernel._raster()
  rng = np.random.default_rng(0)
  for case in cases:
    (m, n, k), dtype, (bm, bn, bk, group), alpha, beta, wide = case
    a, b, c = (
      rng.standard_normal(shape).astype(dtype)
      for shape in ((m, k), (k, n), (m, n))
    )
    if beta == 0:
      c[:] = np.nan  # must not be read
    out = np.full((m, n), np.nan, dtype)
    grid = (-(-m // bm) * -(-n // bn),)
    triton_kernel.device_code()[grid](
      *map(Buffer, (a, b, c, out)), m=m, n=n, k=k, alpha=alpha, beta=beta,
      block_m=bm, block_n=bn, block_k=bk, group_m=group,
      precision="ieee", wide=wide,
    )  # fmt: skip
    found = numerics.check(out, a, b, c, alpha=alpha, beta=beta)
    print(json.dumps([case, found.passed, found.worst_ratio]))
