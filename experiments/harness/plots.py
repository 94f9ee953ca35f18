"""How the figures look, and what they have in common.

A figure is drawn of the rows of one device, to a path. It raises ValueError if
none of them was measured, and ImportError if matplotlib is not installed.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; what
tells kinds apart is also said in words or by shape, never by colour alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
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
# Of the bars of an item, in lines; and of columns of bars.
_THICKNESS = 0.84
_COLUMNS = 2


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
  ax, words: str, at: tuple[Any, Any], offset: tuple[float, float], **font: Any
):
  """Writes words so many points right of and above a place in the data."""
  place = {"xytext": offset, "textcoords": "offset points"}
  return ax.annotate(words, at, **place, **font)


def lines(ax, names: Sequence[str], top: float = -0.6) -> None:
  """Lines with names from the first down to the last; `top` is above them."""
  ax.set_yticks(range(len(names)), names)
  ax.set_ylim(len(names) - 0.4, top)
  ax.tick_params(axis="y", length=0)


@dataclasses.dataclass(frozen=True)
class Bars:
  """Horizontal bars: groups of items, several arms of each item.

  Attributes:
    label: an item's name.
    value: of an item's arm; None draws nothing.
    colours: of arms, from the top; they are told apart by their order too.
    ceiling: an arm that is a line across the bars, and its name.
  """

  label: Callable[[Any], str]
  value: Callable[[Any, str], float | None]
  colours: Mapping[str, str]
  ceiling: Mapping[str, str]

  def figure(
    self,
    groups: Mapping[str, Sequence[Any]],
    what: str,
    marks: Sequence[tuple[float, str]] = (),
  ):
    """The groups in two columns of about one height, `what` below each.

    Args:
      groups: items by name.
      what: is shown.
      marks: values that the axis has room for; the last has a line and a name.
    """
    columns = list(_columns(groups))
    height = max(map(_lines_of, columns))
    values = (
      self.value(item, arm)
      for group in groups.values()
      for item in group
      for arm in (*self.colours, *self.ceiling)
    )
    limit = 1.08 * max(x for x in values if x is not None)
    size = 6 * len(columns), 1.8 + 0.32 * height
    figure, axes = panels(*size, ncols=len(columns))
    handles = {}
    for ax, column in zip(axes, columns):
      self._column(ax, column)
      right = max([limit, *(x for x, _ in marks)])
      ax.set(xlim=(0, right), ylim=(height - 0.5, -1), xlabel=what)
      for x, words in marks[-1:]:
        ax.axvline(x, color=INK, linewidth=1, linestyle=":")
        note(ax, words, (x, -1), (-3, 3), ha="right", fontsize=8)
      # All arms of any column, each once, below the columns.
      for handle, name in zip(*ax.get_legend_handles_labels()):
        handles.setdefault(name, handle)
    figure.legend(
      handles.values(), handles, loc="outside lower center", ncols=5,
    )  # fmt: skip
    return figure

  def _column(self, ax, groups: Mapping[str, Sequence[Any]]) -> None:
    """Groups one below the other, each below its name."""
    ticks: dict[int, str] = {}
    at = 0
    for name, group in groups.items():
      note(
        ax, name, (0, at), (4, 0), xycoords=("axes fraction", "data"),
        va="center", fontweight="bold", fontsize=9,
      )  # fmt: skip
      for line, item in enumerate(group, at + 1):
        ticks[line] = self.label(item)
        self._item(ax, item, line)
      at += len(group) + 2
    ax.set_yticks(list(ticks), list(ticks.values()), fontsize=7)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")

  def _item(self, ax, item: Any, line: int) -> None:
    arms = [x for x in self.colours if self.value(item, x) is not None]
    thickness = _THICKNESS / len(arms)
    top, bottom = line - _THICKNESS / 2, line + _THICKNESS / 2
    for i, arm in enumerate(arms):
      ax.barh(
        top + (i + 0.5) * thickness, self.value(item, arm), height=thickness,
        color=self.colours[arm], label=arm,
      )  # fmt: skip
    for arm, name in self.ceiling.items():
      if (x := self.value(item, arm)) is not None:
        ax.plot([x] * 2, [top, bottom], color=INK, linewidth=1.5, label=name)


def _columns(
  groups: Mapping[str, Sequence[Any]],
) -> Iterator[dict[str, Sequence[Any]]]:
  """Groups in order, cut into columns of about one height."""
  enough = _lines_of(groups) / _COLUMNS
  column: dict[str, Sequence[Any]] = {}
  for name, group in groups.items():
    # A group that would mostly hang over begins the next column.
    if column and _lines_of(column) + len(group) / 2 > enough:
      yield column
      column = {}
    column[name] = group
  yield column


def _lines_of(groups: Mapping[str, Sequence[Any]]) -> int:
  """Lines of a column: a title and a gap for each group, and its items."""
  return sum(len(group) + 2 for group in groups.values())
