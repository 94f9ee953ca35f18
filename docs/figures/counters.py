"""Counters of the twelve rungs on an H200, a panel each, at 4096 cubed.

Float32 above in each panel, 16 bits below in another colour. What binds shows
as a bar near its end: issue slots and the FMA pipe in 5 to 8, the tensor pipe
from 10 on. Bytes and conflicts are on a logarithmic axis.
"""

from docs.extensions import results
from docs.figures.style import SMALL, Figure, Style, chart, note, ticks
from experiments.harness import ladder_tables

# Title, counter, scale, and whether its axis is logarithmic.
PANELS = (
  ("DRAM read, GB", "dram_read_bytes", 1e-9, True),
  ("L2 read, GB", "l2_read_bytes", 1e-9, True),
  ("conflicts, M", "shared_load_bank_conflicts", 1e-6, True),
  ("issue slots, %", "issue_active_percent", 1, False),
  ("FMA pipe, %", "fma_pipe_percent", 1, False),
  ("tensor pipe, %", "tensor_pipe_percent", 1, False),
)


def rungs() -> list[dict]:
  """The counters of each rung, without variants."""
  return [x for x in results.counted(results.FIRST) if not x.get("variant")]


def draw(style: Style) -> Figure:
  """Two rows of three panels; bars from the first rung down."""
  rows = rungs()
  figure, axes = chart(84, nrows=2, ncols=3, sharey=True)
  tones = {"float32": style.fp32, "bfloat16": style.half}
  colours = [tones[row["dtype"]] for row in rows]
  for ax, (title, name, scale, log) in zip(axes, PANELS, strict=True):
    values = [row["measured"][name] * scale for row in rows]
    low = min(x for x in values if x > 0) / 3 if log else 0
    ends = [max(x, low) for x in values]
    ax.barh(range(len(rows)), ends, height=0.74, color=colours)
    if log:
      ax.set(xscale="log", xlim=(low, max(ends) * (max(ends) / low) ** 0.5))
    else:
      ax.set_xlim(0, 145)
    for i, (x, end) in enumerate(zip(values, ends)):
      note(ax, f"{x:.3g}", (end, i), (4, 0), va="center", size=SMALL)
    ax.set_title(title, loc="left", weight="bold")
    ticks(ax.xaxis, [])
    ax.spines["bottom"].set_visible(False)
    ax.set_yticks(range(len(rows)), [ladder_tables.label(row) for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.6)
    ax.tick_params(axis="y", length=0)
  return figure
