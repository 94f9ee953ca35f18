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

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import cli, provenance, rows, tables, timing
from experiments.harness import console as console_lib
from experiments.harness import memory_kernels as kernels
from experiments.harness import run as run_lib
from experiments.harness import session as session_lib
from pallas_gemm import compat, hardware
from pallas_gemm.hardware import KIB, MIB

EXPERIMENT = "memory"
MEASURES = ("latency", "rate", "sweep")
LEVELS = ("shared", "l1", "l2", "dram")
GIB = 1024 * MIB
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """What was measured of one level.

  Attributes:
    experiment: "memory".
    measure: "latency", "rate"; "sweep" for a latency of no named level.
    level: one of `LEVELS`; None in a sweep.
    working_set_bytes: that the loads touch; of shared memory, those of a block.
    blocks: thread blocks.
    steps: loads of a chase, or tiles that each block loads or copies, in the
      time below.
    ms_median, ms_p25, ms_p75: of `steps`, so of the difference of two calls;
      of a copy, of the call.
    ms_short: median of the shorter call; None of a copy.
    ns: latency, a step's time.
    cycles: that of the SM clock of this run.
    gbytes_per_s: rate of the whole GPU, in 1e9/s.
    bytes_per_sm_cycle: the same, by SMs and the clock.
    cold: whether the L2 was flushed before each call.
    max_error, error_bound, passed: the result is exact or wrong.
    repeats, warmup, seed, device, driver, cuda, jax, jaxlib, sm_clock_mhz,
      power_w, temperature_c, kernel_names, commit, utc: as in `rows.Row`.
  """

  experiment: str
  measure: str
  level: str | None
  working_set_bytes: int
  blocks: int
  steps: int
  ms_median: float | None
  ms_p25: float | None
  ms_p75: float | None
  ms_short: float | None
  ns: float | None
  cycles: float | None
  gbytes_per_s: float | None
  bytes_per_sm_cycle: float | None
  cold: bool
  max_error: float
  error_bound: float
  passed: bool
  repeats: int
  warmup: int
  seed: int
  device: str | None
  driver: str | None
  cuda: str | None
  jax: str | None
  jaxlib: str | None
  sm_clock_mhz: float | None
  power_w: float | None
  temperature_c: float | None
  kernel_names: list[str]
  commit: str | None
  utc: str


