"""How the figures look, and what they have in common.

A figure is drawn of the rows of one device, to a path. It raises ValueError if
none of them was measured, and ImportError if matplotlib is not installed.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; what
tells kinds apart is also said in words or by shape, never by colour alone.
"""

from collections.abc import Callable, Sequence
import functools
import os
import pathlib
from typing import Any

BLUE, VERMILLION, GREEN, ORANGE, GREY, INK = (
    "#0072B2", "#D55E00", "#009E73", "#E69F00", "#8C8C8C", "#222222",
)  # fmt: skip
COLOURS = {"float32": BLUE, "bfloat16": VERMILLION, "float16": VERMILLION}
STYLE = {
  "font.size": 10,
  "axes.axisbelow": True,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.edgecolor": GREY,
  "axes.labelcolor": INK,
  "axes.titlelocation": "left",
  "axes.titlesize": 10,
  "text.color": INK,
  "xtick.color": INK,
  "ytick.color": INK,
  "grid.color": "#E3E3E3",
  "grid.linewidth": 0.8,
  "figure.facecolor": "white",
  "legend.frameon": False,
}
_DPI = 160


def drawn(draw: Callable[..., Any]) -> Callable[..., None]:
  """Has a function that returns a figure write it, to its last argument.

  The function is called in the style of this module.
  """

  @functools.wraps(draw)
  def write(*args: Any) -> None:
    import matplotlib  # pylint: disable=g-import-not-at-top

    *of, path = args
    with matplotlib.rc_context(STYLE):
      save(draw(*of), path)

  return write


def save(figure, path: str | os.PathLike[str]) -> None:
  """Writes a figure as PNG: the same rows give the same bytes."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=_DPI, metadata={"Software": None})


def panels(width: float, height: float, **subplots: Any):
  """A figure of so many inches, and its axes; both leave room for words."""
  # pylint: disable=g-import-not-at-top
  from matplotlib.backends import backend_agg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout="constrained")
  backend_agg.FigureCanvasAgg(figure)
  return figure, [*figure.subplots(squeeze=False, **subplots).flat]


def title(figure, words: str) -> None:
  """The title of all panels."""
  figure.suptitle(words, fontweight="bold", x=0.01, ha="left")


def note(
  ax, words: str, at: tuple[Any, Any], beside: tuple[float, float], **font: Any
):
  """Writes words so many points right of and above a place in the data."""
  offset = {"xytext": beside, "textcoords": "offset points"}
  return ax.annotate(words, at, **offset, **font)


def lines(ax, names: Sequence[str], top: float = -0.6) -> None:
  """Lines with names from the first down to the last; `top` is above them."""
  ax.set_yticks(range(len(names)), names)
  ax.set_ylim(len(names) - 0.4, top)
  ax.tick_params(axis="y", length=0)
