"""The ladder's pages, from rows: README's tables, the page of sizes, plots."""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import itertools
import pathlib
from typing import Any

from experiments.harness import cli, plots, report, suites, tables
from experiments.harness import console as console_lib
from experiments.harness import rows as rows_lib
from pallas_gemm import hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract, traffic

EXPERIMENT = "ladder"
SWEEP = "sweep"


def print_table(
  console: console_lib.Console, title: str, rows: Sequence[dict[str, Any]]
) -> None:
  """Prints the rungs of one problem, then of the next."""
  problems = map(tables.ordered, tables.problems(rows))
  header, cells = tables.summary(list(itertools.chain.from_iterable(problems)))
  console.line()
  console.table(
    title, header, cells, [name for name in header if name not in tables.WORDS]
  )


@dataclasses.dataclass(frozen=True)
class Device:
  """A folder of results: the timed rows of its newest commit, and its plots."""

  folder: pathlib.Path
  ladder: list[dict[str, Any]]
  sweep: list[dict[str, Any]]

  @classmethod
  def of(cls, folder: pathlib.Path, rows: Sequence[dict[str, Any]]) -> "Device":
    """Of rows of both experiments."""
    swept = [row for row in rows if row["experiment"] == SWEEP]
    others = [row for row in rows if row["experiment"] != SWEEP]
    return cls(folder, tables.newest(others), tables.newest(swept, failed=True))

  @classmethod
  def read(cls, folder: pathlib.Path) -> "Device":
    """Of the files in a folder.

    Raises:
      cli.FlagError: one holds something else.
    """
    rows = []
    for path in (folder / f"{name}.jsonl" for name in (EXPERIMENT, SWEEP)):
      try:
        found = rows_lib.read(path)
        for row in found:
          rows_lib.validate(row)
      except (OSError, ValueError) as error:
        raise cli.FlagError(f"--update_readme: {path}: {error}") from None
      rows += found
    return cls.of(folder, rows)

  @property
  def figures(self) -> dict[str, Callable[[pathlib.Path], None]]:
    """What draws each plot, by the name of its file."""
    rows = self.ladder + self.sweep
    try:
      gpu = hardware.lookup(cli.GPU.value or rows[0]["device"])
    except ValueError:
      gpu = hardware.current()
    counted = rows_lib.read(self.folder / "counters.jsonl")
    moved = functools.partial(bytes_read, counted=counted, gpu=gpu)
    found = {}
    if self.ladder:
      found["ladder.png"] = functools.partial(plots.ladder, self.ladder, gpu)
      found["roofline.png"] = functools.partial(
        plots.roofline, self.ladder, gpu, moved
      )
    if self.sweep:
      found["sweep.png"] = functools.partial(plots.sweep, self.sweep)
    return found


def bytes_read(
  row: dict[str, Any],
  level: str,
  counted: Sequence[dict[str, Any]],
  gpu: hardware.Gpu,
) -> tuple[float | None, bool]:
  """Bytes that a row's kernel read, and whether they were counted.

  Args:
    row: of the ladder.
    level: "l2" (by SMs) or "dram".
    counted: rows of experiments.counters; one of the same kernel, problem and
      config goes before the model, which knows of L2 alone, and there of rungs
      whose operands pass through shared memory.
    gpu: that the model is of.
  """
  same = {f: row[f] for f in (*rows_lib.PROBLEM_FIELDS, "config")}
  if counter := rows_lib.find(counted, **same):
    return counter["measured"].get(f"{level}_read_bytes"), True
  problem = contract.Problem(
    *(row[f] for f in rows_lib.PROBLEM_FIELDS if f != "kernel")
  )
  try:
    [rung] = cli.parse_rungs(row["kernel"], ladder_lib.LADDER)
    config = rung.config_type(**row["config"])
    model = traffic.model(rung, config, problem, gpu)
  except (cli.FlagError, TypeError, ValueError):  # of another version
    return None, False
  known = level == "l2" and model.slabs
  return (model.global_load_bytes if known else None), False


