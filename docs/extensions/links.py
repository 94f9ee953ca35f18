"""Checks a built site: every link within it leads somewhere, none is fetched.

  python -m docs.extensions.links docs/_build/html

Files, pages and anchors that links name must be there, and no page may load a
script, a style, a font or a picture from another site. Links to other sites are
not followed. Exit status 1 if something is wrong; each is printed.
"""

from collections.abc import Iterator
import functools
import html
import pathlib
import re
import sys
from urllib import parse

# A tag's own attributes: what it links to, what it loads, its anchors.
_TAG = re.compile(r"<\w+\s[^>]*>")
_NAMED = re.compile(r"""(?<![\w-])(href|src|data|id)=["']([^"']*)""")
_LOADED_BY_STYLES = re.compile(r"(?:url\(|@import)\s*['\"]?(https?:)?//")


@functools.cache
def _page(path: pathlib.Path) -> tuple[list[tuple[str, bool]], set[str]]:
  """The links of a page, each with whether it is loaded; and its anchors."""
  links, anchors = [], set()
  for tag in _TAG.findall(path.read_text()):
    for name, value in _NAMED.findall(tag):
      if name == "id":
        anchors.add(html.unescape(value))
      elif 'rel="canonical"' not in tag:
        links.append((html.unescape(value), not tag.startswith("<a ")))
  return links, anchors


def problems(site: pathlib.Path) -> Iterator[str]:
  """What is wrong with the links of a site, a line each."""
  _page.cache_clear()
  for path in sorted(site.rglob("*.html")):
    for target, loaded in _page(path)[0]:
      if wrong := _wrong(site, path, target, loaded):
        yield f"{path.relative_to(site)}: {target}: {wrong}"
  for path in sorted(site.rglob("*.css")):
    if _LOADED_BY_STYLES.search(path.read_text()):
      yield f"{path.relative_to(site)}: loads from another site"


def _wrong(site, page, target: str, loaded: bool) -> str:
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
  if anchor and path.suffix == ".html" and anchor not in _page(path)[1]:
    return "no such anchor"
  return ""


def main(argv: list[str]) -> int:
  """Prints what is wrong; the exit status."""
  site = pathlib.Path(*argv[1:]).resolve()
  if not (site / "index.html").exists():
    print(f"there is no site in {site}", file=sys.stderr)
    return 2
  found = list(problems(site))
  pages = sum(1 for _ in site.rglob("*.html"))
  print(*found, f"{pages} pages, {len(found)} broken links", sep="\n")
  return 1 if found else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
