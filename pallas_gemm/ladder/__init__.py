"""The ladder: twelve GEMM kernels, each with one idea more than the last.

Example:
  >>> import jax.numpy as jnp
  >>> from pallas_gemm.ladder import LADDER
  >>> [rung.name for rung in LADDER[:3]]
  ['naive', 'coalesced', 'shared_memory']
  >>> LADDER[1].gemm(jnp.ones((2, 3)), jnp.ones((3, 2))).tolist()
  [[3.0, 3.0], [3.0, 3.0]]
"""

from pallas_gemm.ladder import (
  k01_naive,
  k02_coalesced,
  k03_shared_memory,
  k04_blocktiling_1d,
  k05_blocktiling_2d,
  k06_vectorized,
  k07_warptiling,
  k08_double_buffering,
  k09_tensor_cores,
  k10_warp_specialized,
  k11_persistent,
  k12_cluster_multicast,
  k13_tensor_memory,
)
from pallas_gemm.ladder.contract import Gemm as Gemm
from pallas_gemm.ladder.contract import Problem as Problem
from pallas_gemm.ladder.contract import Rung as Rung
from pallas_gemm.ladder.contract import SimtConfig as SimtConfig
from pallas_gemm.ladder.contract import TensorCoreConfig as TensorCoreConfig

LADDER: tuple[Rung, ...] = (
  k01_naive.RUNG,
  k02_coalesced.RUNG,
  k03_shared_memory.RUNG,
  k04_blocktiling_1d.RUNG,
  k05_blocktiling_2d.RUNG,
  k06_vectorized.RUNG,
  k07_warptiling.RUNG,
  k08_double_buffering.RUNG,
  k09_tensor_cores.RUNG,
  k10_warp_specialized.RUNG,
  k11_persistent.RUNG,
  k12_cluster_multicast.RUNG,
)

# For GPUs that nobody has measured it on.
BLACKWELL: tuple[Rung, ...] = (k13_tensor_memory.RUNG,)


def with_variants(ladder: tuple[Rung, ...] = LADDER) -> tuple[Rung, ...]:
  """Each rung and, after it, its variants: 8, 8a, 9, 9a, ..."""
  return tuple(x for rung in ladder for x in (rung, *rung.variants))


def find(rung: Rung | int | str) -> Rung:
  """The rung, or variant, of a number, a label ("8a") or a name.

  Raises:
    ValueError: there is none; the message lists them.
  """
  if isinstance(rung, Rung):
    return rung
  every = with_variants(LADDER + BLACKWELL)
  for each in every:
    if str(rung) in (each.label, each.name) and not isinstance(rung, bool):
      return each
  there = ", ".join(f"{each.label} {each.name}" for each in every)
  raise ValueError(
    f"rung must be a number, label or name of {there}; got {rung!r}"
  )
