"""Pages are plain Markdown that is up to date: `docs.write`."""

import re

import pytest

from docs import write
from docs.extensions import page_tables
from tests.support import pages

PAGES = write.pages()
PICTURE = re.compile(r"!\[[^]]*\]\(([^)\s]+)\)")


def name_of(path):
  return path.relative_to(pages.ROOT).as_posix()


@pytest.mark.rows
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_up_to_date(page):
  text = page.read_text()
  assert write.behind(text, write.written(text)) == [], (
    "run python -m docs.write"
  )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_reads_without_sphinx(page):
  """No role, no directive, no empty block, and each picture is there."""
  text = page.read_text()
  plain = pages.without_code(text)
  assert not re.search(r"\{[a-z:-]+\}`|^:{3,}|^\([\w-]+\)=$", plain, re.M)
  assert not re.search(r"^`{3,}\{", text, re.M)
  assert not re.search(r"-->\s*\??<!---->|-->\s*<!-- end -->", text)
  # A comment at the beginning of a line would end the paragraph.
  assert not re.search(r"^[ >]*(?:[-*+] +|\d+\. +)?<!--(?! )", plain, re.M)
  for target in PICTURE.findall(text):
    assert (page.parent / target).is_file(), target


def test_the_roadmap_is_the_same_everywhere():
  found = set()
  for name in ("README.md", "docs/index.md", "docs/rungs/index.md"):
    text = (pages.ROOT / name).read_text()
    [table] = re.findall(r"<!-- ladder-roadmap[^>]*>(.*?)<!-- end", text, re.S)
    found.add(re.sub(r"\]\(.*?\)", "", table))
  assert len(found) == 1


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_table_is_wider_than_the_text(page):
  rules = re.findall(r"^\|(?: *:?-+:? *\|)+$", page.read_text(), re.M)
  assert all(rule.count("|") - 1 <= page_tables.COLUMNS for rule in rules)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_units_are_written_one_way(page):
  text = pages.without_code(re.sub("<!--.*?-->", "", page.read_text()))
  assert not re.search(r"\d us\b|\^3\b|\*\*3\b(?!\. )", text)


def test_pages_show_the_pictures_that_are_drawn():
  figures = pytest.importorskip("docs.figures", reason="needs matplotlib")
  shown = {
    target.rsplit("/", 1)[-1].removesuffix(".svg")
    for page in PAGES
    for target in PICTURE.findall(page.read_text())
    if target.endswith(".svg")
  }
  drawn = {path.stem for path in pages.DOCS.glob("img/*.svg")}
  assert shown == drawn == set(figures.FIGURES)


PAGE = """# A page

Rung 6 takes <!--rung 6 time-->?<!---->, and 2 * 3 is <!--calc 2 * 3-->7<!---->.

<!-- rung-card 6 -->
<!-- end -->

<!-- cell -->

```python
print(6)
```

<!-- end -->
"""


def test_what_is_written():
  text = write.written(PAGE, ["\n```text\n6\n```\n"])
  assert re.search(r"time-->\d\.\d\d ms<!---->, and 2 \* 3 is .*-->6<!", text)
  assert text.count("| --: |") >= 1
  assert "print(6)\n```\n\n```text\n6\n```\n\n<!-- end -->" in text
  assert write.written(text) == text
  assert write.cells(text) == ["print(6)\n"]
  behind = write.behind(PAGE, write.written(PAGE))
  assert behind == ["rung 6 time", "calc 2 * 3", "rung-card 6"]


@pytest.mark.parametrize(
  "text, said",
  [
    ("<!--rung 6 speed-->?<!---->", "<!-- rung 6 speed -->: no figure 'speed'"),
    ("<!--speed 6-->?<!---->", "no kind of marker 'speed'; there is rung"),
    (
      "<!-- rung-code 6 nothing -->\n<!-- end -->",
      "no name in k06_vectorized.py",
    ),
    ("<!-- rung-box 6: nothing -->\n<!-- end -->", "no line of k06"),
    ("<!-- code no.py x -->\n<!-- end -->", "no file 'no.py'"),
    ("<!-- api pallas_gemm.nothing -->\n<!-- end -->", "has no 'nothing'"),
  ],
)
def test_what_is_not_there(text, said):
  with pytest.raises(ValueError, match=re.escape(said)):
    write.written(text)


def test_check_names_page_and_marker(tmp_path, capsys):
  page = tmp_path / "page.md"
  page.write_text("It is <!--calc 2 * 3-->7<!---->.\n")
  assert write.main(["--check", str(page)]) == 1
  assert f"{page} is behind: calc 2 * 3" in capsys.readouterr().out
  assert write.main([str(page)]) == 0
  assert write.main(["--check", str(page)]) == 0
  assert page.read_text() == "It is <!--calc 2 * 3-->6<!---->.\n"
