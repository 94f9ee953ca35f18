"""The counters program: parsing, comparing, and a run with a stand-in ncu."""

import contextlib
import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from experiments import counters
from experiments.harness import (
  cli,
  compiled,
  counter_tables,
  ladder_tables,
  ncu,
  rows,
)
from pallas_gemm import hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract, traffic
from tests.support import programs

LADDER = ladder_lib.LADDER
NUMBERS = ncu.COUNTERS | ncu.STALLS | ncu.OCCUPANCY
FIRST = [names[0] for names in NUMBERS.values()]
CANNED = """\
hello from the program
==PROF== Connected to process 42 (/usr/bin/python3)
==PROF== Profiling "naive" - 0: 0%....100% - 9 passes
==PROF== Disconnected from process 42
"ID","Process ID","Kernel Name","Grid Size","dram__bytes_read.sum",\
"dram__bytes_write.sum","gpu__time_duration.sum",\
"lts__t_sectors_srcunit_tex_op_read.sum","lts__t_sector_hit_rate.pct",\
"smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",\
"smsp__issue_active.avg.pct_of_peak_sustained_active","l1tex__x.sum"
"","","","","byte","Mbyte","nsecond","sector","%","inst","%",""
"0","42","naive(int, ""x"")","(128, 128, 1)","134,217,728","67.108864",\
"1500000","1,000","98.5","68719476736","12.5","n/a"
"""


def test_parse_reads_names_units_and_thousands():
  [kernel] = ncu.kernels(CANNED)
  assert kernel["Kernel Name"] == 'naive(int, "x")'
  assert kernel["dram__bytes_read.sum"] == 134217728
  assert kernel["dram__bytes_write.sum"] == pytest.approx(67108864)
  assert "l1tex__x.sum" not in kernel and "Grid Size" not in kernel


def test_counters_take_the_name_that_is_there_and_scale():
  [kernel] = ncu.kernels(CANNED)
  assert ncu.read(kernel, ncu.COUNTERS) == {
    "duration_ms": pytest.approx(1.5),
    "dram_read_bytes": 134217728,
    "dram_write_bytes": pytest.approx(67108864),
    "l2_hit_percent": 98.5,
    "l2_read_bytes": 32000,
    "ffma": 68719476736,
    "issue_active_percent": 12.5,  # by its second name
  }


# What a child says of a rung, on an H200, and ncu with it.
SAID_OF_ONE = {
  "registers": 168,
  "spill_bytes": 0,
  "shared_bytes": 196673,
  "blocks_per_sm": 1,
  "warps_per_sm": 12,
  "limit": "registers and shared memory",
}
LAUNCH = {"threads": 384.0, "warps_active_percent": 18.5}


@pytest.mark.parametrize("device", ["nvidia_h200", "nvidia_h100_80gb_hbm3"])
def test_occupancy_is_what_ncu_said(device):
  """In the rows of the repository it is ncu's, not the child's."""
  counted = rows.read(rows.RESULTS / device / "counters.jsonl")
  gpu = hardware.lookup(counted[0]["device"])
  found = [row["occupancy"] for row in counted if "occupancy" in row]
  of = {row["kernel"] for row in counted if "occupancy" in row}
  assert {rung.name for rung in ladder_lib.LADDER} <= of
  for row in found:
    fields = ("registers", "threads", "shared_bytes")
    room = hardware.occupancy(gpu, **{name: int(row[name]) for name in fields})
    assert (room.blocks, room.warps, room.limit) == (
      row["blocks_per_sm"],
      row["warps_per_sm"],
      row["limit"],
    )


def test_parse_of_other_output():
  name = "launch__shared_mem_per_block_dynamic"
  text = f'"ID","Kernel Name","{name}"\n"","","Kbyte/block"\n"0","x","8.2"\n'
  assert ncu.kernels(text)[0][name] == pytest.approx(8200)
  for text in ("", "==WARNING== No kernels were profiled."):
    assert ncu.kernels(text) == []
  lines = CANNED.splitlines()
  text = "\n".join([*lines, lines[-1].replace("naive", "other"), "bye", ""])
  names = [kernel["Kernel Name"] for kernel in ncu.kernels(text)]
  assert names == ['naive(int, "x")', 'other(int, "x")']


def test_metrics_are_one_a_counter_of_those_known():
  assert ncu.metrics(None) == FIRST
  launch = [name for name in FIRST if name.startswith("launch__")]
  assert ncu.metrics(set()) == launch and len(launch) == 1
  stalled = "smsp__average_warps_issue_stalled_gmma_per_issue_active"
  known = {
    "smsp__issue_active",
    "sm__issue_active",
    "dram__bytes_read",
    stalled,
  }
  percent = "avg.pct_of_peak_sustained_active"
  assert set(ncu.metrics(known)) - set(launch) == {
    "dram__bytes_read.sum",
    f"sm__issue_active.{percent}",
    f"{stalled}.ratio",
  }


