"""The twelve rungs in TFLOP/s on an H200, at 4096 x 4096 x 4096.

Above, float32 on CUDA cores; below, 16 bits on tensor cores, on a scale of
its own. The dashed line is what jnp.dot does in the same precision.
"""

from docs.figures.style import SMALL, Figure, Style, chart, note
from experiments.harness import ladder_tables, tables
from experiments.harness import rows as rows_lib
from pallas_gemm import ladder

SIZE = 4096


def speeds() -> list[tuple[str, list[tuple[ladder.Rung, float]], float]]:
  """(precision, [(rung, TFLOP/s)], jnp.dot's TFLOP/s) of both halves."""
  rows = ladder_tables.newest(
    rows_lib.read(rows_lib.RESULTS / "nvidia_h200/ladder.jsonl")
  )
  found = []
  for dtype, name, dot in (
    ("float32", "float32, CUDA cores", "jnp.dot HIGHEST"),
    ("bfloat16", "bfloat16, tensor cores", "jnp.dot"),
  ):

    def speed(kernel, dtype=dtype):
      same = {"m": SIZE, "n": SIZE, "k": SIZE, "dtype": dtype, "beta": 0.0}
      return rows_lib.find(rows, kernel=kernel, **same)["tflops"]

    rungs = [rung for rung in ladder.LADDER if dtype in rung.dtypes]
    found.append((name, [(x, speed(x.name)) for x in rungs], speed(dot)))
  return found


def draw(style: Style) -> Figure:
  """A panel for each precision, one above the other."""
  halves = speeds()
  counts = [len(rungs) for _, rungs, _ in halves]
  figure, panels = chart(
    53, nrows=2, height_ratios=[count + 1.6 for count in counts]
  )
  for ax, (name, rungs, dot), colour in zip(
    panels, halves, (style.fp32, style.half)
  ):
    limit = 1.2 * max(dot, *(speed for _, speed in rungs))
    for line, (_, speed) in enumerate(rungs):
      ax.barh(line, speed, height=0.72, color=colour)
      ax.text(
        limit, line, tables.rate(speed), va="center", ha="right", size=SMALL
      )
    ax.axvline(dot, color=style.text, lw=1.4, linestyle=(0, (4, 3)), zorder=0)
    note(
      ax, f"jnp.dot {tables.rate(dot)}", (dot, -0.62), (-5, 0), ha="right",
      va="center", size=SMALL,
    )  # fmt: skip
    ax.set_yticks(
      range(len(rungs)),
      [f"{rung.label}  {rung.name.replace('_', ' ')}" for rung, _ in rungs],
    )
    ax.set(xlim=(0, limit), ylim=(len(rungs) - 0.5, -1.1))
    ax.tick_params(axis="y", length=0)
    ax.set_title(name, loc="left", weight="bold")
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x")
  panels[-1].set_xlabel("TFLOP/s on an H200")
  return figure
