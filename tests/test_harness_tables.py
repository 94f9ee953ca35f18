"""Tables, markers, published figures and plots, from made-up rows."""

import pytest

from experiments.harness import plots, published, tables
from pallas_gemm import hardware
from tests.test_harness_rows import make_row


def ladder_rows():
  """Two fp32 rungs and one 16-bit rung, with their baselines, at 4096^3."""
  found = []
  for kernel, number, tflops, dtype in (
    ("jnp.dot HIGHEST", None, 50.0, "float32"),
    ("jnp.dot DEFAULT", None, 400.0, "float32"),
    ("naive", 1, 0.5, "float32"),
    ("coalesced", 2, 5.0, "float32"),
    ("jnp.dot", None, 800.0, "bfloat16"),
    ("tensor_cores", 9, 320.0, "bfloat16"),
  ):
    yardstick = 50.0 if dtype == "float32" else 800.0
    found.append(
      make_row(
        kernel=kernel,
        number=number,
        dtype=dtype,
        m=4096,
        n=4096,
        k=4096,
        tflops=tflops,
        ms_median=100 / tflops,
        ratio_to_jnp_dot=tflops / yardstick,
      )
    )
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


def test_speed_over_the_rung_before_is_of_the_same_problem():
  found = ladder_rows()
  assert tables.over_rung_before(found[3], found) == pytest.approx(10)
  assert tables.over_rung_before(found[2], found) is None  # the first
  assert tables.over_rung_before(found[0], found) is None  # no rung
  other = make_row(number=2, m=1, ms_median=1.0)
  assert tables.over_rung_before(other, found) is None


def test_of_bound_and_verdict():
  assert tables.of_bound(make_row(max_error=1e-6, error_bound=4e-6)) == "0.25"
  assert tables.of_bound(make_row(max_error=None)) == "not finite"
  assert tables.of_bound(make_row(max_error=0.0, error_bound=0.0)) == "0"
  assert tables.of_bound(make_row(max_error=1.0, error_bound=0.0)) == "inf"
  words = [tables.verdict(make_row(passed=p)) for p in (True, False, None)]
  assert words == ["PASSED", "FAILED", "not judged"]


def test_readme_block_has_a_table_a_problem_and_the_sources():
  text = tables.ladder_markdown(ladder_rows())
  assert text.count("| --: | --- |") == 2
  assert text.index("float32**") < text.index("bfloat16**")
  assert "| 2 | coalesced | 20.0 ms | 5.00 | 0.100x | 10.0x | 0.085x |" in text
  assert "| 9 | tensor_cores | 312 us | 320 | 0.400x | - | 0.443x |" in text
  assert "siboehm.com" in text and "fast.cu" in text
  assert "Test GPU" in text and "seed 0" in text


def test_problems_with_most_rungs_come_first():
  small = [make_row(m=1), make_row(m=1, kernel="x", number=2)]
  groups = tables.problems([make_row(), *small])
  assert [len(group) for group in groups] == [2, 1]


def test_blocks_between_markers():
  text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n"
  once = tables.between_markers(text, "x", "\nnew\n")
  assert once == "a\n<!-- x:begin -->\n\nnew\n\n<!-- x:end -->\nb\n"
  assert tables.between_markers(once, "x", "new") == once


@pytest.mark.parametrize(
  "text",
  [
    "",
    "<!-- x:begin -->",
    "<!-- x:end --><!-- x:begin -->",
    "<!-- x:begin --><!-- x:begin --><!-- x:end -->",
  ],
)
def test_markers_that_are_not_a_pair(text):
  with pytest.raises(ValueError, match="x:"):
    tables.between_markers(text, "x", "new")


def test_update_file_says_whether_it_changed(tmp_path):
  path = tmp_path / "README.md"
  with pytest.raises(ValueError, match="there is no"):
    tables.update_file(path, "x", "new")
  path.write_text("<!-- x:begin --><!-- x:end -->")
  assert tables.update_file(path, "x", "new")
  assert not tables.update_file(path, "x", "new")
  with pytest.raises(ValueError, match=r"README\.md: want one line"):
    tables.update_file(path, "y", "new")


def test_published_figures():
  boehm = published.beside(7)
  assert boehm.key == "Boehm"
  assert boehm.of_cublas(7) == pytest.approx(0.937, abs=1e-3)
  assert boehm.gain(2) == pytest.approx(6.43, abs=1e-2)
  assert boehm.gain(1) is None and boehm.of_cublas(9) is None
  assert published.beside(12).of_cublas(12) == pytest.approx(1.025, abs=1e-3)
  assert published.beside(8) is None
  for ladder in published.LADDERS:
    assert "https://" in ladder.source
    numbers = set(ladder.tflops or ladder.ratios)
    assert numbers <= set(range(1, 13))


def test_plots_are_written_and_the_same_each_time(tmp_path):
  gpu = hardware.lookup("H200")
  plots.ladder(ladder_rows(), tmp_path / "ladder.png")
  path = tmp_path / "new" / "roofline.png"
  plots.roofline(ladder_rows(), gpu, lambda row: row["number"] * 2.0, path)
  first = path.read_bytes()
  assert first.startswith(b"\x89PNG")
  assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
  plots.roofline(ladder_rows(), gpu, lambda row: row["number"] * 2.0, path)
  assert path.read_bytes() == first


def test_plots_of_nothing_are_refused(tmp_path):
  untimed = [make_row(tflops=None)]
  with pytest.raises(ValueError, match="nothing to draw"):
    plots.ladder(untimed, tmp_path / "x.png")
  gpu = hardware.lookup("H200")
  with pytest.raises(ValueError, match="nothing to draw"):
    plots.roofline(ladder_rows(), gpu, lambda row: None, tmp_path / "x.png")


def test_panels_are_of_one_size_where_a_size_has_both():
  other = [
    make_row(number=n, kernel=str(n), dtype="bfloat16", m=1)
    for n in (9, 10, 11)
  ]
  panels = plots.one_problem_each_kind([*other, *ladder_rows()])
  assert [panel[0]["dtype"] for panel in panels] == ["float32", "bfloat16"]
  assert {panel[0]["m"] for panel in panels} == {4096}
