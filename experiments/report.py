"""Writes all pages, tables and plots from the rows that were measured.

  python -m experiments.report                     every page, with its plots
  python -m experiments.report dense ragged        these pages alone
  python -m experiments.report --rows=/tmp/rows    tables and plots of a folder

Nothing is measured. Pages are those in experiments/results (dense, ladder,
ragged); `docs.write` writes the others. A block of a page stands between
the lines `<!-- NAME:begin -->` and `<!-- NAME:end -->`, and is made of the rows
in experiments/results/<device>; of a kernel and problem the last row counts.
Plots lie with the rows. A line is printed for each file that was written.

With --rows, the folder that a program had as --output_dir, tables are printed,
plots are drawn into it, and no page changes.

Exit status: 0; 2 for a command that can't be carried out.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import pathlib
import re

from absl import flags

from experiments.harness import (
  cli,
  counter_tables,
  dense_tables,
  ladder_plots,
  ladder_tables,
  ragged_cases,
  ragged_tables,
  tables,
)
from experiments.harness import rows as rows_lib
from experiments.harness.tables import RowDict

# The overview of the ops is of this.
DEVICE = "nvidia_h200"

_ROWS = flags.DEFINE_string(
  "rows",
  None,
  "A folder of rows: print their tables and draw their plots into it. Default:"
  " the pages and plots of the rows in experiments/results.",
)
cli.not_empty("rows")

_BLOCK = re.compile(r"(?s)<!-- (\w+):begin -->.*?<!-- \1:end -->")
Rows = Sequence[RowDict]
Folders = Mapping[pathlib.Path, Rows]


@dataclasses.dataclass(frozen=True)
class Experiment:
  """What is shown of the rows in a file.

  Attributes:
    select: of all rows those that are shown; none if none was timed.
    figures: by the name of a file, what draws it: (rows, path).
    block: the text between a page's markers, of the rows in each folder.
    summary: the table on a terminal; None prints the block.
  """

  select: Callable[[Rows], Rows]
  figures: Mapping[str, Callable[[Rows, pathlib.Path], None]]
  block: Callable[[Folders], str] | None
  summary: Callable[[Rows], tables.Table] | None


def _pictures(folder: pathlib.Path, *names: str) -> list[str]:
  """What shows those pictures of a folder that there are."""
  there = [folder / name for name in names if (folder / name).exists()]
  return [f"![{x.stem}]({folder.name}/{x.name})" for x in there]


def _ladder(folders: Folders) -> str:
  found = {x: own for x in folders if (own := ladder_tables.own(folders[x]))}
  if not found:
    raise cli.FlagError("no row of the ladder is of its own problems")
  parts = [ladder_tables.markdown([*found.values()])]
  for folder in found:
    parts += _pictures(folder, "ladder.png", "roofline.png")
  return "\n\n".join(parts)


def _sweep(folders: Folders) -> str:
  parts = []
  for rows in folders.values():
    parts += [f"### {rows[0]['device']}", ladder_tables.sweep_markdown(rows)]
  for folder in folders:
    parts += _pictures(folder, "sweep.png")
  return "\n\n".join(parts)


def _counters(folders: Folders) -> str:
  parts = []
  for folder, rows in sorted(folders.items()):
    shown = {x: _pictures(folder, x) for x in counter_tables.FIGURES}
    parts.append(counter_tables.markdown(rows, shown))
  return "\n\n".join(parts)


def _each_device(
  markdown: Callable[[Rows], str], figures: Sequence[str]
) -> Callable[[Folders], str]:
  """A block that has each device's tables, and the pictures below them."""

  def block(folders: Folders) -> str:
    parts = []
    for folder, rows in folders.items():
      parts += [markdown(rows), *_pictures(folder, *figures)]
    return "\n\n".join(parts)

  return block


def _roofline(rows: Rows, path: pathlib.Path) -> None:
  counted = rows_lib.read(path.with_name("counters.jsonl"))
  ladder_plots.roofline(rows, counted, path)


