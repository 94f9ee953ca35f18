"""The program that writes pages, tables and plots from rows."""

import re

import pytest

from experiments import report
from experiments.harness import cli, rows
from tests.support import programs, result_rows

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
PAGES = {
  "ladder": ("ladder", "published", "sweep", "counters"),
  "dense": ("dense",),
  "ragged": ("ragged",),
}


def rows_of(device, cases=3):
  """The rows of each file of a device."""
  compared = [result_rows.dense(2.0, n=n) for n in range(1, cases + 1)]
  small = [result_rows.dense(1.5, suite="llama_8b", m=8)]
  return {
    "ladder": result_rows.ladder(),
    "sweep": result_rows.sweep([128, 256]),
    "counters": [result_rows.counters()],
    "dense": compared + small,
    "ragged": [*result_rows.sizes(), result_rows.ragged(0.5)],
  }


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
  """Runs the program on two devices' rows: (status, output); has `pages`."""
  monkeypatch.setattr(rows, "RESULTS", tmp_path)
  for device, cases in ((H200, report.dense_tables.ENOUGH), (H100, 3)):
    for name, found in rows_of(device, cases).items():
      for row in found:
        path = tmp_path / rows.slug(device) / f"{name}.jsonl"
        rows.append(path, row | {"device": device})
  for page, names in PAGES.items():
    text = "".join(programs.readme(name) for name in names)
    (tmp_path / f"{page}.md").write_text(text)

  def call(*args):
    status = programs.call(report.main, args)
    return status, capsys.readouterr().out

  return call


def test_pages_are_of_all_devices(run, monkeypatch, tmp_path):
  status, out = run()
  assert status == 0 and out.count("rewrote ") == len(PAGES)
  pages = {page: (tmp_path / f"{page}.md").read_text() for page in PAGES}
  for text in pages.values():
    assert text.startswith("# Title\n\n<!-- ") and text.endswith("End.\n")
    assert "\nold\n" not in text
    assert text.index(f"{H200};") < text.index(f"{H100};")
    # A picture is shown where it could be drawn.
    for folder, name in re.findall(r"!\[\w+\]\((\w+)/(\w+\.png)\)", text):
      assert (tmp_path / folder / name).stat().st_size > 10_000
  assert {path.name for path in tmp_path.glob("nvidia_h200/*.png")} == {
      "counters.png", "stalls.png", "dense.png", "dense_small_m.png",
      "ladder.png", "sweep.png", "ragged.png", "ragged_sizes.png",
  }  # fmt: skip
  text = pages["ladder"]
  assert "| H200 time |" in text and "| H100 time |" in text
  assert "| 1 | naive | " in text and "| 9b | tensor_cores_pipelined" in text
  assert text.count("| # | kernel | 128 | 256 |") == 2 * 2 * 4
  assert "| 1 | naive | 2.5 GB | - |" in text and "61.2" in text
  assert "| 1 | naive | 2.00 | 0 | 2.00 |" in text
  assert "*wait*: the fixed latency of its last instruction." in text
  assert f"### {H200}" in text and "bbbbbbbbbb; 2026-01-02" in text
  assert "no ragged_decode.png: no such case was timed" in out.replace(
    f"{tmp_path}/nvidia_h200/", ""
  )
  # Of a few cases a histogram says nothing.
  assert "(nvidia_h200/dense.png)" in pages["dense"]
  assert "nvidia_h100_80gb_hbm3/dense.png" not in pages["dense"]
  monkeypatch.setattr(report, "draw", lambda *_: [])  # they are there
  assert run()[1].count("nothing new for") == len(PAGES)
  for page, text in pages.items():
    assert (tmp_path / f"{page}.md").read_text() == text


def test_pages_are_named(run, tmp_path):
  before = (tmp_path / "ladder.md").read_text()
  _, out = run("dense")
  assert f"rewrote {tmp_path / 'dense.md'}" in out and "ladder" not in out
  assert (tmp_path / "ladder.md").read_text() == before
  with pytest.raises(cli.FlagError, match="no page 'x'; there are dense"):
    run("x")


def test_somebodys_rows_are_printed_and_drawn_where_they_lie(run, tmp_path):
  folder = tmp_path / "elsewhere"
  for name, found in rows_of(H200).items():
    for row in found:
      rows.append(folder / f"{name}.jsonl", row)
  unseen = {"experiment": "dense_unseen", "suite": "odd"}
  rows.append(folder / "dense_unseen.jsonl", result_rows.dense(2.0, **unseen))
  before = {path: path.read_text() for path in tmp_path.glob("*.md")}
  status, out = run(f"--rows={folder}")
  assert status == 0
  for text in ("coalesced +4096x4096x4096 ", "llama_8b +1 ", "odd +1 "):
    assert re.search(text, out)
  assert "**Counters.**" in out
  assert f"plot: {folder / 'ragged_sizes.png'}" in out
  assert {path: path.read_text() for path in before} == before
  assert not list(tmp_path.glob("nvidia*/*.png"))


