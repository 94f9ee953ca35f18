"""Measures many configs of many problems: rows for `experiments.fit`.

  python tools/tuning_rows.py --output=rows.jsonl --run=choice-12 \\
      --unseen=101:60
  python tools/tuning_rows.py --output=rows.jsonl --run=ragged-13 \\
      --groups=4096x2048x32x64xrandom:dw,4096x14336x8x1024xeven:forward
  python tools/tuning_rows.py --output=rows.jsonl --run=dense-48 \\
      --cases=4096x2048x2560:NT:none:float32,8x192x196x256:NT

For each problem the configs that the cost model ranks first and some of those
after them, drawn at random, are compiled and timed in turns (CUPTI, cold L2),
and so is XLA's product of dense ones. The first ones are checked against
float64. Some processes share the work, since Python is what takes the time:
each compiles its problems; then one at a time uses the GPU.

Groups are K x N x groups x rows a group x distribution (`group_sizes`), then
the pass: forward, dx or dw. Cases are M x N x K, or batch x M x N x K, then,
as far as they are not NN, none and bfloat16: layout, epilogue, result's dtype.

Exit status: 0; 1 if a process failed; 2 for a command that can't be carried
out; 130 after Ctrl-C.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import os
from pathlib import Path
import random
import re
import subprocess
import sys
import time
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from absl import flags  # noqa: E402
import numpy as np  # noqa: E402

from experiments.harness import (  # noqa: E402
  cli,
  dense_cases,
  dense_unseen,
  group_sizes,
  provenance,
)
from pallas_gemm import autotuning, measure, tuning  # noqa: E402
from pallas_gemm.kernels.sm90 import legal  # noqa: E402
from pallas_gemm.kernels.sm90.config import Config  # noqa: E402
from pallas_gemm.kernels.sm90.plan import Plan  # noqa: E402
from pallas_gemm.problem import Problem  # noqa: E402
from pallas_gemm.tuning import cache, trial  # noqa: E402

_OUTPUT = flags.DEFINE_string("output", None, "Rows are added.", required=True)
_RUN = flags.DEFINE_string("run", None, "Name of the run.", required=True)
_UNSEEN = flags.DEFINE_list(
  "unseen", [], "SEED:COUNT of random dense problems (dense_unseen)."
)
_SUITE = flags.DEFINE_list("suite", [], "Suites of experiments.dense.")
_CASES = flags.DEFINE_list("cases", [], "Dense products, see above.")
_GROUPS = flags.DEFINE_list("groups", [], "Grouped products, see above.")
_CONFIGS = flags.DEFINE_list(
  "configs", [], "Files of rows whose configs are measured of each problem."
)
_TOP = flags.DEFINE_integer("top", 8, "Configs that the model ranks first.")
_MORE = flags.DEFINE_integer("more", 2, "Configs of the 40 after them.")
_XLA = flags.DEFINE_bool("xla", True, "Whether XLA's product is timed.")
_CHECKED = flags.DEFINE_integer(
  "checked", 2, "Configs of a problem whose results are compared with float64."
)
_PROCESSES = flags.DEFINE_integer(
  "processes", 8, "How many share the work.", lower_bound=1
)
_SECONDS = flags.DEFINE_integer("seconds", 540, "No problem is compiled later.")
_SHARE = flags.DEFINE_integer(
  "share", None, "Which process this is.", module_name=cli.INTERNAL
)
cli.not_empty("output")
_AFTER = 40
_EPILOGUES = {"none", "bias", "residual", *dense_cases.ACTIVATIONS}


@dataclasses.dataclass(frozen=True)
class Work:
  """A problem to be measured.

  Attributes:
    case: what is run.
    sizes: of groups, how many rows each has, by a name of `group_sizes`.
  """

  case: trial.Case
  sizes: str | None = None

  @property
  def rows(self) -> np.ndarray | None:
    """Rows of each group."""
    groups = self.case.problem.groups
    if groups is None:
      return None
    p = self.case.problem
    rows = p.m if p.along == "m" else p.k
    rng = np.random.default_rng(0)
    return group_sizes.DISTRIBUTIONS[self.sizes](rows, groups.count, rng)


def all_work() -> Iterator[Work]:
  """What the flags name."""
  for case in dense_of_flags():
    fn = dense_cases.ours(case, "sm90")
    try:
      yield from map(Work, autotuning.find(fn, **case.operands()))
    except (ValueError, NotImplementedError) as error:
      print(f"nothing for the kernel: {case}: {error}")
  yield from map(_groups, _GROUPS.value)


def dense_of_flags() -> list[dense_cases.Case]:
  """The dense products that the flags name.

  Raises:
    cli.FlagError: an item can't be read.
  """
  cases = list(map(_case, _CASES.value))
  for name in _SUITE.value:
    try:
      cases += dense_cases.suite(name)
    except ValueError as error:
      raise cli.FlagError(f"--suite: {error}") from None
  for text in _UNSEEN.value:
    if not re.fullmatch(r"\d+:\d+", text):
      raise cli.FlagError(f"--unseen: want SEED:COUNT, got {text!r}")
    seed, count = map(int, text.split(":"))
    cases += dense_unseen.draw(seed, count, "bfloat16")
  return cases


def _case(text: str) -> dense_cases.Case:
  """What an item of --cases names.

  Raises:
    cli.FlagError: it can't be read.
  """
  found = re.fullmatch(
    r"((?:[1-9]\d*x){2,3}[1-9]\d*)(?::([NT]{2})(?::([^:]+)(?::([^:]+))?)?)?",
    text,
  )
  sizes, *how = found.groups() if found else ("", None, None, None)
  names = "layout", "epilogue", "out_dtype"
  fields = {name: x for name, x in zip(names, how) if x is not None}
  if (
    not found
    or not {*fields.get("epilogue", "none").split("+")} <= _EPILOGUES
    or fields.get("out_dtype", "bfloat16") not in cli.DTYPES
  ):
    raise cli.FlagError(
      "--cases: want [BATCHx]MxNxK[:LAYOUT[:EPILOGUE[:DTYPE]]], as in"
      f" 8x192x196x256:NT:bias+gelu:float32, got {text!r}"
    )
  *batch, m, n, k = map(int, sizes.split("x"))
  if batch:
    fields["batch"] = batch[0]
  return dense_cases.Case(suite="cases", m=m, n=n, k=k, **fields)


def _groups(text: str) -> Work:
  """What an item of --groups names.

  Raises:
    cli.FlagError: it can't be read.
  """
  found = re.fullmatch(
    r"((?:[1-9]\d*x){4})([a-z_]+)(?::(forward|dx|dw))?", text
  )
  if not found or found[2] not in group_sizes.DISTRIBUTIONS:
    raise cli.FlagError(
      "--groups: want KxNxGROUPSxROWSxDISTRIBUTION[:forward|dx|dw], of"
      f" {', '.join(group_sizes.DISTRIBUTIONS)}, got {text!r}"
    )
  k, n, groups, rows = map(int, found[1].split("x")[:4])
  problem = _grouped(k, n, groups, rows * groups, found[3] or "forward")
  return Work(trial.Case(problem), found[2])


def _grouped(k: int, n: int, groups: int, rows: int, pass_: str) -> Problem:
  common = {"dtype": "bfloat16", "out_dtype": "bfloat16", "groups": groups}
  sizes = {
    "forward": {"m": rows, "n": n, "k": k, "ragged": "m"},
    "dx": {"m": rows, "n": k, "k": n, "ragged": "m", "transpose_b": True},
    "dw": {"m": k, "n": n, "k": rows, "ragged": "k", "transpose_a": True},
  }
  return Problem.flat(**common, **sizes[pass_])


def configs_of(problem: Problem) -> list[Config]:
  """What is measured: the model's first, some after them, and given ones."""

  def is_legal(config: Config) -> bool:
    return legal.reason(Plan.of(problem, config)) is None

  candidates = tuning.model_of(problem).candidates(problem)
  ranked = filter(is_legal, dict.fromkeys(candidates))
  found = list(itertools.islice(ranked, _TOP.value + _AFTER))
  rest = found[_TOP.value :]
  rng = random.Random(cache.key_of(problem))
  found = found[: _TOP.value] + rng.sample(rest, min(_MORE.value, len(rest)))
  for path in _CONFIGS.value:
    for line in Path(path).read_text().splitlines():
      found.append(Config(**json.loads(line)["config"]))
  return list(filter(is_legal, dict.fromkeys(found)))


