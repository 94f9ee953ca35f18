"""How the pictures look: colours, and a sheet to draw on.

A meaning has one colour everywhere: A is blue, B orange, C and whatever
computes it green, loading purple, waiting grey; warps have four colours of
their own. The hues stay apart for colour-blind readers (Okabe and Ito's, and
of P. Tol's "muted" for warps), and none is the only sign of what it means.

A sheet is measured in tenths of an inch, 64 wide, from the top left corner: a
letter of ordinary size is about one wide and two high. Shown 340 pixels wide,
as on a phone, the smallest letters are still 8 pixels high.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Any

from matplotlib import colors, patches, ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
import numpy as np

# Points; nothing is smaller than SMALL.
SMALL, TEXT, HEAD = 11.0, 12.5, 13.5
WIDTH = 64.0
Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Style:
  """Colours.

  Attributes:
    page: what the picture lies on, so that it reads on light and dark pages.
    text, muted: of words; of those that matter less.
    line: of frames and grids.
    a, b, c: of the matrices; c also of what computes it.
    load: of loading, and of the producer.
    wait: of waiting.
    fp32, half: of float32 and of 16-bit operands in charts.
    warps: of the four warps of a warpgroup.
  """

  page: str = "#ffffff"
  text: str = "#1f2328"
  muted: str = "#59626c"
  line: str = "#aab2ba"
  a: str = "#0072b2"
  b: str = "#e08a00"
  c: str = "#009e73"
  load: str = "#b0518f"
  wait: str = "#b4bac1"
  fp32: str = "#6457a6"
  half: str = "#cc6677"
  warps: tuple[str, ...] = (fp32, half, "#c2aa3e", "#2f8f9d")

  def tint(self, colour: str, strength: float = 0.3) -> str:
    """A colour as it looks on the page with that opacity."""
    top, under = (np.array(colors.to_rgb(x)) for x in (colour, self.page))
    return colors.to_hex(strength * top + (1 - strength) * under)

  def on(self, fill: str) -> str:
    """Black or white, whichever stands out more from a fill."""
    r, g, b = (
      x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4
      for x in colors.to_rgb(fill)
    )
    luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b
    return "#ffffff" if luminance < 0.189 else "#0c0e10"

  @property
  def rc(self) -> dict[str, Any]:
    """matplotlib's settings for charts."""
    found = {
      TEXT: "font.size axes.labelsize",
      HEAD: "axes.titlesize",
      SMALL: "xtick.labelsize ytick.labelsize legend.fontsize",
      self.text: "text.color axes.labelcolor axes.titlecolor xtick.labelcolor"
      " ytick.labelcolor",
      self.line: "axes.edgecolor xtick.color ytick.color",
      self.page: "axes.facecolor figure.facecolor",
      True: "axes.axisbelow",
      False: "axes.spines.top axes.spines.right",
      self.tint(self.line, 0.6): "grid.color",
      0.6: "grid.linewidth",
    }
    return {name: x for x, names in found.items() for name in names.split()}


LIGHT = Style()


def chart(height: float, **subplots: Any):
  """A figure of so many tenths of an inch, and its axes, for data."""
  figure = Figure(figsize=(WIDTH / 10, height / 10), layout="constrained")
  return figure, [*figure.subplots(squeeze=False, **subplots).flat]


def ticks(axis: Axis, places: Sequence[float], form: str = "%g") -> None:
  """Ticks at these places alone."""
  axis.set_major_locator(ticker.FixedLocator(places))
  axis.set_major_formatter(ticker.FormatStrFormatter(form))
  axis.set_minor_locator(ticker.NullLocator())


def note(ax: Axes, words: str, at: Point, offset: Point, **font: Any) -> None:
  """Writes words so many points right of and above a place in the data."""
  place = {"xytext": offset, "textcoords": "offset points"}
  ax.annotate(words, at, **place, **font)


