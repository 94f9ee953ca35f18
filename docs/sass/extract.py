"""Writes excerpts of the rungs' machine code, compiled without a GPU.

  python -m docs.sass.extract              docs/sass/NN_name.txt of every rung
  python -m docs.sass.extract --rungs=6    of one; numbers or labels (8a)

An excerpt is the loop in which the kernel spends its time: of all loops (a
label, and a branch back to it) the one with the largest share of FFMA, HMMA or
HGMMA. Where a warpgroup of its own loads, that warpgroup's loop follows. At the
head of each stands how many instructions of each kind the whole loop has. Of a
loop of more than 40 lines the beginning stands: of a run of one kind the first
line, of address arithmetic the number of instructions.

Needs the extra `aot`, as tests/test_ladder_compile.py does. Exit status: 0; 2
where the compiler is missing or a rung is not known.
"""

import collections
from collections.abc import Sequence
import dataclasses
import pathlib
import re
import sys

from absl import app, flags

from experiments.harness import compile_process
from experiments.harness import compiled as compiled_lib
from pallas_gemm import ladder
from pallas_gemm.ladder import contract

HERE = pathlib.Path(__file__).resolve().parent
SIZE = 4096
_RUNGS = flags.DEFINE_list("rungs", [], "Rungs by number or label; all.")

# Kinds of instruction, in the order in which counts are given. What matches
# none is address arithmetic, moves, predicates and the like: "others".
KINDS = {
  "multiply-adds of 32 lanes": r"FFMA",
  "on tensor cores": r"HG?MMA\.\S+",
  "loads from global memory": r"LDG?\.E\S*",
  "copies to shared memory": r"LDGSTS\S*",
  "stores to global memory": r"STG?\.E\S*",
  "loads from shared memory": r"LDS\S*|LDSM\S*",
  "stores to shared memory": r"STS\S*|STSM\S*",
  "TMA": r"UTMA\S+|UBLKCP\S*",
  "waits and arrivals": r"(LDG)?DEPBAR\S*|BAR\.\S+|SYNCS\.\S+|WARPGROUP\.\S+"
  r"|WARPSYNC\S*",
}
MATH = re.compile(r"FFMA|HG?MMA\.\S+")
LONGEST = 40  # lines of an excerpt
RUN = 2  # of a longer run of one opcode, the first alone is shown

_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")


@dataclasses.dataclass(frozen=True)
class Loop:
  """The instructions from a label to a branch back to it, in order."""

  instructions: tuple[str, ...]

  @property
  def opcodes(self) -> tuple[str, ...]:
    """The instructions without predicates and operands."""
    return tuple(map(opcode, self.instructions))

  def share(self, pattern: re.Pattern[str]) -> float:
    """Part of the instructions whose opcode matches."""
    found = sum(bool(pattern.fullmatch(x)) for x in self.opcodes)
    return found / len(self.instructions)


def opcode(instruction: str) -> str:
  """FFMA of `@P0 FFMA R1, R2, R3, R4`."""
  words = instruction.lstrip("{ ").split()
  return words[1] if words[0].startswith("@") else words[0]


def loops(sass: str) -> list[Loop]:
  """All loops of a disassembly, those inside of others too."""
  instructions: list[str] = []
  labels: dict[str, int] = {}
  found = []
  for line in sass.splitlines():
    if label := _LABEL.match(line):
      labels[label[1]] = len(instructions)
    elif match := _INSTRUCTION.match(line):
      instructions.append(match[1])
      back = _BRANCH.search(match[1])
      if back and back[1] in labels:
        found.append(Loop(tuple(instructions[labels[back[1]] :])))
  return found


def main_loop(sass: str) -> Loop:
  """The loop with the largest share of multiply-adds."""
  return max(loops(sass), key=lambda loop: loop.share(MATH))


def loader_loop(sass: str) -> Loop | None:
  """The smallest loop that starts TMA copies, if it multiplies nothing."""
  load = re.compile(r"UTMALDG\S*")
  with_loads = [loop for loop in loops(sass) if loop.share(load)]
  smallest = min(with_loads, key=lambda x: len(x.instructions), default=None)
  return None if smallest is None or smallest.share(MATH) else smallest


