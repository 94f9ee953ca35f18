"""Tables, markers, published figures and plots, from made-up rows."""

import itertools
import math
import pathlib

from matplotlib import text
import pytest

from experiments.harness import (
  ladder_plots,
  ladder_tables,
  plots,
  published,
  shapes,
  tables,
)
from pallas_gemm import hardware
from pallas_gemm import ladder as ladder_lib
from tests.test_harness_rows import make_row

ROOT = pathlib.Path(__file__).resolve().parents[1]


def ladder_rows(size=4096, device="NVIDIA H200"):
  """Two fp32 rungs, one of 16 bits and a variant of it, with baselines."""
  found = []
  for kernel, number, tflops, dtype in (
    ("jnp.dot HIGHEST", None, 50.0, "float32"),
    ("jnp.dot DEFAULT", None, 400.0, "float32"),
    ("naive", 1, 0.5, "float32"),
    ("coalesced", 2, 5.0, "float32"),
    ("jnp.dot", None, 800.0, "bfloat16"),
    ("tensor_cores", 9, 320.0, "bfloat16"),
    ("tensor_cores_pipelined", 9, 640.0, "bfloat16"),
  ):
    yardstick = 50.0 if dtype == "float32" else 800.0
    row = make_row(
      kernel=kernel,
      number=number,
      dtype=dtype,
      m=size,
      n=size,
      k=size,
      tflops=tflops,
      ms_median=100 / tflops,
      ratio_to_jnp_dot=tflops / yardstick,
      device=device,
    )
    if kernel == "jnp.dot DEFAULT":
      row["config"] = {"precision": "DEFAULT"}
    if kernel == "tensor_cores_pipelined":
      row["variant"] = "b"
    found.append(row)
  return found


def sweep_rows():
  """Every rung and variant over the sizes of the sweep; 1 not at the last."""
  found = []
  sizes = [shape.m for shape in shapes.suite("sweep")]
  for rung in ladder_lib.with_variants():
    for size in sizes[:-1] if rung.number == 1 else sizes:
      tflops = rung.number * size / 128
      row = make_row(
        experiment="sweep",
        kernel=rung.name,
        number=rung.number,
        dtype=rung.dtypes[0],
        **dict.fromkeys("mnk", size),
        tflops=tflops,
        ms_median=2 * size**3 / tflops / 1e9,
      )
      found.append(row | ({"variant": rung.variant} if rung.variant else {}))
  return found


@pytest.mark.parametrize(
  "ms, text",
  [
    (0.00412, "4.12 us"),
    (0.172, "172 us"),
    (2.671, "2.67 ms"),
    (274.9, "275 ms"),
    (2199.0, "2.20 s"),
    (0.0, "0.00 us"),
    (None, "-"),
  ],
)
def test_durations_have_three_digits_and_a_fitting_unit(ms, text):
  assert tables.duration(ms) == text


def test_a_line_is_a_row_or_what_columns_say_of_an_index():
  found = [
    make_row(m=m, passed=p) for m, p in ((1, True), (2, None), (1, False))
  ]
  size, check = {"M": tables.field("m")}, {"check": tables.verdict}
  _, cells = tables.pivot(found, size | check)
  assert cells == [["1", "PASSED"], ["2", "not judged"], ["1", "FAILED"]]
  columns = [("", found, check), ("x", found[1:2], check)]
  assert tables.pivot(found, size, columns) == (
    ["M", "check", "x check"],
    [["1", "FAILED", "-"], ["2", "not judged", "not judged"]],
  )


def test_speed_over_the_rung_before_is_of_the_same_problem():
  found = ladder_rows()

  def before(row, rows=found):
    return ladder_tables.relative(rows)["x before"](row)

  # None of the baselines, of the first, and of rung 9: rung 8 is float32.
  texts = [before(row) for row in found]
  assert texts == ["-", "-", "-", "10.0x", "-", "-", "2.000x"]
  assert before(make_row(number=2, m=1, ms_median=1.0)) == "-"
  # A variant is compared with its rung, and nothing with a variant.
  after = make_row(**found[5] | {"number": 10, "ms_median": 0.15625})
  assert before(after) == "2.000x"
  assert before(after, found[6:]) == "-"


