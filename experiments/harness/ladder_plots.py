"""The figures of the ladder: bars of the rungs, the roofline, and the sweep."""

from collections.abc import Sequence
import math

from experiments.harness import ladder_tables, plots, tables
from experiments.harness import rows as rows_lib
from experiments.harness.plots import BLUE, GREY, INK, VERMILLION
from experiments.harness.tables import RowDict
from pallas_gemm import hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm import roofline as roofline_lib
from pallas_gemm.ladder import contract, traffic

# A row, its FLOP per byte, and whether the bytes were counted.
Point = tuple[RowDict, float, bool]


def one_problem_each_kind(rows: Sequence[RowDict]) -> list[list[RowDict]]:
  """The problem with the most rungs: in float32, and in 16 bits.

  Both of one size where a size has both.
  """
  timed = [row for row in rows if row["tflops"] is not None]
  found: list[list[RowDict]] = []
  for is_wide in (True, False):
    of_kind = [
      group
      for group in ladder_tables.problems(timed)
      if any(row["number"] is not None for row in group)
      and (group[0]["dtype"] == "float32") == is_wide
    ]
    if found:  # the same size as the first panel, if it was run
      size = tables.shape(found[0][0])
      of_kind.sort(key=lambda group: tables.shape(group[0]) != size)
    found += of_kind[:1]
  return found


@plots.drawn
def ladder(rows: Sequence[RowDict]):
  """The rungs as bars, in per cent of the GPU's peak; jnp.dot as a line.

  fp32 and 16-bit rungs have a panel each, one above the other on one axis:
  they compute on different units, and each is measured against its own.
  """
  groups = one_problem_each_kind(rows)
  if not groups:
    raise ValueError("no rung was timed; there is nothing to draw")
  counts = [sum(not ladder_tables.is_dot(x) for x in rows) for rows in groups]
  fig, axes = plots.panels(
    9,
    1.4 + 0.31 * sum(counts) + 0.7 * len(groups),
    nrows=len(groups),
    sharex=True,
    height_ratios=[count + 0.4 for count in counts],
  )
  gpu = gpu_of(rows)
  for ax, group in zip(axes, groups):
    _bars(ax, group, gpu)
  axes[-1].set_xlabel("% of the peak of the unit that computes")
  axes[-1].set_xlim(0, 100)
  plots.title(fig, f"The ladder on {groups[0][0]['device']}")
  return fig


def _bars(ax, group: Sequence[RowDict], gpu: hardware.Gpu) -> None:
  """One panel: horizontal bars, so that names can be read."""
  bars = [row for row in group if not ladder_tables.is_dot(row)]

  def share(row: RowDict) -> float:
    return 1e14 * row["tflops"] / ladder_tables.peak_flops(row, gpu)

  for line, row in enumerate(bars):
    ax.barh(line, share(row), height=0.74, color=_tone(row))
  plots.lines(ax, [_name(row) for row in bars], top=-1.5)
  # The figures stand in a margin of their own, where no line crosses them.
  figures = ["TFLOP/s  x jnp.dot"]
  for row in bars:
    figures.append(f"{tables.TFLOPS(row):>7}  {tables.RATIO(row):>9}")
  margin = ax.secondary_yaxis("right")
  places = range(-1, len(bars))
  margin.set_yticks(places, figures, family="monospace", fontsize=9)
  margin.tick_params(length=0)
  margin.spines["right"].set_visible(False)
  for dot in [row for row in group if ladder_tables.is_dot(row)][:1]:
    x = share(dot)
    ax.axvline(x, color=INK, linewidth=1.4, linestyle=(0, (5, 3)), zorder=3)
    words = f"{dot['kernel']}: {tables.TFLOPS(dot)} TFLOP/s"
    plots.note(ax, words, (x, -1.1), (-5, 0), ha="right", va="center", size=9)
  first = group[0]
  peak = roofline_lib.peak_flops(gpu, first["dtype"]) / 1e12
  ax.set_title(
    f"{first['dtype']}, {ladder_tables.expression(first)},"
    f" {tables.shape(first)}; 100 % are {peak:.0f} TFLOP/s of the"
    f" {'CUDA' if first['dtype'] == 'float32' else 'tensor'} cores",
  )
  ax.grid(axis="x")


