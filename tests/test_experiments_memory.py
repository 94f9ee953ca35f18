"""The memory program: its kernels, rows, flags, and SASS. No GPU needed."""

import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from docs.sass import extract
from experiments import memory
from experiments.harness import cli, compiled, provenance, rows, timing
from experiments.harness import memory_kernels as kernels
from pallas_gemm import hardware
from tests.support import programs

GPUS = ("H200", "H100 80GB HBM3")
MIB = 1024**2
# Those of the rows that the docs are made of.
FIELDS = rows.read(rows.RESULTS / "nvidia_h200" / "memory.jsonl")[0].keys()


@pytest.fixture
def run(tmp_path, capsys):
  """Runs the program in this process: (status, standard output, rows)."""

  def call(*args):
    args = [f"--output_dir={tmp_path}", *args]
    status = programs.call(memory.main, args)
    return status, capsys.readouterr().out, rows.read(tmp_path / "memory.jsonl")

  return call


@pytest.fixture
def gpu(monkeypatch):
  """Pretends that there is a GPU, where calls take made-up times."""
  programs.pretend_times(monkeypatch)
  fake = types.SimpleNamespace(targets_gpu=lambda: True)
  monkeypatch.setattr(memory, "compat", fake)
  monkeypatch.setattr(memory, "probes", lambda gpu: memory.tiny_probes())
  load = provenance.Load(sm_clock_mhz=2000.0, power_w=300.0)
  monkeypatch.setattr(provenance, "read_load", lambda: load)


# The kernels, interpreted.


def test_a_ring_is_one_cycle_through_all_lines():
  visits = kernels.order(50, seed=0)
  assert sorted(visits) == list(range(50)) and visits[0] == 0
  links = np.asarray(kernels.ring(visits, 64))
  assert len(links) == 64 * kernels.LINE_WORDS
  at, seen = 0, []
  for _ in range(50):
    seen.append(at)
    at = links[at]
  assert at == 0 and seen == (visits * kernels.LINE_WORDS).tolist()
  assert kernels.end(visits, 7) == seen[7]
  assert (kernels.order(50, seed=1) != visits).any()


@pytest.mark.parametrize("shared", [False, True])
def test_kernels_are_right(shared):
  visits = kernels.order(12, seed=3)
  links = kernels.ring(visits, 12)
  for steps in (0, 1, 11, 12, 30):
    out = kernels.chase(links, jnp.asarray([steps]), shared=shared)
    assert np.unique(out).tolist() == [kernels.end(visits, steps)]
  rng = np.random.default_rng(0)
  words = rng.integers(-(2**31), 2**31, 2 * kernels.TILE, dtype=np.int32)
  steps = jnp.asarray([4, 1])
  out = kernels.read(jnp.asarray(words), steps, blocks=2, shared=shared)
  assert out.shape == (2, kernels.VECTOR)
  np.testing.assert_array_equal(out, [kernels.sums(words, 4)] * 2)


# What is measured.


@pytest.mark.parametrize("name", GPUS)
def test_probes_are_of_whole_rounds_and_fit(name):
  gpu = hardware.lookup(name)
  found = memory.probes(gpu)
  keys = [(x.measure, x.level) for x in found if x.measure != "sweep"]
  assert keys == [(m, x) for m in ("latency", "rate") for x in memory.LEVELS]
  for probe in found:
    assert probe.cold == (
      probe.measure != "rate" and probe.nbytes > gpu.l2_bytes
    )
    if probe.measure != "rate":
      lines, rest = divmod(probe.nbytes, kernels.LINE_BYTES)
      assert rest == 0 and probe.nbytes // kernels.WORD_BYTES < 2**31
      # Warm: from the second round on. Cold: no line twice.
      assert probe.cold or probe.first == lines
      assert not probe.cold or probe.first + probe.more <= lines
      assert probe.first % 32 == probe.more % 32 == 0  # the unrolled loop
    elif probe.level != "dram":
      tiles, rest = divmod(probe.nbytes, kernels.TILE_BYTES)
      assert rest == 0 and tiles & (tiles - 1) == 0
      assert probe.first % tiles == probe.more % tiles == 0
      assert probe.blocks % gpu.sm_count == 0
    else:
      assert probe.blocks * kernels.TILE_BYTES == probe.nbytes
  sweep = [x.nbytes for x in found if x.measure == "sweep"]
  assert sweep == sorted(set(sweep)) and 256 * MIB in sweep


