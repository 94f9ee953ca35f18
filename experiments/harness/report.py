"""From rows on disk to plots and pages, as the flags in cli say."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import pathlib
from typing import Any

from experiments.harness import cli, overview, tables
from experiments.harness import console as console_lib
from experiments.harness import rows as rows_lib

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"
Figures = Mapping[str, Callable[[pathlib.Path], None]]
Rows = Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """The table, the plots and the page of an experiment's rows.

  Attributes:
    experiment: its name: of its rows' file and of the page's markers.
    summary: header and cells of the table.
    timed: which of some rows are of cases that were timed.
    markdown: the text of the page.
    figures: by the name of a file, what draws it: (rows, path).
  """

  experiment: str
  summary: Callable[[Rows], tuple[list[str], list[list[str]]]]
  timed: Callable[[Rows], Rows]
  markdown: Callable[[Rows], str]
  figures: Mapping[str, Callable[[Rows, pathlib.Path], None]]

  def table(self, console: console_lib.Console, title: str, rows: Rows) -> None:
    """Prints the table."""
    console.line()
    header, cells = self.summary(rows)
    console.table(title, header, cells, tables.numeric(header))

  def show(
    self, console: console_lib.Console, rows: Rows, folder: pathlib.Path
  ) -> None:
    """Plots and pages, as the flags say, of one device's rows.

    A page has the tables of other devices after them.

    Raises:
      cli.FlagError: none of the rows was timed.
    """
    latest = rows_lib.latest(rows)
    if not self.timed(latest):
      raise cli.FlagError(f"no timed rows in {folder}; measure on a GPU first")
    figures = {
      name: functools.partial(figure, latest)
      for name, figure in self.figures.items()
    }
    if cli.PLOT.value:
      draw(console, folder, figures)
    if cli.UPDATE_README.value:
      own = folder / f"{self.experiment}.jsonl"
      path = pathlib.Path(cli.FROM_ROWS.value or own)
      paths = of_all_devices(path, self.experiment)
      paths.sort(key=lambda x: x.parent.name != overview.DEVICES[0])
      parts = [
        (latest, folder)
        if x == path
        else (rows_lib.latest(rows_lib.read(x)), x.parent)
        for x in paths
      ]
      text = "\n\n".join(
        self._part(*part) for part in parts if self.timed(part[0])
      )
      update_page(console, self.experiment, text)
      update_readme(console)

  def _part(self, rows: Rows, folder: pathlib.Path) -> str:
    """What a page says of a device: tables and pictures."""
    pictures = [folder / name for name in self.figures]
    shown = links(self.experiment, pictures)
    return "\n\n".join([self.markdown(rows), *map(picture, shown)])

  def from_rows(self, console: console_lib.Console) -> int:
    """Table, plots and pages of rows measured before; the exit status."""
    path, folder, rows = measured_before(self.experiment)
    self.table(console, f"Rows of {path}", rows_lib.latest(rows))
    self.show(console, rows, folder)
    return 0


def files(experiment: str) -> list[pathlib.Path]:
  """The files of rows that the flags mean: one, or those of all devices."""
  name = f"{experiment}.jsonl"
  if cli.FROM_ROWS.value:
    return [pathlib.Path(cli.FROM_ROWS.value)]
  if cli.OUTPUT_DIR.value:
    return [pathlib.Path(cli.OUTPUT_DIR.value, name)]
  return _kept(experiment)


def is_kept(path: pathlib.Path, *experiments: str) -> bool:
  """Whether a file is a device's in the repository, of such an experiment."""
  there = [x for name in experiments for x in _kept(name)]
  return path.resolve() in [x.resolve() for x in there]


def _kept(experiment: str) -> list[pathlib.Path]:
  return sorted(rows_lib.RESULTS.glob(f"*/{experiment}.jsonl"))


def of_all_devices(path: pathlib.Path, experiment: str) -> list[pathlib.Path]:
  """The files that a page is made of: `path`, and those of the other devices.

  A file that lies elsewhere than in the repository is alone.
  """
  if not is_kept(path, experiment):
    return [path]
  return [
    path if x.resolve() == path.resolve() else x for x in _kept(experiment)
  ]


def folder_of(path: pathlib.Path) -> pathlib.Path:
  """Where the plots of a file of rows go."""
  return pathlib.Path(cli.OUTPUT_DIR.value or path.parent)


def check_rows(path: pathlib.Path, rows: Rows, *experiments: str) -> None:
  """Looks whether rows are such as plots and pages are made of.

  Args:
    path: of their file.
    rows: all of it.
    experiments: whose they may be.

  Raises:
    cli.FlagError: they are of something else; or their plots and tables would
      replace those of the experiment's own file beside them.
  """
  for row in rows:
    if (name := row.get("experiment")) not in experiments:
      want = " or ".join(experiments)
      raise cli.FlagError(
        f"{_flag()}: want rows of {want}, got one of {name} in {path}"
      )
  own = [path.with_name(f"{name}.jsonl") for name in experiments]
  if path in own or not any(x.exists() for x in own):
    return
  draws = cli.PLOT.value and folder_of(path).resolve() == path.parent.resolve()
  if draws or (cli.UPDATE_README.value and not cli.README_FILE.value):
    raise cli.FlagError(
      f"{_flag()}: {path} would replace what is made of {own[0].name}; want"
      f" another {'--output_dir' if draws else '--readme'}"
    )


