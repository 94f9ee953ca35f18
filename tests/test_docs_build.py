"""The site's extension within Sphinx, and the check of a built site's links.

Needs the extra `docs`; `make docs` sets it up, and .ci/run does so before it
runs the tests.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("sphinx", reason="needs Sphinx (the extra `docs`)")

from docs.extensions import links, lookup, pictures

CONF = """
extensions = ["myst_parser", "docs.extensions"]
html_math_renderer = "mathml"
html_theme = "basic"
myst_enable_extensions = ["dollarmath"]
"""


@pytest.fixture
def build(tmp_path, repository):
  """Builds a site of one page: (exit status, what was said, the page)."""

  def built(text: str):
    (tmp_path / "conf.py").write_text(CONF)
    (tmp_path / "index.md").write_text(text)
    out = tmp_path / "out"
    done = subprocess.run(
      [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-D",
        "draw_pictures=0",
        tmp_path,
        out,
      ],
      env=os.environ | {"PYTHONPATH": str(repository), "JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
    )
    page = out / "index.html"
    html = page.read_text() if page.exists() else ""
    return done.returncode, done.stdout + done.stderr, html

  return built


def test_roles_and_directives(build):
  status, said, html = build(
    "# A page\n\n{rung}`6 time` and {calc}`2 * 3`, $a_i^2$\n\n"
    "```{rung-card} 6\n```\n\n```{rung-grid} 6\n```\n\n"
    "```{rung-code} 6 kernel\n```\n\n```{rung-diff} 6\n```\n\n"
    "```{rung-counters} 6\n```\n"
  )
  assert status == 0, said
  assert 'title="rung: 6 time"' in html
  assert "<msubsup>" in html
  assert html.count("<table") >= 6
  assert "compat.kernel" in html


# What a page may have wrong, and what is said of it.
WRONG = {
  "{rung}`6 speed`": "role rung, '6 speed': no figure 'speed'; there is",
  "{rung}`13 time`": "role rung, '13 time': ",
  "{row}`a/b ms`": "role row, 'a/b ms': no file 'a/b'; there is",
  "```{rung-card} 13\n```": "directive rung-card '13': ",
  "```{rung-code} 6 nothing\n```": "0 definitions of 'nothing'",
  "```{picture} nothing\n```": "directive picture 'nothing': want :alt:",
  "[x](#nowhere)": "nowhere",
}


def test_what_is_not_there_fails_the_build(build):
  text = "# A page\n\n" + "\n\n".join(WRONG) + "\n"
  status, log, _ = build(text)
  assert status != 0
  for wrong, said in WRONG.items():
    number = text[: text.index(wrong)].count("\n") + 1
    [line] = [line for line in log.splitlines() if said in line]
    assert f"index.md:{number}: " in line


def test_a_picture_that_is_not_drawn(tmp_path, monkeypatch):
  (tmp_path / "some-light.svg").touch()
  monkeypatch.setattr(pictures, "FOLDER", tmp_path)
  pictures.check("some")
  with pytest.raises(lookup.UnknownError, match="'none'; there is some"):
    pictures.check("none")


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
