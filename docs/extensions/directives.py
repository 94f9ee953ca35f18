"""The directives: tables from rows, and code from the files of the rungs."""

from collections.abc import Callable
from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from docs.extensions import lookup, page_tables, rung_tables, sources

TABLES: dict[str, Callable[[str], str]] = {
  "rung-card": rung_tables.card,
  "rung-grid": rung_tables.grid,
  "rung-traffic": rung_tables.traffic,
  "rung-counters": rung_tables.counters,
  "ladder-table": page_tables.ladder,
  "ops-table": page_tables.ops,
  "random-table": page_tables.random,
}


class Directive(SphinxDirective):
  """A directive of one argument, which says so when it is not understood."""

  optional_arguments = 1
  final_argument_whitespace = True

  def run(self) -> list[nodes.Node]:
    """What `made` gives."""
    text = self.arguments[0] if self.arguments else ""
    try:
      return self.made(text)
    except lookup.UnknownError as error:
      raise self.error(f"directive {self.name} {text!r}: {error}") from None

  def made(self, text: str) -> list[nodes.Node]:
    """The nodes in its place."""
    raise NotImplementedError

  def parsed(self, lines: list[str]) -> list[nodes.Node]:
    """Nodes of Markdown, which stands where the directive does."""
    box = nodes.Element()
    file, line = self.get_source_info()
    content = StringList(lines, items=[(file, line)] * len(lines))
    self.state.nested_parse(content, self.content_offset, box)
    return box.children

  def captioned(self, block: nodes.literal_block, caption: nodes.Node):
    """A block of code under its caption."""
    box = nodes.container("", literal_block=True)
    box["classes"].append("literal-block-wrapper")
    title = nodes.caption("", "")
    title += caption
    box += [title, block]
    return box


class TableDirective(Directive):
  """Markdown of rows."""

  table: ClassVar[Callable[[str], str]]

  def made(self, text: str) -> list[nodes.Node]:
    """The tables."""
    return self.parsed(type(self).table(text).splitlines())


class RungCode(Directive):
  """The source of a function of a rung, or of its file."""

  required_arguments = 1
  optional_arguments = 0

  def made(self, text: str) -> list[nodes.Node]:
    """The code, with the numbers of its lines."""
    found = sources.excerpt(text)
    self.env.note_dependency(str(lookup.ROOT / found.file))
    block = nodes.literal_block(found.text, found.text, language="python")
    block["linenos"] = True
    block["highlight_args"] = {"linenostart": found.first}
    return [self.captioned(block, nodes.literal("", found.file))]


class RungDiff(Directive):
  """What a rung changes of the one before."""

  required_arguments = 1
  optional_arguments = 0

  def made(self, text: str) -> list[nodes.Node]:
    """The unified diff."""
    found, language = sources.diff(text)
    return [nodes.literal_block(found, found, language=language)]


class RungSass(Directive):
  """Machine code, its caption the directive's content."""

  required_arguments = 1
  optional_arguments = 0
  has_content = True

  def made(self, text: str) -> list[nodes.Node]:
    """The excerpt."""
    found, file = sources.sass(text)
    self.env.note_dependency(str(lookup.ROOT / file))
    block = nodes.literal_block(found, found, language="text")
    inner = nodes.inline()
    for paragraph in self.parsed(list(self.content)):
      inner += paragraph.children
    return [
      self.captioned(block, inner if inner.children else nodes.Text(file))
    ]


def setup(app: Any) -> None:
  """Adds the directives."""
  for name, function in TABLES.items():
    fields = {"table": staticmethod(function)}
    app.add_directive(name, type("Table", (TableDirective,), fields))
  app.add_directive("rung-code", RungCode)
  app.add_directive("rung-diff", RungDiff)
  app.add_directive("rung-sass", RungSass)
