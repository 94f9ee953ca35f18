"""The ladder runner: flags, rows, README, exit status. No GPU needed."""

import dataclasses
import re
import types

from absl.testing import flagsaver
import jax.numpy as jnp
import pytest

from experiments import ladder
from experiments.harness import (
  cli,
  contestants,
  inputs,
  ladder_tables,
  report,
  rows,
  shapes,
  timing,
)
from pallas_gemm import compat, hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract
from tests import test_harness_rows
from tests.support import programs


def right(operands, problem, config):
  del config
  a, b, *c = operands
  acc = jnp.dot(a, b, precision="highest", preferred_element_type=jnp.float32)
  c = c[0] if c else None
  return contract.combine(acc, c, problem=problem).astype(problem.dtype)


def wrong(operands, problem, config):
  return right(operands, problem, config).at[0, 0].add(1.0)


def not_a_number(operands, problem, config):
  return right(operands, problem, config).at[1, 1].set(jnp.nan)


def broken(operands, problem, config):
  raise RuntimeError("no such instruction\nand more lines")


def interrupts(operands, problem, config):
  raise KeyboardInterrupt


def stub(name, kernel=right, variants=()):
  """A rung, or a variant, whose kernel is a function of this file."""
  return dataclasses.replace(
    ladder_lib.find(name), kernel=kernel, variants=variants
  )


LADDER = (
  stub("naive"),
  stub("coalesced"),
  stub("shared_memory"),
  stub("tensor_cores", variants=(stub("tensor_cores_pipelined"),)),
)
ALL = ladder_lib.with_variants(LADDER)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
  """Runs the program in this process: (status, standard output)."""
  monkeypatch.setattr(ladder_lib, "LADDER", LADDER, raising=False)
  text = programs.readme("ladder") + programs.readme("published")
  (tmp_path / "README.md").write_text(text)

  def call(*args, output_dir=tmp_path):
    places = [f"--readme={tmp_path / 'README.md'}"]
    places += [f"--output_dir={output_dir}"] if output_dir else []
    status = programs.call(ladder.main, [*places, *args])
    return status, capsys.readouterr().out

  return call


@pytest.fixture
def gpu(monkeypatch):
  """Pretends that there is an H200, where calls take made-up times."""
  programs.pretend_times(monkeypatch)
  monkeypatch.setattr(compat, "targets_gpu", lambda: True)
  monkeypatch.setattr(hardware, "current", lambda: hardware.lookup("H200"))


def stored(tmp_path):
  return rows.read(tmp_path / "ladder.jsonl")


def test_interpreter_run_checks_all_and_times_nothing(run, tmp_path):
  status, out = run()
  assert status == 0
  found = stored(tmp_path)
  assert [row["kernel"] for row in found] == [rung.name for rung in ALL]
  for rung, row in zip(ALL, found):
    rows.validate(row)
    assert (row["number"], row.get("variant", "")) == (
      rung.number,
      rung.variant,
    )
    assert row["passed"] is True
    assert row["max_error"] <= row["error_bound"]
    assert (row["m"], row["n"], row["k"]) == shapes.suite("one")[0]
    for name in ("ms_median", "tflops", "gbytes_per_s", "ratio_to_jnp_dot"):
      assert row[name] is None
    problem = contract.Problem(row["m"], row["n"], row["k"], row["dtype"])
    config = rung.default_config(problem)
    assert row["config"] == dataclasses.asdict(config)
  assert [r["dtype"] for r in found] == ["float32"] * 3 + ["bfloat16"] * 2
  assert "run in Pallas' GPU interpreter" in out
  assert out.count("FLOP/byte") == len(ALL)
  assert out.count("PASSED") == 2 * len(ALL)  # lines and table


@pytest.mark.parametrize(
  ("kind", "capability", "skipped"),
  [
    ("Tesla T4", "7.5", ("mbarrier needs", "wgmma needs")),
    ("Tesla V100", "7.0", ("ptxas needs",)),
    ("NVIDIA A100-SXM4-80GB", "8.0", ("wgmma needs",)),
    ("strange", None, ("ptxas needs",)),
    ("AMD Instinct MI300X", "gfx942", ()),
  ],
)
def test_another_gpu_measures_what_it_can(
  run, monkeypatch, kind, capability, skipped
):
  """Or says why not, rung by rung; AMD's is as good as none."""
  programs.pretend_times(monkeypatch)
  device = types.SimpleNamespace(
    platform="gpu", device_kind=kind, compute_capability=capability
  )
  monkeypatch.setattr(compat, "target_device", lambda: device)
  status, out = run("--sizes=32", "--nopeers", "--noplot")
  assert status == 0, out
  assert ("skipped: " in out) == bool(skipped)
  for reason in skipped:
    assert f"  skipped: {reason} a GPU of compute capability" in out
  ran = {"Tesla T4": 2, "NVIDIA A100-SXM4-80GB": 3}.get(kind, 0)
  of_rungs = len(re.findall(r"(?m)^ +\d+[ab]? .*PASSED error", out))
  assert of_rungs == (ran if skipped else len(ALL)), out


