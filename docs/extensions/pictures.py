"""Pictures: drawn by docs/figures before the build, light and dark."""

from collections.abc import Iterator
import importlib
import pathlib
import shutil
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives as options
from sphinx.util import logging

from docs.extensions import directives, lookup

FOLDER = lookup.ROOT / "docs" / "_generated" / "figures"
STYLES = ("light", "dark")
_LOGGER = logging.getLogger(__name__)


class Picture(directives.Directive):
  """A picture in both styles; content: its caption."""

  required_arguments = 1
  optional_arguments = 0
  has_content = True
  option_spec: ClassVar[dict[str, Any]] = {"alt": options.unchanged_required}

  def made(self, text: str) -> list[nodes.Node]:
    """A figure with two images, of which the theme shows one."""
    if "alt" not in self.options:
      raise lookup.UnknownError("want :alt:, what the picture shows in words")
    if not self.config.draw_pictures:
      return []
    check(text)
    figure = nodes.figure(classes=["picture"])
    for style in STYLES:
      figure += nodes.image(
        uri=f"/_generated/figures/{text}-{style}.svg",
        alt=self.options["alt"],
        classes=[f"only-{style}"],
      )
    if self.content:
      caption = nodes.caption()
      for paragraph in self.parsed(list(self.content)):
        caption += paragraph.children
      figure += caption
    self.set_source_info(figure)
    return [figure]


def check(name: str) -> None:
  """That a picture was drawn.

  Raises:
    UnknownError: it was not; the message lists those that were.
  """
  there = sorted(
    path.name.removesuffix("-light.svg") for path in FOLDER.glob("*-light.svg")
  )
  lookup.pick(dict.fromkeys(there), name, "picture")


def draw(app: Any) -> None:
  """Draws all pictures, unless what they are drawn from is older."""
  if not app.config.draw_pictures:
    return
  drawn = [path.stat().st_mtime for path in FOLDER.glob("*.svg")]
  if drawn and min(drawn) > max(x.stat().st_mtime for x in _drawn_from()):
    return
  figures = importlib.import_module("docs.figures")
  shutil.rmtree(FOLDER, ignore_errors=True)
  FOLDER.mkdir(parents=True)
  _LOGGER.info("drawing pictures into %s", FOLDER.relative_to(lookup.ROOT))
  figures.draw_all(FOLDER)


def _drawn_from() -> Iterator[pathlib.Path]:
  """The code and the rows that pictures may show, and their folders."""
  for folder in ("docs/figures", "pallas_gemm", "experiments"):
    for path in (lookup.ROOT / folder).rglob("*"):
      if path.suffix in (".py", ".jsonl"):
        yield path
        yield path.parent


def setup(app: Any) -> None:
  """Adds the directive, and the drawing before a build.

  With draw_pictures = False in conf.py pages have none.
  """
  app.add_config_value("draw_pictures", True, "env")
  app.add_directive("picture", Picture)
  app.connect("builder-inited", draw)