class Sheet:
  """A page to draw a diagram on, measured in tenths of an inch from the top."""

  def __init__(self, style: Style, height: float):
    self.style = style
    self.figure = Figure(figsize=(WIDTH / 10, height / 10))
    self.ax: Axes = self.figure.add_axes((0, 0, 1, 1))
    self.ax.set(xlim=(0, WIDTH), ylim=(height, 0))
    self.ax.axis("off")

  def text(self, x: float, y: float, words: Any, **more: Any) -> None:
    """Words; centred at (x, y) unless told."""
    look = {"size": TEXT, "ha": "center", "va": "center"} | more
    look["color"] = look.pop("colour", None) or self.style.text
    self.ax.text(x, y, str(words), **look)

  def say(
    self, x: float, y: float, *lines: Any, apart: float = 2.6, **more: Any
  ) -> None:
    """Lines of words below each other, each from x to the right."""
    for i, words in enumerate(lines):
      self.text(x, y + apart * i, words, ha="left", **more)

  def keys(self, y: float, *entries: tuple[float, str, str]) -> None:
    """What colours mean: (x, colour, words) of each, in a line."""
    for x, fill, words in entries:
      self.box(x, y - 0.9, 1.8, 1.8, fill=fill)
      self.say(x + 2.5, y, words, size=SMALL)

  def tile(self, *place: Any, **more: Any) -> None:
    """A box among others, which the page's colour parts."""
    self.box(*place, **{"edge": self.style.page, "size": SMALL} | more)

  def head(self, x: float, y: float, words: str, ha: str = "left") -> None:
    """The heading of a part."""
    self.text(x, y, words, size=HEAD, weight="bold", ha=ha)

  def box(
      self, x: float, y: float, width: float, height: float, words: Any = "",
      *, fill: str | None = None, edge: str | None = None, line: float = 1.0,
      size: float = TEXT, colour: str | None = None, z: float = 1.0,
      **more: Any,
  ) -> None:  # fmt: skip
    """A rectangle with words in the middle."""
    look = {"facecolor": fill or "none", "edgecolor": edge or "none"} | more
    look |= {"linewidth": line if edge else 0, "zorder": z}
    self.ax.add_patch(patches.Rectangle((x, y), width, height, **look))
    if words != "":
      colour = colour or (self.style.on(fill) if fill else None)
      middle = x + width / 2, y + height / 2
      self.text(*middle, words, size=size, colour=colour, zorder=z + 2)

  def lines(
      self, segments: Sequence[tuple[Point, Point]], colour: str | None = None,
      width: float = 0.8, z: float = 1.5, **more: Any,
  ) -> None:  # fmt: skip
    """Straight lines."""
    look = {"colors": colour or self.style.line, "linewidths": width} | more
    lines = LineCollection(segments, zorder=z, **look)
    self.ax.add_collection(lines, autolim=False)

  def grid(
      self, x: float, y: float, shape: tuple[int, int],
      cell: tuple[float, float], every: tuple[int, int] = (1, 1),
      colour: str | None = None, width: float = 0.8, z: float = 1.5,
  ) -> None:  # fmt: skip
    """The lines of a matrix of (rows, columns), in cells (width, height).

    `every` draws only each so manieth line.
    """
    (rows, columns), (w, h) = shape, cell
    right, bottom = x + columns * w, y + rows * h
    across = [y + r * h for r in range(0, rows + 1, every[0])]
    down = [x + c * w for c in range(0, columns + 1, every[1])]
    segments = [((x, at), (right, at)) for at in across]
    segments += [((at, y), (at, bottom)) for at in down]
    self.lines(segments, colour, width, z)

  def cells(
      self, x: float, y: float, mask: np.ndarray, cell: tuple[float, float],
      fill: str, edge: str | None = None, **more: Any,
  ) -> None:  # fmt: skip
    """Fills the elements of a matrix that a mask names, in few rectangles."""
    w, h = cell
    for row, column, rows, columns in rectangles(mask):
      place = x + column * w, y + row * h, columns * w, rows * h
      self.box(*place, fill=fill, edge=edge, **more)

  def arrow(
      self, start: Point, end: Point, colour: str | None = None,
      width: float = 1.8,
  ) -> None:  # fmt: skip
    """An arrow from one point to another."""
    look = {"arrowstyle": "-|>,head_length=4.5,head_width=2.6", "zorder": 3.0}
    look |= {"connectionstyle": "arc3,rad=0.0", "shrinkA": 0, "shrinkB": 0}
    look |= {"color": colour or self.style.text, "linewidth": width}
    self.ax.add_patch(patches.FancyArrowPatch(start, end, **look))


def rectangles(mask: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
  """(row, column, rows, columns) of rectangles that make up a mask.

  Example:
    >>> import numpy as np
    >>> list(rectangles(np.array([[1, 1, 0], [1, 1, 1]], bool)))
    [(0, 0, 2, 2), (1, 2, 1, 1)]
  """
  rows, columns = mask.shape
  left = np.array(mask, bool)
  for row in range(rows):
    for column in range(columns):
      if not left[row, column]:
        continue
      wide = 1
      while column + wide < columns and left[row, column + wide]:
        wide += 1
      run = slice(column, column + wide)
      high = 1
      while row + high < rows and left[row + high, run].all():
        high += 1
      left[row : row + high, run] = False
      yield row, column, high, wide