def test_alpha_beta_and_shapes_reach_the_kernel(run, tmp_path):
  status, out = run("--alpha=0.5", "--beta=-2", "--shapes=5x7x3", "--sizes=8")
  assert status == 0, out
  found = stored(tmp_path)
  assert {(r["m"], r["n"], r["k"]) for r in found} == {(8, 8, 8), (5, 7, 3)}
  assert {(r["alpha"], r["beta"]) for r in found} == {(0.5, -2.0)}


@pytest.mark.parametrize("kernel", [wrong, not_a_number])
def test_a_failed_check_exits_non_zero_and_the_run_goes_on(
  run, monkeypatch, tmp_path, kernel
):
  bad = (LADDER[0], stub("coalesced", kernel), LADDER[2])
  monkeypatch.setattr(ladder_lib, "LADDER", bad, raising=False)
  status, out = run()
  assert status == 1
  assert [row["passed"] for row in stored(tmp_path)] == [True, False, True]
  assert "FAILED (1): 2 coalesced 48x40x24 float32" in out
  if kernel is not_a_number:
    assert stored(tmp_path)[1]["max_error"] is None


def test_a_kernel_that_can_not_run_costs_no_other_row(
  run, monkeypatch, tmp_path
):
  bad = (LADDER[0], stub("coalesced", broken), LADDER[2])
  monkeypatch.setattr(ladder_lib, "LADDER", bad, raising=False)
  status, out = run()
  assert status == 1
  assert [r["kernel"] for r in stored(tmp_path)] == ["naive", "shared_memory"]
  assert "can't run here: RuntimeError: no such instruction\n" in out


def test_a_problem_too_large_costs_no_other_row(run, monkeypatch, tmp_path):
  real = inputs.operands

  def operands(problem, seed):
    if problem.m > 100:
      raise MemoryError("RESOURCE_EXHAUSTED: out of memory")
    return real(problem, seed)

  monkeypatch.setattr(inputs, "operands", operands)
  status, out = run("--kernels=1", "--sizes=101,8")
  assert status == 1
  assert "101x101x101 float32  can't run here: MemoryError: RESOURCE" in out
  assert [row["m"] for row in stored(tmp_path)] == [8]


def test_interrupt_keeps_finished_rows_and_resume_goes_on(
  run, monkeypatch, tmp_path
):
  stops = (LADDER[0], stub("coalesced", interrupts), LADDER[2])
  monkeypatch.setattr(ladder_lib, "LADDER", stops, raising=False)
  status, out = run()
  assert status == 130
  assert "interrupted: 1 finished rows were kept" in out
  assert [row["kernel"] for row in stored(tmp_path)] == ["naive"]

  monkeypatch.setattr(ladder_lib, "LADDER", LADDER, raising=False)
  status, out = run("--resume")
  assert status == 0
  assert " 1 naive" in out and "kept from" in out
  # Measured once each, in order; the kept row was not written again.
  names = [row["kernel"] for row in stored(tmp_path)]
  assert names == [rung.name for rung in ALL]
  # Another seed is another measurement.
  run("--resume", "--seed=1", "--kernels=1")
  assert len(stored(tmp_path)) == len(ALL) + 1


def test_failed_rows_are_measured_again_on_resume(run, monkeypatch, tmp_path):
  bad = (stub("naive", wrong),)
  monkeypatch.setattr(ladder_lib, "LADDER", bad, raising=False)
  assert run()[0] == 1
  monkeypatch.setattr(ladder_lib, "LADDER", LADDER[:1], raising=False)
  assert run("--resume")[0] == 0
  assert [row["passed"] for row in stored(tmp_path)] == [False, True]


