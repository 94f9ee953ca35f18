"""Tables, markers, published figures and plots, from made-up rows."""

import functools
import itertools
import math
from unittest import mock

from matplotlib import text
import pytest

from experiments.harness import (
  ladder_plots,
  ladder_tables,
  plots,
  shapes,
  tables,
)
from pallas_gemm import ladder as ladder_lib
from tests.support import result_rows
from tests.support.result_rows import row as make_row

SIZES = [shape.m for shape in shapes.suite("sweep")]


@pytest.mark.parametrize(
  "ms, text",
  [
    (0.00412, "4.12 µs"),
    (0.172, "172 µs"),
    (2.671, "2.67 ms"),
    (274.9, "275 ms"),
    (2199.0, "2.20 s"),
    (0.0, "0.00 µs"),
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
  found = result_rows.ladder()

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
  found = result_rows.ladder()
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
  assert ladder_tables.of_peak(result_rows.ladder()[index]) == share
  assert (
    ladder_tables.of_peak(result_rows.ladder(device="Test GPU")[index]) == "-"
  )
  assert (
    ladder_tables.of_peak(make_row(tflops=None, device="NVIDIA H200")) == "-"
  )


def test_labels_have_the_letter_of_a_variant():
  labels = [ladder_tables.label(row) for row in result_rows.ladder()]
  assert labels == ["", "", "1", "2", "", "9", "9b"]
  assert ladder_tables.ordered(result_rows.ladder()[::-1])[3]["variant"] == "b"


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
  text = ladder_tables.markdown([result_rows.ladder()])
  assert text.count("| --: | --- |") == 2
  assert text.index("float32**") < text.index("bfloat16**")
  row = "| 2 | coalesced | 20.0 ms | 5.00 | 7.5 | 0.100x | 10.0x | 10.0x |"
  assert f"{row} 0.085x |" in text
  row = (
    "| 9 | tensor_cores | 312 µs | 320 | 32.3 | 0.400x | - | 640x | 1.000x |"
  )
  assert f"{row} 0.443x |" in text
  row = (
    "| 9b | tensor_cores_pipelined | 156 µs | 640 | 64.7 | 0.800x | 2.000x |"
  )
  assert f"{row} 1280x | 2.000x | - |" in text
  assert "(S. Boehm, RTX A6000)" in text and "(fast.cu, H100)" in text
  assert "NVIDIA H200; driver" in text and "seed 0" in text
  assert "*x rung 9*: speed over tensor_cores in bfloat16" in text


def test_readme_block_has_devices_side_by_side():
  h100 = result_rows.ladder(device="NVIDIA H100 80GB HBM3")[:4]  # float32 alone
  text = ladder_tables.markdown([result_rows.ladder(), h100])
  assert (
    text.startswith("NVIDIA H200;") and "\n\nNVIDIA H100 80GB HBM3;" in text
  )
  cells = "20.0 ms | 5.00 | 7.5 | 0.100x"
  assert f"| 2 | coalesced | {cells} | {cells} | 10.0x | 10.0x |" in text
  assert "| 320 | 32.3 | 0.400x | - | - | - | - | - | 640x |" in text
  assert "H200 % of peak" in text and "H100 % of peak" in text


def test_sweep_has_a_row_a_rung_and_a_column_a_size():
  text = ladder_tables.sweep_markdown(result_rows.sweep(SIZES))
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


def test_published_figures():
  boehm = ladder_tables.published(7)
  assert boehm.source == "S. Boehm"
  assert boehm.of_cublas(7) == pytest.approx(0.937, abs=1e-3)
  assert boehm.of_cublas(9) is None
  assert ladder_tables.published(12).of_cublas(12) == pytest.approx(
    1.025, abs=1e-3
  )
  assert ladder_tables.published(8) is None
  by_gpu = {ladder.gpu: ladder for ladder in ladder_tables.PUBLISHED}
  assert by_gpu["RTX 5090"].of_cublas(1) == pytest.approx(0.045 / 3.94)
  assert by_gpu["H200 NVL"].of_cublas(9) == pytest.approx(0.737)
  assert by_gpu[None].of_cublas(1) is None  # no cuBLAS there
  numbers = {rung.number for rung in ladder_lib.LADDER}
  for ladder in ladder_tables.PUBLISHED:
    assert ladder.url is None or ladder.url.startswith("https://")
    assert {rung for _, _, rung in ladder.steps} <= numbers | {None}


def roofline(rows, path, levels=("l2", "dram")):
  """With made-up bytes: those from L2 are modelled, from DRAM counted."""

  def bytes_read(row, level, *_):
    if level not in levels:
      return None, True
    return 1e9 * (10 if level == "l2" else 1) / row["number"], level == "dram"

  with mock.patch.object(ladder_plots, "bytes_read", bytes_read):
    ladder_plots.roofline(rows, [], path)


def sweep(_, path):
  ladder_plots.sweep(result_rows.sweep(SIZES), path)


@pytest.mark.parametrize("draw", [ladder_plots.ladder, roofline, sweep])
def test_plots_are_the_same_each_time(tmp_path, draw):
  first, again = tmp_path / "first.png", tmp_path / "new" / "again.png"
  for path in (first, again):
    draw(result_rows.ladder(), path)
  assert first.read_bytes().startswith(b"\x89PNG")
  assert first.read_bytes() == again.read_bytes()


def test_plots_of_nothing_are_refused():
  for draw in (ladder_plots.ladder, ladder_plots.sweep, roofline):
    with pytest.raises(ValueError, match="nothing to draw"):
      draw([make_row(tflops=None)], "")
  with pytest.raises(ValueError, match="nothing to draw"):
    roofline(result_rows.ladder(), "", levels=())


@pytest.mark.parametrize(
  "draw",
  [
    ladder_plots.ladder,
    roofline,
    functools.partial(roofline, levels=["l2"]),
    sweep,
  ],
  ids=["ladder", "roofline", "roofline without counters", "sweep"],
)
def test_no_text_is_cut_and_no_labels_overlap(monkeypatch, draw):
  """Of a figure as it was to be saved, laid out."""
  figures = []
  monkeypatch.setattr(plots, "save", lambda fig, path: figures.append(fig))
  rows = [row for row in result_rows.sweep(SIZES) if row["m"] == 4096]
  rows += result_rows.ladder()[:2]
  for row in rows:
    below_its_roof = row["tflops"] / (8 if row["dtype"] == "float32" else 1)
    row |= {"ratio_to_jnp_dot": 0.5, "tflops": below_its_roof}
    row["device"] = "NVIDIA H200"
  draw(rows, "")
  (fig,) = figures
  fig.canvas.draw()
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
  panels = ladder_plots.one_problem_each_kind([*other, *result_rows.ladder()])
  assert [panel[0]["dtype"] for panel in panels] == ["float32", "bfloat16"]
  assert {panel[0]["m"] for panel in panels} == {4096}