def test_cumulative_speed_goes_on_from_float32_to_16_bits():
  found = ladder_rows()
  starts = ladder_tables.starts()
  assert [rung.number for rung in starts] == [1, 9]
  assert ladder_tables.starts({"float32"}) == starts[:1]
  assert ladder_tables.starts({"float16"}) == starts
  _, first, ninth = ladder_tables.relative(found, starts).values()
  texts = ["100x", "800x", "1.000x", "10.0x", "1600x", "640x", "1280x"]
  assert [first(row) for row in found] == texts
  assert ninth(found[6]) == "2.000x"
  assert ninth(found[3]) == "-"  # float32
  assert first(make_row(m=1)) == "-"


@pytest.mark.parametrize(
  "index, share",
  [(0, "74.6"), (1, "80.9"), (2, "0.7"), (5, "32.3")],  # 1 is TF32
)
def test_share_of_the_peak_of_the_unit_used(index, share):
  assert ladder_tables.of_peak(ladder_rows()[index]) == share
  assert ladder_tables.of_peak(ladder_rows(device="Test GPU")[index]) == "-"
  assert (
    ladder_tables.of_peak(make_row(tflops=None, device="NVIDIA H200")) == "-"
  )


def test_labels_have_the_letter_of_a_variant():
  labels = [ladder_tables.label(row) for row in ladder_rows()]
  assert labels == ["", "", "1", "2", "", "9", "9b"]
  assert ladder_tables.ordered(ladder_rows()[::-1])[3]["variant"] == "b"


def test_the_newest_commit_counts():
  old, new = ({"commit": x, "utc": x} for x in ("2026-01", "2026-02"))
  found = [
    make_row(**new, tflops=1.0),
    make_row(**new, tflops=2.0),
    make_row(**old, kernel="coalesced", number=2),
    make_row(commit="2026-03", utc="2026-03", ms_median=None),
  ]
  (row,) = ladder_tables.newest(found)
  assert (row["commit"], row["tflops"]) == ("2026-02", 2.0)
  assert ladder_tables.newest(found[3:]) == []


def test_of_bound_and_verdict():
  assert tables.of_bound(make_row(max_error=1e-6, error_bound=4e-6)) == "0.25"
  assert tables.of_bound(make_row(max_error=None)) == "not finite"
  assert tables.of_bound(make_row(max_error=0.0, error_bound=0.0)) == "0"
  assert tables.of_bound(make_row(max_error=1.0, error_bound=0.0)) == "inf"
  words = [tables.verdict(make_row(passed=p)) for p in (True, False, None)]
  assert words == ["PASSED", "FAILED", "not judged"]


def test_readme_block_has_a_table_a_problem():
  text = ladder_tables.markdown([ladder_rows()])
  assert text.count("| --: | --- |") == 2
  assert text.index("float32**") < text.index("bfloat16**")
  row = "| 2 | coalesced | 20.0 ms | 5.00 | 7.5 | 0.100x | 10.0x | 10.0x |"
  assert f"{row} 0.085x |" in text
  row = (
    "| 9 | tensor_cores | 312 us | 320 | 32.3 | 0.400x | - | 640x | 1.000x |"
  )
  assert f"{row} 0.443x |" in text
  row = (
    "| 9b | tensor_cores_pipelined | 156 us | 640 | 64.7 | 0.800x | 2.000x |"
  )
  assert f"{row} 1280x | 2.000x | - |" in text
  assert "(S. Boehm, RTX A6000)" in text and "(fast.cu, H100)" in text
  assert "NVIDIA H200; driver" in text and "seed 0" in text
  assert "*x rung 9*: speed over tensor_cores in bfloat16" in text


