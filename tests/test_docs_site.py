"""The pages: their parts, their numbers, their commands, what is written."""

import json
import os
import re
import subprocess
import sys

import pytest

from docs.extensions import (
  numbers,
  page_tables,
  rows,
  rung_tables,
  sources,
)
from experiments.harness import ragged_cases, tables
import pallas_gemm
from pallas_gemm import ladder
from tests.support import pages, result_rows

RUNGS = {f"{rung.module.rsplit('.k', 1)[1]}.md": rung for rung in ladder.LADDER}
RUNG_PAGES = sorted(pages.DOCS.glob("rungs/[01]*.md"))
PARTS = (
  "What binds the rung before", "The idea", "Grid and BlockSpecs",
  "What changes", "The code", "Traffic by hand", "Measured",
  "In the machine code", "Published ladders", "Exercises",
)  # fmt: skip
# What is written into a rung's page, each with the part that it stands in.
WRITTEN = {
  "rung-grid": "Grid and BlockSpecs",
  "rung-diff": "What changes",
  "rung-code": "The code",
  "cell": "Traffic by hand",
  "rung-traffic": "Traffic by hand",
  "rung-card": "Measured",
  "rung-counters": "Measured",
}
# Without any numbers of ours.
UNMEASURED = {"changelog.md", "contributing.md"}
NUMBER = re.compile(
  r"\d[\d.,]*(?:\s?(?:ms|us|µs|ns|[TGM]?FLOP/s|[TGM]B/s)\b|\s?%"
  # A factor; the sizes of a tile have a number or a letter after the x, and a
  # cross between spaces multiplies.
  r"|×(?!\w)|\s?x(?!\w)(?!\s*(?:\d|[A-Z]+\b)))"
)
# Limits that the harness sets itself.
SETTINGS = re.compile(r"\b20 µs")
COMMANDS = sorted(
  {
    command
    for page in pages.PAGES
    for command, runs in pages.console(page.read_text())
    if runs and not re.match(r"(?:make|pip|uv|git|cd)\b", command)
  }
)


def name_of(path):
  return path.relative_to(pages.DOCS).as_posix()


def test_every_rung_has_a_page():
  assert [page.name for page in RUNG_PAGES] == sorted(RUNGS)


@pytest.mark.parametrize("page", RUNG_PAGES, ids=name_of)
def test_a_rungs_page_has_its_parts(page):
  text, rung = page.read_text(), RUNGS[page.name]
  title = f"Rung {rung.number}: {rung_tables.title(rung.number)}"
  assert pages.headings(text, 1) == [title]
  parts = list(PARTS) if rung.number > 1 else ["The problem", *PARTS[1:]]
  assert pages.headings(text) == parts
  for block, part in WRITTEN.items():
    assert f"<!-- {block} " in pages.section(text, part), block
  assert "](../img/" in pages.section(text, "The idea")
  exercises = pages.section(text, "Exercises")
  assert exercises.count("<summary>Answer</summary>") == 3
  # What is written is about it, and what it gains stands on top.
  found = re.findall(r"<!-- rung-(?:box|card|grid|traffic) (\w+)", text)
  assert {int(re.sub(r"\D", "", label)) for label in found} == {rung.number}
  assert text.index("<!-- rung-box ") < text.index("\n## ")


@pytest.mark.parametrize("page", RUNG_PAGES, ids=name_of)
def test_a_rungs_page_is_short(page):
  text = re.sub(r"<details>.*?</details>", "", page.read_text(), flags=re.S)
  assert len(pages.prose(text).split()) <= 1500
  assert len(text[: text.index("<!-- rung-box ")].splitlines()) <= 12