def _compared(rows: Rows) -> Rows:
  latest = rows_lib.latest(rows)
  return latest if dense_tables.compared(latest) else []


def _timed(rows: Rows) -> Rows:
  latest = rows_lib.latest(rows)
  return latest if ragged_tables.timed(latest) else []


_DENSE = {
  "dense.png": dense_tables.draw_ratios,
  "dense_small_m.png": dense_tables.draw_small_m,
}
_RAGGED = {
  "ragged.png": ragged_tables.draw_throughput,
  "ragged_decode.png": ragged_tables.draw_decode,
  "ragged_sizes.png": ragged_tables.draw_sizes,
}
# By the name of the file of rows, and of a block.
EXPERIMENTS = {
  "ladder": Experiment(
    ladder_tables.newest,
    {"ladder.png": ladder_plots.ladder, "roofline.png": _roofline},
    _ladder,
    ladder_tables.summary,
  ),
  "sweep": Experiment(
    functools.partial(ladder_tables.newest, failed=True),
    {"sweep.png": ladder_plots.sweep},
    _sweep,
    ladder_tables.summary,
  ),
  "counters": Experiment(
    counter_tables.newest, counter_tables.FIGURES, _counters, None
  ),
  "dense": Experiment(
    _compared,
    _DENSE,
    _each_device(dense_tables.markdown, [*_DENSE]),
    dense_tables.summary,
  ),
  "dense_unseen": Experiment(
    _compared,
    {"dense_unseen.png": dense_tables.draw_ratios},
    None,
    dense_tables.summary,
  ),
  "ragged": Experiment(
    _timed,
    _RAGGED,
    _each_device(ragged_tables.markdown, [*_RAGGED]),
    ragged_tables.summary,
  ),
}


def rows_of(folder: pathlib.Path, name: str) -> Rows:
  """The rows of an experiment in a folder that are shown.

  Raises:
    cli.FlagError: the file can't be read, or holds something else.
  """
  path = folder / f"{name}.jsonl"
  try:
    found = rows_lib.read(path)
    for row in found:
      if (other := row.get("experiment")) != name:
        raise ValueError(f"want rows of {name}, got one of {other}")
      if name != "counters":
        rows_lib.validate(row)
  except (OSError, ValueError) as error:
    raise cli.FlagError(f"{path}: {error}") from None
  return EXPERIMENTS[name].select(found) if found else []


def draw(name: str, rows: Rows, folder: pathlib.Path) -> list[str]:
  """Draws the figures of an experiment; a line for each."""
  lines = []
  for file, figure in EXPERIMENTS[name].figures.items():
    try:
      figure(rows, folder / file)
    except ImportError:
      return ["no plots: matplotlib is missing (the extra 'bench')"]
    except (OSError, ValueError) as error:
      lines.append(f"no {folder / file}: {error}")
    else:
      lines.append(f"plot: {folder / file}")
  return lines


def ops_overview() -> str:
  """What an op computes, its baseline, and how much faster; then the losses."""
  folder = rows_lib.RESULTS / DEVICE
  dense = dense_tables.compared(rows_of(folder, "dense"))
  mixtral = [
    row
    for row in ragged_tables.timed(rows_of(folder, "ragged"))
    if row["suite"] == "mixtral"
  ]

  def over_jnp(rows: Rows) -> list[float]:
    return [*map(dense_tables.ratio, rows)]

  def over_arm(arm: str) -> list[float]:
    speeds = (ragged_tables.speed_over(row, arm) for row in mixtral)
    return [speed for speed in speeds if speed is not None]

  fused = [row for row in dense if row["epilogue"] != "none"]
  small = over_jnp(dense_tables.small_m(dense))
  example = over_arm(ragged_cases.EXAMPLE)
  lines = [
    ("`matmul`, all suites", "`jnp`", over_jnp(dense)),
    ("`matmul` with bias, C, activation", "`jnp`", over_jnp(fused)),
    ("`matmul`, 1 to 128 rows (Llama)", "`jnp`", small),
    (
      "`ragged_dot`, Mixtral, and gradients",
      "`lax.ragged_dot`",
      over_arm(ragged_cases.LAX),
    ),
    ("`ragged_dot`, Mixtral", "JAX's `ragged_dot_mgpu`", example),
  ]
  header = ["op", "beside", "cases", "geomean", "worst", "best"]
  cells = []
  for op, baseline, speeds in lines:
    figures = tables.geomean(speeds), min(speeds), max(speeds)
    cells.append([op, baseline, str(len(speeds)), *map(tables.factor, figures)])
  table = tables.markdown(header, cells)
  note = "`lax.ragged_dot` multiplies all rows with every group."
  return f"{table}\n\n`matmul`: {dense_tables.losses(dense)} {note}"