def counted(loop: Loop) -> list[tuple[int, str, str]]:
  """(how many, opcode, its kind), in the order of `KINDS`; others together."""
  rows = []
  left = collections.Counter(loop.opcodes)
  for kind, pattern in KINDS.items():
    named = {x: n for x, n in left.items() if re.fullmatch(pattern, x)}
    for name in sorted(named, key=lambda x: (-named[x], x)):
      rows.append((left.pop(name), name, kind))
  if left:
    others = "addresses, moves, predicates, branches"
    rows.append((left.total(), "others", others))
  return rows


def folded(loop: Loop, longest: int = LONGEST) -> list[str]:
  """The loop's lines, no more than `longest`.

  A longer loop is shortened: of a run of one opcode the first line stands,
  address arithmetic is counted, and the end is left out but for the branch.
  """
  if len(loop.instructions) <= longest:
    return list(loop.instructions)
  lines: list[str] = []
  shown = 0  # instructions that the lines so far stand for
  body = loop.instructions[:-1]
  for name, run in _runs(body):
    new = list(run)
    if name is None:
      new = [f"  ... {_others(len(run))}"]
    elif len(run) > RUN:
      named = sum(opcode(x) == name for x in run)
      rest = f", {_others(len(run) - named)}" if len(run) > named else ""
      new = [run[0], f"  ... {named - 1} more {name}{rest}"]
    if len(lines) + len(new) > longest - 2:
      lines.append(f"  ... {len(body) - shown:,} more instructions")
      break
    lines += new
    shown += len(run)
  return [*lines, loop.instructions[-1]]


def _runs(instructions: Sequence[str]) -> list[tuple[str | None, list[str]]]:
  """Consecutive instructions of one opcode; None are others, of any.

  Others among multiply-adds do not end a run of them.
  """
  runs: list[tuple[str | None, list[str]]] = []
  for instruction in instructions:
    name = opcode(instruction)
    if not any(re.fullmatch(x, name) for x in KINDS.values()):
      name = None
    last = runs[-1][0] if runs else ""
    if last == name or (name is None and last and MATH.fullmatch(last)):
      runs[-1][1].append(instruction)
    else:
      runs.append((name, [instruction]))
  return runs


def _others(count: int) -> str:
  return f"{count} other{'s' * (count > 1)}"


def section(title: str, loop: Loop) -> list[str]:
  """Counts at the head, then the lines."""
  rows = counted(loop)
  wide = max(len(name) for _, name, _ in rows)
  return [
    f"{title}: {len(loop.instructions):,} instructions",
    "",
    *(f"{n:6,}  {name:{wide}}  {kind}".rstrip() for n, name, kind in rows),
    "",
    *folded(loop),
  ]


def excerpt(rung: contract.Rung) -> str:
  """The text of a rung's file."""
  dtype = rung.dtypes[0]
  problem = contract.Problem(SIZE, SIZE, SIZE, dtype)
  kernel = compiled_lib.compile_rung(rung, problem)
  loader = loader_loop(kernel.sass)
  head = f"Rung {rung.label}, {rung.name}, {dtype}: {kernel.registers}"
  title = "Loop of a consumer" if loader else "Main loop"
  head += " registers a thread"
  lines = [head, "", *section(title, main_loop(kernel.sass))]
  if loader:
    lines += ["", *section("Loop of the producer", loader)]
  return "\n".join(lines) + "\n"


def path(rung: contract.Rung) -> pathlib.Path:
  """Where a rung's excerpt lies: 06_vectorized.txt."""
  return HERE / f"{rung.number:02}{rung.variant}_{rung.name}.txt"


def main(argv: Sequence[str]) -> None:
  """Writes the files."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  try:
    rungs = [ladder.find(x) for x in _RUNGS.value] or ladder.with_variants()
    reason = compile_process.unavailable()
  except ValueError as error:
    reason = error
  if reason:
    print(reason, file=sys.stderr)
    sys.exit(2)
  for rung in rungs:
    path(rung).write_text(excerpt(rung))
    print(path(rung).relative_to(HERE.parent.parent))


if __name__ == "__main__":
  app.run(main)