def test_readme_block_has_devices_side_by_side():
  h100 = ladder_rows(device="NVIDIA H100 80GB HBM3")[:4]  # float32 alone
  text = ladder_tables.markdown([ladder_rows(), h100])
  assert (
    text.startswith("NVIDIA H200;") and "\n\nNVIDIA H100 80GB HBM3;" in text
  )
  cells = "20.0 ms | 5.00 | 7.5 | 0.100x"
  assert f"| 2 | coalesced | {cells} | {cells} | 10.0x | 10.0x |" in text
  assert "| 320 | 32.3 | 0.400x | - | - | - | - | - | 640x |" in text
  assert "H200 % of peak" in text and "H100 % of peak" in text


def test_sweep_has_a_row_a_rung_and_a_column_a_size():
  text = ladder_tables.sweep_markdown(sweep_rows())
  header = "| # | kernel | 128 | 256 | 512 | 1024 | 2048 | 4096 | 8192 |"
  assert text.count(header) == 2 * 4
  for quantity in ("time", "GFLOP/s", "GB/s", "speed over rung 1, naive"):
    assert f"**A@B, float32: {quantity}**" in text
  assert "**A@B, bfloat16: speed over rung 9, tensor_cores**" in text
  naive = "1000 | 2000 | 4000 | 8000 | 16000 | 32000 | - |"
  assert f"| 1 | naive | {naive}" in text
  assert "| 2 | coalesced | " + 6 * "2.000x | " + "- |" in text
  assert text.count("| 8a | ") == 4


def test_problems_with_most_rungs_come_first():
  small = [make_row(m=1), make_row(m=1, kernel="x", number=2)]
  groups = ladder_tables.problems([make_row(), *small])
  assert [len(group) for group in groups] == [2, 1]


def test_blocks_between_markers(tmp_path):
  path = tmp_path / "page.md"
  path.write_text("a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n")
  assert tables.update_file(path, "x", "\nnew\n")
  new = "a\n<!-- x:begin -->\n\nnew\n\n<!-- x:end -->\nb\n"
  assert path.read_text() == new
  assert not tables.update_file(path, "x", "new")
  assert path.read_text() == new


@pytest.mark.parametrize(
  "text, said",
  [
    (None, "there is no"),
    ("", "want one line"),
    ("<!-- x:begin -->", "want one line"),
    ("<!-- x:end --><!-- x:begin -->", "must come after"),
    ("<!-- x:begin --><!-- x:begin --><!-- x:end -->", "want one line"),
  ],
)
def test_markers_that_are_not_a_pair(tmp_path, text, said):
  path = tmp_path / "page.md"
  if text is not None:
    path.write_text(text)
  with pytest.raises(ValueError, match=rf"page\.md.*{said}|{said}.*page\.md"):
    tables.update_file(path, "x", "new")


def test_published_figures():
  boehm = published.beside(7)
  assert boehm.source == "S. Boehm"
  assert boehm.of_cublas(7) == pytest.approx(0.937, abs=1e-3)
  assert boehm.of_cublas(9) is None
  assert published.beside(12).of_cublas(12) == pytest.approx(1.025, abs=1e-3)
  assert published.beside(8) is None
  by_gpu = {ladder.gpu: ladder for ladder in published.LADDERS}
  assert by_gpu["RTX 5090"].of_cublas(1) == pytest.approx(0.045 / 3.94)
  assert by_gpu["H200 NVL"].of_cublas(9) == pytest.approx(0.737)
  assert by_gpu[None].of_cublas(1) is None  # no cuBLAS there
  numbers = {rung.number for rung in ladder_lib.LADDER}
  for ladder in published.LADDERS:
    assert ladder.url is None or ladder.url.startswith("https://")
    assert {rung for _, _, rung in ladder.steps} <= numbers | {None}


def test_the_page_has_the_published_figures():
  text = (ROOT / "experiments/results/ladder.md").read_text()
  table = ladder_tables.published_markdown()
  assert f"<!-- published:begin -->\n\n{table}\n\n<!-- published:end" in text
  for said in ("naive 22.3", "DRAM-coalesced 0.518", "60.56x in all"):
    assert said in table


H200 = hardware.lookup("H200")


def bytes_read(row, level):
  """Made up: what is read from L2 is modelled, from DRAM counted."""
  return 1e9 * (10 if level == "l2" else 1) / row["number"], level == "dram"


