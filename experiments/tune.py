"""Measures configs of the Hopper kernels; the fastest is remembered.

  python -m experiments.tune --suite=llama_70b --dtype=float16 --top=16
  python -m experiments.tune \\
      --shapes=4096x14336x4096:NN:bias+gelu,8x192x196x256:NT:none:float32
  python -m experiments.tune --groups=4096x14336x8x1024xeven:dw
  python -m experiments.tune --random=101:60 --more=2 --processes=8 \\
      --seconds=540 --output=rows.jsonl --run=choice-12
  python -m experiments.tune --freeze=pallas_gemm/tuning/table/nvidia_h200.jsonl

For each problem the configs that the cost model ranks first, the one that was
remembered so far and those of --more and --configs are compiled, and so is
XLA's product; checked against a float64 product; and timed interleaved (CUPTI
kernel time, cold L2). The fastest goes to the tuning cache, where the ops find
it: the file in the user's cache folder or in $PALLAS_GEMM_CACHE_DIR.
`pallas_gemm.autotune` does the same for the products of any function.

A shape is [BATCHx]MxNxK, then, as far as they are not NN, none and --dtype:
layout (T is transposed: A as [K,M], B as [N,K]), epilogue, and the result's
dtype. An epilogue is "gated", silu(x@w_gate) * (x@w_up), or parts of bias,
residual and an activation. Groups are K x N x groups x rows a group x how rows
are shared out, then the pass: forward, dx, dw or gated.

With --output every config is a row, from which `experiments.fit` fits the cost
model. Rows are added once a problem is measured; --resume leaves out problems
that have rows of that --run.

Several processes share the work, since Python is what takes the time: each
compiles its problems; once all have, one at a time uses the GPU.

On a machine without an NVIDIA GPU the kernel is interpreted, on a small
problem unless told otherwise; nothing is written to the tuning cache then.

Exit status: 0; 1 if a config or a process failed; 2 for a command that can't be
carried out; 130 after Ctrl-C.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import json
import os
from pathlib import Path
import random
import re
import subprocess
import sys
import time
from typing import Any

from absl import flags

from experiments.harness import cli, dense_cases, provenance, ragged_cases
from experiments.harness import rows as rows_lib
from pallas_gemm import autotuning, compat, hardware, tuning
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import cache

flags.declare_key_flag("shapes")
flags.declare_key_flag("dtype")
_SUITE = flags.DEFINE_list(
  "suite",
  [],
  f"Suites of dense products: {', '.join(dense_cases.NAMES)}.",
  # experiments.dense has one of this name; the tests import both.
  allow_override=True,
)
_RANDOM = flags.DEFINE_list(
  "random", [], "SEED:COUNT of random dense products."
)
_GROUPS = flags.DEFINE_list("groups", [], "Grouped products, see above.")
_TOP = flags.DEFINE_integer(
  "top", 8, "How many configs of the cost model to measure.", lower_bound=1
)
_MORE = flags.DEFINE_integer(
  "more", 0, "Configs of the 40 after them, drawn at random.", lower_bound=0
)
_CONFIGS = flags.DEFINE_list(
  "configs", [], "Files of rows whose configs are measured of each problem."
)
_OUTPUT = flags.DEFINE_string("output", None, "File to which rows are added.")
_RUN = flags.DEFINE_string("run", "tune", "What rows call this run.")
_RESUME = flags.DEFINE_bool(
  "resume", False, "Leave out what --output has rows of.", allow_override=True
)
_PROCESSES = flags.DEFINE_integer(
  "processes", 1, "How many share the work.", lower_bound=1
)
_SECONDS = flags.DEFINE_integer("seconds", None, "No case is compiled later.")
_SHARE = flags.DEFINE_integer(
  "share", None, "Which process this is.", module_name=cli.INTERNAL
)
_FREEZE = flags.DEFINE_string(
  "freeze",
  None,
  "Measures nothing: writes what is chosen today for the problems of all"
  " published suites, as pallas_gemm/tuning/table has it.",
)
cli.not_empty("output", "freeze")
_EPILOGUES = {"none", "bias", "residual", *dense_cases.ACTIVATIONS}
_PASSES = "forward", "dx", "dw", "gated"

Case = dense_cases.Case | ragged_cases.Case
# Of a case: what is said, whether something failed, rows.
Found = dict[str, Any]


def cases_of_flags() -> list[Case]:
  """What is to be measured.

  Raises:
    cli.FlagError: an item can't be read, or there is none.
  """
  dtype = cli.DTYPE.value or "bfloat16"
  if dtype == "float32":
    raise cli.FlagError("--dtype=float32: the kernel takes 16 bits")
  found: list[Case] = [_shape(text, dtype) for text in cli.SHAPES.value]
  for name in _SUITE.value:
    try:
      found += dense_cases.suite(name, dtype)
    except ValueError as error:
      raise cli.FlagError(f"--suite: {error}") from None
  for text in _RANDOM.value:
    if not re.fullmatch(r"\d+:\d+", text):
      raise cli.FlagError(f"--random: want SEED:COUNT, got {text!r}")
    found += dense_cases.draw(*map(int, text.split(":")), dtype)
  found += [_groups(text, dtype) for text in _GROUPS.value]
  if not found and compat.targets_gpu():
    raise cli.FlagError("want --suite, --shapes, --random or --groups")
  return found or [_shape("48x40x24", dtype)]


def _shape(text: str, dtype: str) -> dense_cases.Case:
  """What an item of --shapes names.

  Raises:
    cli.FlagError: it can't be read.
  """
  found = re.fullmatch(
    r"((?:[1-9]\d*x){2,3}[1-9]\d*)(?::([NT]{2})(?::([^:]+)(?::([^:]+))?)?)?",
    text.strip(),
  )
  sizes, *how = found.groups() if found else ("",)
  names = "layout", "epilogue", "out_dtype"
  fields = {name: x for name, x in zip(names, how) if x is not None}
  if fields.get("epilogue") == "gated" and fields["layout"] == "NN":
    fields |= {"kernel": "gated_matmul", "epilogue": "none"}
  if (
    not found
    or not {*fields.get("epilogue", "none").split("+")} <= _EPILOGUES
    or fields.get("out_dtype", dtype) not in cli.DTYPES
  ):
    raise cli.FlagError(
      "--shapes: want [BATCHx]MxNxK[:LAYOUT[:EPILOGUE[:DTYPE]]], as in"
      f" 8x192x196x256:NT:bias+gelu:float32, got {text!r}"
    )
  *batch, m, n, k = map(int, sizes.split("x"))
  if batch:
    fields["batch"] = batch[0]
  return dense_cases.Case(suite="shapes", m=m, n=n, k=k, dtype=dtype, **fields)


def _groups(text: str, dtype: str) -> ragged_cases.Case:
  """What an item of --groups names.

  Raises:
    cli.FlagError: it can't be read.
  """
  found = re.fullmatch(r"((?:[1-9]\d*x){4})([a-z_]+)(?::([a-z]+))?", text)
  known, pass_ = ragged_cases.DISTRIBUTIONS, found and (found[3] or "forward")
  if not found or found[2] not in known or pass_ not in _PASSES:
    raise cli.FlagError(
      f"--groups: want KxNxGROUPSxROWSxHOW[:{'|'.join(_PASSES)}], of"
      f" {', '.join(known)}, got {text!r}"
    )
  k, n, groups, rows = map(int, found[1].split("x")[:4])
  return ragged_cases.Case(
    suite="groups",
    m=rows * groups,
    n=n,
    k=k,
    groups=groups,
    sizes=found[2],
    pass_=pass_,
    dtype=dtype,
  )


def configs_of(problem: Problem) -> list[Config]:
  """The model's first, the remembered one, some after them, and given ones."""
  found = autotuning.candidates(problem, _TOP.value)
  if _MORE.value:
    after = autotuning.candidates(problem, _TOP.value + 40)[_TOP.value :]
    rng = random.Random(cache.key_of(problem))
    found += rng.sample(after, min(_MORE.value, len(after)))
  for path in _CONFIGS.value:
    for row in rows_lib.read(path):
      config = Config(**row["config"])
      if legal.reason(Plan.of(problem, config)) is None:
        found.append(config)
  return list(dict.fromkeys(found))