def predicted(number):
  rung = LADDER[number - 1]
  problem = contract.Problem(256, 256, 256, rung.dtypes[0])
  config = rung.default_config(problem)
  gpu = hardware.lookup("H200")
  return counters.predicted(traffic.model(rung, config, problem, gpu))


def test_the_model_speaks_of_what_a_rung_does():
  common = {"dram_read_bytes", "dram_write_bytes"}
  threads = common | {"thread_load_bytes", "ffma"}
  found = predicted(1)
  assert set(found) == threads | {"sectors_per_request"}
  assert found["dram_read_bytes"] == 2 * 256**2 * 4
  assert found["dram_write_bytes"] == 256**2 * 4
  assert found["ffma"] == 256**3
  assert set(predicted(3)) == threads | {"l2_read_bytes"}
  assert set(predicted(8)) == common | {"l2_read_bytes", "ffma"}
  assert set(predicted(9)) == common | {"l2_read_bytes"}


FAKE = """#!{python}
import sys
args = sys.argv[1:]
if "--query-metrics" in args:
  print('"dram__bytes_read","x"')
  for name in {names!r}: print(name.split(".")[0], "words")
  sys.exit(0)
open({log!r}, "a").write(" ".join(args) + "\\n")
print({says!r})
sys.exit({status})
"""
SECOND = CANNED.splitlines()[-1].replace("naive(int", "coalesced_mosaic(int")
BOTH = f"{CANNED}{SECOND}\n"
SAID = '{"label": "1", "spill_bytes": 4}\n{"label": "2", "spill_bytes": 0}\n'


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
  """Runs the program with a stand-in for ncu: (status, output, its calls)."""
  monkeypatch.setattr(ladder_lib, "LADDER", LADDER[:2])
  # The program sets it for its own process; put it back afterwards.
  monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  log = tmp_path / "log"

  def call(*args, says=SAID + BOTH, status=0, output_dir=tmp_path):
    program = tmp_path / "ncu"
    program.write_text(
      FAKE.format(
        python=sys.executable,
        names=FIRST,
        log=str(log),
        says=says,
        status=status,
      )
    )
    program.chmod(0o755)
    places = [f"--ncu={program}"]
    places += [f"--output_dir={output_dir}"] if output_dir else []
    got = programs.call(counters.main, [*places, *args])
    calls = log.read_text().splitlines() if log.exists() else []
    return got, capsys.readouterr().out, calls

  return call


def test_a_run_writes_a_row_a_rung(run, tmp_path):
  status, out, calls = run("--shapes=256x256x256", "--seed=3")
  assert status == 0, out
  found = rows.read(tmp_path / "counters.jsonl")
  assert [row["kernel"] for row in found] == ["naive", "coalesced"]
  row = found[0]
  assert row["measured"]["dram_read_bytes"] == 134217728
  assert row["model"]["dram_read_bytes"] == 2 * 256**2 * 4
  assert row["ratio"]["dram_read_bytes"] == pytest.approx(256)
  assert row["kernel_name"] == 'naive(int, "x")'
  assert row["config"]["block_m"] == 32 and row["utc"].endswith("Z")
  assert row["occupancy"] == {"spill_bytes": 4} and row["stalls"] == {}
  assert "variant" not in row
  assert "ratio 256.00" in out
  [one] = calls  # both rungs in one process
  for part in (
      "--clock-control none", "--csv --page raw",
      "--kernel-name regex:^(naive|coalesced) ", "--child --kernels=1,2 ",
      "--shapes=256x256x256", "--seed=3",
  ):  # fmt: skip
    assert part in one, part
  assert "--dtype" not in one


def test_kernels_are_told_apart_where_a_name_begins_another():
  rungs = ladder_lib.with_variants()
  names = [f"{rung.name}_mosaic_gpu_kernel" for rung in reversed(rungs)]
  found = counters.by_label([{"Kernel Name": name} for name in names], rungs)
  assert {label: k["Kernel Name"] for label, k in found.items()} == {
    rung.label: f"{rung.name}_mosaic_gpu_kernel" for rung in rungs
  }
  assert counters.by_label([{"Kernel Name": "loop_pad_fusion"}], rungs) == {}


def test_a_rung_that_could_not_run_costs_no_other(run, tmp_path):
  said = SAID.replace('"spill_bytes": 4', '"error": "out of registers"')
  status, out, _ = run(says=said + BOTH)
  assert status == 1
  assert "1 naive: out of registers" in out and "not counted: naive" in out
  [row] = rows.read(tmp_path / "counters.jsonl")
  assert row["kernel"] == "coalesced"


