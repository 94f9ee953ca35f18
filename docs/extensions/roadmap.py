"""The ladder on one screen, and the box on top of a rung's page."""

import pathlib

from docs.extensions import lookup, results
from experiments.harness import tables
from pallas_gemm import ladder

# What holds each rung back, as the next page's counters show it.
BOUND_BY = {
  1: "L1: a line for each lane's load",
  2: "L1: two requests for each FMA",
  3: "shared memory: two reads for each FMA",
  4: "shared memory: five reads for eight FMAs",
  5: "issue slots: loads and addresses",
  6: "bank conflicts in shared memory",
  7: "waits for the slab",
  8: "the FMA units",
  9: "latency: loads and wgmma alternate",
  10: "beginning and end of each tile",
  11: "power, and the tensor cores",
  12: "power, and the tensor cores",
}


def title(number: int) -> str:
  """The name of a rung in words: "Shared memory"."""
  words = ladder.find(number).name.replace("_", " ").capitalize()
  return words.replace("1d", "1D").replace("2d", "2D")


def table(text: str) -> str:
  """All rungs; links from "docs" (a page there), "rungs" or "root".

  Raises:
    UnknownError: no such folder.
  """
  folders = {"root": "docs/rungs/", "docs": "rungs/", "rungs": ""}
  folder = lookup.pick(folders, text.strip() or "root", "folder")
  header = ["#", "rung", "what it adds", "bound by", "TFLOP/s", "x before"]
  cells = []
  for one in ladder.LADDER:
    row = results.timed(one, "h200")
    page = f"{folder}{pathlib.Path(one.module.rsplit('.k', 1)[1])}.md"
    cells.append(
      [
        f"[{one.number}]({page})",
        title(one.number),
        one.idea,
        BOUND_BY[one.number],
        tables.TFLOPS(row),
        results.relative(row, "x before") if one.number > 1 else "",
      ]
    )
  return tables.markdown(header, cells, [header[0], *header[4:]])


def box(text: str) -> str:
  """What a rung gains, what binds it, and the lines that do it.

  "6: one part | another": each part is of a line in the rung's file.

  Raises:
    UnknownError: a part is in no line, or there is no such rung.
  """
  label, _, parts = text.partition(":")
  one = results.rung(label.strip())
  number = one.number
  row = results.timed(one, "h200")
  gain = f"{tables.TFLOPS(row)} TFLOP/s on an H200"
  binds = BOUND_BY[number]
  if number > 1:
    before = results.timed(ladder.find(number - 1), "h200")
    gain = (
      f"{tables.TFLOPS(before)} → {gain}, {results.relative(row, 'x before')}"
    )
    binds = f"{BOUND_BY[number - 1]} → {binds}"
  lines = [f"> **{gain}.** Bound by: {binds}."]
  shown = _lines(one.module, [p.strip() for p in parts.split("|") if p.strip()])
  if shown:
    lines += [">", "> ```python", *(f"> {line}" for line in shown), "> ```"]
  return "\n".join(lines)


def _lines(module: str, parts: list[str]) -> list[str]:
  path = lookup.ROOT / (module.replace(".", "/") + ".py")
  source = path.read_text().splitlines()
  found = []
  for part in parts:
    mine = [line for line in source if part in line]
    if not mine:
      raise lookup.UnknownError(f"no line of {path.name} has {part!r}")
    found.append(mine[0].strip())
  return found
