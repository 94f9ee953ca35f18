"""The ladder climbs a roof: FLOP per byte against TFLOP/s on an H200.

Above: each rung's arithmetic intensity, by the traffic model, and what it was
measured to do at 4096 x 4096 x 4096. The slope is device memory, the ceilings
are the CUDA cores and the tensor cores. What lies above the slope is answered
by caches: rung 2's loads, and those of the tensor-core rungs by L2. Below:
ridge points, the intensity from which on arithmetic binds, of GPUs that
ladders were published on.
"""

import math

from matplotlib import ticker

from docs.extensions import results
from docs.figures.style import SMALL, Figure, Style, chart, note
from pallas_gemm import hardware, ladder
from pallas_gemm import roofline as roofline_lib
from pallas_gemm.ladder import traffic

GPU = "H200"
RIDGES = (
  "RTX A6000", "RTX 3090", "A100-SXM4-80GB", "RTX 5090", "H100 80GB HBM3",
  "H200", "B200",
)  # fmt: skip


# Where labels stand next to their points, if not on the right.
_LEFT, _BELOW = (-8, -1, "right"), (3, -13, "left")
_ABOVE_LEFT, _BELOW_LEFT = (-8, 4, "right"), (-8, -6, "right")
_PLACES = {
  "5, 6": _LEFT, "7": _BELOW, "9": _BELOW_LEFT, "10, 11": _ABOVE_LEFT,
  "12": _BELOW,
}  # fmt: skip


def measured() -> list[tuple[ladder.Rung, float, float]]:
  """(rung, FLOP/byte modelled, TFLOP/s measured) of the twelve."""
  found = []
  for rung in ladder.LADDER:
    row = results.timed(rung, "h200")
    config = rung.config_type(**row["config"])
    problem, gpu = results.problem(rung), hardware.lookup(GPU)
    model = traffic.model(rung, config, problem, gpu)
    found.append((rung, model.intensity, row["tflops"]))
  return found


def _labels(points, x_near=1.35, y_near=1.12) -> list[tuple[str, float, float]]:
  """Labels of points; those that nearly meet share one."""
  groups: list[list] = []
  for rung, x, y in points:
    for group in groups:
      _, gx, gy = group[-1]
      if max(x / gx, gx / x) < x_near and max(y / gy, gy / y) < y_near:
        group.append((rung, x, y))
        break
    else:
      groups.append([(rung, x, y)])
  found = []
  for group in groups:
    names = [rung.label for rung, _, _ in group]
    words = names[0] if len(names) == 1 else f"{names[0]}, {names[-1]}"
    if len(names) > 2:
      words = f"{names[0]}-{names[-1]}"
    found.append((words, group[-1][1], group[-1][2]))
  return found


def draw(style: Style) -> Figure:
  """The roof above, ridge points below."""
  gpu = hardware.lookup(GPU)
  points = measured()
  figure, (roof, ridges) = chart(78, nrows=2, height_ratios=(5, 3.1))
  tera = {"fp32": gpu.fp32_flops / 1e12, "half": gpu.bf16_flops / 1e12}
  slope = gpu.dram_bytes_per_s / 1e12
  low, high = 0.12, 1500
  top = tera["half"] / slope
  roof.plot([low, top], [low * slope, tera["half"]], color=style.text, lw=2)
  for key, name, colour in (
    ("fp32", "CUDA cores, fp32", style.fp32),
    ("half", "tensor cores", style.half),
  ):
    level = tera[key]
    roof.plot([level / slope, high], [level, level], color=colour, lw=2.4)
    words = f"{name} {level:.0f}"
    note(roof, words, (high, level), (0, 5), size=SMALL, ha="right")
  for rung, x, y in points:
    is_fp32 = rung.dtypes[0] == "float32"
    look = ("o", style.fp32) if is_fp32 else ("s", style.half)
    roof.plot(x, y, look[0], color=look[1], markersize=7, zorder=4)
  for words, x, y in _labels(points):
    dx, dy, ha = _PLACES.get(words, (8, -1, "left"))
    look = {"ha": ha, "weight": "bold", "size": SMALL}
    note(roof, words, (x, y), (dx, dy), va="center", **look)
  roof.set(
    xscale="log", yscale="log", xlim=(low, high), ylim=(0.3, 2500),
    xlabel="FLOP per byte that blocks load", ylabel="TFLOP/s",
  )  # fmt: skip
  at = 0.45
  roof.text(
    at, at * slope * 0.62, f"device memory, {slope:.1f} TB/s", size=SMALL,
    rotation=math.degrees(math.atan(0.62 * slope)), transform_rotates_text=True,
    rotation_mode="anchor", va="top",
  )  # fmt: skip
  roof.set_title("Rungs 1 to 12 on an H200", loc="left", weight="bold")
  for axis in (roof.xaxis, roof.yaxis):
    axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
  roof.grid(which="major")
  for line, name in enumerate(RIDGES):
    of = hardware.lookup(name)
    pair = [roofline_lib.ridge_point(of, x) for x in ("float32", "bfloat16")]
    ridges.plot(pair, [line, line], color=style.line, lw=1.2, zorder=1)
    ridges.plot(pair[0], line, "o", color=style.fp32, markersize=8)
    ridges.plot(pair[1], line, "s", color=style.half, markersize=8)
    for value, side, ha in zip(pair, (-9, 9), ("right", "left")):
      look = {"va": "center", "ha": ha, "size": SMALL}
      note(ridges, f"{value:.0f}", (value, line), (side, 0), **look)
  names = [name.split(" 80GB")[0].split("-SXM")[0] for name in RIDGES]
  ridges.set_yticks(range(len(names)), names)
  ridges.set(xscale="log", xlim=(5, 700), ylim=(len(names) - 0.4, -0.6))
  ridges.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
  ridges.set_xlabel("FLOP per byte of device memory")
  ridges.set_title("Ridge points", loc="left", weight="bold")
  ridges.tick_params(axis="y", length=0)
  ridges.grid(axis="x", which="major")
  for mark, words in ("o", "fp32"), ("s", "16 bits"):
    tone = style.fp32 if mark == "o" else style.half
    ridges.plot([], [], mark, color=tone, markersize=8, label=words)
  ridges.legend(
    loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False,
    borderpad=0, handletextpad=0.1, columnspacing=1.2,
  )  # fmt: skip
  return figure