def block(name: str) -> str:
  """The text between a page's markers of that name; draws its plots.

  Raises:
    cli.FlagError: no text has that name, or there is no row for it.
  """
  if name == "published":
    return ladder_tables.published_markdown()
  if name not in EXPERIMENTS or EXPERIMENTS[name].block is None:
    raise cli.FlagError(f"no text is called {name}")
  # Newer GPUs have higher numbers.
  folders = sorted(rows_lib.RESULTS.glob("*/"), reverse=True)
  found = {x: rows for x in folders if (rows := rows_of(x, name))}
  if not found:
    raise cli.FlagError(f"no timed rows of {name} in {rows_lib.RESULTS}")
  for folder, rows in found.items():
    for line in draw(name, rows, folder):
      print(line, flush=True)
  return EXPERIMENTS[name].block(found)


def write_page(page: pathlib.Path) -> None:
  """Writes the blocks of a page, and draws its plots.

  Raises:
    cli.FlagError: no text belongs to a marker, or a marker has no end.
  """
  old = page.read_text()
  begins = re.findall(r"<!-- (\w+):begin -->", old)
  if begins != [match[1] for match in _BLOCK.finditer(old)]:
    raise cli.FlagError(
      f"{page}: want a line <!-- NAME:end --> after each <!-- NAME:begin -->"
    )

  def text(match: re.Match[str]) -> str:
    name = match[1]
    return f"<!-- {name}:begin -->\n\n{block(name)}\n\n<!-- {name}:end -->"

  new = _BLOCK.sub(text, old)
  if new != old:
    page.write_text(new)
  print("nothing new for" if new == old else "rewrote", page, flush=True)


def show_folder(folder: pathlib.Path) -> None:
  """Prints the tables of the rows in a folder, and draws their plots.

  Raises:
    cli.FlagError: there are none.
  """
  found = {name: rows_of(folder, name) for name in EXPERIMENTS}
  found = {name: rows for name, rows in found.items() if rows}
  if not found:
    raise cli.FlagError(f"--rows: no timed rows in {folder}")
  for name, rows in found.items():
    lines = draw(name, rows, folder)
    experiment = EXPERIMENTS[name]
    if experiment.summary is None:
      print(experiment.block({folder: rows}))
    else:
      title = f"Rows of {folder / name}.jsonl"
      header, cells = experiment.summary(rows)
      cli.Console().table(title, header, cells, tables.numeric(header))
    print(*lines, sep="\n", flush=True)


def main(argv: Sequence[str]) -> int:
  """Carries out the command; returns the exit status."""
  if _ROWS.value is not None:
    if argv[1:]:
      raise cli.FlagError("--rows: goes with no pages")
    show_folder(pathlib.Path(_ROWS.value))
    return 0
  pages = {x.stem: x for x in sorted(rows_lib.RESULTS.glob("*.md"))}
  names = argv[1:] or pages
  if unknown := [name for name in names if name not in pages]:
    raise cli.FlagError(f"no page {unknown[0]!r}; there are {', '.join(pages)}")
  for name in names:
    write_page(pages[name])
  return 0


if __name__ == "__main__":
  cli.run(main, takes_arguments=True)