def test_a_rung_that_ncu_did_not_see_is_said(run, tmp_path):
  status, out, _ = run(says=SAID + CANNED)
  assert status == 1
  assert "2 coalesced: ncu saw no kernel of that name" in out
  assert len(rows.read(tmp_path / "counters.jsonl")) == 1


def test_what_ncu_refuses_is_said(run, tmp_path):
  refusal = "==ERROR== ERR_NVGPUCTRPERM\n" + SAID + "bye\n"
  status, out, _ = run("--kernels=1", says=refusal, status=1)
  assert status == 1
  assert "ncu saw no kernel: ==ERROR== ERR_NVGPUCTRPERM\n" in out
  assert "not counted: naive" in out and "rows: " not in out
  assert not (tmp_path / "counters.jsonl").exists()


@pytest.mark.parametrize(
  "args, message",
  [
    (["--ncu=/no/such/ncu"], "--ncu: there is no /no/such/ncu"),
    (["--kernels=12"], "--kernels: no rung '12'"),
    (["--shapes=1x1"], "--shapes: want MxNxK"),
    (["--dtype=float16"], "--dtype: none of these rungs takes float16"),
    (["--gpu=potato"], "--gpu: name must be a known GPU"),
    (["--output_dir=tests/conftest.py/below"], "--output_dir: want .*conftest"),
  ],
)
def test_an_impossible_flag_is_an_error_in_a_line(run, tmp_path, args, message):
  with pytest.raises(cli.FlagError, match=message) as caught:
    run(*args)
  assert not (tmp_path / "log").exists()  # ncu was not run
  assert "\n" not in str(caught.value)


def test_the_child_runs_each_rung_once(run, monkeypatch, capsys):
  runs = []

  def kernel(operands, problem, config):
    jax.debug.callback(lambda: runs.append(operands[0].shape))
    return jnp.dot(*operands)

  def broken(operands, problem, config):
    raise RuntimeError("no such instruction\nand more lines")

  @contextlib.contextmanager
  def capture():
    yield {"registers": 32, "occupancy_limit": "threads", "blocks_per_sm": None}

  monkeypatch.setattr(compiled, "capture", capture)
  ladder = tuple(
    dataclasses.replace(
      rung, kernel=k, padding=lambda problem, config: (1,) * 3
    )
    for rung, k in zip(LADDER[:2], (kernel, broken))
  )
  monkeypatch.setattr(ladder_lib, "LADDER", ladder)
  status, out, calls = run("--child", "--kernels=1,2", "--shapes=8x4x2")
  jax.effects_barrier()
  assert (status, calls) == (0, [])
  assert runs == [(8, 2)]
  assert [json.loads(line) for line in out.splitlines()] == [
    {"label": "1", "registers": 32, "limit": "threads"},
    {"label": "2", "error": "RuntimeError: no such instruction"},
  ]


def made_up(number, variant="", m=4096, commit="b" * 40, **stalls):
  """A row as the program writes it."""
  rung = next(
    rung
    for rung in ladder_lib.with_variants()
    if (rung.number, rung.variant) == (number, variant)
  )
  problem = contract.Problem(m, 4096, 4096, rung.dtypes[0])
  return {
    "experiment": "counters",
    "kernel": rung.name,
    "number": number,
    **({"variant": variant} if variant else {}),
    **dataclasses.asdict(problem),
    "measured": {"dram_read_bytes": 2.5e9, "fma_pipe_percent": 61.25},
    "stalls": stalls,
    "occupancy": {**SAID_OF_ONE, **LAUNCH},
    "device": "NVIDIA H200",
    "driver": "580",
    "cuda": "13.0",
    "jax": "0.11.2",
    "commit": commit,
    "utc": "2026-01-02T03:04:05Z",
  }


def test_tables_are_of_what_was_counted_last():
  found = counter_tables.newest(
    [
      made_up(3, commit="a" * 40),
      made_up(9, "a"),
      made_up(9),
      made_up(1, wait=1.0),
      made_up(1, m=8192),
      made_up(1, wait=2.0),
    ]
  )
  assert [ladder_tables.label(row) for row in found] == ["1", "9", "9a"]
  assert found[0]["stalls"] == {"wait": 2.0}


def test_the_largest_stalls_have_columns_and_the_rest_a_sum():
  few = dict.fromkeys(list(counter_tables.REASONS)[:10], 0.1)
  header, cells = counter_tables.stalls(
    [made_up(1, **few | {"gmma": 3.0, "selected": 1.0}), made_up(2)]
  )
  assert header[2] == "gmma" and header[-2:] == ["others", "sum"]
  assert len(header) == 2 + counter_tables.SHOWN_REASONS + 2
  [row] = cells  # rung 2's row tells of none
  assert row[2] == "3.00" and row[-2:] == ["0.20", "3.90"]


def test_reasons_are_metrics_of_ncu():
  assert list(ncu.STALLS) == list(counter_tables.REASONS)
  assert len(ncu.STALLS) == 19
