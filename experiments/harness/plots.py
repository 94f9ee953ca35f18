"""The two figures of a ladder run: bars of the rungs, and the roofline.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; what
tells kinds apart is also said in words or by shape, never by colour alone.
matplotlib is needed only when a figure is drawn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import math
import os
import pathlib
from typing import Any

from experiments.harness import tables
from pallas_gemm import hardware

RowDict = Mapping[str, Any]
BLUE, VERMILLION, GREEN, GREY, INK = (
    "#0072B2", "#D55E00", "#009E73", "#8C8C8C", "#222222",
)  # fmt: skip
GRID = {"color": "#E3E3E3", "linewidth": 0.8}
_COLOURS = {"float32": BLUE, "bfloat16": VERMILLION, "float16": VERMILLION}
_DPI = 160
STYLE = {
  "font.size": 10,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.edgecolor": GREY,
  "axes.labelcolor": INK,
  "text.color": INK,
  "xtick.color": INK,
  "ytick.color": INK,
  "figure.facecolor": "white",
}


def pyplot():
  """matplotlib.pyplot, drawing to files."""
  # pylint: disable=g-import-not-at-top
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  return plt


Groups = dict[str, Sequence[RowDict]]


def columns(groups: Groups, count: int) -> Iterator[Groups]:
  """Groups in order, cut into about `count` columns of about one height."""
  enough = lines(groups) / count
  column: Groups = {}
  for name, group in groups.items():
    # A group that would mostly hang over begins the next column.
    if column and lines(column) + len(group) / 2 > enough:
      yield column
      column = {}
    column[name] = group
  yield column


def lines(groups: Groups) -> int:
  """Lines of a column: a title and a gap for each group, and its rows."""
  return sum(len(group) + 2 for group in groups.values())


def heading(ax, name: str, line: float) -> None:
  """A group's title in a column, at a line."""
  ax.annotate(
    name,
    (0, line),
    xycoords=("axes fraction", "data"),
    xytext=(4, 0),
    textcoords="offset points",
    va="center",
    fontweight="bold",
    fontsize=9,
  )


def one_problem_each_kind(
  rows: Sequence[RowDict],
) -> list[list[RowDict]]:
  """The problem with the most rungs: in float32, and in 16 bits.

  Both of one size where a size has both.
  """
  timed = [row for row in rows if row["tflops"] is not None]
  groups = [
    group
    for group in tables.problems(timed)
    if any(row["number"] is not None for row in group)
  ]
  found: list[list[RowDict]] = []
  for wants_float32 in (True, False):
    of_kind = [
      group
      for group in groups
      if (group[0]["dtype"] == "float32") == wants_float32
    ]
    if found:  # the same size as the first panel, if it was run
      size = tables.shape(found[0][0])
      of_kind.sort(key=lambda group: tables.shape(group[0]) != size)
    found += of_kind[:1]
  return found


def ladder(rows: Sequence[RowDict], path: str | os.PathLike[str]) -> None:
  """Draws throughput by rung as bars, jnp.dot as a line.

  fp32 and 16-bit rungs have a panel each: they differ by a factor of ten, and
  by their arithmetic.

  Args:
    rows: of one device.
    path: of the PNG.

  Raises:
    ValueError: no row of a rung was timed.
    ImportError: matplotlib is not installed.
  """
  groups = one_problem_each_kind(rows)
  if not groups:
    raise ValueError("no rung was timed; there is nothing to draw")
  plt = pyplot()
  counts = [sum(not _is_dot(row) for row in group) for group in groups]
  with plt.rc_context(STYLE):
    fig, axes = plt.subplots(
      1,
      len(groups),
      figsize=(6.4 * len(groups), 1.5 + 0.42 * max(counts)),
      squeeze=False,
      layout="constrained",
    )
    for ax, group in zip(axes[0], groups, strict=True):
      _bars(ax, group)
    fig.suptitle(
        f"The ladder on {groups[0][0]['device']}", fontweight="bold", x=0.01,
        ha="left",
    )  # fmt: skip
    save(plt, fig, path)