def prepared(case: Case, known: set[str]) -> Callable[[], Found]:
  """Compiles a case; what measures it.

  Args:
    case: a dense or a grouped product.
    known: keys of the problems that are left out.
  """
  cases, sizes, rows = dense_cases, None, None
  if isinstance(case, ragged_cases.Case):
    cases, sizes, rows = ragged_cases, case.sizes, case.group_sizes(0)
  try:
    found = autotuning.find(cases.ours(case, "sm90"), **case.operands())
  except RuntimeError as error:  # no Hopper GPU
    raise cli.FlagError(str(error)) from None
  except (ValueError, NotImplementedError) as error:
    return functools.partial(dict, text=f"{case} not tuned: {error}")
  ready = [
    autotuning.prepare(x, configs_of(x.problem), rows)
    for x in found
    if key_of(problem_row(x.problem), sizes) not in known
  ]

  def measure() -> Found:
    done = [autotuning.measured(x) for x in ready]
    return {
      "text": "\n".join(map(str, done)) or f"has rows: {case}",
      "bad": any(reason for tuned in done for *_, reason in tuned.tried),
      "rows": [row for tuned in done for row in rows_of(tuned, sizes)],
    }

  return measure


def rows_of(
  tuned: autotuning.Tuned, sizes: str | None
) -> Iterator[dict[str, Any]]:
  """A row for each config that was timed, the fastest first."""
  where = provenance.versions()
  common = {"run": _RUN.value, "problem": problem_row(tuned.problem)}
  if sizes:
    common["group_sizes"] = sizes
  timed = [(config, s) for config, s, _ in tuned.tried if s is not None]
  for config, seconds in sorted(timed, key=lambda x: x[1]):
    entry = cache.to_json(cache.Entry(config))
    found = common | {"config": entry["config"], "us": round(1e6 * seconds, 2)}
    if tuned.xla_seconds is not None:
      found["xla_us"] = round(1e6 * tuned.xla_seconds, 2)
    found |= {name: where[name] for name in ("commit", "device", "jax")}
    yield found | {"utc": provenance.utc()}


