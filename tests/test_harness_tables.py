"""Tables and published figures, from made-up rows."""

import pytest

from experiments.harness import (
  ladder_tables,
  tables,
)
from pallas_gemm import ladder as ladder_lib
from tests.support import result_rows
from tests.support.result_rows import row as make_row


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


def test_problems_with_most_rungs_come_first():
  small = [make_row(m=1), make_row(m=1, kernel="x", number=2)]
  groups = ladder_tables.problems([make_row(), *small])
  assert [len(group) for group in groups] == [2, 1]


def test_published_figures():
  by_gpu = {ladder.gpu: ladder for ladder in ladder_tables.PUBLISHED}
  assert by_gpu["RTX 5090"].of_cublas(1) == pytest.approx(0.045 / 3.94)
  assert by_gpu["H200 NVL"].of_cublas(9) == pytest.approx(0.737)
  assert by_gpu[None].of_cublas(1) is None  # no cuBLAS there
  numbers = {rung.number for rung in ladder_lib.LADDER}
  for ladder in ladder_tables.PUBLISHED:
    assert ladder.url is None or ladder.url.startswith("https://")
    assert {rung for _, _, rung in ladder.steps} <= numbers | {None}