def _tone(row: RowDict) -> tuple[float, ...]:
  """A rung's colour, lighter for its variants; grey for what is no rung."""
  from matplotlib import colors  # pylint: disable=g-import-not-at-top

  of_rung = row["number"] is not None
  rgb = colors.to_rgb(plots.COLOURS[row["dtype"]] if of_rung else GREY)
  light = 0.5 if row.get("variant") else 0
  return tuple(x + light * (1 - x) for x in rgb)


def _name(row: RowDict) -> str:
  return f"{ladder_tables.label(row)}  {row['kernel']}".strip()


def gpu_of(rows: Sequence[RowDict]) -> hardware.Gpu:
  """The GPU of some rows; of one that is not known, this machine's."""
  try:
    return hardware.lookup(rows[0]["device"] or "")
  except ValueError:
    return hardware.current()


def bytes_read(
  row: RowDict, level: str, counted: Sequence[RowDict], gpu: hardware.Gpu
) -> tuple[float | None, bool]:
  """Bytes that a row's kernel read, None if unknown, and whether counted.

  Args:
    row: of the ladder.
    level: "l2" (by SMs) or "dram".
    counted: rows of experiments.counters; one of the same kernel, problem and
      config goes before the model, which knows of L2 alone, and there of rungs
      whose operands pass through shared memory.
    gpu: that the model is of.
  """
  same = {f: row[f] for f in (*rows_lib.PROBLEM_FIELDS, "config")}
  if counter := rows_lib.find(counted, **same):
    return counter["measured"].get(f"{level}_read_bytes"), True
  problem = contract.Problem(*ladder_tables.problem(row))
  try:
    rung = ladder_lib.find(row["kernel"])
    config = rung.config_type(**row["config"])
    model = traffic.model(rung, config, problem, gpu)
  except (TypeError, ValueError):  # of another version
    return None, False
  known = level == "l2" and model.slabs
  return (model.global_load_bytes if known else None), False


@plots.drawn
def roofline(rows: Sequence[RowDict], counted: Sequence[RowDict]):
  """Each rung's throughput over what it reads from L2, and from DRAM.

  A panel for each level of the memory, with the roof of that level.

  Args:
    rows: of one device.
    counted: its rows of experiments.counters; see `bytes_read`.
  """
  gpu = gpu_of(rows)
  rungs = [
    row
    for group in one_problem_each_kind(rows)
    for row in group
    if row["number"] is not None
  ]
  l2 = roofline_lib.L2_BYTES_PER_CLOCK * gpu.sm_count * gpu.clock_hz
  panels = []
  for name, level, bandwidth in (
    ("L2", "l2", l2 / 1e12),
    ("device memory", "dram", gpu.dram_bytes_per_s / 1e12),
  ):
    moved = [(row, *bytes_read(row, level, counted, gpu)) for row in rungs]
    if points := [
      (row, 2 * row["m"] * row["n"] * row["k"] / count, counted)
      for row, count, counted in moved
      if count
    ]:
      panels.append((name, bandwidth, points))
  if not panels:
    raise ValueError("no rung was timed; there is nothing to draw")
  width = 6.4 * len(panels)
  fig, axes = plots.panels(width, 6.8, ncols=len(panels), sharey=True)
  for ax, panel in zip(axes, panels):
    _roofs(ax, *panel, gpu)
  axes[0].set_ylabel("TFLOP/s (measured)")
  sizes = dict.fromkeys(map(tables.shape, rungs))
  fig.suptitle(
      f"Roofline of {rows[0]['device']}, {', '.join(sizes)}\ncircles float32,"
      " squares 16 bits; hollow where bytes are modelled, not counted",
      x=0.01, ha="left", fontsize=11,
  )  # fmt: skip
  drawn = {_name(row) for _, _, points in panels for row, _, _ in points}
  names = [_name(row) for row in rungs if _name(row) in drawn]
  deep = math.ceil(len(names) / (2 * len(panels)))
  legend = ["".join(f"{x:<32}" for x in names[i::deep]) for i in range(deep)]
  font = {"family": "monospace", "fontsize": 8}
  fig.supxlabel("\n".join(legend), ha="left", x=0.06, **font)
  fig.canvas.draw()  # now it is known where points are on the page
  for ax, (_, _, points) in zip(axes, panels):
    _label_points(ax, points)
  return fig


