"""The roles: numbers in a sentence."""

from collections.abc import Callable
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxRole

from docs.extensions import arithmetic, lookup, numbers, rows

ROLES: dict[str, Callable[[str], str]] = {
  "rung": numbers.rung,
  "counter": numbers.counter,
  "model": numbers.model,
  "published": numbers.published_figure,
  "row": rows.row,
  "gpu": numbers.gpu,
  "calc": arithmetic.calc,
}


class NumberRole(SphinxRole):
  """A role that prints what a function makes of its text."""

  def __init__(self, function: Callable[[str], str]):
    super().__init__()
    self._function = function

  def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """The number, unbroken over lines; its source on hover."""
    try:
      text = self._function(self.text)
    except lookup.UnknownError as error:
      message = self.inliner.reporter.error(
        f"role {self.name}, {self.text!r}: {error}", line=self.lineno
      )
      return [nodes.problematic(self.rawtext, self.rawtext)], [message]
    text = text.replace(" ", "\N{NO-BREAK SPACE}")
    source = f"{self.name}: {self.text}"
    node = nodes.abbreviation(self.rawtext, text, explanation=source)
    node["classes"].append("from-rows")
    return [node], []


def setup(app: Any) -> None:
  """Adds the roles."""
  for name, function in ROLES.items():
    app.add_role(name, NumberRole(function))