@dataclasses.dataclass(frozen=True)
class Probe:
  """One thing to measure.

  Attributes:
    measure, level: as in `Row`.
    nbytes: the working set.
    first: steps of the shorter call; a whole number of rounds, but for a
      chase through cold lines.
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


def size(nbytes: int) -> str:
  """A working set in words: "32 KiB", "37.5 MiB"."""
  units = {"GiB": GIB, "MiB": MIB, "KiB": KIB}
  name = next(x for x, unit in units.items() if nbytes >= unit or x == "KiB")
  return f"{nbytes / units[name]:g} {name}"


# How much is measured on a GPU, and what the interpreter can do.


def probes(gpu: hardware.Gpu) -> list[Probe]:
  """All that is measured on a GPU."""
  rings = {
    "shared": 32 * KIB,
    "l1": 32 * KIB,
    "l2": 8 * MIB,
    "dram": GIB,
  }
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


# What is measured, and the row of it.


@dataclasses.dataclass(frozen=True)
class Calls:
  """A probe's kernel, ready to be called.

  Attributes:
    short: the shorter call; None of a copy.
    long: the longer one.
    error: how far their results are from what they must be.
    moved: bytes loaded and stored in the difference; None of a chase.
  """

  short: timing.Arm | None
  long: timing.Arm
  error: float
  moved: int | None = None


def prepare(probe: Probe, seed: int, buffer_bytes: int) -> Calls:
  """Makes a probe's data, and calls and checks its kernel.

  Args:
    probe: what is measured.
    seed: of the ring or of the words.
    buffer_bytes: of the array that rings in global memory are put into, so
      that one kernel serves all of them.
  """
  if probe.measure != "rate":
    return _prepare_chase(probe, seed, buffer_bytes)
  if probe.level == "dram":
    return _prepare_copy(probe, seed)
  return _prepare_read(probe, seed)


def _prepare_chase(probe: Probe, seed: int, buffer_bytes: int) -> Calls:
  shared = probe.level == "shared"
  kernel = kernels.chase_shared if shared else kernels.chase
  visits = kernels.order(probe.nbytes // kernels.LINE_BYTES, seed)
  lines = (probe.nbytes if shared else buffer_bytes) // kernels.LINE_BYTES
  links = kernels.ring(visits, lines)
  ends = functools.partial(kernels.end, visits)
  short, long, error = _pair(probe, kernel, links, (), ends)
  return Calls(short, long, error)


def _prepare_read(probe: Probe, seed: int) -> Calls:
  shared = probe.level == "shared"
  kernel = kernels.read_shared if shared else kernels.read
  rng = np.random.default_rng(seed)
  count = probe.nbytes // kernels.WORD_BYTES
  words = rng.integers(-(2**31), 2**31, count, dtype=np.int32)
  tiles = count // kernels.TILE
  short, long, error = _pair(
    probe,
    functools.partial(kernel, blocks=probe.blocks),
    jnp.asarray(words),
    (tiles - 1,),
    lambda steps: kernels.sums(words, steps // tiles),
  )
  moved = probe.blocks * probe.more * kernels.TILE_BYTES
  return Calls(short, long, error, moved)


def _pair(
  probe: Probe,
  kernel: Callable[..., jax.Array],
  data: jax.Array,
  others: tuple[int, ...],
  want: Callable[[int], Any],
) -> tuple[timing.Arm, timing.Arm, float]:
  """A kernel's calls of two lengths, and the larger error of their results.

  Args:
    probe: what is measured.
    kernel: of the data and of int32 [steps, *others].
    data: on the device.
    others: beside the steps.
    want: result by steps.
  """
  arms, errors = [], []
  for name, steps in (
    ("short", probe.first),
    ("long", probe.first + probe.more),
  ):
    arguments = data, jnp.asarray([steps, *others], jnp.int32)
    arms.append(timing.Arm(name, kernel, arguments))
    got = np.asarray(kernel(*arguments), np.int64)
    errors.append(float(np.abs(got - want(steps)).max()))
  return *arms, max(errors)


def _prepare_copy(probe: Probe, seed: int) -> Calls:
  words = _random_words(seed, probe.nbytes // kernels.WORD_BYTES)
  error = _differences(kernels.copy(words), words)
  long = timing.Arm("copy", kernels.copy, (words,))
  return Calls(None, long, float(error), 2 * probe.nbytes)


@functools.partial(jax.jit, static_argnums=1)
def _random_words(seed: int, count: int) -> jax.Array:
  bits = jax.random.bits(jax.random.key(seed), (count,), jnp.uint32)
  return jax.lax.bitcast_convert_type(bits, jnp.int32)


@jax.jit
def _differences(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.sum(a != b)


def measure(probe: Probe, bench: run_lib.Bench, buffer_bytes: int) -> dict:
  """The row of a probe; a result that is wrong is not timed.

  Raises:
    RuntimeError: the longer call took no longer.
  """
  calls = prepare(probe, bench.seed, buffer_bytes)
  bench = dataclasses.replace(
    bench,
    flush=bench.flush if probe.cold else None,
    **(_SWEEP if probe.measure == "sweep" else {}),
  )
  timings, load = {}, provenance.Load()
  if bench.timed and calls.error == 0:
    arms = [arm for arm in (calls.short, calls.long) if arm is not None]
    with provenance.Monitor() as monitor:
      timings = bench.times(arms)
    load = monitor.load
  return make_row(probe, calls, timings, load, bench)


def make_row(
  probe: Probe,
  calls: Calls,
  timings: dict[str, timing.Timing],
  load: provenance.Load,
  bench: run_lib.Bench,
) -> dict[str, Any]:
  """A row of the times of a probe's calls; of none if there are no times."""
  short = timings.get(calls.short.name) if calls.short else None
  long = timings.get(calls.long.name)
  row = Row(
    experiment=EXPERIMENT,
    measure=probe.measure,
    level=probe.level,
    working_set_bytes=probe.nbytes,
    blocks=probe.blocks,
    steps=probe.more,
    ms_short=short and short.median,
    cold=probe.cold,
    max_error=calls.error,
    error_bound=0.0,
    passed=calls.error == 0,
    repeats=long.repeats if long else 0,
    warmup=long.warmup if long else 0,
    seed=bench.seed,
    kernel_names=list(long.kernel_names) if long else [],
    utc=provenance.utc(),
    **_figures(probe, calls, short, long, load.sm_clock_mhz),
    **dataclasses.asdict(load),
    **provenance.versions(),
  )
  return rows.as_dict(row)