def _roofs(
  ax, name: str, bandwidth: float, points: Sequence[Point], gpu: hardware.Gpu
) -> None:
  """One panel: the slope of a memory, the ceilings of the units, the rungs."""
  low_roof, top = gpu.fp32_flops / 1e12, gpu.bf16_flops / 1e12
  low = min(min(x for _, x, _ in points) / 3, low_roof / bandwidth / 12)
  high = max(max(x for _, x, _ in points), top / bandwidth) * 5
  bottom = min(row["tflops"] for row, _, _ in points) / 2.5
  ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, 2.2 * top))
  # The text of the lower ceiling stands on the left: on the right hang the
  # labels of points below the upper one.
  for text, roof, colour, x, side in (
    ("CUDA cores, fp32", low_roof, BLUE, 2 * low_roof / bandwidth, "left"),
    ("tensor cores, 16 bits", top, VERMILLION, high, "right"),
  ):
    ax.plot([roof / bandwidth, high], [roof, roof], color=colour, linewidth=2)
    words = f"{text}: {tables.rate(roof)}"
    plots.note(ax, words, (x, roof), (-2, 4), ha=side, color=colour, fontsize=9)
  ax.plot([low, top / bandwidth], [low * bandwidth, top], color=INK, lw=2)
  for row, x, counted in points:
    colour = _tone(row)
    ax.plot(
        x, row["tflops"], marker="o" if row["dtype"] == "float32" else "s",
        markersize=6, color=colour, markeredgecolor=colour, zorder=4,
        markerfacecolor=colour if counted else "white",
    )  # fmt: skip
  ax.set_xlabel(f"FLOP per byte read from {name}")
  ax.grid(which="major")
  # Along the slope, between the edge and the lower ceiling.
  middle = math.sqrt(max(low, bottom / bandwidth) * low_roof / bandwidth)
  ax.text(
      middle, 1.1 * middle * bandwidth,
      f"{name}, {tables.rate(bandwidth)} TB/s", ha="center", va="bottom",
      fontsize=9, rotation=math.degrees(math.atan(bandwidth)),
      transform_rotates_text=True, rotation_mode="anchor",
  )  # fmt: skip


def _label_points(ax, points: Sequence[Point]) -> None:
  """The rungs' labels, right of the points of each cluster, with a line."""
  gap = 12
  clusters: list[list[tuple[tuple[float, float], RowDict]]] = []
  for row, x, _ in sorted(points, key=lambda point: point[0]["tflops"]):
    spot = _place(ax, x, row["tflops"]), row
    # Of the cluster whose last point is so near that labels would touch.
    near = (
      cluster
      for cluster in clusters
      if spot[0][1] - cluster[-1][0][1] < gap
      and abs(spot[0][0] - cluster[-1][0][0]) < 60
    )
    if (cluster := next(near, None)) is None:
      clusters.append(cluster := [])
    cluster.append(spot)
  xs = {row["kernel"]: x for row, x, _ in points}
  taken: list[tuple[float, float]] = []
  # The large ones first; a point by itself can have its label on the left.
  for cluster in sorted(clusters, key=len, reverse=True):
    right = max(x for (x, _), _ in cluster) + 12
    heights = spread([y for (_, y), _ in cluster], gap)
    # Above the points there is a ceiling.
    lower = max(heights) - max(y for (_, y), _ in cluster)
    if len(cluster) == 1 and any(
      abs(right - x) < 40 and abs(heights[0] - y) < gap for x, y in taken
    ):
      right -= 42
    taken += [(right, height - lower) for height in heights]
    for ((x, y), row), height in zip(cluster, heights):
      at = xs[row["kernel"]], row["tflops"]
      offset = right - x, height - lower - y
      name = ladder_tables.label(row)
      _label(ax, name, at, offset, GREY, fontweight="bold")


def _place(ax, x: float, y: float) -> tuple[float, float]:
  """Where a point is on the page, in points of 1/72 inch."""
  place = ax.transData.transform((x, y)) * 72 / ax.figure.dpi
  return tuple(place.tolist())


