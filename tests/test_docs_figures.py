"""The pictures of the documentation: all draw, and what they claim holds."""

import importlib
import itertools
import math
import re

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib (the extra `bench`)")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from docs import figures
from docs.figures import _facts, style
from experiments.harness import shapes
from pallas_gemm import hardware, ladder
from pallas_gemm.ladder import contract, register_layouts, traffic

# Names that pages refer to.
NAMES = {
  "a_and_b_in_memory", "bank_conflicts", "block_and_thread_index",
  "c_by_blocks", "cluster_multicast", "counters", "grid_and_blockspec",
  "group_sizes", "ladder_overview",
  "memory_hierarchy", "one_value_per_thread_to_column", "persistent_tiles",
  "producer_consumers", "register_layout", "ring_of_stages", "roofline",
  "stalls", "steps_along_k", "sweep", "swizzle", "tensor_core_fragment",
  "thread_tile_outer_product", "tile_order_and_l2",
  "timeline_serial_and_overlapped", "vector_loads", "warp_tiles",
}  # fmt: skip


def picture(name):
  return importlib.import_module(f"docs.figures.{name}")


def shown_texts(figure):
  """Texts that are drawn, with their boxes in pixels."""
  canvas = FigureCanvasAgg(figure)
  canvas.draw()
  outside = set()
  for ax, name in itertools.product(figure.axes, "xy"):
    axis = getattr(ax, f"{name}axis")
    low, high = sorted(axis.get_view_interval())
    for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
      if not low <= tick.get_loc() <= high:
        outside |= {tick.label1, tick.label2}
  return [
    (text, text.get_window_extent(canvas.get_renderer()))
    for text in figure.findobj(Text)
    if text.get_text().strip() and text.get_alpha() != 0 and text not in outside
  ]


def test_names():
  assert NAMES <= set(figures.FIGURES)
  for name in figures.FIGURES:  # the docstring says what to see
    summary, empty, *rest = picture(name).__doc__.splitlines()
    assert summary.endswith(".") and not empty and rest, name
  with pytest.raises(ValueError, match="c_by_blocks"):
    figures.draw("nothing")


@pytest.mark.parametrize("name", figures.FIGURES)
def test_draws_readably(name):
  """Nothing is cut off, too small, or written over something else."""
  figure = figures.draw(name)
  assert figure.get_figwidth() <= style.WIDTH / 10
  width, height = figure.bbox.width, figure.bbox.height
  found = shown_texts(figure)
  for text, box in found:
    assert text.get_fontsize() >= style.SMALL, text
    assert box.x0 > -1 and box.y0 > -1, text
    assert box.x1 < width + 1 and box.y1 < height + 1, text
  for (one, a), (other, b) in itertools.combinations(found, 2):
    across = min(a.x1, b.x1) - max(a.x0, b.x0)
    down = min(a.y1, b.y1) - max(a.y0, b.y0)
    assert across < 1 or down < 1.5, (one, other)


def test_same_drawing_same_file(tmp_path):
  names = ["bank_conflicts", "counters"]
  first = figures.draw_all(tmp_path / "first", names)
  second = figures.draw_all(tmp_path / "second", names)
  assert [path.name for path in first] == [f"{name}.svg" for name in names]
  for one, other in zip(first, second, strict=True):
    assert one.read_bytes() == other.read_bytes()
    text = one.read_text()
    assert "<dc:date>" not in text and "<text" not in text
    assert "prefers-color-scheme: dark" in text


def test_words_stand_out_on_every_colour():
  def luminance(colour):
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
      x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb
    ]
    return np.dot(linear, (0.2126, 0.7152, 0.0722))

  def contrast(*colours):
    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)

  look = style.LIGHT
  assert contrast(look.text, look.page) > 7
  assert contrast(look.muted, look.page) > 4.5
  for fill in (look.a, look.b, look.c, look.load, *look.warps):
    for strength in (0.2, 0.4, 0.6, 1.0):
      tint = look.tint(fill, strength)
      assert contrast(look.on(tint), tint) > 4.3, (fill, strength)


# What pictures claim.


