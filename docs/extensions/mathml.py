"""Formulas as MathML, which browsers draw: no script, no font, no network."""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

NAME = "mathml"
_LOGGER = logging.getLogger(__name__)


def setup(app: Any) -> None:
  """Adds the renderer."""
  app.add_html_math_renderer(NAME, (_inline, None), (_display, None))


def _inline(writer: Any, node: nodes.math) -> None:
  writer.body.append(_mathml(node, as_block=False))
  raise nodes.SkipNode


def _display(writer: Any, node: nodes.math_block) -> None:
  writer.body.append(writer.starttag(node, "div", CLASS="math"))
  writer.body.append(_mathml(node, as_block=True))
  writer.body.append("</div>\n")
  raise nodes.SkipNode


def _mathml(node: nodes.Element, as_block: bool) -> str:
  try:
    return latex2mathml.tex2mathml(node.astext(), as_block=as_block)
  except MathError as error:
    _LOGGER.warning("formula %r: %s", node.astext(), error, location=node)
    return node.astext()