def _is_dot(row: RowDict) -> bool:
  return row["kernel"].startswith("jnp.dot")


def _bars(ax, group: Sequence[RowDict]) -> None:
  """One panel: horizontal bars, so that names can be read."""
  bars = [row for row in group if not _is_dot(row)]
  dots = [row for row in group if _is_dot(row)]
  values = [row["tflops"] for row in bars]
  colour = _COLOURS[group[0]["dtype"]]
  colours = [GREY if row["number"] is None else colour for row in bars]
  ax.barh(range(len(bars)), values, color=colours, height=0.72)
  ax.set_yticks(
    range(len(bars)),
    [f"{row['number'] or ''}  {row['kernel']}".strip() for row in bars],
  )
  ax.invert_yaxis()
  ax.tick_params(axis="y", length=0)
  yardstick = dots[0] if dots else None
  widest = max(values + ([yardstick["tflops"]] if yardstick else []))
  for i, row in enumerate(bars):
    label = tables.rate(row["tflops"])
    if row["ratio_to_jnp_dot"] is not None:
      label += f"  ({tables.factor(row['ratio_to_jnp_dot'])})"
    ax.text(
        row["tflops"] + widest * 0.012, i, label, va="center", fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        zorder=4,
    )  # fmt: skip
  ax.set_xlim(0, widest * 1.27)
  if yardstick is not None:
    value = yardstick["tflops"]
    ax.axvline(value, color=INK, linewidth=1.4, linestyle=(0, (5, 3)), zorder=3)
    ax.annotate(
      f"{yardstick['kernel']} (cuBLAS) {tables.rate(value)}",
      (value, 1.0),
      xycoords=("data", "axes fraction"),
      xytext=(0, 3),
      textcoords="offset points",
      ha="center",
      fontsize=9,
    )
  first = group[0]
  others = "".join(
    f"; {row['kernel']} (TF32): {tables.rate(row['tflops'])}"
    for row in dots[1:]
  )
  ax.set_xlabel(
    f"TFLOP/s (x {yardstick['kernel'] if yardstick else 'jnp.dot'}){others}"
  )
  ax.set_title(
    f"{first['dtype']}, {tables.expression(first)},"
    f" M x N x K = {tables.shape(first)}",
    fontsize=10,
    loc="left",
    pad=20,
  )
  ax.grid(axis="x", **GRID)
  ax.set_axisbelow(True)


