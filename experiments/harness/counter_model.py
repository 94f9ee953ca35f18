"""What the traffic model says of the counters, and why they differ from it."""

from collections.abc import Mapping

from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract, traffic

TOLERANCE = 0.20

# Why a count differs from the model, by rung and counter: one sentence each,
# for what was seen at the ladder's own shape on an H200.
_BROADCAST = (
  "ncu counts the different bytes of a request: the word that 32 lanes share"
  " counts once, so 33 words a step of the 64 that threads load."
)
_SECOND_READ = (
  "The model reads A and B once; together they are larger than the L2, and"
  " what blocks that run at different times share is read from DRAM again."
)
_ROW_OF_BLOCKS = (
  "The model reads B once; it is larger than the L2 and is read again for each"
  " group of rows of blocks that run at the same time, about {} times."
)
_MERGED = (
  "Each SM receives what the model counts, but requests of several SMs for the"
  " same tile at the same time are merged before the L2 counts them."
)
_RUNGS = ladder_lib.with_variants()
EXPLANATIONS: dict[tuple[str, str], str] = {
  **{(x.name, "dram_read_bytes"): _SECOND_READ for x in _RUNGS},
  **{
    (x.name, "l2_read_bytes"): _MERGED
    for x in _RUNGS
    if x.config_type is contract.TensorCoreConfig
  },
  ("naive", "thread_load_bytes"): _BROADCAST,
  ("coalesced", "thread_load_bytes"): _BROADCAST,
  ("naive", "dram_read_bytes"): (
    "Of each 32-byte sector of A a warp uses 4 bytes a step, and it is fetched"
    " again where caches drop it before the next 7 steps; B, larger than the"
    " L2, is read again for each group of rows of blocks that run together."
  ),
  ("naive", "dram_write_bytes"): (
    "C is written 4 bytes a sector; some sectors leave the L2 before their"
    " other 28 bytes have come, and are written more than once."
  ),
  ("coalesced", "dram_read_bytes"): _ROW_OF_BLOCKS.format(60),
  ("shared_memory", "dram_read_bytes"): _ROW_OF_BLOCKS.format(120),
  ("blocktiling_1d", "dram_read_bytes"): _ROW_OF_BLOCKS.format(30),
}


def predicted(t: traffic.Traffic) -> dict[str, float]:
  """What the model says of the counters; none where it says nothing."""
  p = t.problem
  result = p.m * p.n * p.itemsize
  found = {
    "dram_read_bytes": float(t.compulsory_bytes - result),
    "dram_write_bytes": float(result),
  }
  if t.threads_load:
    found["thread_load_bytes"] = float(t.global_load_bytes)
  if t.slabs:  # what L1 keeps of loads without them is not modelled
    found["l2_read_bytes"] = float(t.global_load_bytes)
  if t.sectors is not None:
    # A warp loads a value of A and one of B in each step.
    found["sectors_per_request"] = sum(t.sectors) / 2
  if p.dtype == "float32":  # 16-bit rungs multiply on tensor cores
    found["ffma"] = float(t.fmas)
  return found


def compare(
  name: str, measured: Mapping[str, float], model: Mapping[str, float]
) -> tuple[dict[str, float | None], dict[str, str | None]]:
  """measured / model, and a sentence for each that is off by over 20 %.

  Args:
    name: of the rung.
    measured: by counter.
    model: by counter.

  Returns:
    The ratios (None if the model says zero), and explanations by counter
    (None where there is none yet). A counter that agrees is not among them.
  """
  ratios = {
    counter: measured[counter] / want if want else None
    for counter, want in model.items()
    if counter in measured
  }
  reasons = {
    counter: EXPLANATIONS.get((name, counter))
    for counter, ratio in ratios.items()
    if ratio is None or abs(ratio - 1) > TOLERANCE
  }
  return ratios, reasons
