"""Measures how long, and how fast, each level of a GPU's memory answers.

  python -m experiments.memory                   all levels, about a minute
  python -m experiments.memory --levels=l1,l2 --measures=latency
  python -m experiments.memory --measures=sweep  latency over working sets

Latency is that of a chase: one warpgroup alone on the GPU steps from word to
word of a random ring, and the result of each load is the address of the next.
A step goes to another line of 128 bytes. Two lengths are timed, and the
difference of their times, by the difference of their steps, is a step's: what
a launch takes and the first round of the ring are in both.

  shared  a ring of 32 KiB in shared memory      LEA, LDS a step
  l1      a ring of 32 KiB in global memory      IMAD.WIDE, LDG.E a step
  l2      a ring of 8 MiB, which no L1 holds     likewise
  dram    a ring of 1 GiB, the L2 flushed        likewise

The instruction before the load makes an address of the word's index. Its few
cycles are in the figures, nothing is subtracted: loads of a kernel have
addresses to compute too. A latency of dram has in it what the translation of
addresses takes, more with more pages: the sweep, from 16 KiB to 4 GiB, shows
how much. It also shows how much of the L2 serves one SM: rings of more than
about half of it miss.

A rate is that of the whole GPU, all SMs at once, with loads of 128 bits:

  shared  each block sums its own 32 KiB, again and again, without conflicts
  l1      the blocks sum the same 32 KiB of global memory
  l2      the blocks sum the same 16 MiB, from different places on
  dram    4 GiB are copied; bytes read and written

Two lengths again, but for the copy. Every result is checked: a chase ends at
the word that NumPy's does, sums and copies agree in every bit. Times are CUPTI
kernel times. Cycles are of the SM clock that was sampled meanwhile.
The method is that of H. Wong et al., "Demystifying GPU Microarchitecture
through Microbenchmarking" (2010); for Hopper see W. Luo et al. (2024),
arXiv 2402.13499.

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

from experiments.harness import cli, provenance, tables, timing
from experiments.harness import memory_kernels as kernels
from experiments.harness import session as session_lib
from pallas_gemm import compat, hardware
from pallas_gemm.hardware import KIB, MIB

EXPERIMENT = "memory"
MEASURES = ("latency", "rate", "sweep")
LEVELS = ("shared", "l1", "l2", "dram")
GIB = 1024 * MIB
UNITS = {
  "ns": "ns",
  "cycles": "cycles",
  "gbytes_per_s": "GB/s",
  "bytes_per_sm_cycle": "bytes / SM cycle",
}
_NUMERIC = ("working set", *UNITS.values(), "SM MHz")
_HEADER = ("measure", "level", *_NUMERIC, "check")
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
  """One thing to measure.

  Attributes:
    measure, level: as in a row.
    nbytes: the working set.
    first: steps of the shorter call, or tiles that each block reads; a whole
      number of rounds, but for a chase through cold lines.
    more: steps that the longer call makes beyond.
    cold: whether the L2 is flushed before each call.
    blocks: thread blocks.
  """

  measure: str
  level: str | None
  nbytes: int
  first: int
  more: int
  cold: bool = False
  blocks: int = 1

  @property
  def name(self) -> str:
    """What the probe is called in a line."""
    words = self.measure, self.level, size(self.nbytes)
    return " ".join(word for word in words if word)

  @property
  def is_copy(self) -> bool:
    """Whether it has but one call."""
    return (self.measure, self.level) == ("rate", "dram")

  @property
  def moved(self) -> int | None:
    """Bytes loaded and stored in `more` steps; None of a chase."""
    if self.is_copy:
      return 2 * self.nbytes
    tiles = self.blocks * self.more
    return tiles * kernels.TILE_BYTES if self.measure == "rate" else None


def size(nbytes: int) -> str:
  """A working set in words: "32 KiB", "37.5 MiB"."""
  units = {"GiB": GIB, "MiB": MIB, "KiB": KIB}
  name = next(x for x, unit in units.items() if nbytes >= unit or x == "KiB")
  return f"{nbytes / units[name]:g} {name}"


def probes(gpu: hardware.Gpu) -> list[Probe]:
  """All that is measured on a GPU."""
  rings = dict(zip(LEVELS, (32 * KIB, 32 * KIB, 8 * MIB, GIB)))
  chases = [("latency", level, nbytes) for level, nbytes in rings.items()]
  powers = [2**e for e in range(14, 33)]
  between = [3 * 2**e for e in range(15, 27)]
  chases += [("sweep", None, nbytes) for nbytes in sorted(powers + between)]
  sms = gpu.sm_count
  return [
    *(_chase(*chase, gpu) for chase in chases),
    # Four blocks of 33 KiB and eight of 48 registers a thread fit on an SM.
    Probe("rate", "shared", 32 * KIB, 2**14, 2**16, blocks=4 * sms),
    Probe("rate", "l1", 32 * KIB, 2**13, 2**15, blocks=8 * sms),
    Probe("rate", "l2", 16 * MIB, 2**10, 2**12, blocks=8 * sms),
    Probe("rate", "dram", 4 * GIB, 0, 1, blocks=4 * GIB // kernels.TILE_BYTES),
  ]


def _chase(
  measure: str, level: str | None, nbytes: int, gpu: hardware.Gpu
) -> Probe:
  """A chase after a whole round of a ring that the L2 holds, or cold."""
  cold = nbytes > gpu.l2_bytes
  first = 2**12 if cold else nbytes // kernels.LINE_BYTES
  more = 2**20 if nbytes <= 64 * KIB else 2**16
  return Probe(measure, level, nbytes, first, more, cold)


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
    cli.FlagError: no such measure or level, or nothing is left.
  """
  given = {}
  for flag, there in ((_MEASURES, MEASURES), (_LEVELS, LEVELS)):
    names = [name.strip() for name in flag.value]
    if unknown := [name for name in names if name not in there]:
      raise cli.FlagError(
        f"--{flag.name}: no {unknown[0]!r}; there are {', '.join(there)}"
      )
    given[flag.name] = {*names}
  taken = [
    probe
    for probe in found
    if probe.measure in given["measures"]
    and probe.level in {None, *given["levels"]}
  ]
  if not taken:
    raise cli.FlagError("--levels, --measures: they leave nothing to measure")
  return taken