def _label(ax, text, point, offset, colour, **font) -> None:
  """A text next to a point, and a thin line from one to the other."""
  line = {
    "arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 0, "shrinkB": 0,
    "relpos": (0, 0.5),
  }  # fmt: skip
  font |= {"va": "center", "fontsize": 9, "zorder": 5, "arrowprops": line}
  plots.note(ax, text, point, offset, **font).set_in_layout(False)


def spread(places: Sequence[float], gap: float) -> list[float]:
  """Places moved as little as it takes to be `gap` apart, in their order."""
  order = sorted(range(len(places)), key=places.__getitem__)
  groups: list[tuple[float, list[int]]] = []  # centre, who is in it
  for index in order:
    centre, members = places[index], [index]
    while groups and (
      centre - groups[-1][0] < gap * (len(members) + len(groups[-1][1])) / 2
    ):
      _, before = groups.pop()
      members = before + members
      centre = sum(places[i] for i in members) / len(members)
    groups.append((centre, members))
  found = list(places)
  for centre, members in groups:
    for i, index in enumerate(members):
      found[index] = centre + gap * (i - (len(members) - 1) / 2)
  return found


@plots.drawn
def sweep(rows: Sequence[RowDict]):
  """The throughput of each kernel over the size of square products."""
  timed = [row for row in rows if row["tflops"] is not None]
  if not timed:
    raise ValueError("no kernel was timed; there is nothing to draw")
  by_dtype = tables.grouped(timed, lambda row: row["dtype"])
  dtypes = sorted(by_dtype, key=lambda dtype: dtype != "float32")
  fig, axes = plots.panels(7 * len(dtypes), 6, ncols=len(dtypes))
  for ax, dtype in zip(axes, dtypes):
    _over_size(ax, by_dtype[dtype])
  axes[0].set_ylabel("TFLOP/s")
  plots.title(fig, f"Throughput over size on {timed[0]['device']}")
  fig.canvas.draw()
  for ax in axes:
    _label_ends(ax)
  return fig


def _over_size(ax, rows: Sequence[RowDict]) -> None:
  """One precision: a line for each kernel, darker for later rungs."""
  import matplotlib  # pylint: disable=g-import-not-at-top

  by_number = ladder_tables.ordered(rows)
  kernels = tables.grouped(by_number, lambda row: row["kernel"])
  numbers = sorted({row["number"] for row in rows if row["number"] is not None})
  shades = matplotlib.colormaps["viridis_r"]
  for group in kernels.values():
    group = sorted(group, key=lambda row: row["m"])
    first = group[0]
    style = {"color": INK, "linestyle": (0, (5, 2)), "linewidth": 1.6}
    if first["number"] is not None:
      place = numbers.index(first["number"]) / max(1, len(numbers) - 1)
      style = {"color": shades(0.2 + 0.8 * place), "linewidth": 1.8}
      if first.get("variant"):
        style |= {"linestyle": ":", "linewidth": 1.4}
    ax.plot(
        [row["m"] for row in group], [row["tflops"] for row in group],
        marker="o", markersize=3.5, label=_name(first), **style,
    )  # fmt: skip
  sizes = sorted({row["m"] for row in rows})
  ax.set(xscale="log", yscale="log", xlabel="M = N = K")
  ax.set_xticks(sizes, [str(size) for size in sizes])
  ax.minorticks_off()
  ax.yaxis.set_major_formatter("{x:g}")
  ax.set_title(rows[0]["dtype"], fontsize=11)
  ax.grid()
  # Room for the names at the lines' ends.
  ax.set_ylim(top=3 * max(row["tflops"] for row in rows))
  ax.set_xlim(sizes[0] * 0.85, sizes[-1] * (sizes[-1] / sizes[0]) ** 0.62)


def _label_ends(ax) -> None:
  """Each line's name right of the last size, with a line to its end."""
  ends = [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in ax.lines]
  places = [_place(ax, *end) for end in ends]
  right = max(x for x, _ in places) + 18
  heights = spread([y for _, y in places], 13)
  for line, end, (x, y), height in zip(ax.lines, ends, places, heights):
    offset = right - x, height - y
    _label(ax, line.get_label(), end, offset, line.get_color())
