"""Measures how long, and how fast, each level of a GPU's memory answers.

  python -m experiments.memory                   all levels, about a minute
  python -m experiments.memory --levels=l1,l2 --measures=latency
  python -m experiments.memory --measures=sweep  latency over working sets

A latency is that of a chase: one warpgroup alone steps from line to line (128
bytes) of a random ring; the result of each load is the address of the next. The
instruction that makes an address of a word's index is in the figures, as it is
in any kernel's, and in those of dram the translation of addresses: the sweep,
from 16 KiB to 4 GiB, shows how much. A rate is that of all SMs, with loads of
128 bits.

           latency: a ring of         rate
  shared   32 KiB in shared memory    each block sums its own 32 KiB, repeatedly
  l1       32 KiB in global memory    all blocks sum the same 32 KiB
  l2       8 MiB, which no L1 holds   all sum the same 16 MiB, from other starts
  dram     1 GiB, the L2 flushed      4 GiB are copied; bytes read and written

But for the copy, calls of two lengths are timed, and the difference of times is
divided by that of steps. Every result is checked, in every bit. Times are CUPTI
kernel times; cycles are of the SM clock that was sampled meanwhile. The method
is that of H. Wong et al., "Demystifying GPU Microarchitecture through
Microbenchmarking" (2010); for Hopper see W. Luo et al., arXiv 2402.13499.

Rows go to experiments/results/<device>/memory.jsonl; `measure` is "latency",
"rate" or "sweep", and of the first two there is one row a level. Without an
NVIDIA GPU tiny rings and tiles are interpreted and checked, and nothing timed.

Exit status: 0; 1 if a result is wrong or a kernel can't run; 2 for a command
that can't be carried out; 130 after Ctrl-C.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import cli, provenance, timing
from experiments.harness import memory_kernels as kernels
from experiments.harness import session as session_lib
from pallas_gemm import compat, hardware
from pallas_gemm.hardware import KIB, MIB

EXPERIMENT = "memory"
MEASURES = ("latency", "rate", "sweep")
LEVELS = ("shared", "l1", "l2", "dram")
GIB = 1024 * MIB
# By field of a row, the unit in a line.
UNITS = {
  "ns": "ns",
  "cycles": "cycles",
  "gbytes_per_s": "GB/s",
  "bytes_per_sm_cycle": "bytes / SM cycle",
}
# Enough for the shape of a curve of many points.
_SWEEP = {"warmup": 1, "repeats": 5}

for _name in ("seed", "output_dir", "warmup", "repeats"):
  flags.declare_key_flag(_name)
_MEASURES = flags.DEFINE_list(
  "measures",
  list(MEASURES),
  f"What to measure, separated by commas: {', '.join(MEASURES)}.",
)
_LEVELS = flags.DEFINE_list(
  "levels",
  list(LEVELS),
  f"Of which levels, separated by commas: {', '.join(LEVELS)}. A sweep is of"
  " none.",
)


@dataclasses.dataclass(frozen=True)
class Probe:
  """One thing to measure; `nbytes` is the working set.

  The shorter call has `first` steps, or tiles that each block reads: a whole
  number of rounds, but for a chase through cold lines. The longer one has as
  many `more`. A copy has one call.
  """

  measure: str
  level: str | None
  nbytes: int
  first: int
  more: int
  cold: bool = False
  blocks: int = 1

  @property
  def is_copy(self) -> bool:
    """Whether it is the copy."""
    return (self.measure, self.level) == ("rate", "dram")


def size(nbytes: int) -> str:
  """A working set in words: "32 KiB", "37.5 MiB"."""
  units = {"GiB": GIB, "MiB": MIB, "KiB": KIB}
  name = next(x for x, unit in units.items() if nbytes >= unit or x == "KiB")
  return f"{nbytes / units[name]:g} {name}"


def probes(gpu: hardware.Gpu) -> list[Probe]:
  """All that is measured on a GPU."""
  rings = zip(LEVELS, (32 * KIB, 32 * KIB, 8 * MIB, GIB))
  chases = [("latency", level, nbytes) for level, nbytes in rings]
  points = [2**e for e in range(14, 33)] + [3 * 2**e for e in range(15, 27)]
  chases += [("sweep", None, nbytes) for nbytes in sorted(points)]
  found = []
  for measure, level, nbytes in chases:
    # After a whole round of a ring that the L2 holds, or all lines cold.
    cold = nbytes > gpu.l2_bytes
    first = 2**12 if cold else nbytes // kernels.LINE_BYTES
    more = 2**20 if nbytes <= 64 * KIB else 2**16
    found.append(Probe(measure, level, nbytes, first, more, cold))
  sms = gpu.sm_count
  return [
    *found,
    # Four blocks of 33 KiB and eight of 48 registers a thread fit on an SM.
    Probe("rate", "shared", 32 * KIB, 2**14, 2**16, blocks=4 * sms),
    Probe("rate", "l1", 32 * KIB, 2**13, 2**15, blocks=8 * sms),
    Probe("rate", "l2", 16 * MIB, 2**10, 2**12, blocks=8 * sms),
    Probe("rate", "dram", 4 * GIB, 0, 1, blocks=4 * GIB // kernels.TILE_BYTES),
  ]


def tiny_probes() -> list[Probe]:
  """The same kernels at sizes for the interpreter."""
  rings = [("latency", level, KIB) for level in LEVELS] + [("sweep", None, KIB)]
  tiles = 2 * kernels.TILE_BYTES
  return [
    *(Probe(*ring, first=8, more=4) for ring in rings),
    *(Probe("rate", level, tiles, 2, 2, blocks=2) for level in LEVELS[:3]),
    Probe("rate", "dram", tiles, 0, 1, blocks=2),
  ]


def chosen(found: Sequence[Probe]) -> list[Probe]:
  """Those of the probes that the flags name.

  Raises:
    cli.FlagError: an unknown measure or level, or nothing is left.
  """
  given = {}
  for flag, there in ((_MEASURES, MEASURES), (_LEVELS, LEVELS)):
    given[flag.name] = {name.strip() for name in flag.value}
    if unknown := given[flag.name] - {*there}:
      raise cli.FlagError(
        f"--{flag.name}: no {min(unknown)!r}; there are {', '.join(there)}"
      )
  levels = {None, *given["levels"]}
  taken = [
    x for x in found if x.measure in given["measures"] and x.level in levels
  ]
  if not taken:
    raise cli.FlagError("--levels, --measures: they leave nothing to measure")
  return taken


def prepare(
  probe: Probe, seed: int, buffer_bytes: int
) -> tuple[list[timing.Arm], float]:
  """A probe's calls, the longer one last, and the largest error of a result.

  Rings in global memory are put into an array of buffer_bytes, so that one
  kernel serves all of them.
  """
  shared, words = probe.level == "shared", probe.nbytes // kernels.WORD_BYTES
  if probe.is_copy:
    bits = jax.random.bits(jax.random.key(seed), (words,), jnp.uint32)
    source = jax.lax.bitcast_convert_type(bits, jnp.int32)
    error = float(jnp.sum(kernels.copy(source) != source))
    return [timing.Arm("copy", kernels.copy, (source,))], error
  if probe.measure == "rate":
    rng, tiles = np.random.default_rng(seed), words // kernels.TILE
    drawn = rng.integers(-(2**31), 2**31, words, dtype=np.int32)
    kernel = functools.partial(kernels.read, blocks=probe.blocks, shared=shared)
    data, others = jnp.asarray(drawn), [tiles - 1]
    right = functools.partial(kernels.sums, drawn)
  else:
    visits = kernels.order(probe.nbytes // kernels.LINE_BYTES, seed)
    lines = (probe.nbytes if shared else buffer_bytes) // kernels.LINE_BYTES
    kernel = functools.partial(kernels.chase, shared=shared)
    data, others = kernels.ring(visits, lines), []
    right = functools.partial(kernels.end, visits)
  arms, errors = [], []
  lengths = {"short": probe.first, "long": probe.first + probe.more}
  for name, steps in lengths.items():
    operands = data, jnp.asarray([steps, *others], jnp.int32)
    got = np.asarray(kernel(*operands), np.int64)
    errors.append(float(np.abs(got - right(steps)).max()))
    arms.append(timing.Arm(name, kernel, operands))
  return arms, max(errors)


def measure(
  probe: Probe, buffer_bytes: int, flush: timing.Arm | None
) -> dict[str, Any]:
  """The row of a probe; a result that is wrong is not timed.

  Its fields, but for those that all rows have (see `rows.Row`):
    measure, level: None is the level of a sweep.
    working_set_bytes: that the loads touch; of shared memory, those of a block.
    steps: loads of a chase, or tiles that each block loads or copies, in the
      times ms_*: the difference of two calls; of a copy, the call.
    ms_short: median of the shorter call; None of a copy.
    ns, cycles: of a step, and by the SM clock of this run.
    gbytes_per_s, bytes_per_sm_cycle: of the whole GPU; by SMs and clock.
    cold: whether the L2 was flushed before each call.

  Raises:
    RuntimeError: the longer call took no longer.
  """
  arms, error = prepare(probe, cli.SEED.value, buffer_bytes)
  times: list[timing.Timing] = []
  load = provenance.Load()
  if compat.targets_gpu() and error == 0:
    calls = {"warmup": cli.WARMUP.value, "repeats": cli.REPEATS.value}
    calls |= _SWEEP if probe.measure == "sweep" else {}
    with provenance.Monitor() as monitor:
      found = timing.measure(arms, flush=flush if probe.cold else None, **calls)
    times, load = [found[arm.name] for arm in arms], monitor.load
  last = times[-1] if times else timing.Timing((), (), 0)
  return {
    "experiment": EXPERIMENT,
    "measure": probe.measure,
    "level": probe.level,
    "working_set_bytes": probe.nbytes,
    "blocks": probe.blocks,
    "steps": probe.more,
    **_figures(probe, times, load.sm_clock_mhz),
    "cold": probe.cold,
    "max_error": error,
    "error_bound": 0.0,
    "passed": error == 0,
    "repeats": last.repeats,
    "warmup": last.warmup,
    "seed": cli.SEED.value,
    **provenance.versions(),
    **dataclasses.asdict(load),
    "kernel_names": list(last.kernel_names),
    "utc": provenance.utc(),
  }


def _figures(
  probe: Probe, times: Sequence[timing.Timing], clock_mhz: float | None
) -> dict[str, float | None]:
  """The fields of a row that follow from times; None without."""
  names = "ms_median", "ms_p25", "ms_p75", "ms_short", *UNITS
  found: dict[str, float | None] = dict.fromkeys(names)
  if not times:
    return found
  # By rounds: what a round has of a clock that moves, both calls have.
  *short, long = (np.array(x.ms) for x in times)
  ms = timing.Timing(tuple(long - sum(short)), (), 0)
  if ms.median <= 0:
    raise RuntimeError(f"{probe.more} more steps took {ms.median:.3g} ms")
  found |= {"ms_median": ms.median, "ms_p25": ms.p25, "ms_p75": ms.p75}
  found["ms_short"] = times[0].median if short else None
  hertz, seconds = clock_mhz and clock_mhz * 1e6, ms.median * 1e-3
  if probe.measure != "rate":
    step = seconds / probe.more
    return found | {"ns": step * 1e9, "cycles": hertz and step * hertz}
  moved = probe.blocks * probe.more * kernels.TILE_BYTES
  rate = (2 * probe.nbytes if probe.is_copy else moved) / seconds
  per_cycle = hertz and rate / hertz / hardware.current().sm_count
  return found | {"gbytes_per_s": rate / 1e9, "bytes_per_sm_cycle": per_cycle}


def parts(row: dict[str, Any]) -> list[str]:
  """What was measured, as parts of a line."""
  found = [
    f"{row[name]:,.1f} {unit}"
    for name, unit in UNITS.items()
    if row[name] is not None
  ]
  return found or ["not timed"]


def main(argv: Sequence[str]) -> int:
  """Measures what the flags say; returns the exit status."""
  del argv
  on_gpu, gpu = compat.targets_gpu(), hardware.current()
  taken = chosen(probes(gpu) if on_gpu else tiny_probes())
  session = session_lib.start(
    EXPERIMENT,
    on_gpu,
    name_width=24,
    caches="L2 warm for what it can hold, else flushed",
  )
  flush = timing.l2_flush(gpu.l2_bytes) if on_gpu else None
  rings = [x.nbytes for x in taken if x.measure != "rate"]
  buffer_bytes = max(rings, default=0)
  with session.measuring():
    for probe in taken:
      work = functools.partial(measure, probe, buffer_bytes, flush)
      name = f"{probe.measure} {probe.level or ''} {size(probe.nbytes)}"
      session.case(" ".join(name.split()), work, parts)
  return session.finish()


if __name__ == "__main__":
  cli.run(main)