def test_timed_run_compares_with_jnp_dot(run, gpu, tmp_path):
  status, out = run("--sizes=32", "--nopeers")
  assert status == 0, out
  found = stored(tmp_path)
  assert [row["kernel"] for row in found] == [
      "jnp.dot HIGHEST", "jnp.dot DEFAULT", "naive", "coalesced",
      "shared_memory", "jnp.dot", "tensor_cores", "tensor_cores_pipelined",
  ]  # fmt: skip
  for row in found:
    rows.validate(row)
    assert row["repeats"] == timing.DEFAULT_REPEATS
    assert row["ms_p25"] < row["ms_median"] < row["ms_p75"]
    # The fake takes twice as long for the second arm, the baseline.
    assert row["ratio_to_jnp_dot"] == pytest.approx(2)
    want = 2 * 32**3 / row["ms_median"] / 1e9
    assert row["tflops"] == pytest.approx(want)
    assert row["kernel_names"] == ["k0"]
    assert row["baseline_kernel_names"] == ["k1"]
  assert "(w:5 r:25)" in out and "2.000x of jnp.dot" in out
  assert "1.000x of rung 1" in out
  assert "1.000x of rung 9" in out  # its variant
  assert "x rung 1  x rung 9" in out
  assert (tmp_path / "ladder.png").stat().st_size > 10_000
  assert (tmp_path / "roofline.png").stat().st_size > 10_000


def test_peers_that_can_not_run_are_named_with_their_reason(
  run, gpu, monkeypatch, tmp_path
):
  monkeypatch.setattr(compat, "target_device", lambda: None, raising=False)
  status, out = run("--sizes=32", "--kernels=1", "--noplot")
  assert status == 0, out
  for name in ("triton_dense", "jax_hopper_matmul_mgpu"):
    [text] = [
      line for line in out.splitlines() if line.strip().startswith(name)
    ]
    assert "can't run here: " in text and len(text) > 60
    assert rows.find(stored(tmp_path), kernel=name) is None


def test_readme_is_rewritten_between_markers_and_only_once(
  run, gpu, monkeypatch, tmp_path
):
  cube = shapes.Suite([{"m": 32, "n": 32, "k": 32}], ())
  monkeypatch.setitem(shapes.DENSE, "ladder", cube)
  run("--sizes=32", "--nopeers", "--update_readme")
  text = (tmp_path / "README.md").read_text()
  assert text.startswith("# Title\n\n<!-- ladder:begin -->\n\n")
  assert text.endswith("\n\n<!-- published:end -->\n\nEnd.\n")
  assert "old" not in text
  assert "| 1 | naive | " in text and "| 9b | tensor_cores_pipelined" in text
  assert "jnp.dot HIGHEST" in text and "![ladder](ladder.png)" in text
  assert ladder_tables.published_markdown() in text  # others' figures
  count = len(stored(tmp_path))
  # Alone, it measures nothing and finds nothing new.
  status, out = run("--update_readme")
  assert status == 0 and out.count("nothing new for") == 3
  assert (tmp_path / "README.md").read_text() == text
  assert len(stored(tmp_path)) == count


def test_other_sizes_have_no_table_in_the_readme(run, tmp_path):
  path = tmp_path / "ladder.jsonl"
  rows.append(path, test_harness_rows.make_row(m=48))
  _, out = run(f"--from_rows={path}", "--update_readme", "--noplot")
  assert "none of its rows is of 4096x4096x4096, 4096x8192x4096" in out
  assert "\nold\n" in (tmp_path / "README.md").read_text()


def large_row(**fields):
  size = dict.fromkeys("mnk", 4096)
  return test_harness_rows.make_row(**size | fields)


def test_from_rows_needs_no_gpu(run, tmp_path):
  path = tmp_path / "measured" / "ladder.jsonl"
  for number, name in ((1, "naive"), (2, "coalesced")):
    rows.append(path, large_row(number=number, kernel=name))
  status, out = run(f"--from_rows={path}", "--update_readme", "--noplot")
  assert status == 0
  assert "naive" in out
  assert "| 2 | coalesced | " in (tmp_path / "README.md").read_text()


def test_the_latest_rows_of_the_newest_commit_count(run, tmp_path):
  path = tmp_path / "ladder.jsonl"
  old = {"commit": "old", "utc": "2026-01-01"}
  rows.append(path, large_row(number=2, kernel="coalesced", **old))
  for tflops in (1.0, 3.0):
    rows.append(path, large_row(tflops=tflops, commit="new", utc="2026-01-02"))
  run(f"--from_rows={path}", "--update_readme", "--noplot")
  text = (tmp_path / "README.md").read_text()
  assert "| 3.00 |" in text and "| 1.00 |" not in text
  assert "| 2 |" not in text and "commit new;" in text


