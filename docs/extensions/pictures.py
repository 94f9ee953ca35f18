"""Pictures: drawn by docs/figures before the build, light and dark."""

import importlib
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
    there = {
      x.name.removesuffix("-light.svg") for x in FOLDER.glob("*-light.svg")
    }
    if text not in there:
      raise lookup.UnknownError(
        f"no picture; there is {lookup.listed(sorted(there))}"
      )
    if "alt" not in self.options:
      raise lookup.UnknownError("want :alt:, what the picture shows in words")
    figure = nodes.figure(classes=["picture"])
    for style in STYLES:
      image = nodes.image(
        uri=f"/_generated/figures/{text}-{style}.svg",
        alt=self.options["alt"],
        classes=[f"only-{style}"],
      )
      figure += image
    if self.content:
      caption = nodes.caption()
      for paragraph in self.parsed(list(self.content)):
        caption += paragraph.children
      figure += caption
    self.set_source_info(figure)
    return [figure]


def draw(app: Any) -> None:
  """Draws all pictures."""
  del app
  FOLDER.mkdir(parents=True, exist_ok=True)
  if not (lookup.ROOT / "docs" / "figures").exists():  # Until it is merged.
    return
  figures = importlib.import_module("docs.figures")
  _LOGGER.info("drawing pictures into %s", FOLDER.relative_to(lookup.ROOT))
  figures.draw_all(FOLDER)


def setup(app: Any) -> None:
  """Adds the directive, and the drawing before a build."""
  app.add_directive("picture", Picture)
  app.connect("builder-inited", draw)
