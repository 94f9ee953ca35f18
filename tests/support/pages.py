"""The pages of the documentation as text: what they say, and what they run."""

from collections.abc import Iterator
from pathlib import Path
import re

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
  path
  for path in DOCS.rglob("*.md")
  if not path.relative_to(DOCS).parts[0].startswith("_")
)
_FENCE = re.compile(
  r"^(?P<fence>`{3,}|~{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)`*[ ]*$",
  re.M | re.S,
)
# What `docs.write` writes: a block, or a number in a sentence.
WRITTEN = re.compile(
  r"^<!-- [^\n]* -->\n.*?^<!-- end -->$|<!--[^>]*?-->[^<]*<!---->", re.M | re.S
)
_CODE = re.compile(r"(`+).+?\1", re.S)


def without_code(text: str) -> str:
  """A page without fenced blocks and `code`."""
  return _CODE.sub("", _FENCE.sub("", text))


def prose(text: str) -> str:
  """What is typed: no code, nothing written, no addresses of links."""
  text = without_code(WRITTEN.sub("", text))
  return re.sub(r"\]\([^)]*\)|<https?:[^>]*>", "]", text)


def console(text: str) -> Iterator[tuple[str, bool]]:
  """The commands of a page, and whether a test may run them here."""
  for fence in _FENCE.finditer(text):
    info, body = fence["info"].split(), fence["body"]
    if info[:1] != ["console"]:
      continue
    body = re.sub(r"\\\n>?\s*", "", body)
    for line in body.splitlines():
      if line.startswith("$ "):
        yield line.removeprefix("$ ").strip(), len(info) == 1


def headings(text: str, level: int = 2) -> list[str]:
  """The headings of a level, in order."""
  text = _FENCE.sub("", text)
  return re.findall(rf"^{'#' * level} +(.+?) *$", text, re.M)


def section(text: str, heading: str) -> str:
  """What stands under a heading of level 2."""
  found = re.search(
    rf"^## +{re.escape(heading)} *$(.*?)(?=^## |\Z)", text, re.M | re.S
  )
  return found[1] if found else ""