def test_rows_of_an_older_version_have_the_counters_alone(run, tmp_path):
  row = result_rows.counters()
  del row["stalls"], row["occupancy"]
  rows.append(tmp_path / "old" / "counters.jsonl", row)
  _, out = run(f"--rows={tmp_path / 'old'}")
  assert "**Counters.**" in out and "stalls.png: no row tells of" in out
  assert "**Stalls.**" not in out and "**Occupancy.**" not in out


def test_the_latest_rows_of_the_newest_commit_count(run, tmp_path):
  path = tmp_path / "nvidia_h200" / "ladder.jsonl"
  old = {"commit": "old", "utc": "2026-01-02", "kernel": "coalesced"}
  new = {"commit": "new", "utc": "2026-01-03"}
  size = dict.fromkeys("mnk", 4096)
  rows.append(path, result_rows.row(**size, **old, number=2))
  for tflops in (1.5, 3.0):
    rows.append(path, result_rows.row(**size, **new, tflops=tflops))
  (tmp_path / "nvidia_h100_80gb_hbm3" / "ladder.jsonl").unlink()
  run("ladder")
  text = (tmp_path / "ladder.md").read_text()
  assert "| 3.00 |" in text and "| 1.50 |" not in text
  assert "commit new;" in text
  assert "coalesced" not in text[: text.index("ladder:end")]


@pytest.mark.parametrize(
  "content, message",
  [
    ('{"experiment": "ladder"}\n', "dense.jsonl: want rows of dense, got one"),
    ('{"experiment": "dense"}\n', "dense.jsonl: row lacks kernel"),
    ("", "no timed rows of dense in"),
    ("no rows\n", "no timed rows of dense in"),
    (None, "no timed rows of dense in"),
  ],
)
def test_files_that_hold_no_such_rows(run, tmp_path, content, message):
  for folder in tmp_path.glob("*/"):
    (folder / "dense.jsonl").unlink()
    if content is not None:
      (folder / "dense.jsonl").write_text(content)
  with pytest.raises(cli.FlagError, match=message):
    run("dense")


@pytest.mark.parametrize(
  "text, message",
  [
    ("<!-- dense:begin -->", "want a line <!-- NAME:end --> after each"),
    ("<!-- dense:end --><!-- dense:begin -->", "dense.md: want a line"),
    (2 * "<!-- dense:begin -->" + "<!-- dense:end -->", "want a line"),
    ("<!-- other:begin --><!-- other:end -->", "no text is called other"),
  ],
)
def test_pages_with_other_markers(run, tmp_path, text, message):
  (tmp_path / "dense.md").write_text(text)
  with pytest.raises(cli.FlagError, match=message):
    run("dense")
  assert (tmp_path / "dense.md").read_text() == text


@pytest.mark.parametrize(
  "args, message",
  [
    (["--rows=/no/such"], "no timed rows in /no/such"),
    (["--rows=x", "dense"], "--rows: goes with no pages"),
  ],
)
def test_commands_that_can_not_be_carried_out(run, args, message):
  with pytest.raises(cli.FlagError, match=message):
    run(*args)


@pytest.mark.parametrize("page", PAGES)
def test_committed_pages_have_the_rows_of_today(monkeypatch, page):
  monkeypatch.setattr(report, "draw", lambda *_: [])
  text = (rows.RESULTS / f"{page}.md").read_text()
  for name in PAGES[page]:
    block = report.block(name)
    assert f"<!-- {name}:begin -->\n\n{block}\n\n<!-- {name}:end" in text, (
      f"run python -m experiments.report {page}"
    )


FLAGS = {
  "ladder": (
    "kernels sizes shapes dtype alpha beta warmup repeats seed output_dir peers"
    " resume explain diff gpu sweep"
  ),
  "dense": (
    "suite shapes dtype repeats warmup seed output_dir tuned implementation"
  ),
  "ragged": (
    "suite passes beside dtype repeats warmup seed output_dir implementation"
  ),
  "report": "rows",
}


@pytest.mark.parametrize("name", FLAGS)
def test_help_is_for_newcomers(name):
  status, out, err = programs.start(f"experiments.{name}", "--help")
  assert (status, err) == (0, "")
  assert f"  python -m experiments.{name}  " in out
  shown = re.findall(r"(?m)^  --(?:\[no\])?(\w+):", out)
  assert set(FLAGS[name].split()) <= {*shown}
  assert not {"plot", "update_readme", "from_rows", "readme"} & {*shown}


@pytest.mark.parametrize(
  "name, args, message",
  [
    ("ladder", ["--kernels=99"], "error: --kernels: no rung '99'"),
    ("ladder", ["--repeats=3"], "error: flag --repeats=3: "),
    ("dense", ["extra"], "error: unexpected argument 'extra'"),
    ("report", ["--rows="], "error: flag --rows=: want a path, got nothing"),
    ("report", ["--seed=1"], "error: --seed: not a flag of this program"),
    ("ragged", ["--output_dir=/dev/null"], "error: --output_dir: want a fold"),
  ],
)
def test_errors_are_one_line_without_a_traceback(name, args, message):
  status, out, err = programs.start(f"experiments.{name}", *args)
  assert (status, out) == (2, "")
  assert err.startswith(message), err
  assert len(err.splitlines()) == 1
