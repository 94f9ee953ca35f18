"""Times this checkout's ops and those of another one, interleaved.

  python tools/before.py --base=DIRECTORY --output=before.jsonl
  python tools/before.py --base=DIRECTORY --dense=square,gated --ragged=

Both packages run in one process: the other one's is copied under another name.
Each case of the suites is compiled by both, and timed interleaved (CUPTI, cold
L2). Then the host's time: a call outside of jit, and the first call of a new
shape. A row a case, and at the end the geometric means.

Exit status: 0; 2 for a command that can't be carried out; 130 after Ctrl-C.
"""

from collections.abc import Iterator, Sequence
from concurrent import futures
import functools
import importlib
import json
import math
import os
from pathlib import Path
import re
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from absl import flags  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from experiments.harness import cli, provenance, timing  # noqa: E402
from pallas_gemm import hardware  # noqa: E402

_BASE = flags.DEFINE_string("base", None, "The other checkout.", required=True)
_OUTPUT = flags.DEFINE_string("output", "before.jsonl", "Where rows go.")
_DENSE = flags.DEFINE_list(
  "dense",
  "square,unaligned,epilogues,gated,training,batched,models,short,lora,narrow,"
  "tall_skinny,vocabulary,float32,layouts,llama_8b,llama_70b",
  "Suites of experiments.dense.",
)
_RAGGED = flags.DEFINE_list(
  "ragged",
  "mixtral,deepseek,qwen,distributions,gated,decode,moe",
  "Suites of experiments.ragged.",
)
cli.not_empty("base", "output")
flags.declare_key_flag("repeats")
flags.set_default(cli.REPEATS, 20)
_PACKAGES = "pallas_gemm", "experiments", "examples"
_HOST_ROUNDS, _HOST_CALLS = 30, 200
# Of products that no suite has; the first call compiles them.
_NEW_SHAPES = tuple((1024 + 128 * i, 2048, 1024 + 64 * i) for i in range(8))


def check() -> None:
  """Looks whether the flags can be carried out.

  Raises:
    cli.FlagError: they can't.
  """
  for name in _PACKAGES:
    if not (path := Path(_BASE.value, name)).is_dir():
      raise cli.FlagError(f"--base: want another checkout, there is no {path}")
  for flag in (_DENSE, _RAGGED):
    module = importlib.import_module(f"experiments.harness.{flag.name}_cases")
    for suite in filter(None, flag.value):
      try:
        module.suite(suite)
      except ValueError as error:
        raise cli.FlagError(f"--{flag.name}: {error}") from None
  cli.check_file("output", Path(_OUTPUT.value))


def copied(base: Path, folder: str) -> None:
  """The other checkout's packages, importable under names of their own."""
  for name in _PACKAGES:
    to = Path(folder) / f"{name}_before"
    shutil.copytree(
      base / name, to, ignore=shutil.ignore_patterns("results", "__pycache__")
    )
    for file in to.rglob("*.py"):
      text = file.read_text()
      for package in _PACKAGES:
        text = re.sub(rf"\b{package}\b", f"{package}_before", text)
      file.write_text(text)
  sys.path.insert(0, folder)


def cases(kind: str, suite: str) -> Iterator[tuple[Any, Any, Any]]:
  """(case, its function now, its function before) of a suite."""
  now, before = (
    importlib.import_module(f"experiments{suffix}.harness.{kind}_cases")
    for suffix in ("", "_before")
  )
  for case, old in zip(now.suite(suite), before.suite(suite), strict=True):
    yield case, now.ours(case), before.ours(old)


