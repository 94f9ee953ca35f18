"""The twelve rungs in TFLOP/s on an H200, at 4096 x 4096 x 4096.

Above, float32 on CUDA cores; below, 16 bits on tensor cores, on a scale of
its own. The dashed line is what jnp.dot does in the same precision.
"""

from docs.extensions import results
from docs.figures.style import SMALL, Figure, Style, chart, note
from experiments.harness import tables
from pallas_gemm import ladder


def speeds() -> list[tuple[str, list[tuple[ladder.Rung, float]], float]]:
  """(precision, [(rung, TFLOP/s)], jnp.dot's TFLOP/s) of both halves."""
  found = []
  for dtype, where, dot in (
    ("float32", "CUDA cores", "jnp.dot HIGHEST"),
    ("bfloat16", "tensor cores", "jnp.dot"),
  ):
    rungs = [rung for rung in ladder.LADDER if dtype in rung.dtypes]
    speed = [(x, results.timed(x, results.FIRST)["tflops"]) for x in rungs]
    of_dot = results.kernel(dot, results.FIRST, dtype=dtype)["tflops"]
    found.append((f"{dtype}, {where}", speed, of_dot))
  return found


def draw(style: Style) -> Figure:
  """A panel for each precision, one above the other."""
  halves = speeds()
  heights = [len(rungs) + 1.6 for _, rungs, _ in halves]
  figure, panels = chart(53, nrows=2, height_ratios=heights)
  colours = style.fp32, style.half
  for ax, (name, rungs, dot), colour in zip(panels, halves, colours):
    limit = 1.2 * max(dot, *(speed for _, speed in rungs))
    for line, (_, speed) in enumerate(rungs):
      ax.barh(line, speed, height=0.72, color=colour)
      look = {"va": "center", "ha": "right", "size": SMALL}
      ax.text(limit, line, tables.rate(speed), **look)
    ax.axvline(dot, color=style.text, lw=1.4, linestyle=(0, (4, 3)), zorder=0)
    note(ax, f"jnp.dot {tables.rate(dot)}", (dot, -0.62), (-5, 0), **look)
    names = [f"{x.label}  {x.name.replace('_', ' ')}" for x, _ in rungs]
    ax.set_yticks(range(len(rungs)), names)
    ax.set(xlim=(0, limit), ylim=(len(rungs) - 0.5, -1.1))
    ax.tick_params(axis="y", length=0)
    ax.set_title(name, loc="left", weight="bold")
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x")
  panels[-1].set_xlabel(f"TFLOP/s on an {results.FIRST.upper()}")
  return figure
