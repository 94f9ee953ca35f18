"""Runs each rung under NVIDIA's compute-sanitizer, at a small odd shape.

  python -m experiments.sanitize                      memcheck, all rungs
  python -m experiments.sanitize --kernels=8-12 --tool=racecheck

Each rung computes 0.5 * A @ B - C once in a process of its own. Rows go to
experiments/results/<device>/sanitize.jsonl, one a rung: the tool's own error
count, and whether the result passed the float64 check under it. racecheck
does not follow TMA and mbarriers: what it says of rungs 8-12 is kept in the
row and is no verdict.

Exit status: 0; 1 if a rung has memcheck errors, a wrong result or did not
run; 2 for a command that can't be carried out.
"""

from collections.abc import Sequence
import os
import re
import shutil
import subprocess
import sys

from absl import flags
import jax

from experiments.harness import cli, inputs, provenance, suites
from experiments.harness import rows as rows_lib
from pallas_gemm import ladder as ladder_lib
from pallas_gemm import numerics
from pallas_gemm.ladder import contract

EXPERIMENT = "sanitize"
FACTORS = {"alpha": 0.5, "beta": -1.0}
DEFAULT_SHAPE = suites.Shape(129, 257, 65)
_SUMMARY = re.compile(
  r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards?)"
)

for _name in ("kernels", "shapes", "output_dir", "seed"):
  flags.declare_key_flag(_name)
_TOOL = flags.DEFINE_enum(
  "tool",
  "memcheck",
  ["memcheck", "racecheck", "initcheck", "synccheck"],
  "compute-sanitizer's tool.",
)
_TIMEOUT = flags.DEFINE_integer(
  "sanitize_timeout_s", 300, "Longest time for one rung.", lower_bound=1
)
_UNDER = flags.DEFINE_bool(
  "under_sanitizer", False, "Run the one rung of --kernels and exit."
)


def run_once(rung: contract.Rung, shape: suites.Shape) -> int:
  """What the sanitizer looks at: one call, checked; 0 if it passed."""
  problem = contract.Problem(*shape, rung.dtypes[0], **FACTORS)
  a, b, c = inputs.operands(problem, cli.SEED.value)
  out = jax.jit(lambda *x: rung.gemm(*x, **FACTORS))(a, b, c)
  return 0 if numerics.check(out, a, b, c, **FACTORS).passed else 1


def errors_in(output: str) -> int | None:
  """The error count that the tool printed last, or None."""
  found = _SUMMARY.findall(output)
  return int(next(filter(None, found[-1]))) if found else None


def examine(rung: contract.Rung, shape: suites.Shape, tool: str) -> dict:
  """Runs one rung under the tool; the row's own fields."""
  child = [sys.executable, "-m", "experiments.sanitize", "--under_sanitizer"]
  child += [f"--kernels={rung.number}", f"--seed={cli.SEED.value}"]
  child += [f"--shapes={shape.m}x{shape.n}x{shape.k}"]
  # Without preallocation each array is an allocation of its own, with its
  # own bounds.
  env = os.environ | {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  }
  done = subprocess.run(
    ["compute-sanitizer", "--tool", tool, *child],
    capture_output=True,
    text=True,
    timeout=_TIMEOUT.value,
    env=env,
  )
  output = done.stdout + done.stderr
  said = [x for x in output.splitlines() if x.startswith("=========")]
  return {
    "experiment": EXPERIMENT,
    "tool": tool,
    "kernel": rung.name,
    "number": rung.number,
    **{name: getattr(shape, name) for name in ("m", "n", "k")},
    "dtype": rung.dtypes[0],
    **FACTORS,
    "errors": errors_in(output),
    "passed": done.returncode == 0,
    "said": said[:12],
  }


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  rungs = cli.parse_rungs(cli.KERNELS.value, ladder_lib.LADDER)
  shapes = cli.parse_shapes(cli.SHAPES.value) or (DEFAULT_SHAPE,)
  if _UNDER.value:
    return run_once(rungs[0], shapes[0])
  if shutil.which("compute-sanitizer") is None:
    raise cli.FlagError("compute-sanitizer is not on PATH")
  facts = provenance.versions() | {"utc": provenance.utc()}
  path = rows_lib.results_file(
    facts["device"], EXPERIMENT, cli.OUTPUT_DIR.value
  )
  bad = 0
  for rung in rungs:
    for shape in shapes:
      row = examine(rung, shape, _TOOL.value) | facts
      rows_lib.append(path, row)
      clean = row["passed"] and row["errors"] is not None
      if _TOOL.value == "memcheck":
        clean = clean and row["errors"] == 0
      bad += not clean
      print(
        f"{rung.number:2} {rung.name:18} {_TOOL.value}"
        f" {shape.m}x{shape.n}x{shape.k}: {row['errors']} errors,"
        f" result {'PASSED' if row['passed'] else 'FAILED'}",
        flush=True,
      )
  print(f"rows: {path}")
  return 1 if bad else 0


if __name__ == "__main__":
  cli.run(main)
