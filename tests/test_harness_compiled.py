"""compiled: what ptxas and launches say, and stdout while a kernel compiles."""

import os
import subprocess
import sys
import tempfile

import pytest

from experiments.harness import compile_process, compiled
from pallas_gemm import hardware
from pallas_gemm.ladder import LADDER, contract
from tests.support import programs

H200 = hardware.lookup("H200")
PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'x_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for x_mosaic_gpu_kernel
    8 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 16 barriers, 1 bytes smem
"""
SASS = "\t.target\tsm_90a\n        /*0000*/  HGMMA.64x256x16.F32 R24 ;\n"
DECLARED = "declare void @mosaic_gpu_build_kernel_spec(ptr, i32, i32, i32)\n"
# As JAX 0.12 and 0.11 write it.
SPEC = (
  "  call void @mosaic_gpu_build_kernel_spec(ptr %0, i32 66, i32 2, i32 1,"
  " i32 1, i32 2, i32 1, i32 384, i32 1, i32 1, i32 {shared}, i32 0, i32 1,"
  " ptr %337, ptr %339)\n"
)
LAUNCH = (
  "  %188 = call i32 @mosaic_gpu_launch_kernel(ptr %0, i32 512, i32 1, i32 1,"
  " i32 0, i32 0, i32 0, i32 128, i32 2, i32 1, i32 {shared}, i32 0, ptr %1,"
  " ptr %185)\n"
)
HOST = "; ModuleID = 'LLVMDialectModule'\n" + DECLARED


def ptxas(registers=168, stores=0, loads=0):
  return PTXAS.format(registers=registers, stores=stores, loads=loads)


@pytest.mark.parametrize(
  "launch, threads", [(SPEC, 384), (LAUNCH, 256)], ids=["0.12", "0.11"]
)
def test_what_a_kernel_takes(launch, threads):
  text = ptxas(stores=4, loads=12) + HOST + launch.format(shared=213056)
  assert compiled.resources(text) == compiled.Resources(
    registers=168,
    spill_bytes=16,
    stack_bytes=8,
    threads=threads,
    shared_bytes=213057,
  )


def test_of_several_kernels_the_largest():
  one = ptxas(40, 4) + SASS + HOST + SPEC.format(shared=1024)
  other = ptxas(80, 0, 2) + SASS + HOST + LAUNCH.format(shared=4096)
  found = compiled.parse(one + other)
  assert (found.registers, found.spill_bytes, found.stack_bytes) == (80, 6, 16)
  assert (found.threads, found.shared_bytes) == (384, 4097)
  # Machine code of both, without what launches them.
  assert found.sass.count("HGMMA") == 2 and "mosaic_gpu_build" not in found.sass
  assert found.has(r"HGMMA\S*") and not found.has("FFMA")


def test_the_machine_code_of_one_kernel():
  codes = [f"\t.target\tsm_90a\n.text.{name}:\n HFMA2 ;\n" for name in "ab"]
  found = compiled.parse(ptxas() + codes[0] + ptxas() + codes[1])
  assert found.only("b").sass.count("HFMA2") == 1
  assert ".text.b" in found.only("b").sass
  assert found.only("c").sass == ""


def test_a_launch_that_is_not_found_leaves_no_occupancy():
  found = compiled.parse(ptxas() + SASS)
  assert (found.threads, found.shared_bytes) == (None, None)
  assert found.occupancy(H200) is None
  facts = compiled.facts(found, H200)
  assert facts["registers"] == 168 and facts["blocks_per_sm"] is None


@pytest.mark.parametrize("text", ["", SASS, ptxas()])
def test_silence_is_an_error(text):
  with pytest.raises(RuntimeError, match="printed nothing"):
    compiled.parse(text)


def test_ptxas_on_lost_performance_is_kept():
  lost = "ptxas info : (C7510) Potential Performance Loss: wgmma serialized"
  fence = "ptxas info : (C7519) warpgroup.arrive is injected"
  found = compiled.parse("\n".join([lost, fence, ptxas() + SASS]))
  assert found.warnings == (lost,)


def print_in_c(text):
  """On the process's stdout, past Python's."""
  os.write(1, text.encode())


def test_capture_fills_its_dict_at_the_end(capfd):
  print_in_c("before ")
  with compiled.capture(H200) as found:
    assert os.environ["MOSAIC_GPU_DUMP_PTXAS"] == "1"
    print_in_c(ptxas() + HOST + SPEC.format(shared=196672))
    assert found == {}
  print_in_c("after")
  assert found == {
    "registers": 168,
    "spill_bytes": 0,
    "shared_bytes": 196673,
    "blocks_per_sm": 1,
    "warps_per_sm": 12,
    "occupancy_limit": "registers and shared memory",
  }
  assert capfd.readouterr().out == "before after"
  assert "MOSAIC_GPU_DUMP_PTXAS" not in os.environ


def test_capture_gives_everything_back_after_an_error(capfd, monkeypatch):
  monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "0")
  with pytest.raises(OSError, match="of the kernel"):
    with compiled.capture(H200) as found:
      print_in_c("lost")
      raise OSError("of the kernel")
  print_in_c("after")
  assert found == {} and capfd.readouterr().out == "after"
  assert os.environ["MOSAIC_GPU_DUMP_PTXAS"] == "0"


def test_capture_without_a_file_or_a_stdout(capfd, monkeypatch):
  def full(*args):
    raise OSError("no space left")

  for module, name in ((tempfile, "TemporaryFile"), (os, "dup")):
    with monkeypatch.context() as patch:
      patch.setattr(module, name, full)
      with compiled.capture(H200) as found:
        print_in_c("said ")
    assert found == {}
  assert capfd.readouterr().out == "said said "


def test_capture_hears_what_c_holds_back():
  """Into a pipe, C writes late: at the end of the process unless flushed."""
  code = """