@pytest.fixture
def results(monkeypatch, tmp_path):
  """A folder of results, with a page and two devices."""
  folder = tmp_path / "results"
  monkeypatch.setattr(rows, "RESULTS", folder)
  for device in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
    place = folder / rows.slug(device)
    for number, kernel in ((1, "naive"), (2, "coalesced")):
      row = large_row(number=number, kernel=kernel, device=device)
      rows.append(place / "ladder.jsonl", row)
      for m in (128, 256):
        swept = row | {"experiment": "sweep", **dict.fromkeys("mnk", m)}
        rows.append(place / "sweep.jsonl", swept)
  with open(tmp_path / "README.md", "a") as page:
    page.write(programs.readme("sweep"))
  return folder


def test_pages_are_of_all_devices(run, results, tmp_path):
  status, out = run("--update_readme", output_dir=None)
  assert status == 0, out
  text = (tmp_path / "README.md").read_text()
  assert text.index("| H200 time |") < text.index("| H100 time |")
  assert "![roofline](results/nvidia_h200/roofline.png)" not in text  # no bytes
  assert "![ladder](results/nvidia_h200/ladder.png)" in text
  assert text.index("### NVIDIA H200") < text.index("### NVIDIA H100 80GB HBM3")
  assert "![sweep](results/nvidia_h100_80gb_hbm3/sweep.png)" in text
  assert text.count("| # | kernel | 128 | 256 |") == 2 * 4
  assert out.count("sweep.png") == 2
  _, out = run("--update_readme", "--noplot", output_dir=None)
  assert out.count("nothing new for") == 4


def test_pages_from_one_devices_rows_keep_the_others(run, results, tmp_path):
  flags = "--update_readme", "--noplot"
  run(*flags, output_dir=None)
  text = (tmp_path / "README.md").read_text()
  places = [results / x for x in ("nvidia_h200", "nvidia_h100_80gb_hbm3")]
  for path in (x / f"{y}.jsonl" for x in places for y in ("ladder", "sweep")):
    _, out = run(*flags, f"--from_rows={path}", output_dir=None)
    assert out.count("nothing new for") == 4
  assert (tmp_path / "README.md").read_text() == text
  run("--update_readme", f"--from_rows={path}", output_dir=None)
  assert [x.parent for x in results.rglob("*.png")] == [path.parent]


def test_plots_stay_those_of_the_file_beside_them(
  run, results, monkeypatch, tmp_path
):
  monkeypatch.setattr(report, "README", tmp_path / "README.md")
  path = results / "nvidia_h200" / "older.jsonl"
  path.write_text((path.parent / "ladder.jsonl").read_text())
  with pytest.raises(cli.FlagError, match="want another --output_dir"):
    run(f"--from_rows={path}", output_dir=None)
  assert run(f"--from_rows={path}")[0] == 0
  assert (tmp_path / "ladder.png").exists()
  assert not list(results.rglob("*.png"))
  flags = f"--from_rows={path}", "--noplot"
  assert run(*flags, output_dir=None)[0] == 0
  with pytest.raises(cli.FlagError, match="want another --readme"):
    programs.call(ladder.main, [*flags, "--update_readme"])


def test_blocks_are_in_the_page_that_has_their_markers(results):
  for name in ("ladder", "sweep"):
    (results / f"{name}.md").write_text(programs.readme(name))
  with flagsaver.flagsaver(readme=None):
    assert report.page_of("sweep") == results / "sweep.md"
    assert report.page_of("ladder") == results / "ladder.md"
    assert report.page_of("published") == report.README
  with flagsaver.flagsaver(readme="other.md"):
    assert report.page_of("sweep").name == "other.md"