def folders() -> list[pathlib.Path]:
  """Where rows may be: of every device, or where --output_dir says."""
  if cli.OUTPUT_DIR.value:
    return [pathlib.Path(cli.OUTPUT_DIR.value)]
  found = {
    path.parent
    for name in (EXPERIMENT, SWEEP)
    for path in rows_lib.RESULTS.glob(f"*/{name}.jsonl")
  }
  return sorted(found, reverse=True)  # newer GPUs have higher numbers


def from_rows(console: console_lib.Console) -> int:
  """Tables, plots and pages of rows measured before; the exit status."""
  if cli.FROM_ROWS.value:
    path, folder, rows = report.measured_before(EXPERIMENT)
    print_table(console, f"Rows of {path}", rows_lib.latest(rows))
    show(console, [Device.of(folder, rows)])
  else:
    show(console, [Device.read(folder) for folder in folders()])
  return 0


def show(console: console_lib.Console, devices: Sequence[Device]) -> None:
  """Plots and pages, as the flags say.

  Raises:
    cli.FlagError: none of the rows was timed, or a page can't be written.
  """
  devices = [device for device in devices if device.ladder + device.sweep]
  if not devices:
    raise cli.FlagError(
      "no timed rows in"
      f" {cli.FROM_ROWS.value or cli.OUTPUT_DIR.value or rows_lib.RESULTS};"
      " measure on a GPU first"
    )
  if cli.PLOT.value:
    for device in devices:
      cli.check_folder(device.folder)
      report.draw(console, device.folder, device.figures)
  if cli.UPDATE_README.value:
    update_readme(console, devices)
    update_page(console, devices)


def update_readme(
  console: console_lib.Console, devices: Sequence[Device]
) -> None:
  """Writes README's tables: of the ladder's own problems, and published ones.

  Raises:
    cli.FlagError: it has no such markers.
  """
  tabled = own_rows(devices)
  if tabled:
    text = tables.ladder_markdown(list(tabled.values()))
    page = (rows_lib.RESULTS / "ladder.md").resolve()
    root = pathlib.Path(cli.README_FILE.value or report.README).resolve().parent
    if page.is_relative_to(root) and page.exists():
      link = page.relative_to(root).as_posix()
      text += f"\n\nOver sizes, with occupancy and counters: [{link}]({link})."
    first = next(iter(tabled))
    pictures = [first / "ladder.png", first / "roofline.png"]
    report.update_readme(console, EXPERIMENT, text, pictures)
  else:
    sizes = ", ".join(map(str, own_problems()))
    console.line(f"no table of the ladder: none of its rows is of {sizes}")
  report.update_readme(console, "published", tables.published_markdown(), ())


def own_problems() -> tuple[suites.Shape, ...]:
  """The shapes of the tables; others are of the sweep, or somebody's own."""
  return suites.suite("ladder") + suites.suite("large")


def own_rows(
  devices: Iterable[Device],
) -> dict[pathlib.Path, list[dict[str, Any]]]:
  """Rows of the ladder's own problems by folder, of devices that have some."""
  own = own_problems()
  return {
    device.folder: rows
    for device in devices
    if (rows := [x for x in device.ladder if (x["m"], x["n"], x["k"]) in own])
  }


def update_page(
  console: console_lib.Console, devices: Sequence[Device]
) -> None:
  """Writes the sweep's tables into the page beside the results.

  Raises:
    cli.FlagError: there is no such page, or it has no markers.
  """
  page = rows_lib.RESULTS / "ladder.md"
  parts = []
  for device in devices:
    if not device.sweep:
      continue
    parts += [f"### {device.sweep[0]['device']}"]
    for picture in sorted(device.folder.glob("*.png")):
      if picture.name in device.figures and picture.is_relative_to(page.parent):
        link = picture.relative_to(page.parent).as_posix()
        parts.append(f"![{picture.stem}]({link})")
    parts.append(tables.sweep_markdown(device.sweep))
  if not parts:
    console.line("no tables over sizes: there are no rows of --sweep")
    return
  try:
    changed = tables.update_file(page, SWEEP, "\n\n".join(parts))
  except (OSError, ValueError) as error:
    raise cli.FlagError(f"--update_readme: {error}") from None
  console.line(f"{'rewrote' if changed else 'nothing new for'} {page}")