def test_blocks_of_an_sm_read_different_parts_of_the_l2():
  """Else one would find in L1 what another has loaded."""
  gpu = hardware.lookup("H200")
  (probe,) = (
    x for x in memory.probes(gpu) if (x.measure, x.level) == ("rate", "l2")
  )
  tiles = probe.nbytes // kernels.TILE_BYTES
  l1_tiles = gpu.shared_bytes_per_sm // kernels.TILE_BYTES
  starts = [block * kernels._APART % tiles for block in range(probe.blocks)]
  # Whether blocks are dealt one to each SM in turn, or eight to an SM.
  for together in (starts[:: gpu.sm_count], starts[:8]):
    for i, a in enumerate(together):
      for b in together[:i]:
        assert min((a - b) % tiles, (b - a) % tiles) > l1_tiles


def test_sizes_in_words():
  found = [memory.size(x) for x in (512, 2**15, 45 * MIB, 75 * MIB // 2, 2**30)]
  assert found == ["0.5 KiB", "32 KiB", "45 MiB", "37.5 MiB", "1 GiB"]


# The program.


def test_without_a_gpu_results_are_checked(run):
  status, out, found = run()
  assert status == 0, out
  assert len(found) == len(memory.tiny_probes())
  for row in found:
    assert row.keys() == FIELDS
    assert row["passed"] and row["ms_median"] is None and row["ns"] is None
  assert "not timed  PASSED" in out


def test_rows_of_a_gpu(run, gpu):
  status, out, found = run("--repeats=25")
  assert status == 0, out
  for row in found:
    assert row.keys() == FIELDS
    assert row["passed"] and row["sm_clock_mhz"] == 2000.0
  assert {x["repeats"] for x in found if x["measure"] == "sweep"} == {5}
  latency = rows.find(found, measure="latency", level="l2")
  # The longer call takes twice as long as the other: 1.00, 1.01, ... 1.24 ms.
  assert latency["ms_median"] == pytest.approx(1.12)
  assert latency["ms_short"] == pytest.approx(1.12)
  assert latency["ns"] == pytest.approx(1.12e6 / 4)
  assert latency["cycles"] == pytest.approx(2 * latency["ns"])
  assert latency["gbytes_per_s"] is None
  rate = rows.find(found, measure="rate", level="l2")
  moved = 2 * 2 * kernels.TILE_BYTES  # blocks, tiles
  assert rate["gbytes_per_s"] == pytest.approx(moved / 1.12e-3 / 1e9)
  assert rate["bytes_per_sm_cycle"] == pytest.approx(
    rate["gbytes_per_s"] / 2 / hardware.current().sm_count
  )
  assert rate["ns"] is None
  copy = rows.find(found, measure="rate", level="dram")
  assert copy["gbytes_per_s"] == pytest.approx(
    2 * copy["working_set_bytes"] / 1.12e-3 / 1e9
  )
  assert copy["ms_short"] is None
  assert "  280,000.0 ns  560,000.0 cycles  PASSED" in out


@pytest.mark.parametrize(
  ("kernel", "level"),
  [("chase", "l1"), ("read", "l2"), ("read", "shared"), ("copy", "dram")],
)
def test_a_wrong_result_fails_and_is_not_timed(
  run, gpu, monkeypatch, kernel, level
):
  right = getattr(kernels, kernel)

  def wrong(*args, **kwargs):
    return right(*args, **kwargs).at[..., -1].add(1)

  monkeypatch.setattr(kernels, kernel, wrong)
  measure = "latency" if kernel == "chase" else "rate"
  status, out, found = run(f"--levels={level}", f"--measures={measure}")
  assert status == 1
  assert "FAILED (1)" in out
  (row,) = found
  assert (row["measure"], row["level"]) == (measure, level)
  assert row["passed"] is False and row["max_error"] > 0
  assert row["ms_median"] is None


def test_more_steps_must_take_longer(run, gpu, monkeypatch):
  same = timing.Timing((1.0,) * 20, ("k",), 0)
  monkeypatch.setattr(
    timing, "measure", lambda arms, **_: {arm.name: same for arm in arms}
  )
  status, out, found = run("--measures=latency", "--levels=l1")
  assert (status, found) == (1, [])
  assert "4 more steps took 0 ms" in out


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (["--levels=l3"], "--levels: no 'l3'; there are shared, l1"),
    (["--measures=speed"], "--measures: no 'speed'; there are latency"),
    (["--measures=rate", "--levels="], "nothing to measure"),
  ],
)
def test_an_impossible_flag_is_an_error_in_a_line(run, args, message):
  with pytest.raises(cli.FlagError, match=message) as caught:
    run(*args)
  assert "\n" not in str(caught.value)