def test_sizes_and_places():
  sizes = [size for _, _, size in picture("memory_hierarchy").sizes()]
  assert sizes == [
    "256 KiB an SM", "up to 228 KiB an SM", "50 / 60 MiB", "80 / 141 GB",
  ]  # fmt: skip
  loaders = picture("steps_along_k").loaders()
  assert loaders.tolist() == [[row // 4, row % 4] for row in range(32)]
  assert picture("grid_and_blockspec").picked() == [
    ("A", "i, k", (1, 3)), ("B", "k, j", (3, 2)), ("C", "i, j", (1, 2)),
  ]  # fmt: skip
  shape, own = picture("register_layout").owned()
  assert (shape, own[1, 5].tolist()) == ((4, 32), [[1, 5]])
  assert picture("ring_of_stages").stages() == {"8": 2, "9b": 4, "10": 4}
  before, moved = picture("producer_consumers").registers()
  assert (before, 128 * sum(moved)) == ([168] * 3, 64512)
  waves = [len(wave) for wave in picture("persistent_tiles").waves()]
  assert waves == [132, 132, 132, 116]
  swizzle = picture("swizzle")
  assert (swizzle.conflict(False), swizzle.conflict(True)) == (8, 1)
  assert [*map(sorted, swizzle.places(True))] == [[*range(8)]] * 8


def test_what_a_thread_computes():
  values = picture("one_value_per_thread_to_column").thread_values
  assert values("shared_memory") == (1, 1, 1)
  assert values("blocktiling_1d") == (8, 1, 8)
  rows, columns = picture("thread_tile_outer_product").fragments()
  assert rows.tolist() == [*range(0, 16, 2)]
  assert columns.tolist() == [*range(0, 128, 16)]
  own = picture("vector_loads").taken()
  assert own.shape == (32, 4, 2)
  assert (np.diff(own[..., 0]) == 0).all()
  assert (np.diff(own[..., 1]) == 1).all()
  assert len(np.unique(own.reshape(-1, 2), axis=0)) == 16 * 8
  own = picture("warp_tiles").owned()
  rows, columns = (np.unique(own[0, 0, :, side]) for side in (0, 1))
  assert rows.tolist() == [16 * i + r for i in range(4) for r in range(4)]
  assert columns.tolist() == [32 * j + c for j in range(2) for c in range(4)]


def test_rows_that_are_drawn():
  found = picture("group_sizes").cases()
  assert len(found) == len(shapes.GROUPED["sizes"].problems)
  waits = picture("stalls").shares()
  assert [label for label, _, _ in waits] == [str(i + 1) for i in range(12)]
  assert all(abs(sum(part.values()) - 100) < 1e-6 for _, part, _ in waits)
  curves = picture("sweep").curves("float32")
  assert [row["m"] for row in curves["8"]] == [128 << i for i in range(7)]
  halves = picture("ladder_overview").speeds()
  assert [len(rungs) for _, rungs, _ in halves] == [8, 4]
  for _, rungs, dot in halves:
    assert dot > 0 and all(speed > 0 for _, speed in rungs)


def test_bands_are_what_a_block_reads():
  c_by_blocks = picture("c_by_blocks")
  bands = c_by_blocks.bands()
  model = traffic.model("naive", c_by_blocks.CONFIG, c_by_blocks.PROBLEM)
  assert bands["A"].sum() + bands["B"].sum() == model.block_unique_reads
  rows, columns = (np.flatnonzero(bands["C"].any(axis)) for axis in (1, 0))
  assert rows.tolist() == [4, 5, 6, 7]
  assert columns.tolist() == [8, 9, 10, 11]


def test_lines_that_a_warp_touches():
  a_and_b = picture("a_and_b_in_memory")
  for name, mapping, lines in (("naive", "B", 33), ("coalesced", "A", 2)):
    touched = a_and_b.touched(name)
    assert sum(map(len, touched.values())) == lines
    warp = traffic.lanes_addresses(mapping, lanes=range(32))
    for operand in "AB":
      addresses = [getattr(lane, operand.lower()) for lane in warp]
      assert len(touched[operand]) == traffic.units_touched(
        addresses, a_and_b.PROBLEM.k, unit=hardware.LINE_BYTES
      )


def test_bank_conflicts_are_those_of_the_layouts():
  """Counted anew: the most words that lanes want of one bank."""
  banks = picture("bank_conflicts")

  def most(words):
    found = {}
    for word in {word for lane in words for word in lane}:
      found[word % 32] = found.get(word % 32, 0) + 1
    return max(found.values())

  rung = ladder.find("vectorized")
  config = rung.default_config(contract.Problem(4096, 4096, 4096))
  own = register_layouts.owners(rung.layout(config), (64, 128))[0]
  by_rows = [[lane[0, 0] * config.block_k] for lane in own]
  assert banks.words_of_a(transposed=False) == by_rows
  assert most(by_rows) == banks.conflict(by_rows) == 2
  across = banks.words_of_a(transposed=True)
  assert most(across) == banks.conflict(across) == 1
  # And over all of a lane's loads, not only the first.
  for register in range(0, own.shape[1], 4):
    assert most([[m + i for i in range(4)] for m in own[:, register, 0]]) == 1
  for name, apart, times in (("vectorized", 8, 2), ("warptiling", 4, 1)):
    words = banks.words_of_b(name)
    assert [lane[0] for lane in words] == [apart * lane for lane in range(8)]
    assert most(words) == banks.conflict(words) == times


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_ring_times(stages):
  times = _facts.ring_times(12, stages, load=1.5, compute=1.0, gap=0.3)
  for k, step in enumerate(times):
    assert step["compute"][0] >= step["load"][1]
    if k >= stages:  # nothing lands where something is still read
      assert step["load"][0] >= times[k - stages]["compute"][1]
  pauses = [
    following["compute"][0] - step["compute"][1]
    for step, following in itertools.pairwise(times)
  ]
  assert max(pauses) < 1e-9 if stages == 4 else min(pauses) >= 0
  assert stages != 1 or min(pauses) > 1.4


def test_slots_hand_on_to_the_next():
  ring = picture("ring_of_stages")
  laps = [ring.states(slot, 4) for slot in range(4)]
  assert [lap[0] for lap in laps] == [
    (0.0, "reading"), (0.0, "full"), (0.0, "full"), (0.0, "filling"),
  ]  # fmt: skip
  for at in np.arange(0.01, 1, 0.02):
    now = [[state for since, state in lap if since <= at][-1] for lap in laps]
    assert now.index("reading") == int(4 * at)  # one at a time, in order
    assert now.count("reading") == 1 and now.count("filling") <= 1


def test_motion_is_written(tmp_path):
  [path] = figures.draw_all(tmp_path, ["ring_of_stages"])
  text = path.read_text()
  assert "@keyframes fill-3" in text and "prefers-reduced-motion" in text
  for name in re.findall(r"#([\w-]+)", text.split("</style>")[0]):
    is_colour = re.fullmatch("[0-9a-f]{6}", name)
    assert is_colour or f'id="{name}"' in text


def test_accumulators_are_dealt_as_ptx_says():
  """PTX ISA, "Register fragments for wgmma", matrix D."""
  own = picture("tensor_core_fragment").owned()
  for warp, lane, register in np.ndindex(own.shape[:3]):
    row = 16 * warp + lane // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + 2 * (lane % 4) + register % 2
    assert own[warp, lane, register].tolist() == [row, column]


def test_order_of_tiles():
  order_and_l2 = picture("tile_order_and_l2")
  by_row, strips = order_and_l2.orders().values()
  for order in (by_row, strips):
    assert len(np.unique(order, axis=0)) == 132
  assert strips[:9].tolist() == [[i, 0] for i in range(8)] + [[0, 1]]
  # 5 x 32 tiles, and 8 x 17, of 128 rows and 256 columns; 16 bits, K of 8192.
  row = 2 * 8192
  wanted = order_and_l2.bytes_wanted
  assert wanted(by_row) == (5 * 128 * row, 32 * 256 * row)
  assert wanted(strips) == (8 * 128 * row, 17 * 256 * row)


def test_multicast_halves_what_leaves_l2():
  multicast = picture("cluster_multicast")
  (a, b), (shared_a, shared_b) = map(multicast.from_l2, (1, 2))
  assert a == shared_a and b == 2 * shared_b
  problem = contract.Problem(4096, 4096, 4096, "bfloat16")
  reads = [
    traffic.model("cluster_multicast", config, problem).global_load_bytes
    for config in multicast.CONFIGS.values()
  ]
  assert math.isclose(reads[0] / reads[1], (a + b) / (shared_a + shared_b))


def test_points_under_the_roof():
  found = picture("roofline").measured()
  intensities = [0.25, 0.25, 8, 16, 21.3, 21.3, 32, 42.7, 64, 85.3, 85.3, 128]
  assert [x for _, x, _ in found] == pytest.approx(intensities, rel=0.01)
  assert [rung.number for rung, _, _ in found] == [*range(1, 13)]