def measured(kind: str, suite: str) -> Iterator[dict[str, Any]]:
  """Rows of a suite; XLA's own kernels are picked while nothing else runs."""
  flush = timing.l2_flush(hardware.current().l2_bytes)
  with futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
    prepared = []
    for case, *fns in cases(kind, suite):
      lowered = [jax.jit(fn).lower(**case.operands()) for fn in fns]
      arms = [pool.submit(x.compile) for x in lowered]
      for arm, text in zip(arms, (x.as_text() for x in lowered)):
        if "mosaic_gpu" not in text:
          arm.exception()
      prepared.append((case, arms))
  for case, arms in prepared:
    operands = case.draw(0)
    pair = [
      timing.Arm(name, functools.partial(arm.result(), **operands))
      for name, arm in zip(("now", "before"), arms)
    ]
    times = timing.measure(
      pair, flush=flush, repeats=cli.REPEATS.value, warmup=3
    )
    now, before = times["now"], times["before"]
    yield {
      "kind": kind,
      **case.fields(),
      "now_us": 1e3 * now.median,
      "now_quartiles_us": [1e3 * now.p25, 1e3 * now.p75],
      "before_us": 1e3 * before.median,
      "before_quartiles_us": [1e3 * before.p25, 1e3 * before.p75],
      "ratio": before.median / now.median,
      "kernels_now": now.kernel_names,
      "kernels_before": before.kernel_names,
    }


def host_times() -> Iterator[dict[str, Any]]:
  """Rows of eager calls and of first calls, interleaved."""
  names = {"now": "pallas_gemm", "before": "pallas_gemm_before"}
  ops = {arm: importlib.import_module(name) for arm, name in names.items()}
  x = jnp.ones((128, 128), jnp.bfloat16)
  eager = {arm: functools.partial(op.matmul, x, x) for arm, op in ops.items()}
  eager["jnp"] = functools.partial(jnp.matmul, x, x)
  found = {arm: [] for arm in eager}
  for _ in range(_HOST_ROUNDS):
    for arm, call in eager.items():
      jax.block_until_ready(call())
      start = time.perf_counter()
      for _ in range(_HOST_CALLS):
        out = call()
      jax.block_until_ready(out)
      found[arm].append(1e6 * (time.perf_counter() - start) / _HOST_CALLS)
  yield {"kind": "eager call"} | {
    f"{arm}_us": statistics.median(us) for arm, us in found.items()
  }
  first = {arm: [] for arm in ops}
  for m, n, k in _NEW_SHAPES:
    a, b = jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, n), jnp.bfloat16)
    for arm, op in ops.items():
      start = time.perf_counter()
      jax.block_until_ready(op.matmul(a, b, activation=jax.nn.silu))
      first[arm].append(time.perf_counter() - start)
  yield {"kind": "first call"} | {
    f"{arm}_s": statistics.median(s) for arm, s in first.items()
  }


def main(argv: Sequence[str]) -> int:
  """Times what the flags say; returns the exit status."""
  del argv
  check()
  facts = {"device": provenance.device_name(), **provenance.versions()}
  facts |= {"commit": provenance.commit(), "utc": provenance.utc()}
  ratios = []
  with tempfile.TemporaryDirectory() as folder, open(_OUTPUT.value, "w") as out:
    copied(Path(_BASE.value), folder)

    def write(row):
      print(json.dumps(row | facts), file=out, flush=True)

    for row in host_times():
      write(row)
      print(row, flush=True)
    for kind, suites in (("dense", _DENSE.value), ("ragged", _RAGGED.value)):
      for suite in filter(None, suites):
        for row in measured(kind, suite):
          write(row)
          ratios.append((row["ratio"], row))
        print(f"{suite}: {len(ratios)} cases so far", flush=True)
  if ratios:
    mean = math.exp(statistics.fmean(math.log(r) for r, _ in ratios))
    print(f"{len(ratios)} cases, before / now: {mean:.4f}x geometric mean")
    for ratio, row in sorted(ratios, key=lambda x: x[0])[:12]:
      shape = {f: row[f] for f in ("suite", "m", "n", "k") if f in row}
      print(f"{ratio:.3f}x {shape} {row['now_us']:.2f} us")
  return 0


if __name__ == "__main__":
  cli.run(main)