@pytest.mark.parametrize("page", RUNG_PAGES, ids=name_of)
def test_words_are_explained_at_their_first_use(page):
  table = pages.section((pages.DOCS / "cuda_to_pallas.md").read_text(), "Words")
  words = re.findall(r"^\| ([a-zA-Z ]+) \|", table, re.M)[1:]
  assert {"sector", "wavefront", "slab", "stage", "fragment", "issue slot",
          "stall", "mbarrier", "phase"} < set(words)  # fmt: skip
  text = pages.without_code(pages.WRITTEN.sub("", page.read_text()))
  others = r"^(?:#|!\[|\|).*$|\[[^]]*\]\((?!\S*#words)\S*\)"
  text = re.sub(others, "", text, flags=re.M)
  for word in words:
    use = rf"(?i)(\[?)\b{word.replace(' ', r'\s+')}s?\b(\]\(\S*#words\))?"
    if first := re.search(use, text):
      assert first[1] and first[2], f"{word} has no link to its meaning"


@pytest.mark.parametrize("page", pages.PAGES, ids=name_of)
def test_no_measured_number_is_typed(page):
  if name_of(page) not in UNMEASURED:
    text = SETTINGS.sub("", pages.prose(page.read_text()))
    found = [line.strip() for line in text.splitlines() if NUMBER.search(line)]
    assert not found


@pytest.mark.parametrize(
  "typed",
  ["3.46 ms", "172us", "39.7 TFLOP/s", "1,987 GFLOP/s", "4.8 TB/s", "59.3 %",
   "59%", "1.05x", "10.6× faster", "1.05 x jnp.dot"],
)  # fmt: skip
def test_a_typed_number_is_found(typed):
  text = f"# Title\n\nIt takes {typed} of that.\n"
  assert NUMBER.search(pages.prose(text))


@pytest.mark.parametrize(
  "text",
  ["8 x 8 results", "128x256", "2 x TN", "16³ in 4 × 4 blocks", "32 × warp",
   "32 lanes", "<!--rung 6 time-->3 ms<!---->", "`3 ms`",
   "```python\nx = 3 % 2\n```", "<!-- rung-card 6 -->\n3 ms\n<!-- end -->"],
)  # fmt: skip
def test_other_numbers_may_be_typed(text):
  assert not NUMBER.search(pages.prose(f"# Title\n\n{text}\n"))


