"""Checks a built site: every link within it leads somewhere, none is fetched.

  python -m docs.extensions.links docs/_build/html

Files, pages and anchors that links name must be there, and no page may load a
script, a style, a font or a picture from another site. Links to other sites are
not followed. Exit status 1 if something is wrong; each is printed.
"""

from collections.abc import Iterator
import functools
from html import parser
import pathlib
import re
import sys
from urllib import parse

# What a page links to, and what it loads.
_LINKS = {("a", "href")}
_LOADED = {
    ("img", "src"), ("script", "src"), ("link", "href"), ("source", "src"),
    ("iframe", "src"), ("object", "data"),
}  # fmt: skip
_LOADED_BY_STYLES = re.compile(r"(?:url\(|@import)\s*['\"]?(https?:)?//")


class Page(parser.HTMLParser):
  """The links and the anchors of a page."""

  def __init__(self, text: str):
    super().__init__()
    self.links: list[tuple[str, bool]] = []
    self.anchors: set[str] = set()
    self.feed(text)

  def handle_starttag(
    self, tag: str, attrs: list[tuple[str, str | None]]
  ) -> None:
    """Notes what a tag links to, and its anchors."""
    canonical = ("rel", "canonical") in attrs
    for name, value in attrs:
      if value is None:
        continue
      if name == "id" or (tag, name) == ("a", "name"):
        self.anchors.add(value)
      elif (tag, name) in _LINKS or ((tag, name) in _LOADED and not canonical):
        self.links.append((value, (tag, name) in _LOADED))


def problems(site: pathlib.Path) -> Iterator[str]:
  """What is wrong with the links of a site, a line each."""
  read = functools.cache(lambda path: Page(path.read_text()))
  for path in sorted(site.rglob("*.html")):
    name = path.relative_to(site)
    for target, loaded in read(path).links:
      if wrong := _wrong(site, path, target, loaded, read):
        yield f"{name}: {target}: {wrong}"
  for path in sorted(site.rglob("*.css")):
    if _LOADED_BY_STYLES.search(path.read_text()):
      yield f"{path.relative_to(site)}: loads from another site"


def _wrong(site, page, target: str, loaded: bool, read) -> str:
  """What is wrong with a link; "" if nothing is."""
  url = parse.urlsplit(target)
  if url.scheme == "data" or target == "#":
    return ""
  if url.scheme or url.netloc:
    return "loads from another site" if loaded else ""
  path = page
  if url.path:
    path = (page.parent / parse.unquote(url.path)).resolve()
  if path.is_dir():
    path /= "index.html"
  if not path.is_relative_to(site.resolve()):
    return "leads out of the site"
  if not path.exists():
    return "no such file"
  anchor = parse.unquote(url.fragment)
  if anchor and path.suffix == ".html" and anchor not in read(path).anchors:
    return "no such anchor"
  return ""


def main(argv: list[str]) -> int:
  """Prints what is wrong; the exit status."""
  if len(argv) != 2:
    print(__doc__, file=sys.stderr)
    return 2
  site = pathlib.Path(argv[1]).resolve()
  if not (site / "index.html").exists():
    print(f"there is no site in {site}", file=sys.stderr)
    return 2
  found = list(problems(site))
  for line in found:
    print(line)
  pages = sum(1 for _ in site.rglob("*.html"))
  print(f"{pages} pages, {len(found)} broken links")
  return 1 if found else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