def test_plots_are_written_and_the_same_each_time(tmp_path):
  def draw(folder):
    ladder_plots.ladder(ladder_rows(), H200, folder / "ladder.png")
    ladder_plots.roofline(
      ladder_rows(), H200, bytes_read, folder / "roofline.png"
    )
    ladder_plots.sweep(sweep_rows(), folder / "sweep.png")
    return {path.name: path.read_bytes() for path in folder.iterdir()}

  first = draw(tmp_path / "new")
  assert len(first) == 3
  assert all(data.startswith(b"\x89PNG") for data in first.values())
  assert draw(tmp_path / "again") == first


def test_plots_of_nothing_are_refused(tmp_path):
  untimed, path = [make_row(tflops=None)], tmp_path / "x.png"
  for draw in (
    lambda: ladder_plots.ladder(untimed, H200, path),
    lambda: ladder_plots.sweep(untimed, path),
    lambda: ladder_plots.roofline(
      ladder_rows(), H200, lambda *_: (None, True), path
    ),
  ):
    with pytest.raises(ValueError, match="nothing to draw"):
      draw()


@pytest.fixture
def drawn(monkeypatch):
  """Keeps figures: what was to be saved, laid out."""
  figures = []

  def save(fig, path):
    fig.canvas.draw()
    figures.append(fig)

  monkeypatch.setattr(plots, "save", save)
  return figures


@pytest.mark.parametrize(
  "draw",
  [
    lambda rows: ladder_plots.ladder(rows, H200, ""),
    lambda rows: ladder_plots.roofline(rows, H200, bytes_read, ""),
    lambda rows: ladder_plots.roofline(
      rows,
      H200,
      lambda row, level: bytes_read(row, level) if level == "l2" else (None, 0),
      "",
    ),
    lambda rows: ladder_plots.sweep(sweep_rows(), ""),
  ],
  ids=["ladder", "roofline", "roofline without counters", "sweep"],
)
def test_no_text_is_cut_and_no_labels_overlap(drawn, draw):
  rows = [row for row in sweep_rows() if row["m"] == 4096] + ladder_rows()[:2]
  for row in rows:
    below_its_roof = row["tflops"] / (8 if row["dtype"] == "float32" else 1)
    row |= {"ratio_to_jnp_dot": 0.5, "tflops": below_its_roof}
  draw(rows)
  (fig,) = drawn
  bounds = fig.bbox.padded(1)
  tight = fig.get_tightbbox().transformed(fig.dpi_scale_trans)
  assert bounds.count_contains([tight.min, tight.max]) == 2
  for ax in fig.axes:
    # Labels have no part in the layout. Without the lines that lead to them:
    labels = [text.Text.get_window_extent(label) for label in ax.texts]
    for i, box in enumerate(labels):
      assert bounds.count_contains([box.min, box.max]) == 2, ax.texts[i]
      overlaps = [x for x in labels[:i] if box.overlaps(x)]
      assert not overlaps, ax.texts[i]


def test_spread_keeps_order_and_distance():
  places = [10.0, 0.0, 10.5, 30.0]
  assert ladder_plots.spread(places, 4) == [8.25, 0.0, 12.25, 30.0]
  assert ladder_plots.spread([5.0] * 3, 2) == [3.0, 5.0, 7.0]
  crowd = ladder_plots.spread([0.0, 1, 2, 3, 9], 3)
  assert all(b - a >= 3 - 1e-9 for a, b in itertools.pairwise(crowd))
  assert math.isclose(sum(crowd[:4]) / 4, 1.5)


def test_panels_are_of_one_size_where_a_size_has_both():
  other = [
    make_row(number=n, kernel=str(n), dtype="bfloat16", m=1)
    for n in (9, 10, 11)
  ]
  panels = ladder_plots.one_problem_each_kind([*other, *ladder_rows()])
  assert [panel[0]["dtype"] for panel in panels] == ["float32", "bfloat16"]
  assert {panel[0]["m"] for panel in panels} == {4096}