def test_the_notebook_holds_no_outputs():
  cells = json.loads((pages.DOCS / "notebook.ipynb").read_text())["cells"]
  code = [cell for cell in cells if cell["cell_type"] == "code"]
  assert code
  for cell in code:
    assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_a_page_runs(command):
  path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
  done = subprocess.run(
    ["bash", "-c", command],
    cwd=pages.ROOT,
    env=os.environ | {"PATH": path, "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "32"},
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_which_commands_run():
  text = (
    "```console\n$ python -m a \\\n    --b\nprinted\n```\n"
    "```console gpu\n$ python -m c\n```\n"
    "```console slow\n$ python -m d\n```\n"
  )
  assert list(pages.console(text)) == [
    ("python -m a --b", True),
    ("python -m c", False),
    ("python -m d", False),
  ]


def test_every_public_name_is_in_the_reference():
  text = "".join(path.read_text() for path in pages.DOCS.glob("api/*.md"))
  found = re.findall(r"^<!-- api pallas_gemm\.(\w+)[ *\w]* -->$", text, re.M)
  assert not set(pallas_gemm.__all__) - set(found)


# What roles print, and what they say of what is not there.


@pytest.mark.parametrize(
  "role, text, printed",
  [
    (numbers.rung, "6 tflops", r"\d+\.\d TFLOP/s"),
    (numbers.rung, "6 time", r"\d\.\d\d ms"),
    (numbers.rung, "6 peak", r"\d\d\.\d %"),
    (numbers.rung, "6 jnp", r"0\.\d{3}x"),
    (numbers.rung, "6 before", r"1\.\d{3}x"),
    (numbers.rung, "6 first", r"\d+\.\dx"),
    (numbers.rung, "12 jnp 4096x8192x4096", r"[01]\.\d{3}x"),
    (numbers.rung, "8a tflops h100", r"\d+\.\d TFLOP/s"),
    (numbers.rung, "6 time 512x512x512", r"\d+\.\d µs"),
    (numbers.rung, "jnp.dot HIGHEST time", r"\d\.\d\d ms"),
    (numbers.rung, "6 registers", r"\d+"),
    (numbers.counter, "6 dram_read_bytes", r"\d+ MB"),
    (numbers.counter, "6 issue_active_percent", r"\d+\.\d %"),
    (numbers.counter, "6 duration_ms", r"\d\.\d\d ms"),
    (numbers.counter, "6 long_scoreboard", r"[\d.]+"),
    (numbers.counter, "6 instructions h100", r"[\d.]+ G"),
    (numbers.counter, "6 limit", r"registers"),
    (numbers.model, "6 global_load_bytes", r"6\.44 GB"),
    (numbers.model, "3 intensity", r"8 FLOP/byte"),
    (numbers.model, "6 binds", r"compute"),
    (numbers.model, "6 floor h100", r"[\d.]+ ms"),
    (numbers.model, "6 blocks 128x256x64", r"4"),
    (numbers.published, "Boehm 6", r"18,237 GFLOP/s"),
    (numbers.published, "boehm cublas", r"23,250 GFLOP/s"),
    (numbers.published, "Boehm 6 x", r"0\.784x"),
    (numbers.published, "fast.cu two consumers", r"610 TFLOP/s"),
    (numbers.published, "tilus stages", r"75\.6 % of cuBLAS"),
    (numbers.gpu, "h200 sms", r"132"),
    (numbers.gpu, "h100 l2", r"50 MiB"),
    (numbers.gpu, "rtx 3090 fp32", r"35\.6 TFLOP/s"),
    (numbers.gpu, "h200 ridge_fp32", r"14 FLOP/byte"),
    (numbers.calc, "2 * 4096**3 / 1e9 .1f", r"137\.4"),
    (numbers.calc, "-(4096 // 64) * 2", r"-128"),
    (numbers.calc, "4096 * 4096", r"16,777,216"),
  ],
)
def test_what_roles_print(role, text, printed):
  assert re.fullmatch(printed, role(text))


@pytest.mark.parametrize(
  "role, text, said",
  [
    (numbers.rung, "14 tflops", "13 tensor_memory"),
    (numbers.rung, "6 speed", "time, tflops, peak"),
    (numbers.rung, "6 tflops 100x100x100", "at 100x100x100 on h200"),
    (numbers.rung, "1 before", "no 'before'"),
    (numbers.rung, "cublas time", "no one row of 'cublas'"),
    (numbers.rung, "6", "want a rung and a key"),
    (numbers.counter, "6 bytes", "dram_read_bytes"),
    (numbers.model, "6 bytes", "global_load_bytes"),
    (numbers.published, "cutlass 6", "there is S. Boehm, L. Mao"),
    (numbers.published, "Boehm 12", "there is cublas, naive"),
    (numbers.published, "six-step 6 x", "gives no cuBLAS"),
    (numbers.gpu, "h300 sms", "NVIDIA H200"),
    (numbers.gpu, "h200 price", "sms, lanes"),
    (numbers.calc, "__import__('os')", "want numbers"),
    (numbers.calc, "1 / 0", "division by zero"),
    (numbers.calc, "m * n", "want numbers"),
    (rung_tables.card, "14", "13 tensor_memory"),
    (sources.rung_code, "6 kernels", "no name in k06_vectorized.py"),
    (sources.rung_code, "14 kernel", "13 tensor_memory"),
    (rung_tables.problems, "1x1x1", "4096x4096x4096 float32"),
    (page_tables.ops, "sparse h100", "dense, ragged"),
    (page_tables.ops, "dense", "want ops and a GPU"),
    (page_tables.random, "a100", "h200, h100"),
  ],
)
def test_roles_say_what_there_is(role, text, said):
  with pytest.raises(ValueError, match=re.escape(said)):
    role(text)


@pytest.fixture
def results(tmp_path, monkeypatch):
  """Rows of a file gpu/some.jsonl."""
  folder = tmp_path / "gpu"
  folder.mkdir()
  (folder / "some.jsonl").write_text(
    '{"level": "l1", "ns": 20.5, "size": 1, "inner": {"a.b": {"us": 1.25}}}\n'
    '{"level": "l2", "ns": 150, "size": 1, "commit": "abcdef"}\n'
    '{"level": "l2", "ns": 600.0, "size": 2, "commit": "abcdef"}\n'
  )
  monkeypatch.setattr(rows.rows_lib, "RESULTS", tmp_path)
  rows.read.cache_clear()
  yield
  rows.read.cache_clear()


@pytest.mark.parametrize(
  "text, printed",
  [
    ("gpu/some ns level=l1", "20.5 ns"),
    ("gpu/some ns level=l2 size=1", "150 ns"),
    ("gpu/some ns commit=abc size=2", "600 ns"),
    ("gpu/some ns level=l1 format=.2f unit=ns", "20.50 ns"),
    ("gpu/some ns level=l1 scale=1e-3 format=.3g unit=us", "0.0205 µs"),
    ("gpu/some ns level=l2 reduce=geomean", "300 ns"),
    ("gpu/some ns level=l2 reduce=max unit=x", "600x"),
    ("gpu/some inner.a.b.us level=l1", "1.25 µs"),
    ("gpu/some level ns=20.5", "l1"),
  ],
)
def test_a_field_of_a_row(results, text, printed):
  assert rows.row(text) == printed


@pytest.mark.parametrize(
  "text, said",
  [
    ("gpu/none ns", "no file 'gpu/none'; there is gpu/some"),
    ("gpu/some ns level=l3", "0 of 3 rows of gpu/some have"),
    ("gpu/some ms level=l1", "0 a field 'ms'"),
    ("gpu/some ns level=l2", "2 of 3 rows of gpu/some have"),
    ("gpu/some ns level=l2 reduce=mode", "geomean, median"),
    ("gpu/some ns level", "want conditions key=value"),
    ("gpu/some", "want a file, a field and conditions"),
  ],
)
def test_a_field_that_is_not_there(results, text, said):
  with pytest.raises(ValueError, match=re.escape(said)):
    rows.row(text)


@pytest.mark.rows
def test_the_last_row_of_a_kernel_counts():
  text = "nvidia_h200/counters number kernel=vectorized"
  assert rows.row(text) == "6"
  with pytest.raises(ValueError, match="0 of"):
    rows.row(f"{text} commit=0000000")


def test_code_of_a_rung():
  file, text = sources.rung_code("6 kernel.slab").split("\n\n", 1)
  assert file == "`pallas_gemm/ladder/k06_vectorized.py`"
  assert text.startswith("```python\ndef slab(k, acc):\n  a_tile = ")


@pytest.mark.parametrize("rung", ladder.with_variants(), ids=lambda x: x.label)
def test_tables_of_every_rung(rung):
  assert "| --: |" in rung_tables.grid(rung.label)
  for table in (rung_tables.card, rung_tables.traffic, rung_tables.counters):
    found = table(rung.label)
    # A variant may wait for its rows.
    assert "| --: |" in found or (rung.variant and " yet" in found)
  assert sources.rung_sass(rung.label)
  assert sources.rung_diff(rung.label)
  assert sources.rung_code(rung.label)


def test_a_rung_that_was_never_run():
  assert "Not measured yet on an H100: 13." in rung_tables.card("13")
  assert rung_tables.traffic("13") == "Not counted yet."
  assert "Not measured yet" in rung_tables.counters("13")
  assert "Not measured yet" in rung_tables.steps("12 13")


def test_what_has_no_rows_is_left_out(monkeypatch):
  there = {}
  read = lambda gpu, name: there.get(name, [])  # noqa: E731
  monkeypatch.setattr(page_tables.results, "read", read)
  monkeypatch.setattr(page_tables.results, "measured", lambda *_: [])
  heads = page_tables.ops_overview("h100"), page_tables.ops("dense h100")
  assert all("| cases |" in x and "x |" not in x for x in heads)
  assert page_tables.ops("ragged h100")
  case = {"implementation": "xla", "commit": "abc"}
  there["dense"] = [result_rows.dense(2.0, **case)]
  older = result_rows.dense(8.0, implementation="sm90", commit="older")
  there["dense_unseen"] = [older, result_rows.dense(0.5, **case)]
  there["ragged"] = [result_rows.ragged(1.0)]
  text = page_tables.ops_overview("h100")
  *lines, notes = text.splitlines()
  assert [x.split(" | ")[2:4] for x in lines[2:4]] == [
    ["1", "2.000x"], ["1", "0.500x"],
  ]  # fmt: skip
  assert "1 of 1 random ones are below" in notes and "; commit abc;" in notes
  assert "2 of all 2 are left to XLA" in notes
  assert not {"Llama", "Mixtral", "wall", "`lax"} & {*re.findall(r"\S+", text)}
  there["ragged"][0]["arms"][ragged_cases.INDEXED] = {"ms_median": 3.0}
  of_float32 = {"suite": "unseen", "commit": "abc"} | {
    "arms": {"xla": {"ms_median": 3.0}, "pallas_gemm": {"ms_median": 2.0}}
  }
  other = of_float32 | {"commit": "another"}
  there["float32"] = [of_float32, other]
  wide = of_float32 | {"dtype": "bfloat16", "ms_median": 5.0}
  of_eight = of_float32 | {"dtype": "int8", "suite": "dense", "epilogue": "row"}
  there["eight_bits"] = [wide, of_eight]
  text = page_tables.ops_overview("h100")
  assert "| best of JAX, tokamax, cuequivariance | 1 | 3.000x |" in text
  assert "Mixtral's rows lack `tokamax triton`." in text
  assert "`indexed" not in text and "tuned" not in text
  assert "random (" not in text and "roofline" not in text
  assert "random | `jnp` | 1 | 1.500x |" in text
  assert "by rows | `matmul`, 16 bits | 1 | 2.500x |" in text
  assert "| mixtral | `indexed_linear` |" in page_tables.ops("ragged h100")
  drawn = result_rows.ragged(2.0, suite="unseen", implementation="xla")
  drawn["arms"][ragged_cases.INDEXED] = {"ms_median": 1.0}
  there["ragged"] += [drawn, *result_rows.sizes()]
  text = page_tables.ops_overview("h100")
  assert "| `ragged_dot`, random | the same | 1 | 0.500x |" in text
  assert "Groups of 64 to 384 rows: at least 20% of the roofline." in text


@pytest.mark.parametrize(
  "columns, widths", [(8, [7]), (9, [4, 4]), (10, [3, 3, 3]), (14, [7, 6])]
)
def test_wide_tables_are_cut(columns, widths):
  header = ["suite", *map(str, range(columns - 1))]
  text = page_tables.narrow(tables.markdown(header, [["x"] * columns]))
  rules = re.findall(r"^\| -.*", text, re.M)
  assert [rule.count("|") - 2 for rule in rules] == widths


def test_a_layer_of_float32_has_a_row(monkeypatch):
  """Though it has no layout, as products have."""
  sizes, arms = {"m": 4, "n": 8, "k": 2}, {"pallas_gemm": 1.0, "xla": 3.0}
  row = sizes | {"dtype": "float32", "epilogue": "HIGHEST"}
  row["arms"] = {x: {"ms_median": ms, "tflops": 1} for x, ms in arms.items()}
  layer = row | {"suite": "layer", "kernel": "mlp"}
  step = layer | {"kernel": "newton_schulz"}
  rows = [layer, step, row | {"suite": "unseen"}]
  monkeypatch.setattr(page_tables.results, "read", lambda *_: rows)
  table = page_tables.float32("h100")
  assert "MLP of 4x8x2, forward and backward | HIGHEST | 1 | 3.000x" in table
  assert "a step of Newton and Schulz, 4² | HIGHEST | 1 | 3.000x" in table
  assert "1 drawn products at HIGHEST have 3.000x" in table