def test_the_sweep_has_rows_of_its_own(run, gpu, monkeypatch, tmp_path):
  # The model says 1.1 ms for naive at 640, 8 us at 128.
  monkeypatch.setattr(ladder, "DOES_NOT_FIT_S", 0.5e-3)
  monkeypatch.setattr(ladder, "LONG_S", 5e-6)
  status, out = run("--sweep", "--sizes=128,640", "--kernels=1,2,9,9b")
  assert status == 0, out
  assert not (tmp_path / "ladder.jsonl").exists()
  found = rows.read(tmp_path / "sweep.jsonl")
  assert {row["experiment"] for row in found} == {"sweep"}
  assert not {row["kernel"] for row in found} & set(contestants.PEERS)
  assert rows.find(found, kernel="naive", m=640) is None
  assert "naive                      640x640x640 float32  does not fit" in out
  repeats = {(r["kernel"], r["m"]): r["repeats"] for r in found}
  assert repeats["naive", 128] == ladder.LONG_REPEATS
  assert repeats["coalesced", 128] == timing.DEFAULT_REPEATS
  assert (tmp_path / "sweep.png").stat().st_size > 10_000
  # Fewer calls are no reason to measure again.
  _, out = run("--sweep", "--sizes=128", "--kernels=1", "--resume", "--noplot")
  assert "kept from" in out and len(rows.read(tmp_path / "sweep.jsonl")) == len(
    found
  )


def test_what_the_sweep_runs_is_a_suite():
  sizes = [shape.m for shape in shapes.suite("sweep")]
  assert sizes == [128, 256, 512, 1024, 2048, 4096, 8192]


@pytest.mark.parametrize(
  "args, message",
  [
    (["--kernels=13"], "--kernels: no rung 13; there are 1 naive"),
    (["--kernels=0-2"], "--kernels: no rung 0-2"),
    (["--kernels=2-1"], "--kernels: no rung 2-1"),
    (["--kernels=nave"], "--kernels: no rung 'nave'"),
    (["--kernels=9c"], "no rung '9c'; .* 9b tensor_cores_pipelined"),
    (["--kernels="], "--kernels: no rung ''"),
    (["--sizes=12,x"], "--sizes: want positive integers, got 'x'"),
    (["--sizes=0"], "--sizes: want positive integers, got '0'"),
    (["--shapes=4x4"], "--shapes: want MxNxK"),
    (["--shapes=4x0x4"], "--shapes: every dimension must be at least 1"),
    (["--gpu=potato"], "--gpu: name must be a known GPU, got 'potato'"),
    (["--kernels=1", "--dtype=bfloat16"], "none of the rungs"),
    (["--alpha=nan"], "--alpha: want a number, got nan"),
    (["--beta=inf"], "--beta: want a number, got inf"),
    (["--explain=42"], "--explain: no rung 42"),
    (["--explain=1", "--dtype=bfloat16"], "rungs of --explain=1 takes it"),
    (["--explain=1", "--diff=1,2"], "--explain, --diff: want one of them"),
    (["--from_rows=/no/such"], "--from_rows: there is no /no/such"),
    (["--update_readme"], "no timed rows"),
  ],
)
def test_an_impossible_flag_is_an_error_in_a_line(run, args, message):
  with pytest.raises(cli.FlagError, match=message) as caught:
    run(*args)
  assert "\n" not in str(caught.value)


def test_a_readme_without_markers_is_an_error(run, tmp_path):
  path = tmp_path / "ladder.jsonl"
  rows.append(path, large_row())
  (tmp_path / "README.md").write_text("no markers")
  with pytest.raises(cli.FlagError, match="want one line <!-- ladder:begin"):
    run(f"--from_rows={path}", "--update_readme", "--noplot")


def test_a_foreign_row_is_an_error(run, tmp_path):
  path = tmp_path / "ladder.jsonl"
  rows.append(path, {"experiment": "ladder"})
  with pytest.raises(cli.FlagError, match="row lacks kernel"):
    run(f"--from_rows={path}")


@pytest.mark.parametrize(
  "text, labels",
  [
    ("all", "1 2 3 9 9b"),
    ("1-2", "1 2"),
    ("3,1", "1 3"),
    ("9,naive, 2", "1 2 9"),
    ("tensor_cores", "9"),
    ("2-9", "2 3 9"),
    ("9b", "9b"),
    ("1,tensor_cores_pipelined", "1 9b"),
  ],
)
def test_kernels_are_numbers_ranges_labels_or_names(text, labels):
  found = cli.parse_rungs(text, LADDER)
  assert " ".join(rung.label for rung in found) == labels


def test_dtype_leaves_out_rungs_that_do_not_take_it(run, tmp_path):
  assert run("--dtype=float16")[0] == 0
  found = [(row["kernel"], row["dtype"]) for row in stored(tmp_path)]
  names = "tensor_cores", "tensor_cores_pipelined"
  assert found == [(name, "float16") for name in names]