import ctypes
from experiments.harness import compiled
from pallas_gemm import hardware
libc = ctypes.CDLL(None)
print("before")
libc.printf(b"early\\n")
with compiled.capture(hardware.lookup("H200")) as found:
  libc.printf(b"ptxas info    : Used 32 registers, used 1 barriers\\n")
libc.printf(b"late\\n")
libc.fflush(None)
print(found["registers"], found["blocks_per_sm"])
"""
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", code],
    capture_output=True,
    text=True,
    timeout=120,
    cwd=programs.ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    check=False,
  )
  assert done.stderr == ""
  assert done.stdout == "before\nearly\nlate\n32 None\n"


def describe(rung, gpu=H200):
  problem = contract.Problem(4096, 4096, 4096, rung.dtypes[0])
  return compiled.describe(rung, problem, gpu)


def test_where_nothing_compiles_a_line_says_so(monkeypatch):
  monkeypatch.setattr(compile_process, "unavailable", lambda: "no ptxas")
  assert describe(LADDER[0]) == ["machine code: not known here; no ptxas"]
  [line] = describe(LADDER[-1], hardware.lookup("L4"))
  assert line.startswith("machine code: none; rung 12 needs wgmma, which")


def test_a_kernel_that_does_not_compile_is_a_line(monkeypatch):
  def fails(*args, **kwargs):
    raise RuntimeError("x does not compile:\nptxas fatal: no such thing")

  monkeypatch.setattr(compile_process, "unavailable", lambda: None)
  monkeypatch.setattr(compiled, "compile_rung", fails)
  [line] = describe(LADDER[0])
  assert line == "machine code: none; ptxas fatal: no such thing"


@pytest.mark.aot
def test_a_rung_described():
  lines = describe(LADDER[-1])
  assert lines[1:] == [
    "  168 registers a thread, no spills",
    "  384 threads and 208.1 KiB of shared memory a block",
    "  room on an SM for 1 block: 12 of 64 warps; limit: registers and shared"
    " memory",
  ]


@pytest.mark.aot
def test_what_does_not_compile():
  problem = contract.Problem(64, 64, 64)
  before = compiled.compile_rung(1, problem)
  with pytest.raises(RuntimeError, match=r"\(exit 1\):\nTraceback"):
    compiled.compile_rung("13", problem)
  with pytest.raises(RuntimeError, match=r"does not compile \(exit -6\)"):
    compiled.compile_example("os:abort")
  # One that was compiled before is compiled again, in a process without it.
  assert compiled.compile_rung("1", problem) == before


def test_the_plugin_is_for_processes_that_compile(monkeypatch, tmp_path):
  monkeypatch.setattr(compile_process, "_PLUGIN", tmp_path / "plugin")
  monkeypatch.setattr(compile_process, "_has_plugin", lambda: False)
  assert compile_process.unavailable().endswith("no CUDA plugin")
  (tmp_path / "plugin").mkdir()
  for before, after in (("", ""), ("/else", os.pathsep + "/else")):
    monkeypatch.setenv("PYTHONPATH", before)
    found = compile_process.environment()["PYTHONPATH"]
    assert found == f"{tmp_path / 'plugin'}{after}"
  monkeypatch.setattr(compile_process, "_has_plugin", lambda: True)
  assert compile_process.environment()["PYTHONPATH"] == "/else"


@pytest.mark.aot
def test_other_programs_do_not_hear_of_the_plugin():
  if compile_process._has_plugin():
    pytest.skip("the plugin is in the environment itself")
  environment = {k: x for k, x in os.environ.items() if k != "JAX_PLATFORMS"}
  done = subprocess.run(
    [sys.executable, "-c", "import jax; jax.devices()"],
    capture_output=True,
    text=True,
    env=environment,
    check=True,
  )
  assert "plugin" not in done.stderr and "Traceback" not in done.stderr
