"""The ladder's pages, from rows: README's tables, the page of sizes, plots."""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import pathlib

from experiments.harness import (
  cli,
  ladder_plots,
  ladder_tables,
  report,
  shapes,
  tables,
)
from experiments.harness import console as console_lib
from experiments.harness import rows as rows_lib
from experiments.harness.tables import RowDict
from pallas_gemm import hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract, traffic

EXPERIMENT = "ladder"
SWEEP = "sweep"


def print_table(
  console: console_lib.Console, title: str, rows: Sequence[RowDict]
) -> None:
  """Prints the rungs of one problem, then of the next."""
  header, cells = ladder_tables.summary(rows)
  console.line()
  console.table(title, header, cells, tables.numeric(header))


@dataclasses.dataclass(frozen=True)
class Device:
  """A folder of results: the timed rows of its newest commit, and its plots."""

  folder: pathlib.Path
  ladder: list[RowDict]
  sweep: list[RowDict]

  @classmethod
  def of(cls, folder: pathlib.Path, rows: Sequence[RowDict]) -> "Device":
    """Of rows of both experiments."""
    swept = [row for row in rows if row["experiment"] == SWEEP]
    others = [row for row in rows if row["experiment"] != SWEEP]
    return cls(
      folder,
      ladder_tables.newest(others),
      ladder_tables.newest(swept, failed=True),
    )

  @classmethod
  def read(cls, folder: pathlib.Path) -> "Device":
    """Of the files in a folder.

    Raises:
      cli.FlagError: one holds something else.
    """
    rows = []
    for name in (EXPERIMENT, SWEEP):
      path = folder / f"{name}.jsonl"
      try:
        found = rows_lib.read(path)
        report.check_rows(path, found, name)
        for row in found:
          rows_lib.validate(row)
      except (OSError, ValueError) as error:
        raise cli.FlagError(f"--update_readme: {path}: {error}") from None
      rows += found
    return cls.of(folder, rows)

  @property
  def figures(self) -> dict[str, Callable[[pathlib.Path], None]]:
    """What draws each plot, by the name of its file."""
    try:
      name = cli.GPU.value or (self.ladder + self.sweep)[0]["device"]
      gpu = hardware.lookup(name)
    except ValueError:
      gpu = hardware.current()
    counted = rows_lib.read(self.folder / "counters.jsonl")
    moved = functools.partial(bytes_read, counted=counted, gpu=gpu)
    draws = {
      "ladder.png": (ladder_plots.ladder, self.ladder, gpu),
      "roofline.png": (ladder_plots.roofline, self.ladder, gpu, moved),
      "sweep.png": (ladder_plots.sweep, self.sweep),
    }
    return {
      name: functools.partial(draw, rows, *more)
      for name, (draw, rows, *more) in draws.items()
      if rows
    }


def bytes_read(
  row: RowDict, level: str, counted: Sequence[RowDict], gpu: hardware.Gpu
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
  problem = contract.Problem(*ladder_tables.problem(row))
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
  return _folders_of_devices()


def _folders_of_devices() -> list[pathlib.Path]:
  found = {
    path.parent
    for name in (EXPERIMENT, SWEEP)
    for path in rows_lib.RESULTS.glob(f"*/{name}.jsonl")
  }
  return sorted(found, reverse=True)  # newer GPUs have higher numbers


def from_rows(console: console_lib.Console) -> int:
  """Tables, plots and pages of rows measured before; the exit status."""
  if not cli.FROM_ROWS.value:
    show(console, [Device.read(folder) for folder in folders()])
    return 0
  path, folder, rows = report.measured_before(EXPERIMENT, SWEEP)
  print_table(console, f"Rows of {path}", rows_lib.latest(rows))
  paged = []
  if cli.UPDATE_README.value and report.is_kept(path, EXPERIMENT, SWEEP):
    paged = [Device.read(place) for place in _folders_of_devices()]
  show(console, [Device.of(folder, rows)], paged)
  return 0


def show(
  console: console_lib.Console,
  devices: Sequence[Device],
  paged: Sequence[Device] = (),
) -> None:
  """Plots and pages, as the flags say.

  Args:
    console: where lines go.
    devices: what is drawn.
    paged: what the pages are of, if that is not the same.

  Raises:
    cli.FlagError: none of the rows was timed, or a page can't be written.
  """
  devices = [device for device in devices if device.ladder + device.sweep]
  if not devices:
    place = cli.FROM_ROWS.value or cli.OUTPUT_DIR.value or rows_lib.RESULTS
    raise cli.FlagError(f"no timed rows in {place}; measure on a GPU first")
  if cli.PLOT.value:
    for device in devices:
      cli.check_folder(device.folder)
      report.draw(console, device.folder, device.figures)
  if cli.UPDATE_README.value:
    _update_pages(console, paged or devices)


def _update_pages(
  console: console_lib.Console, devices: Sequence[Device]
) -> None:
  """Writes the tables of own problems, published ladders, sizes, and README's.

  Raises:
    cli.FlagError: no page has such markers.
  """
  if own := own_rows(devices):
    text = ladder_tables.markdown(list(own.values()))
    names = "ladder.png", "roofline.png"
    pictures = [folder / name for folder in own for name in names]
    report.update_page(console, EXPERIMENT, text, pictures)
  else:
    sizes = ", ".join(map(str, own_problems()))
    console.line(f"no table of the ladder: none of its rows is of {sizes}")
  report.update_page(console, "published", ladder_tables.published_markdown())
  if swept := [device for device in devices if device.sweep]:
    text = "\n\n".join(
      f"### {device.sweep[0]['device']}\n\n"
      + ladder_tables.sweep_markdown(device.sweep)
      for device in swept
    )
    pictures = [device.folder / "sweep.png" for device in swept]
    report.update_page(console, SWEEP, text, pictures)
  else:
    console.line("no tables over sizes: there are no rows of --sweep")
  report.update_readme(console)


def own_problems() -> tuple[shapes.Shape, ...]:
  """The shapes of the tables; others are of the sweep, or somebody's own."""
  return shapes.suite("ladder") + shapes.suite("large")


def own_rows(devices: Iterable[Device]) -> dict[pathlib.Path, list[RowDict]]:
  """Rows of the ladder's own problems by folder, of devices that have some."""
  own = own_problems()
  return {
    device.folder: rows
    for device in devices
    if (rows := [x for x in device.ladder if (x["m"], x["n"], x["k"]) in own])
  }
