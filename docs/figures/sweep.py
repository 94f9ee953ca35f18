"""Throughput over the size of square products, 128 to 8192, on an H200.

Above, TFLOP/s; below, GB/s, where A and B count as read once and the result as
written once. Small products do not fill the GPU: from rung 4 on none is near
its best below 1024. A number stands at the end of its rung's curve; dashes are
jnp.dot's.
"""

from collections.abc import Sequence
import math

from docs.extensions import results
from docs.figures.style import SMALL, Figure, Style, chart, ticks
from experiments.harness import ladder_tables, tables

HALVES = {"float32": "jnp.dot HIGHEST", "bfloat16": "jnp.dot"}
QUANTITIES = {"tflops": "TFLOP/s", "gbytes_per_s": "GB/s"}


def curves(dtype: str) -> dict[str, list[dict]]:
  """Rows by size of each rung, by its number, and of jnp.dot as ""."""
  chosen = [
    row
    for row in ladder_tables.ordered(results.measured("h200", "sweep"))
    if row["dtype"] == dtype
    and row["ms_median"] is not None
    and not row.get("variant")
    and (row["number"] or row["kernel"] == HALVES[dtype])
  ]
  found = tables.grouped(chosen, ladder_tables.label)
  return {x: sorted(y, key=lambda row: row["m"]) for x, y in found.items()}


def spread(places: Sequence[float], gap: float) -> list[float]:
  """Places in their order, each moved up until it is `gap` above the last."""
  found, least = list(places), -math.inf
  for i in sorted(range(len(places)), key=places.__getitem__):
    found[i] = max(places[i], least)
    least = found[i] + gap
  return found


def draw(style: Style) -> Figure:
  """A column for each precision, a row for each quantity."""
  figure, axes = chart(84, nrows=2, ncols=2, sharex=True)
  for i, (quantity, unit) in enumerate(QUANTITIES.items()):
    for j, dtype in enumerate(HALVES):
      _panel(axes[2 * i + j], style, dtype, quantity)
    axes[2 * i].set_ylabel(unit)
  for ax, dtype in zip(axes, HALVES):
    ax.set_title(dtype, loc="left", weight="bold")
  for ax in axes[2:]:
    ax.set_xlabel("M = N = K")
  return figure


def _panel(ax, style: Style, dtype: str, quantity: str) -> None:
  base = style.fp32 if dtype == "float32" else style.half
  found = curves(dtype)
  rungs = [label for label in found if label]
  ends = {}
  for label, rows in found.items():
    look = {"color": style.text, "linestyle": (0, (4, 3)), "lw": 1.4}
    if label:
      place = (rungs.index(label) + 1) / len(rungs)
      look = {"color": style.tint(base, 0.3 + 0.7 * place), "lw": 1.8}
    values = [row[quantity] for row in rows]
    ax.plot([row["m"] for row in rows], values, marker="o", ms=3, **look)
    ends[label] = rows[-1]["m"], values[-1]
  ax.set(xscale="log", yscale="log", xlim=(100, 24000))
  low, high = (math.log(y) for y in ax.get_ylim())
  gap = 0.062 * (high - low)
  heights = spread([math.log(y) for _, y in ends.values()], gap)
  for (label, (x, y)), height in zip(ends.items(), heights):
    words = label or "dot"
    at = 12500, math.exp(height)
    ax.plot([x, at[0]], [y, at[1]], color=style.line, lw=0.6, zorder=0)
    ax.text(*at, f" {words}", size=SMALL, va="center", color=style.text)
  ticks(ax.xaxis, [128, 512, 2048, 8192])
  ax.yaxis.set_major_formatter("{x:g}")
  ax.minorticks_off()
  ax.grid()
