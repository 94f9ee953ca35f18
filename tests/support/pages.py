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
# Directives whose content is prose; that of others is code, or none.
_PROSE = {
  "admonition", "attention", "caution", "danger", "dropdown", "hint",
  "important", "note", "picture", "rung-sass", "tip", "warning",
}  # fmt: skip
_FENCE = re.compile(
  r"^(?P<fence>`{3,}|~{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)`*[ ]*$",
  re.M | re.S,
)
_OPTIONS = re.compile(r"\A(?:\s*:[\w-]+:[^\n]*\n)+")
_ROLE = re.compile(r"\{[\w:-]+\}(`+).+?\1", re.S)
_CODE = re.compile(r"(`+).+?\1", re.S)


def prose(text: str) -> str:
  """A page without its code, roles, directives and the addresses of links."""
  text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)
  while (plain := _FENCE.sub(_content, text)) != text:
    text = plain
  # Fences of colons hold prose; their first line and options are none.
  text = re.sub(r"^:{3,}.*\n(?::[\w-]+:.*\n)*", "", text, flags=re.M)
  text = re.sub(r"^\([\w-]+\)=$|^%.*$", "", text, flags=re.M)
  text = _CODE.sub("", _ROLE.sub("", text))
  return re.sub(r"\]\([^)]*\)|<https?:[^>]*>", "]", text)


def _content(fence: re.Match[str]) -> str:
  """What is prose in a fenced block."""
  directive = re.match(r"\{([\w-]+)\}", fence["info"])
  if directive is None or directive[1] not in _PROSE:
    return ""
  return _OPTIONS.sub("", fence["body"])


def console(text: str) -> Iterator[tuple[str, bool]]:
  """The commands of a page, and whether a test may run them here."""
  for fence in _FENCE.finditer(text):
    info, body = fence["info"].split(), fence["body"]
    if info not in (["console"], ["{code-block}", "console"]):
      continue
    classes = re.match(r"(?s).*?^:class:([^\n]*)$", body, re.M)
    runs = classes is None or "gpu" not in classes[1].split()
    body = re.sub(r"\\\n>?\s*", "", body)
    for line in body.splitlines():
      if line.startswith("$ "):
        yield line.removeprefix("$ ").strip(), runs


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
