"""Drops committed rows that later rows of the same case replaced.

  python -m experiments.prune              of all devices, in their files
  python -m experiments.prune --output_dir=DIRECTORY    of one folder
  python -m experiments.prune --dry_run    says what would go

Of the files whose rows replace each other (`FILES`) these stay:

  the last rows of each case, `KEPT` of them: the last is in the tables, and
      what they differ by is the noise that docs/measuring.md speaks of
  rows of a commit that a page names (`commit=` in a comment)
  of each run, the commit that has most of its rows: pages say from these how
      long a run takes

The rest is in git. Cases keep their order, which is that of tables.
"""

from collections.abc import Iterable, Sequence
import json
import pathlib
import re
from typing import Any

from absl import flags

from experiments.harness import cli, shapes
from experiments.harness import rows as rows_lib

FILES = ("dense",)
KEPT = 3
_DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"

flags.declare_key_flag("output_dir")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Change no file.")


def named_commits(pages: Iterable[pathlib.Path]) -> set[str]:
  """How the commits begin that comments of the pages name."""
  text = "\n".join(page.read_text() for page in pages)
  return set(re.findall(r"\bcommit=([0-9a-f]{4,40})\b", text))


def kept(
  rows: Sequence[dict[str, Any]], named: set[str]
) -> list[dict[str, Any]]:
  """The rows that stay, by case, those of a case in their order."""
  fields = rows_lib.PROBLEM_FIELDS + rows_lib.VARIANT_FIELDS
  cases: dict[tuple, list[int]] = {}
  for i, row in enumerate(rows):
    cases.setdefault(tuple(row.get(x) for x in fields), []).append(i)
  stay = {i for found in cases.values() for i in found[-KEPT:]}
  most = _largest_runs(rows)
  for i, row in enumerate(rows):
    commit = row["commit"] or ""
    if commit in most or any(commit.startswith(x) for x in named):
      stay.add(i)
  return [rows[i] for found in cases.values() for i in found if i in stay]


def _largest_runs(rows: Sequence[dict[str, Any]]) -> set[str]:
  """Of the published suites, and of the others, the commit with most rows."""
  published = {
    *shapes.tagged(shapes.DENSE, "published"),
    *shapes.tagged(shapes.GROUPED, "published"),
  }
  counts: dict[bool, dict[str, int]] = {}
  for row in rows:
    of = counts.setdefault(row.get("suite") in published, {})
    of[row["commit"]] = of.get(row["commit"], 0) + 1
  return {max(of, key=of.__getitem__) for of in counts.values()}


def main(argv: Sequence[str]) -> int:
  """Prunes the files of the flags; returns the exit status."""
  del argv
  named = named_commits(_DOCS.glob("**/*.md"))
  folders = (
    [pathlib.Path(cli.OUTPUT_DIR.value)]
    if cli.OUTPUT_DIR.value
    else sorted(x for x in rows_lib.RESULTS.glob("*") if x.is_dir())
  )
  for path in (
    folder / f"{name}.jsonl" for folder in folders for name in FILES
  ):
    rows = rows_lib.read(path)
    left = kept(rows, named)
    if len(left) < len(rows):
      print(f"{path}: {len(left)} of {len(rows)} rows stay")
      if not _DRY_RUN.value:
        text = "".join(json.dumps(row) + "\n" for row in left)
        path.write_text(text)
  return 0


if __name__ == "__main__":
  cli.run(main)
