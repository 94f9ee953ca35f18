"""The counters program: parsing, comparing, and a run with a stand-in ncu."""

import os
import stat
import sys

import jax
import pytest

from experiments import counters
from experiments.harness import cli, rows
from pallas_gemm import hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract, traffic
from tests import test_experiments_ladder
from tests.support import programs

FIRST = [counter.names[0] for counter in counters.COUNTERS.values()]
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
  [kernel] = counters.parse(CANNED)
  assert kernel["Kernel Name"] == 'naive(int, "x")'
  assert kernel["dram__bytes_read.sum"] == 134217728
  assert kernel["dram__bytes_write.sum"] == pytest.approx(67108864)
  assert "l1tex__x.sum" not in kernel and "Grid Size" not in kernel


def test_measured_takes_the_name_that_is_there_and_scales():
  [kernel] = counters.parse(CANNED)
  assert counters.measured(kernel) == {
    "duration_ms": pytest.approx(1.5),
    "dram_read_bytes": 134217728,
    "dram_write_bytes": pytest.approx(67108864),
    "l2_hit_percent": 98.5,
    "l2_read_bytes": 32000,
    "ffma": 68719476736,
    "issue_active_percent": 12.5,  # by its second name
  }


@pytest.mark.parametrize("text", ["", "==WARNING== No kernels were profiled."])
def test_parse_of_nothing(text):
  assert counters.parse(text) == []


def test_several_kernels_and_output_after_them():
  lines = CANNED.splitlines()
  text = "\n".join([*lines, lines[-1].replace("naive", "other"), "bye", ""])
  names = [kernel["Kernel Name"] for kernel in counters.parse(text)]
  assert names == ['naive(int, "x")', 'other(int, "x")']


def test_metrics_are_one_a_counter_of_those_known():
  assert counters.metrics(None) == FIRST
  assert counters.metrics(set()) == []
  known = {"smsp__issue_active", "sm__issue_active", "dram__bytes_read"}
  percent = "avg.pct_of_peak_sustained_active"
  assert counters.metrics(known) == [
    "dram__bytes_read.sum",
    f"sm__issue_active.{percent}",
  ]


def modelled(number, config):
  problem = contract.Problem(256, 256, 256, beta=0.0)
  if number > 8:
    problem = contract.Problem(256, 256, 256, "bfloat16")
  return traffic.model(number, config, problem, hardware.lookup("H200"))


def test_the_model_speaks_of_what_a_rung_does():
  simt = contract.SimtConfig(block_m=32, block_n=32, block_k=32)
  wide = contract.TensorCoreConfig(block_m=64, block_n=64, block_k=64)
  common = {"dram_read_bytes", "dram_write_bytes"}
  threads = common | {"thread_load_bytes", "ffma"}
  naive = contract.SimtConfig(block_m=32, block_n=4)
  found = counters.predicted(modelled(1, naive))
  assert set(found) == threads | {"sectors_per_request"}
  assert found["dram_read_bytes"] == 2 * 256**2 * 4
  assert found["dram_write_bytes"] == 256**2 * 4
  assert found["ffma"] == 256**3
  assert set(counters.predicted(modelled(3, simt))) == threads | {
    "l2_read_bytes"
  }
  assert set(counters.predicted(modelled(9, wide))) == common | {
    "l2_read_bytes"
  }


def test_differences_over_a_fifth_want_an_explanation(monkeypatch):
  monkeypatch.setattr(counters, "EXPLANATIONS", {(3, "ffma"): "because"})
  measured = {"x": 1.19, "ffma": 2.0, "y": 0.5, "zero": 1.0, "alone": 7.0}
  model = {"x": 1.0, "ffma": 1.0, "y": 1.0, "zero": 0.0, "missing": 1.0}
  ratios, reasons = counters.compare(3, measured, model)
  assert ratios == {"x": 1.19, "ffma": 2.0, "y": 0.5, "zero": None}
  assert reasons == {"ffma": "because", "y": None, "zero": None}


