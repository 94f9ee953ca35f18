"""Runs rungs and ops under NVIDIA's compute-sanitizer, at a small odd shape.

  python -m experiments.sanitize        memcheck, all rungs and their variants
  python -m experiments.sanitize --kernels=8-12 --tool=racecheck
  python -m experiments.sanitize --ops=all            the ops' Hopper kernels

Each rung computes 0.5 * A @ B - C once in a process of its own, each op its
plain product; ragged_dot also its derivatives, with empty groups and with rows
that no group has. Rows go to experiments/results/<device>/sanitize.jsonl, one a
kernel: the tool's own error count, and whether the result passed the float64
check under it. racecheck does not follow TMA and mbarriers: what it says of
rungs 8-12 and of the ops is kept in the row and is no verdict.

Exit status: 0; 1 if a kernel has memcheck errors, a wrong result or did not
run; 2 for a command that can't be carried out; 130 after Ctrl-C.
"""

from collections.abc import Callable, Sequence
import functools
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

from absl import flags
import jax

from experiments.harness import case as case_lib
from experiments.harness import (
  cli,
  dense_cases,
  ladder_cases,
  provenance,
  ragged_cases,
  suites,
)
from experiments.harness import rows as rows_lib
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract

EXPERIMENT = "sanitize"
FACTORS = {"alpha": 0.5, "beta": -1.0}
DEFAULT_SHAPE = suites.Shape(129, 257, 65)
_SUMMARY = re.compile(
  r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards?)"
)

for _name in ("kernels", "shapes", "output_dir", "seed"):
  flags.declare_key_flag(_name)
_OPS = flags.DEFINE_list(
  "ops", [], "Ops instead of rungs, separated by commas, or all."
)
_TOOL = flags.DEFINE_enum(
  "tool",
  "memcheck",
  ["memcheck", "racecheck", "initcheck", "synccheck"],
  "compute-sanitizer's tool.",
)
_TIMEOUT = flags.DEFINE_integer(
  "sanitize_timeout_s", 300, "Longest time for one kernel.", lower_bound=1
)
_UNDER = flags.DEFINE_bool(
  "under_sanitizer",
  False,
  "Run the one rung, or op, and exit.",
  module_name=cli.INTERNAL,
)


class Subject(NamedTuple):
  """What the sanitizer looks at.

  Attributes:
    name: of the rung or the op.
    flag: what names it to this program.
    cases: what it computes, by shape.
    fields: what else its row says.
  """

  name: str
  flag: str
  cases: Callable[[suites.Shape], Sequence[case_lib.Case]]
  fields: dict[str, Any]


def _rung(rung: contract.Rung, shape: suites.Shape) -> list[case_lib.Case]:
  problem = contract.Problem(*shape, rung.dtypes[0], **FACTORS)
  return [ladder_cases.rung(rung, problem)]


def _matmul(shape: suites.Shape) -> list[case_lib.Case]:
  return [dense_cases.Case(suite=EXPERIMENT, **shape._asdict())]


def _ragged_dot(shape: suites.Shape) -> list[case_lib.Case]:
  case = functools.partial(
    ragged_cases.Case, suite=EXPERIMENT, groups=4, **shape._asdict()
  )
  passes, sizes = ("forward", "dx", "dw"), ("half_empty", "padded")
  return [
    case(pass_=pass_, sizes=how)
    for pass_, how in itertools.product(passes, sizes)
  ]


OPS = {"matmul": _matmul, "ragged_dot": _ragged_dot}


def passes(case: case_lib.Case) -> bool:
  """Runs a case once on the Hopper kernel; whether the result is right."""
  [(fn, _)] = next(iter(case.arms("sm90").values()))()
  operands = case.draw(cli.SEED.value)
  results = jax.jit(fn)(**operands)
  return bool(case.check(results, operands, cli.SEED.value).passed)


def subjects() -> list[Subject]:
  """What the flags name.

  Raises:
    cli.FlagError: there is no such rung, variant or op.
  """
  names = list(OPS) if _OPS.value == ["all"] else _OPS.value
  if unknown := [name for name in names if name not in OPS]:
    raise cli.FlagError(
      f"--ops: no op {unknown[0]!r}; there are {', '.join(OPS)}"
    )
  if names:
    fields = {"dtype": "bfloat16"}
    return [Subject(x, f"--ops={x}", OPS[x], fields) for x in names]
  return [
    Subject(
      x.name,
      f"--kernels={x.label}",
      functools.partial(_rung, x),
      {"number": x.number, "dtype": x.dtypes[0], **FACTORS},
    )
    for x in cli.parse_rungs(cli.KERNELS.value, ladder_lib.LADDER)
  ]


def errors_in(output: str) -> int | None:
  """The error count that the tool printed last, or None."""
  found = _SUMMARY.findall(output)
  return int(next(filter(None, found[-1]))) if found else None


def examine(subject: Subject, shape: suites.Shape) -> dict[str, Any]:
  """Runs one kernel under the tool; the row's own fields."""
  child = [sys.executable, "-m", "experiments.sanitize", "--under_sanitizer"]
  child += [subject.flag, f"--seed={cli.SEED.value}", f"--shapes={shape}"]
  # Without preallocation each array is an allocation of its own, with its
  # own bounds.
  env = os.environ | {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  }
  try:
    done = subprocess.run(
      ["compute-sanitizer", "--tool", _TOOL.value, *child],
      capture_output=True,
      text=True,
      timeout=_TIMEOUT.value,
      env=env,
    )
    passed, output = done.returncode == 0, done.stdout + done.stderr
  except subprocess.TimeoutExpired:
    passed, output = False, f"========= no end after {_TIMEOUT.value} s"
  said = [x for x in output.splitlines() if x.startswith("=========")]
  return {
    "experiment": EXPERIMENT,
    "tool": _TOOL.value,
    "kernel": subject.name,
    **shape._asdict(),
    **subject.fields,
    "errors": errors_in(output),
    "passed": passed,
    "said": said[:12],
  }


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  found = subjects()
  shapes = cli.parse_shapes(cli.SHAPES.value) or (DEFAULT_SHAPE,)
  if _UNDER.value:
    return 0 if all(map(passes, found[0].cases(shapes[0]))) else 1
  if shutil.which("compute-sanitizer") is None:
    raise cli.FlagError("compute-sanitizer is not on PATH")
  facts = provenance.versions() | {"utc": provenance.utc()}
  path = rows_lib.results_file(
    facts["device"], EXPERIMENT, cli.OUTPUT_DIR.value
  )
  bad = 0
  for subject, shape in itertools.product(found, shapes):
    row = examine(subject, shape) | facts
    rows_lib.append(path, row)
    # Of the other tools the count is no verdict.
    most = 0 if _TOOL.value == "memcheck" else math.inf
    errors, passed = row["errors"], row["passed"]
    bad += not passed or errors is None or errors > most
    print(
      f"{subject.name:18} {_TOOL.value} {shape}: {errors} errors,"
      f" result {'PASSED' if passed else 'FAILED'}",
      flush=True,
    )
    if errors is None:
      print("\n".join(row["said"]), flush=True)
  print(f"rows: {path}")
  return 1 if bad else 0


if __name__ == "__main__":
  cli.run(main)