def roofline(
  rows: Sequence[RowDict],
  gpu: hardware.Gpu,
  intensity: Callable[[RowDict], float | None],
  path: str | os.PathLike[str],
) -> None:
  """Draws each rung's throughput over its modelled arithmetic intensity.

  Args:
    rows: of one device.
    gpu: whose roofs to draw.
    intensity: FLOP per byte that the rung's threads read from global memory;
      None leaves a row out. What the caches serve counts too, so a rung may
      stand above the roof of device memory.
    path: of the PNG.

  Raises:
    ValueError: no row of a rung was timed.
    ImportError: matplotlib is not installed.
  """
  points = [
    (row, x)
    for group in one_problem_each_kind(rows)
    for row in group
    if row["number"] is not None and (x := intensity(row)) is not None
  ]
  if not points:
    raise ValueError("no rung was timed; there is nothing to draw")
  plt = pyplot()
  bandwidth = gpu.dram_bytes_per_s / 1e12
  roofs = [("fp32, CUDA cores", gpu.fp32_flops / 1e12, BLUE)]
  if any(row["dtype"] != "float32" for row, _ in points):
    roofs.append(("16-bit, tensor cores", gpu.bf16_flops / 1e12, VERMILLION))
  top = max(roof for _, roof, _ in roofs)
  xs = [x for _, x in points]
  low = min(0.1, min(xs) / 2)
  high = max(4 * top / bandwidth, max(xs) * 4)
  with plt.rc_context(STYLE):
    fig, ax = plt.subplots(figsize=(9, 6), layout="constrained")
    for label, roof, colour in roofs:
      ridge = roof / bandwidth
      ax.plot([ridge, high], [roof, roof], color=colour, linewidth=2)
      ax.annotate(
        f"{label}: {tables.rate(roof)} TFLOP/s",
        (high, roof),
        xytext=(-2, 4),
        textcoords="offset points",
        ha="right",
        color=colour,
        fontsize=9,
      )
      ax.plot([ridge] * 2, [0, roof], color=colour, linewidth=0.8, ls=":")
      ax.annotate(
        f"ridge {tables.rate(ridge)}",
        (ridge, 0.0),
        xycoords=("data", "axes fraction"),
        xytext=(3, 5),
        textcoords="offset points",
        color=colour,
        fontsize=8,
      )
    ax.plot(
      [low, top / bandwidth], [low * bandwidth, top], color=INK, linewidth=2
    )
    for row, x in points:
      wide = row["dtype"] == "float32"
      ax.plot(
          x, row["tflops"], marker="o" if wide else "s", markersize=7,
          color=_COLOURS[row["dtype"]], markeredgecolor="white", zorder=4,
      )  # fmt: skip
    _label_points(ax, points)
    ax.set(xscale="log", yscale="log", xlim=(low, high))
    bottom = min(row["tflops"] for row, _ in points) / 3
    ax.set_ylim(bottom, top * 2.2)
    ax.set_xlabel("FLOP per byte read from global memory, L2 included (model)")
    ax.set_ylabel("TFLOP/s (measured)")
    # The slope's label lies along it; the angle is known once limits are.
    start = max(low, bottom / bandwidth)
    middle = (start * top / bandwidth) ** 0.5
    fig.canvas.draw()
    ends = ax.transData.transform(
      [(middle, middle * bandwidth), (middle * 2, middle * 2 * bandwidth)]
    )
    (x0, y0), (x1, y1) = ends
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    ax.annotate(
      f"device memory {tables.rate(bandwidth)} TB/s",
      (middle, middle * bandwidth),
      xytext=(-7, 7),
      textcoords="offset points",
      rotation=angle,
      rotation_mode="anchor",
      ha="center",
      fontsize=9,
    )
    ax.grid(which="major", **GRID)
    ax.set_axisbelow(True)
    sizes = dict.fromkeys(
      f"{row['dtype']} {tables.shape(row)}" for row, _ in points
    )
    ax.set_title(
      f"Roofline of {rows[0]['device']}: {', '.join(sizes)}",
      loc="left",
      fontsize=11,
    )
    save(plt, fig, path)


def _label_points(ax, points: Sequence[tuple[RowDict, float]]) -> None:
  """Numbers beside the points, and what they stand for in a list.

  Rungs that read the same bytes stand above one another, often closer than
  their labels are high: numbers alternate between right and left.
  """
  columns: dict[str, list[tuple[RowDict, float]]] = {}
  for row, x in sorted(points, key=lambda point: point[0]["tflops"]):
    columns.setdefault(f"{x:.2g}", []).append((row, x))
  for column in columns.values():
    for i, (row, x) in enumerate(column):
      left = i % 2 == 1
      ax.annotate(
        str(row["number"]),
        (x, row["tflops"]),
        xytext=(-7 if left else 7, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        va="center",
        fontweight="bold",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
        zorder=3.5,
      )
  listed = "\n".join(
    f"{row['number']:>2}  {row['kernel']:<17} {row['tflops']:>6.1f} TFLOP/s"
    for row, _ in sorted(points, key=lambda point: point[0]["number"])
  )
  ax.text(
    0.985,
    0.06,
    listed,
    transform=ax.transAxes,
    ha="right",
    va="bottom",
    family="monospace",
    fontsize=8,
    linespacing=1.35,
    bbox={"facecolor": "white", "edgecolor": "#E3E3E3", "pad": 5},
    zorder=5,
  )


def save(plt, fig, path: str | os.PathLike[str]) -> None:
  """Writes a figure as PNG and closes it."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  # No date and no version in the file: the same rows give the same bytes.
  fig.savefig(path, dpi=_DPI, metadata={"Software": None})
  plt.close(fig)
