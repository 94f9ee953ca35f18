"""Instructions that Pallas has no words for, as PTX.

Each function is called by a whole warpgroup. Where there is no GPU the same is
done by operations that Pallas' interpreter knows.
"""

from pallas_gemm.ptx.casts import in_pairs, split_off, to_e5m2
from pallas_gemm.ptx.clusters import add_sent, fence_cluster, send
from pallas_gemm.ptx.copies import (
  commit_async,
  copy_async,
  copy_rows_async,
  prefetch,
  wait_async,
)
from pallas_gemm.ptx.loads import load_clamped
from pallas_gemm.ptx.maxima import largest
from pallas_gemm.ptx.shifts import shift_rows
from pallas_gemm.ptx.stores import store_elements, store_rows
from pallas_gemm.ptx.threads import (
  block_barrier,
  unknown,
  wait_for_block,
  wait_for_warpgroup,
)

__all__ = [
  "add_sent",
  "block_barrier",
  "commit_async",
  "copy_async",
  "copy_rows_async",
  "fence_cluster",
  "in_pairs",
  "largest",
  "load_clamped",
  "prefetch",
  "send",
  "shift_rows",
  "split_off",
  "store_elements",
  "store_rows",
  "to_e5m2",
  "unknown",
  "wait_async",
  "wait_for_block",
  "wait_for_warpgroup",
]