@contextlib.contextmanager
def alone(path: Path):
  """Context: no other process uses the GPU."""
  with path.open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def prepared(work: Work) -> dict[Any, Callable[..., Any]]:
  """Of each config that works, what computes the problem; of XLA, too."""
  problem = work.case.problem
  configs = configs_of(problem)
  attempt = trial.Trial(work.case, work.rows)
  with futures.ThreadPoolExecutor(3) as pool:
    compiled = {
      config: pool.submit(trial.compiled, work.case, config, attempt.operands)
      for config in configs
    }
  found: dict[Any, Callable[..., Any]] = {}
  for config, future in compiled.items():
    try:
      function = future.result()
      results = attempt.call(function)()
      reason = None
      if len(found) < _CHECKED.value:
        reason = attempt.error(results)
    except Exception as error:  # pylint: disable=broad-exception-caught
      reason = f"{type(error).__name__}: {str(error)[:200]}"
    if reason is None:
      found[config] = function
    else:
      print(f"FAILED {autotuning.describe(problem)} {config}: {reason}")
  if _XLA.value and problem.groups is None:
    found["xla"] = autotuning.compiled_xla(work.case, attempt.operands)
  return found


def measured(work: Work, functions: dict[Any, Callable[..., Any]]):
  """A row for each config of a problem."""
  operands = trial.operands(work.case.problem, work.rows)
  calls = [functools.partial(call, **operands) for call in functions.values()]
  times = dict(zip(functions, measure.seconds(calls)))
  xla = times.pop("xla", None)
  for config, seconds in sorted(times.items(), key=lambda x: x[1]):
    yield row(work, config, seconds, xla)