# As machine code.


def _compile(name, words, **keywords):
  example = "experiments.harness.memory_kernels:example"
  return compiled.compile_example(example, name=name, words=words, **keywords)


def loops(sass):
  """Instructions of each loop, but for the trap after a kernel's end."""
  found = (loop.instructions for loop in extract.loops(sass))
  return [body for body in found if len(body) > 1]


def count(body, instruction):
  return sum(bool(re.search(rf"\b{instruction}(?!\S)", x)) for x in body)


# By whether the ring is in shared memory: the address, the load.
CHASES = {
  False: (
    r"IMAD\.WIDE (R\d+), (R\d+)(?:\.reuse)?, 0x4, R\d+"
    r"|LDG\.E (R\d+), desc\[UR\d+\]\[(R\d+)\.64\]"
  ),
  True: (r"LEA (R\d+), (R\d+)(?:\.reuse)?, UR\d+, 0x2|LDS (R\d+), \[(R\d+)\]"),
}


@pytest.mark.aot
@pytest.mark.parametrize(("shared", "words"), [(False, 2**30), (True, 2**13)])
def test_a_step_of_a_chase_is_an_address_and_a_load(shared, words):
  kernel = _compile("chase", words, shared=shared)
  assert kernel.spill_bytes == kernel.stack_bytes == 0
  found = loops(kernel.sass)
  for body in found:
    chain = [m.groups() for x in body if (m := re.search(CHASES[shared], x))]
    addresses = [x[:2] for x in chain if x[0]]
    loads = [x[2:] for x in chain if x[2]]
    assert len(addresses) == len(loads) > 0
    # Each waits for the one before; the first for the last of the round before.
    before = loads[-1][0]
    for (to, of), (value, at) in zip(addresses, loads):
      assert (of, at) == (before, to)
      before = value
    # The counter, its test, the branch; the base of the array.
    assert len(body) - len(chain) <= 4
  # Most steps are in a loop that is unrolled.
  assert max(map(len, found)) >= 64


@pytest.mark.aot
@pytest.mark.parametrize(
  ("words", "shared", "load"),
  [  # L1, L2, shared
    (2**13, False, r"LDG\.E\.128\S*"),
    (2**22, False, r"LDG\.E\.128\S*"),
    (2**13, True, r"LDS\.128"),
  ],
)
def test_loads_of_128_bits_stay_in_their_loop(words, shared, load):
  per_sm = 4 if shared else 8
  kernel = _compile("read", words, blocks=132 * per_sm, shared=shared)
  assert kernel.spill_bytes == kernel.stack_bytes == 0
  for body in loops(kernel.sass):
    rounds, rest = divmod(count(body, load), kernels.LOADS)
    assert rounds > 0 and rest == 0
    assert (
      count(body, r"(?:LD|LDG|LDS|LDL)(?:\.\S+)?") == rounds * kernels.LOADS
    )
    # Each word is added: four a load, two by an instruction.
    assert count(body, "IADD3") >= rounds * kernels.LOADS * 2
    assert len(body) <= rounds * 36
  room = kernel.occupancy(hardware.lookup("H200"))
  assert room.blocks >= per_sm


@pytest.mark.aot
def test_the_copy_loads_all_before_it_stores():
  sass = _compile("copy", 2**30).sass
  kinds = re.findall(r"\s(LDG\.E\.128|STG\.E\.128)\s", sass)
  assert kinds == ["LDG.E.128"] * 8 + ["STG.E.128"] * 8
