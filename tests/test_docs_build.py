"""The check of a built site's links."""

import pytest

from docs.extensions import links


@pytest.fixture
def site(tmp_path):
  """A site of two pages; the second has the anchor `there`."""
  (tmp_path / "other.html").write_text('<h1 id="there">Other</h1>')

  def of(text: str):
    (tmp_path / "index.html").write_text(text)
    return list(links.problems(tmp_path))

  return of


@pytest.mark.parametrize(
  "text",
  [
    '<a href="other.html">x</a>',
    '<a href="other.html#there">x</a>',
    '<a href="#">x</a>',
    '<a id="here"></a><a href="#here">x</a>',
    '<a href="https://example.com/x">x</a>',
    '<img src="data:image/svg+xml;base64,AAAA">',
    '<link rel="canonical" href="https://example.com/">',
  ],
)
def test_good_links(site, text):
  assert site(text) == []


@pytest.mark.parametrize(
  "text, said",
  [
    ('<a href="none.html">x</a>', "no such file"),
    ('<a href="other.html#none">x</a>', "no such anchor"),
    ('<a href="#none">x</a>', "no such anchor"),
    ('<a href="../x.html">x</a>', "leads out of the site"),
    ('<script src="https://example.com/x.js"></script>', "another site"),
    ('<link rel="stylesheet" href="//example.com/x.css">', "another site"),
    ('<img src="none.png">', "no such file"),
  ],
)
def test_bad_links(site, text, said):
  [line] = site(text)
  assert line.startswith("index.html: ")
  assert said in line