def _flag() -> str:
  """The flag that has rows read."""
  return "--from_rows" if cli.FROM_ROWS.value else "--update_readme"


def measured_before(
  *experiments: str,
) -> tuple[pathlib.Path, pathlib.Path, list[dict[str, Any]]]:
  """The file that the flags mean, the folder of its plots, and its rows.

  Args:
    experiments: whose they may be; without --from_rows the first one's file.

  Raises:
    cli.FlagError: no such file, or one that holds something else; or the
      folder can't be written to.
  """
  flag = _flag()
  path = _measured_file(experiments[0])
  if cli.FROM_ROWS.value and not path.exists():
    raise cli.FlagError(f"--from_rows: there is no {path}")
  try:
    rows = rows_lib.read(path)
    check_rows(path, rows, *experiments)
    for row in rows:
      rows_lib.validate(row)
  except OSError as error:
    reason = f"can't read {path}: {error.strerror}"
    raise cli.FlagError(f"{flag}: {reason}") from None
  except ValueError as error:
    raise cli.FlagError(f"{flag}: {path}: {error}") from None
  if not rows:
    raise cli.FlagError(
      f"{flag}: no timed rows in {path}; want one JSON object a line"
    )
  folder = folder_of(path)
  if cli.PLOT.value:
    cli.check_folder(folder)
  return path, folder, rows


def _measured_file(experiment: str) -> pathlib.Path:
  """The file that the flags mean; of several, that of README's tables.

  Raises:
    cli.FlagError: none in the repository holds timed rows, or several do
      without that device's.
  """
  found = files(experiment)
  if cli.FROM_ROWS.value or cli.OUTPUT_DIR.value:
    return found[0]
  found = [
    path
    for path in found
    if any(row.get("ms_median") is not None for row in rows_lib.read(path))
  ]
  first = [x for x in found if x.parent.name == overview.DEVICES[0]]
  if len(found) > 1 and first:
    return first[0]
  if len(found) != 1:
    names = ", ".join(map(str, found)) or "none"
    raise cli.FlagError(
      f"--update_readme: want one file of timed rows in {rows_lib.RESULTS},"
      f" there is {names}; --from_rows names one"
    )
  return found[0]


def draw(
  console: console_lib.Console, folder: pathlib.Path, figures: Figures
) -> None:
  """Draws each figure into the file of its name; says what it could not."""
  for name, figure in figures.items():
    try:
      figure(folder / name)
    except ImportError:
      console.line("no plots: matplotlib is missing (the extra 'bench')")
      return
    except (OSError, ValueError) as error:
      console.line(f"no {name}: {error}")
    else:
      console.line(f"plot: {folder / name}")


def update_page(
  console: console_lib.Console,
  name: str,
  text: str,
  pictures: Sequence[pathlib.Path] = (),
) -> None:
  """Writes text and links to pictures between the markers of that name.

  Raises:
    cli.FlagError: there is no page, or none has such markers.
  """
  block = [text, *map(picture, links(name, pictures))]
  page = page_of(name)
  try:
    changed = tables.update_file(page, name, "\n\n".join(block))
  except (OSError, ValueError) as error:
    raise cli.FlagError(f"--update_readme: {error}") from None
  console.line(f"{'rewrote' if changed else 'nothing new for'} {page}")


def picture(path: pathlib.Path) -> str:
  """What shows a picture on a page."""
  return f"![{path.stem}]({path.as_posix()})"


def links(name: str, pictures: Sequence[pathlib.Path]) -> list[pathlib.Path]:
  """Where the page of that name finds those pictures that lie below it."""
  root = page_of(name).resolve().parent
  there = [x.resolve() for x in pictures if x.exists()]
  return [x.relative_to(root) for x in there if x.is_relative_to(root)]


def page_of(name: str) -> pathlib.Path:
  """The page that has the markers of that name: README, or of the results.

  What --readme says is the one page.
  """
  if cli.README_FILE.value:
    return pathlib.Path(cli.README_FILE.value)
  begin = f"<!-- {name}:begin -->"
  pages = sorted(rows_lib.RESULTS.glob("*.md"))
  return next((page for page in pages if begin in page.read_text()), README)


def update_readme(console: console_lib.Console) -> None:
  """Writes README's own tables, of the rows in the repository."""
  readme = pathlib.Path(cli.README_FILE.value or README)
  changed = overview.update(readme)
  console.line(f"{'rewrote' if changed else 'nothing new for'} {readme}")
