"""Writes into the pages what comes from rows, code and kernels.

  python -m docs.write             writes all pages, and says which changed
  python -m docs.write --check     says what is behind; exit status 1 if any is
  python -m docs.write --cells     runs the pages' cells too, and writes outputs
  python -m docs.write docs/start.md   these pages alone

A page is plain Markdown. What is written stands between HTML comments that say
where it comes from. A number in a sentence, from `docs.extensions.numbers`:

  <!--rung 6 tflops-->39.7 TFLOP/s<!---->

A table, code or the output of a cell, on lines of their own:

  <!-- rung-card 6 -->
  ...
  <!-- end -->

A cell is a block `<!-- cell -->` that begins with a fence of Python; what the
cells of a page print follows each; of `<!-- cell timed -->` it stays as it is
once written. Pictures are files of docs/img, which
`docs.figures` draws. There are the kinds of `NUMBERS` and of `BLOCKS`.
"""

import argparse
from collections.abc import Callable, Sequence
import importlib
import pathlib
import re
import sys

from docs.extensions import (
  api,
  lookup,
  numbers,
  page_tables,
  rows,
  rung_tables,
  sources,
)  # fmt: skip

NUMBERS: dict[str, Callable[[str], str]] = {
  "rung": numbers.rung,
  "counter": numbers.counter,
  "model": numbers.model,
  "published": numbers.published,
  "row": rows.row,
  "gpu": numbers.gpu,
  "calc": numbers.calc,
}
BLOCKS: dict[str, Callable[[str], str]] = {
  "ladder-roadmap": rung_tables.roadmap,
  "ladder-table": rung_tables.problems,
  "ladder-sizes": rung_tables.sizes,
  "ladder-run": rung_tables.run_lines,
  "rung-box": rung_tables.box,
  "rung-card": rung_tables.card,
  "rung-steps": rung_tables.steps,
  "rung-grid": rung_tables.grid,
  "rung-traffic": rung_tables.traffic,
  "rung-counters": rung_tables.counters,
  "rung-code": sources.rung_code,
  "rung-diff": sources.rung_diff,
  "rung-sass": sources.rung_sass,
  "code": sources.code,
  "api": api.markdown,
  "ops-table": page_tables.ops,
  "ops-overview": page_tables.ops_overview,
  "published-table": page_tables.published_ladders,
  "random-table": page_tables.random,
  "targets-table": page_tables.targets,
  "ampere-table": page_tables.ampere,
  "second-run-table": page_tables.second_run,
  "eight-bits-table": page_tables.eight_bits,
  "planes-table": page_tables.float32,
  "planes-errors-table": page_tables.float32_errors,
}
_NUMBER = re.compile(r"<!--([a-z]+) ([^>]*?)-->[^<]*<!---->")
_BLOCK = re.compile(
  r"^<!-- ([a-z-]+)(?: ([^\n]*?))? -->\n(.*?)^<!-- end -->$", re.M | re.S
)
_CELL = re.compile(r"\n```python\n(.*?)^```\n", re.M | re.S)


def pages() -> list[pathlib.Path]:
  """README and all pages, from the root."""
  folder = lookup.ROOT / "docs"
  found = sorted(folder.glob("*.md")) + sorted(folder.glob("[a-z]*/*.md"))
  return [lookup.ROOT / "README.md", *found]


def written(text: str, outputs: Sequence[str] | None = None) -> str:
  """A page as it should be; outputs of cells stay, unless they are given.

  Raises:
    ValueError: a comment names what is not there; the message has both.
  """
  left = list(outputs or ())

  def number(match: re.Match[str]) -> str:
    kind, words = match.groups()
    made = _made(NUMBERS, kind, " ".join(words.split()))
    return f"<!--{kind} {words}-->{made}<!---->"

  def block(match: re.Match[str]) -> str:
    kind, words, inside = match.groups()
    if kind == "cell":
      if outputs is None:
        return match[0]
      output = left.pop(0)
      if words == "timed" and "```text" in inside:
        return match[0]  # another time each time
      body = f"```python\n{_CELL.findall(inside)[0]}```\n{output}"
    else:
      body = _made(BLOCKS, kind, words or "").strip("\n") + "\n"
    head = f"<!-- {kind} {words} -->" if words else f"<!-- {kind} -->"
    return f"{head}\n\n{body}\n<!-- end -->"

  return _BLOCK.sub(block, _NUMBER.sub(number, text))


def _made(known: dict[str, Callable[[str], str]], kind: str, words: str) -> str:
  try:
    return lookup.pick(known, kind, "kind of marker")(words)
  except ValueError as error:
    raise ValueError(f"<!-- {kind} {words} -->: {error}") from None


def cells(text: str) -> list[str]:
  """The code of a page's cells."""
  found = (match[3] for match in _BLOCK.finditer(text) if match[1] == "cell")
  return [_CELL.findall(inside)[0] for inside in found]


def behind(text: str, want: str) -> list[str]:
  """The markers whose content is not what it should be.

  Digits that a cell prints may be others on another machine.
  """
  found = []
  for pattern in (_NUMBER, _BLOCK):
    for have, right in zip(pattern.finditer(text), pattern.finditer(want)):
      kind = have[0].partition("-->")[0].strip("<!- ")
      pair = have[0], right[0]
      if kind.startswith("cell"):
        pair = tuple(re.sub(r"[\d.]+(e[-+]\d+)?", "0", x) for x in pair)
      if pair[0] != pair[1]:
        found.append(kind)
  return found


def main(argv: Sequence[str]) -> int:
  """Writes or checks; the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m docs.write",
    description="Writes into the pages what comes from rows and code.",
  )
  parser.add_argument("pages", nargs="*", type=pathlib.Path)
  parser.add_argument("--check", action="store_true", help="change nothing")
  parser.add_argument("--cells", action="store_true", help="run the cells too")
  parser.add_argument("--pictures", action="store_true", help="draw pictures")
  args = parser.parse_args(argv)
  if args.pictures:
    importlib.import_module("docs.figures").draw_all(lookup.ROOT / "docs/img")
  wrong = 0
  for path in args.pages or pages():
    text = path.read_text()
    outputs = None
    if args.cells and (code := cells(text)):
      outputs = importlib.import_module("docs.extensions.cells").run(code)
    try:
      want = written(text, outputs)
    except ValueError as error:
      print(f"{path}: {error}", file=sys.stderr)
      wrong += 1
      continue
    if args.check:
      if found := behind(text, want):
        wrong += 1
        print(f"{path} is behind: {'; '.join(found)}")
    elif want != text:
      path.write_text(want)
      print(f"wrote {path}")
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
