"""The answers to the exercises on the rungs' pages hold, as their cells do."""

import pathlib
import re
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "rungs").glob("[0-9]*.md"))


@pytest.fixture(params=PAGES, ids=lambda path: path.stem)
def page(request):
  return request.param.read_text()


def cells(page):
  found = re.findall(r"(?ms)^```\{code-cell\} python\n(.*?)^```$", page)
  return [re.sub(r"(?m)^:.*$", "", cell) for cell in found]  # without options


def answers(page):
  """The code of each answer: the indented lines of its dropdown."""
  found = re.findall(r"(?ms)^```\{dropdown\} Answer\n(.*?)^```$", page)
  return [
    textwrap.dedent("\n".join(re.findall(r"(?m)^(?: {4}.*|)$", answer)))
    for answer in found
  ]


def test_cells_and_answers_hold(page):
  found = [answer for answer in answers(page) if "assert" in answer]
  there = {}
  for code in (*cells(page), *found):
    exec(compile(code, "page", "exec"), there)
