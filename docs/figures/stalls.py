"""What the warps of each rung wait for on an H200, in shares of all stalls.

The number on the right is the cycles that warps wait for each instruction:
hundreds in rung 1, two in rung 8. From rung 9 on no thread loads from global
memory: the long scoreboard is then the wait for a slab, and "barrier"
for the most part that for wgmma.
"""

from docs.figures.counters import rungs
from docs.figures.style import SMALL, Figure, Style, chart
from experiments.harness import counter_tables, ladder_tables


def shares() -> list[tuple[str, dict[str, float], float]]:
  """(rung, share of each reason in %, sum) of each."""
  rows = rungs()
  shown = counter_tables.largest(rows)
  found = []
  for row in rows:
    waits = counter_tables.grouped(row, shown)
    total = sum(waits.values())
    part = {name: 100 * x / total for name, x in waits.items()}
    found.append((ladder_tables.label(row), part, total))
  return found


def draw(style: Style) -> Figure:
  """A bar a rung, from the first down."""
  found = shares()
  figure, [ax] = chart(62)
  tones = (style.a, style.b, style.c, style.load, *style.warps, style.wait)
  starts = [0.0] * len(found)
  for name, colour in zip(found[0][1], tones, strict=True):
    widths = [part[name] for _, part, _ in found]
    ax.barh(
      range(len(found)), widths, left=starts, height=0.78, color=colour,
      edgecolor=style.page, label=name.replace("_", " "),
    )  # fmt: skip
    starts = [start + width for start, width in zip(starts, widths)]
  look = {"va": "center", "ha": "right", "size": SMALL}
  for i, (_, _, total) in enumerate(found):
    ax.text(114, i, counter_tables.warps(total), **look)
  ax.set_yticks(range(len(found)), [label for label, _, _ in found])
  ax.set(xlim=(0, 115), ylim=(len(found) - 0.5, -0.6))
  ax.set_xticks(range(0, 101, 25))
  ax.set_xlabel("share of the stalls in %; right: cycles an instruction")
  ax.tick_params(axis="y", length=0)
  ax.spines["left"].set_visible(False)
  figure.legend(loc="outside lower center", ncols=3, frameon=False)
  return figure