def test_explain_prints_the_page_and_the_models_numbers(run, tmp_path):
  status, out = run("--explain=3", "--sizes=64,128", "--gpu=A100-SXM4-40GB")
  assert status == 0
  assert out.startswith("Rung 3: shared_memory\n====")
  assert "Rung 3, shared_memory: a block loads" in out  # the docstring
  assert out.count("arithmetic intensity") == 2 and "A100" in out
  assert not (tmp_path / "ladder.jsonl").exists()


def program(*args):
  """The program as a user starts it: (status, stdout, stderr)."""
  return programs.start("experiments.ladder", *args)


def test_the_real_ladder_runs_without_a_gpu(tmp_path):
  status, out, err = program("--shapes=9x10x11", f"--output_dir={tmp_path}")
  assert status == 0, out + err
  found = stored(tmp_path)
  there = [(x.number, x.name) for x in ladder_lib.with_variants()]
  assert [(row["number"], row["kernel"]) for row in found] == there
  for row in found:
    rows.validate(row)
    assert row["passed"] is True and row["tflops"] is None


def test_help_is_for_newcomers():
  status, out, err = program("--help")
  assert (status, err) == (0, "")
  assert "python -m experiments.ladder --kernels=1-8" in out
  for flag in (
      "kernels", "sizes", "shapes", "dtype", "alpha", "beta", "warmup",
      "repeats", "seed", "output_dir", "plot", "update_readme", "peers",
      "resume", "explain", "from_rows", "gpu", "sweep",
  ):  # fmt: skip
    assert f"--{flag}:" in out or f"--[no]{flag}:" in out


@pytest.mark.parametrize(
  "args, message",
  [
    (["--kernels=99"], "error: --kernels: no rung 99"),
    (["--repeats=3"], "error: flag --repeats=3: "),
    (["--from_rows="], "error: flag --from_rows=: want a path, got nothing"),
    (["extra"], "error: unexpected argument 'extra'"),
  ],
)
def test_errors_are_one_line_without_a_traceback(args, message):
  status, out, err = program(*args)
  assert status == 2
  assert out == ""
  assert err.startswith(message), err
  assert len(err.splitlines()) == 1


def test_rows_that_can_not_be_written_are_told_before_a_run(run, tmp_path):
  before = sorted(tmp_path.rglob("*"))
  for place in ("README.md", "README.md/below"):
    folder = tmp_path / place
    with pytest.raises(cli.FlagError, match=f"--output_dir: want .*{folder}"):
      run(f"--output_dir={folder}")
  assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
  "name, content, message",
  [
    ("missing", None, "there is no"),
    (".", None, "can't read .*: Is a directory"),
    ("empty", "", "no timed rows in"),
    ("text", "not rows\n", "no timed rows in"),
    ("other", "{}\n", "want rows of ladder or sweep, got one of None"),
    ("dense", '{"experiment": "dense"}\n', "got one of dense"),
  ],
)
def test_a_file_of_no_rows_is_an_error(run, name, content, message, tmp_path):
  if content is not None:
    (tmp_path / name).write_text(content)
  with pytest.raises(cli.FlagError, match=f"--from_rows: .*{message}"):
    run(f"--from_rows={tmp_path / name}")


def test_plots_of_rows_want_a_place_too(run, tmp_path):
  path = tmp_path / "ladder.jsonl"
  rows.append(path, test_harness_rows.make_row())
  with pytest.raises(cli.FlagError, match="--output_dir: want"):
    run(f"--from_rows={path}", f"--output_dir={path}")
  assert run(f"--from_rows={path}", "--noplot")[0] == 0


def test_a_run_without_rows_names_no_file(run, monkeypatch, tmp_path):
  for kernel, status in ((broken, 1), (interrupts, 130)):
    only = (stub("naive", kernel),)
    monkeypatch.setattr(ladder_lib, "LADDER", only, raising=False)
    got, out = run(f"--output_dir={tmp_path / 'new'}")
    assert got == status
    assert "rows: " not in out and str(tmp_path) not in out
    assert not (tmp_path / "new").exists()


def test_refused_places_are_one_line(tmp_path):
  (tmp_path / "file").write_bytes(b"\xff\n\n1\n")
  for flag in ("output_dir", "from_rows"):
    status, out, err = program(f"--{flag}={tmp_path / 'file'}")
    assert (status, out) == (2, "")
    assert err.startswith(f"error: --{flag}: "), err
    assert len(err.splitlines()) == 1