def _figures(
  probe: Probe,
  calls: Calls,
  short: timing.Timing | None,
  long: timing.Timing | None,
  clock_mhz: float | None,
) -> dict[str, float | None]:
  """The fields of a row that follow from times; None without."""
  names = (
      "ms_median", "ms_p25", "ms_p75", "ns", "cycles", "gbytes_per_s",
      "bytes_per_sm_cycle",
  )  # fmt: skip
  found: dict[str, float | None] = dict.fromkeys(names)
  if long is None:
    return found
  # By rounds: what a round has of a clock that moves, both calls have.
  ms = np.array(long.ms) - (np.array(short.ms) if short else 0.0)
  p25, median, p75 = (float(x) for x in np.percentile(ms, (25, 50, 75)))
  if median <= 0:
    raise RuntimeError(f"{probe.more} more steps took {median:.3g} ms")
  found |= {"ms_median": median, "ms_p25": p25, "ms_p75": p75}
  hertz = clock_mhz and clock_mhz * 1e6
  if calls.moved is None:
    seconds = median * 1e-3 / probe.more
    return found | {"ns": seconds * 1e9, "cycles": hertz and seconds * hertz}
  rate = calls.moved / (median * 1e-3)
  sms = hardware.current().sm_count
  per_cycle = hertz and rate / hertz / sms
  return found | {"gbytes_per_s": rate / 1e9, "bytes_per_sm_cycle": per_cycle}


# Lines, the table, the program.


def parts(row: dict[str, Any]) -> list[str]:
  """What was measured, as parts of a line."""
  if row["ms_median"] is None:
    return ["not timed"]
  found = []
  for name, unit in UNITS.items():
    if row[name] is not None:
      found.append(f"{_digits(row[name])} {unit}")
  return found


UNITS = {
  "ns": "ns",
  "cycles": "cycles",
  "gbytes_per_s": "GB/s",
  "bytes_per_sm_cycle": "bytes / SM cycle",
}
_HEADER = (
    "measure", "level", "working set", *UNITS.values(), "SM MHz", "check",
)  # fmt: skip
_NUMERIC = ("working set", *UNITS.values(), "SM MHz")


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


def run(console: console_lib.Console) -> int:
  """Measures what the flags say; returns the exit status."""
  on_gpu = compat.targets_gpu()
  gpu = hardware.current()
  taken = chosen(probes(gpu) if on_gpu else tiny_probes())
  session = session_lib.start(
    console,
    EXPERIMENT,
    on_gpu,
    name_width=24,
    caches="L2 warm for what it can hold, else flushed",
  )
  bench = session_lib.bench(EXPERIMENT, on_gpu)
  rings = [x.nbytes for x in taken if x.measure != "rate"]
  buffer_bytes = max(rings, default=0)

  with session.measuring(len(taken)):
    for probe in taken:
      session.case(
        probe.name,
        functools.partial(measure, probe, bench, buffer_bytes),
        parts,
      )
  title = f"Memory of {session.device}"
  console.table(title, _HEADER, [cells(x) for x in session.rows], _NUMERIC)
  return session.finish()


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  return run(console_lib.Console())


if __name__ == "__main__":
  cli.run(main)