def row(work: Work, config: Config, seconds: float, xla: float | None):
  """What is written of a config."""
  fields = cache.short_row(work.case.problem)
  dtype = fields.pop("dtype")
  if fields["out_dtype"] == dtype:
    del fields["out_dtype"]
  if dtype != "bfloat16":
    fields["dtype"] = dtype
  found = {"run": _RUN.value, "problem": fields}
  if work.sizes:
    found["group_sizes"] = work.sizes
  entry = cache.to_json(cache.Entry(config))
  found |= {"config": entry["config"], "us": round(1e6 * seconds, 2)}
  if xla is not None:
    found["xla_us"] = round(1e6 * xla, 2)
  where = provenance.versions()
  found |= {name: where[name] for name in ("commit", "device", "jax")}
  return found | {"utc": provenance.utc()}


def work_alone(share: int) -> None:
  """What one of the processes does: first all that takes the host's time.

  Nothing is timed until every process is done with that.
  """
  start, output = time.monotonic(), Path(_OUTPUT.value)
  mine = itertools.islice(all_work(), share, None, _PROCESSES.value)
  ready = []
  for work in mine:
    if time.monotonic() - start > _SECONDS.value:
      print("out of time:", autotuning.describe(work.case.problem))
      continue
    ready.append((work, prepared(work)))
  parts = parts_of(output)
  ready_of(parts[share]).touch()
  while not all(ready_of(part).exists() for part in parts):
    time.sleep(0.5)
  with parts[share].open("w") as file:
    for work, functions in ready:
      with alone(output.with_suffix(".lock")):
        for found in measured(work, functions):
          file.write(json.dumps(found, separators=(",", ":")) + "\n")
      file.flush()


def parts_of(output: Path) -> list[Path]:
  """The file of rows of each process."""
  return [Path(f"{output}.{i}") for i in range(_PROCESSES.value)]


def ready_of(part: Path) -> Path:
  """The file that is there once a process has nothing left to compile."""
  return Path(f"{part}.ready")


def check() -> None:
  """Looks whether the flags can be carried out.

  Raises:
    cli.FlagError: they can't.
  """
  if not dense_of_flags() and not [*map(_groups, _GROUPS.value)]:
    raise cli.FlagError(
      "nothing to measure; want --unseen, --suite, --cases or --groups"
    )
  for path in _CONFIGS.value:
    if not Path(path).is_file():
      raise cli.FlagError(f"--configs: there is no file {path}")
  cli.check_file("output", Path(_OUTPUT.value))


def main(argv: Sequence[str]) -> int:
  """Starts the processes and joins their rows; returns the exit status."""
  del argv
  if _SHARE.value is not None:
    work_alone(_SHARE.value)
    return 0
  check()
  # Several processes share the memory of one GPU.
  environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  output = Path(_OUTPUT.value)
  parts = parts_of(output)
  ready = [ready_of(part) for part in parts]
  # What a run that was interrupted left.
  for path in (*output.parent.glob(f"{output.name}.*.ready"), *parts):
    path.unlink(missing_ok=True)

  def run(share: int) -> int:
    command = [sys.executable, __file__, *sys.argv[1:], f"--share={share}"]
    code = subprocess.run(command, env=environment, check=False).returncode
    ready[share].touch()  # the others do not wait for one that died
    return code

  with futures.ThreadPoolExecutor(len(parts)) as pool:
    codes = list(pool.map(run, range(len(parts))))
  with output.open("a") as file:
    for part in filter(Path.exists, parts):
      file.write(part.read_text())
      part.unlink()
  for path in ready:
    path.unlink()
  if any(codes):
    print(f"processes ended with {codes}", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  cli.run(main)