def prepare(
  probe: Probe, seed: int, buffer_bytes: int
) -> tuple[list[timing.Arm], float]:
  """A probe's calls, the longer one last, and the largest error of a result.

  Args:
    probe: what is measured.
    seed: of the ring or of the words.
    buffer_bytes: of the array that rings in global memory are put into, so
      that one kernel serves all of them.
  """
  shared = probe.level == "shared"
  if probe.is_copy:
    words = _random_words(seed, probe.nbytes // kernels.WORD_BYTES)
    error = float(_differences(kernels.copy(words), words))
    return [timing.Arm("copy", kernels.copy, (words,))], error
  if probe.measure == "rate":
    count = probe.nbytes // kernels.WORD_BYTES
    rng, tiles = np.random.default_rng(seed), count // kernels.TILE
    words = rng.integers(-(2**31), 2**31, count, dtype=np.int32)
    kernel = functools.partial(kernels.read, blocks=probe.blocks, shared=shared)
    data, others = jnp.asarray(words), [tiles - 1]
    right = functools.partial(kernels.sums, words)
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


@functools.partial(jax.jit, static_argnums=1)
def _random_words(seed: int, count: int) -> jax.Array:
  bits = jax.random.bits(jax.random.key(seed), (count,), jnp.uint32)
  return jax.lax.bitcast_convert_type(bits, jnp.int32)


@jax.jit
def _differences(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.sum(a != b)


def measure(
  probe: Probe, buffer_bytes: int, flush: timing.Arm | None
) -> dict[str, Any]:
  """The row of a probe; a result that is wrong is not timed.

  Its fields, beside those that all rows have (see `rows.Row`):
    measure: "latency", "rate"; "sweep" for a latency of no named level.
    level: one of `LEVELS`; None in a sweep.
    working_set_bytes: that the loads touch; of shared memory, those of a block.
    blocks: thread blocks.
    steps: loads of a chase, or tiles that each block loads or copies, in the
      times ms_*: the difference of two calls; of a copy, the call.
    ms_short: median of the shorter call; None of a copy.
    ns, cycles: latency, a step's time, and that of the SM clock of this run.
    gbytes_per_s, bytes_per_sm_cycle: rate of the whole GPU, in 1e9/s, and the
      same by SMs and the clock.
    cold: whether the L2 was flushed before each call.

  Args:
    probe: what is measured.
    buffer_bytes: see `prepare`.
    flush: evicts the L2; None without a GPU.

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
  hertz = clock_mhz and clock_mhz * 1e6
  seconds = ms.median * 1e-3
  if probe.moved is None:
    step = seconds / probe.more
    return found | {"ns": step * 1e9, "cycles": hertz and step * hertz}
  rate = probe.moved / seconds
  sms = hardware.current().sm_count
  per_cycle = hertz and rate / hertz / sms
  return found | {"gbytes_per_s": rate / 1e9, "bytes_per_sm_cycle": per_cycle}


def parts(row: dict[str, Any]) -> list[str]:
  """What was measured, as parts of a line."""
  found = [
    f"{_digits(row[name])} {unit}"
    for name, unit in UNITS.items()
    if row[name] is not None
  ]
  return found or ["not timed"]


def _digits(x: float | None) -> str:
  return tables.EMPTY if x is None else f"{x:,.1f}"


def cells(row: dict[str, Any]) -> list[str]:
  """A line of the table."""
  return [
    row["measure"],
    row["level"] or "",
    size(row["working_set_bytes"]),
    *(_digits(row[name]) for name in (*UNITS, "sm_clock_mhz")),
    tables.verdict(row),
  ]


def main(argv: Sequence[str]) -> int:
  """Measures what the flags say; returns the exit status."""
  del argv
  console = cli.Console()
  on_gpu, gpu = compat.targets_gpu(), hardware.current()
  taken = chosen(probes(gpu) if on_gpu else tiny_probes())
  session = session_lib.start(
    console,
    EXPERIMENT,
    on_gpu,
    name_width=24,
    caches="L2 warm for what it can hold, else flushed",
  )
  flush = timing.l2_flush(gpu.l2_bytes) if on_gpu else None
  rings = [x.nbytes for x in taken if x.measure != "rate"]
  buffer_bytes = max(rings, default=0)
  with session.measuring(len(taken)):
    for probe in taken:
      work = functools.partial(measure, probe, buffer_bytes, flush)
      session.case(probe.name, work, parts)
  title = f"Memory of {session.device}"
  console.table(title, _HEADER, [cells(x) for x in session.rows], _NUMERIC)
  return session.finish()


if __name__ == "__main__":
  cli.run(main)
