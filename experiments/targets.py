"""Compiles the ladder's kernels for each kind of GPU; needs none.

  python -m experiments.targets                          every rung and target
  python -m experiments.targets --targets=89 --kernels=7

A target is what ptxas compiles for: sm_75 is a T4's, sm_120a an RTX 5090's. Of
each rung's default config at 4096^3 a line and a row say what a thread and a
block take, and how much of it an SM of the target's GPU holds; or why the GPU
can't run the rung. Rows go to experiments/results/targets.jsonl, where they
take the place of those of the same rung, target and version of JAX.

Exit status: 0; 1 if a kernel does not compile, spills, or loses performance by
ptxas's word; 2 for a command that can't be carried out.
"""

from collections.abc import Sequence
import json
import pathlib
from typing import Any

from absl import flags
import jax

from experiments.harness import cli, compile_process, compiled, rows
from pallas_gemm import hardware, ladder
from pallas_gemm.ladder import contract

# A GPU of each.
TARGETS = {
  "75": "Tesla T4",
  "80": "NVIDIA A100-SXM4-80GB",
  "86": "NVIDIA GeForce RTX 3090",
  "89": "NVIDIA GeForce RTX 4090",
  "90a": "NVIDIA H200",
  "100a": "NVIDIA B200",
  "103a": "NVIDIA GB300",
  "120a": "NVIDIA GeForce RTX 5090",
  "121a": "NVIDIA GB10",
}
FILE = "targets.jsonl"
SIZE = 4096

for _name in ("kernels", "output_dir"):
  flags.declare_key_flag(_name)
_TARGETS = flags.DEFINE_list(
  "targets", [*TARGETS], f"Which targets, of {', '.join(TARGETS)}."
)


def every_rung() -> tuple[contract.Rung, ...]:
  """The ladder's, variants, and those of GPUs that have no rows."""
  return ladder.with_variants(ladder.LADDER + ladder.BLACKWELL)


def why_not(rung: contract.Rung, target: str) -> str | None:
  """None, or why the target's GPU does not run the rung's default config."""
  with hardware.assume(TARGETS[target]):
    problem = contract.Problem(SIZE, SIZE, SIZE, rung.dtypes[0])
    return rung.is_legal(rung.default_config(problem), problem)


def kernel(rung: contract.Rung, target: str) -> compiled.Compiled:
  """The rung's kernel for a target.

  Raises:
    RuntimeError: it does not compile.
  """
  problem = contract.Problem(SIZE, SIZE, SIZE, rung.dtypes[0])
  gpu = hardware.lookup(TARGETS[target])
  return compiled.compile_rung(rung, problem, gpu=gpu)


def row(rung: contract.Rung, target: str) -> dict[str, Any]:
  """What a rung takes on a target's GPU, or why it does not run there."""
  found: dict[str, Any] = {
    "rung": rung.label,
    "target": target,
    "gpu": TARGETS[target],
    "jax": jax.__version__,
  }
  if reason := why_not(rung, target):
    return found | {"refused": reason}
  one = kernel(rung, target)
  facts = compiled.facts(one, hardware.lookup(TARGETS[target]))
  lost = {"stack_bytes": one.stack_bytes, "warnings": [*one.warnings]}
  return found | {"threads": one.threads} | facts | lost


def is_clean(found: dict[str, Any]) -> bool:
  """Whether nothing spills and ptxas warns of nothing."""
  return not (
    found.get("spill_bytes") or found.get("stack_bytes") or found["warnings"]
  )


def line(found: dict[str, Any]) -> str:
  """A row in words."""
  if reason := found.get("refused"):
    return f"refused: {reason}"
  return "  ".join(
    (
      f"{found['registers']:>3} registers",
      f"{found['spill_bytes'] + found['stack_bytes']} bytes spilled",
      f"{found['shared_bytes'] / 1024:.1f} KiB",
      f"{found['warps_per_sm']} warps an SM",
      *found["warnings"],
    )
  )


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  if unknown := [x for x in _TARGETS.value if x not in TARGETS]:
    raise cli.FlagError(
      f"--targets: want some of {', '.join(TARGETS)}, got {', '.join(unknown)}"
    )
  if reason := compile_process.unavailable():
    raise cli.FlagError(reason)
  every = ladder.LADDER + ladder.BLACKWELL
  rungs = cli.parse_rungs(cli.KERNELS.value, every)
  folder = pathlib.Path(cli.OUTPUT_DIR.value or rows.RESULTS)
  cli.check_folder(folder)
  new, failed = [], []
  for target in _TARGETS.value:
    for rung in rungs:
      name = f"sm_{target:<5} {rung.label:>3} {rung.name:<26}"
      try:
        new.append(found := row(rung, target))
      except RuntimeError as error:
        failed.append(name)
        cli.say(f"{name} FAILED: {str(error).splitlines()[-1]}")
        continue
      cli.say(f"{name} {line(found)}")
      if "refused" not in found and not is_clean(found):
        failed.append(name)
  _write(folder / FILE, new)
  if failed:
    cli.say(f"FAILED: {'; '.join(' '.join(x.split()) for x in failed)}")
  return 1 if failed else 0


def _write(path: pathlib.Path, new: list[dict[str, Any]]) -> None:
  """Adds rows to a file, in the order of JAX, target and rung."""
  labels = [rung.label for rung in every_rung()]

  def key(found: dict[str, Any]) -> tuple[Any, ...]:
    at = [*TARGETS].index(found["target"]), labels.index(found["rung"])
    return found["jax"], *at

  merged = {key(found): found for found in [*rows.read(path), *new]}
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = [json.dumps(merged[x]) + "\n" for x in sorted(merged)]
  path.write_text("".join(lines))


if __name__ == "__main__":
  cli.run(main)