def problem_row(problem: Problem) -> dict[str, Any]:
  """A problem's fields; what is no default, and bfloat16, goes unsaid."""
  row, usual = cache.short_row(problem), {"dtype", "out_dtype"}
  return {k: x for k, x in row.items() if k not in usual or x != "bfloat16"}


def key_of(row: dict[str, Any], sizes: str | None) -> str:
  """What a row is of."""
  return json.dumps([row, sizes], sort_keys=True)


def in_time(cases: Sequence[Case]) -> Iterator[Callable[[], Found]]:
  """What measures each case, compiled when it is asked for."""
  start = time.monotonic()
  rows = rows_lib.read(_OUTPUT.value) if _RESUME.value else []
  known = {
    key_of(row["problem"], row.get("group_sizes"))
    for row in rows
    if row.get("run") == _RUN.value
  }
  for case in cases:
    if _SECONDS.value and time.monotonic() - start > _SECONDS.value:
      yield functools.partial(dict, text=f"out of time: {case}")
    else:
      yield prepared(case, known)


def work_alone(cases: Sequence[Case]) -> None:
  """One of several processes; says what it found, a line of JSON a case."""
  ready = list(in_time(cases[_SHARE.value :: _PROCESSES.value]))
  print("ready", flush=True)
  sys.stdin.read()  # until it is closed
  for measure in ready:
    print(json.dumps(measure()), flush=True)


def shared() -> Iterator[Found]:
  """What all processes find; one after the other uses the GPU."""
  command = [sys.executable, "-m", "experiments.tune", *sys.argv[1:]]
  # They share the memory of one GPU.
  os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  with contextlib.ExitStack() as stack:
    processes = []
    for share in range(_PROCESSES.value):
      process = subprocess.Popen(
        [*command, f"--share={share}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
      )
      processes.append(stack.enter_context(process))
      stack.callback(process.kill)
    for process in processes:
      process.stdout.readline()  # it is ready, or has ended
    for process in processes:
      process.stdin.close()  # it waits for that
      for line in process.stdout:
        yield json.loads(line)
      if code := process.wait():
        yield {"text": f"a process ended with {code}", "bad": True}


def check_files() -> None:
  """Looks whether files can be read and written.

  Raises:
    cli.FlagError: they can't.
  """
  for path in _CONFIGS.value:
    if not Path(path).is_file():
      raise cli.FlagError(f"--configs: there is no file {path}")
  for flag in (_OUTPUT, _FREEZE):
    if flag.value is not None:
      cli.check_file(flag.name, Path(flag.value))
  if _RESUME.value and _OUTPUT.value is None:
    raise cli.FlagError("--resume: goes with --output")


def shipped_table(device: str, suite: str = "all") -> str:
  """The table of a GPU: what is chosen for each problem of the suites.

  What was measured there, and is in the tuning cache, comes with its times; the
  cost model's choices have none.
  """
  entries: dict[Problem, cache.Entry] = {}
  with hardware.assume(device):
    for cases in (dense_cases, ragged_cases):
      for case in cases.suite(suite):
        try:
          found = autotuning.find(cases.ours(case), **case.operands())
        except ValueError:  # nothing for the kernel
          continue
        for problem in (x.problem for x in found if x.problem not in entries):
          if (entry := cache.lookup(problem) or cache.shipped(problem)) is None:
            how = next(tuning.ranked(problem)).how
            entry = cache.Entry(None if how == "xla" else how)
          entries[problem] = entry
    return cache.shipped_lines(entries.items())


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  check_files()
  if _FREEZE.value is not None:
    Path(_FREEZE.value).write_text(shipped_table(hardware.current().name))
    return 0
  cases = cases_of_flags()
  if _SHARE.value is not None:
    work_alone(cases)
    return 0
  if not compat.targets_gpu():
    cli.say("no NVIDIA GPU here: interpreted, which is slow; nothing is kept")
  interrupt = cli.Interrupt()
  done, is_bad = 0, False
  alone = (measure() for measure in in_time(cases))
  try:
    with interrupt:
      for found in alone if _PROCESSES.value == 1 else shared():
        if interrupt.pressed:  # taken for the failure of a config
          raise KeyboardInterrupt
        for row in found.get("rows", ()) if _OUTPUT.value else ():
          rows_lib.append(_OUTPUT.value, row)
        done, is_bad = done + 1, is_bad or found.get("bad", False)
        cli.say(found["text"])
  except KeyboardInterrupt:  # what is done is kept
    cli.say(f"interrupted after {done} of {len(cases)} cases")
    return cli.INTERRUPTED
  if compat.targets_gpu():
    cli.say(f"remembered in {cache.path_of()}")
  return int(is_bad)


if __name__ == "__main__":
  cli.run(main)
