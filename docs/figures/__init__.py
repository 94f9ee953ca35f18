"""The pictures of the documentation, drawn from the code that they show.

Each module is one picture: its docstring says what one should see, and its
`draw(style)` returns a matplotlib figure. One that moves has `animate(svg,
style)`, which adds the motion to the written file. What a picture shows of a
kernel is asked of the kernel: its grid and BlockSpecs, its register layouts,
the traffic model, the committed rows.

`python -m docs.write --pictures` writes <name>.svg of each.
"""

from collections.abc import Iterable
import importlib
import io
import os
import pathlib
import pkgutil

import matplotlib
from matplotlib.figure import Figure

from docs.figures.style import LIGHT, Style

# Names of the pictures; what they share is in `style` and in `_` modules.
FIGURES: tuple[str, ...] = tuple(
  name
  for _, name, _ in pkgutil.iter_modules(__path__)
  if name != "style" and not name.startswith("_")
)
# The same drawing is the same file: identifiers are hashed with this, and
# neither the date nor the version is written.
_SAVING = {"svg.hashsalt": "pallas_gemm", "svg.fonttype": "path"}
_METADATA = {"Date": None, "Creator": None}
# On dark pages all is inverted but the hues: colours keep their meaning.
_DARK = (
  "<style>@media (prefers-color-scheme: dark) {"
  " svg { filter: invert(0.92) hue-rotate(180deg) } }</style>"
)


def draw(name: str, style: Style = LIGHT) -> Figure:
  """Draws one picture of `FIGURES`."""
  if name not in FIGURES:
    raise ValueError(f"name must be one of {', '.join(FIGURES)}, got {name!r}")
  module = importlib.import_module(f".{name}", __name__)
  with matplotlib.rc_context(style.rc):
    return module.draw(style)


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
  """Writes a figure as SVG, byte for byte the same each time, dark or light."""
  text = io.StringIO()
  with matplotlib.rc_context(_SAVING):
    figure.savefig(text, format="svg", metadata=_METADATA)
  drawing = text.getvalue().replace("<defs>", f"{_DARK}\n <defs>", 1)
  pathlib.Path(path).write_text(drawing)


def draw_all(
  folder: str | os.PathLike[str], names: Iterable[str] = FIGURES
) -> list[pathlib.Path]:
  """Writes <name>.svg of each picture into a folder; the files."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  written = []
  for name in names:
    module = importlib.import_module(f"{__name__}.{name}")
    path = folder / f"{name}.svg"
    save(draw(name), path)
    if hasattr(module, "animate"):
      path.write_text(module.animate(path.read_text(), LIGHT))
    written.append(path)
  return written