FAKE = """#!{python}
import sys
args = sys.argv[1:]
if "--query-metrics" in args:
  print('"dram__bytes_read","x"')
  for name in {names!r}: print(name.split(".")[0], "words")
  sys.exit(0)
open({log!r}, "a").write(" ".join(args) + "\\n")
if {needs_no_name} and "--kernel-name" in args:
  print("==WARNING== No kernels were profiled.")
  sys.exit(0)
if {fails}:
  print("==ERROR== ERR_NVGPUCTRPERM", file=sys.stderr)
  sys.exit(1)
print({canned!r})
"""


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
  """Runs the program with a stand-in for ncu: (status, output, its calls)."""
  ladder = test_experiments_ladder.LADDER[:2]
  monkeypatch.setattr(ladder_lib, "LADDER", ladder, raising=False)
  # The program sets it for its own process; put it back afterwards.
  monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  log = tmp_path / "log"

  def call(*args, fails=False, needs_no_name=False):
    ncu = tmp_path / "ncu"
    ncu.write_text(
      FAKE.format(
        python=sys.executable,
        names=FIRST,
        log=str(log),
        canned=CANNED,
        fails=fails,
        needs_no_name=needs_no_name,
      )
    )
    os.chmod(ncu, ncu.stat().st_mode | stat.S_IEXEC)
    places = f"--ncu={ncu}", f"--output_dir={tmp_path}"
    status = programs.call(counters.main, [*places, *args])
    calls = log.read_text().splitlines() if log.exists() else []
    return status, capsys.readouterr().out, calls

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
  assert row["explanation"]["dram_read_bytes"] is None
  assert row["kernel_name"] == 'naive(int, "x")'
  assert row["config"]["block_m"] == 16 and row["utc"].endswith("Z")
  assert "off by more than 20% and not explained:" in out
  assert "1 naive, dram_read_bytes: 256" in out
  for part in (
      "--clock-control none", "--launch-skip 1", "--launch-count 1",
      "--kernel-name regex:naive", "--csv --page raw", "--child --kernels=1",
      "--shapes=256x256x256", "--seed=3", "--dtype=float32",
  ):  # fmt: skip
    assert part in calls[0], part
  assert len(calls) == 2


def test_a_kernel_of_another_name_is_found(run, tmp_path):
  status, _, calls = run("--kernels=1", needs_no_name=True)
  assert status == 0
  assert len(calls) == 2 and "--kernel-name" not in calls[1]
  assert len(rows.read(tmp_path / "counters.jsonl")) == 1


def test_what_ncu_refuses_is_said(run, tmp_path):
  status, out, _ = run("--kernels=1", fails=True)
  assert status == 1
  assert "ERR_NVGPUCTRPERM" in out and "not counted: naive" in out
  assert not (tmp_path / "counters.jsonl").exists()


@pytest.mark.parametrize(
  "args, message",
  [
    (["--ncu=/no/such/ncu"], "--ncu: there is no /no/such/ncu"),
    (["--kernels=12"], "--kernels: no rung 12"),
    (["--shapes=1x1"], "--shapes: want MxNxK"),
    (["--gpu=potato"], "--gpu: name must be a known GPU"),
  ],
)
def test_an_impossible_flag_is_an_error_in_a_line(run, args, message):
  with pytest.raises(cli.FlagError, match=message) as caught:
    run(*args)
  assert "\n" not in str(caught.value)


def test_the_child_runs_a_rung_twice(run, monkeypatch):
  runs = []

  def kernel(a, b, c, problem, config):
    jax.debug.callback(lambda: runs.append(a.shape))
    return test_experiments_ladder.right(a, b, c, problem, config)

  ladder = (test_experiments_ladder.stub(1, "naive", kernel),)
  monkeypatch.setattr(ladder_lib, "LADDER", ladder)
  status, _, calls = run("--child", "--kernels=1", "--shapes=8x4x2")
  jax.effects_barrier()
  assert (status, calls) == (0, [])
  assert runs == [(8, 2)] * 2
