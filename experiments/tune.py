"""Measures configs of the Hopper kernels and remembers the fastest.

  python -m experiments.tune --suite=llama_70b
  python -m experiments.tune --suite=square,unaligned --dtype=float16 --top=16
  python -m experiments.tune --shapes=4096x14336x4096 --epilogue=bias_gelu
  python -m experiments.tune --shapes=4096x4096x4096 --layout=nt
  python -m experiments.tune --shapes=8192x14336x4096 --groups=8
  python -m experiments.tune --freeze=pallas_gemm/tuning/table/nvidia_h200.jsonl

For each shape the configs that the cost model ranks first, and the one that
was remembered so far, are compiled, checked against a float64 product, and
timed in turns (CUPTI kernel time, cold L2). With --groups that is done for the
grouped product of so many groups of M rows in all, and for those that its
derivatives are. The fastest goes to the tuning cache, where the ops find it:
the file in the user's cache folder or in $PALLAS_GEMM_CACHE_DIR.
`pallas_gemm.autotune` does the same for the products of any function.

With --output_dir every measured config is also a line of <dir>/tune.jsonl:
what was computed, the config, its time and the model's, and where it ran.

On a machine without an NVIDIA GPU the kernel is interpreted, on a small
problem unless told otherwise; nothing is written to the tuning cache then.

Exit status: 0; 1 if a config failed; 2 for a command that can't be carried
out; 130 after Ctrl-C.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import pathlib
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp

from experiments.harness import (
  cli,
  dense_cases,
  freeze,
  provenance,
  tables,
)
from experiments.harness import rows as rows_lib
from experiments.harness import shapes as shapes_lib
import pallas_gemm
from pallas_gemm import compat, hardware, tuning
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.tuning import autotune, cache

EXPERIMENT = "tune"
_DTYPES = ("bfloat16", "float16")

for _name in ("shapes", "dtype", "output_dir"):
  flags.declare_key_flag(_name)
_SUITE = flags.DEFINE_list(
  "suite",
  [],
  "Named lists of shapes, separated by commas:"
  f" {', '.join(shapes_lib.DENSE)}. Their shapes come after those of --shapes.",
  # experiments.dense has one of this name; the tests import both.
  allow_override=True,
)
_OUT_DTYPE = flags.DEFINE_enum(
  "out_dtype",
  None,
  (*_DTYPES, "float32"),
  "Element type of the result. Default: that of the operands.",
)
_LAYOUT = flags.DEFINE_enum(
  "layout",
  "nn",
  ("nn", "nt", "tn", "tt"),
  "How A and B are stored; t is transposed: A as [K,M], B as [N,K].",
)
_TOP = flags.DEFINE_integer(
  "top", 8, "How many configs of the cost model to measure.", lower_bound=1
)
_GROUPS = flags.DEFINE_integer(
  "groups",
  None,
  "Of this many groups of rows, the product for each with a matrix of its own"
  " (ragged_dot), and its derivatives.",
  lower_bound=1,
)
_FREEZE = flags.DEFINE_string(
  "freeze",
  None,
  "Measures nothing: writes to this file what is chosen today for the problems"
  " of all published suites, as pallas_gemm/tuning/table has it.",
)
cli.not_empty("freeze")
_EPILOGUE = flags.DEFINE_enum(
  "epilogue",
  "none",
  (
      "none", "bias", "relu", "gelu", "silu", "bias_relu", "bias_gelu",
      "residual", "residual_bias", "gated_silu",
  ),
  "What the kernel does to the product before it is written; gated_silu is"
  " silu(x@w_gate) * (x@w_up).",
)  # fmt: skip
_HEADER = ("problem", "us", "model's us", "gain", "failed", "config")
_NUMERIC = ("us", "model's us", "gain", "failed")


def call_of(shape: shapes_lib.Shape) -> tuple[Any, dict[str, Any]]:
  """The function of the flags and its arguments, as shapes alone.

  Raises:
    cli.FlagError: the flags do not go together.
  """
  # None tries the Hopper kernel first, but on a GPU alone.
  implementation = None if compat.targets_gpu() else "sm90"
  gated = _EPILOGUE.value == "gated_silu"
  if _GROUPS.value is not None:
    return _grouped_call(shape, _GROUPS.value, gated, implementation)
  if gated and _LAYOUT.value != "nn":
    raise cli.FlagError("--layout: a gated product takes nn alone")
  case = dense_cases.Case(
    suite=EXPERIMENT,
    **shape._asdict(),
    dtype=cli.DTYPE.value or _DTYPES[0],
    kernel="gated_matmul" if gated else "matmul",
    layout=_LAYOUT.value.upper(),
    epilogue="none" if gated else _EPILOGUE.value.replace("_", "+"),
    out_dtype=_OUT_DTYPE.value,
  )
  return dense_cases.ours(case, implementation), case.operands()


def _grouped_call(
  shape: shapes_lib.Shape, groups: int, gated: bool, implementation: str | None
) -> tuple[Any, dict[str, Any]]:
  """A grouped product with its derivatives, as `call_of`."""
  if not (gated or _EPILOGUE.value == "none") or _LAYOUT.value != "nn":
    raise cli.FlagError(
      "--groups: takes --layout=nn and --epilogue=none|gated_silu, got"
      f" {_LAYOUT.value} and {_EPILOGUE.value}"
    )
  op = pallas_gemm.gated_ragged_dot if gated else pallas_gemm.ragged_dot

  def step(group_sizes, arrays):
    grouped = functools.partial(
      op,
      group_sizes=group_sizes,
      preferred_element_type=_OUT_DTYPE.value,
      implementation=implementation,
    )
    out, vjp = jax.vjp(grouped, *arrays)
    return vjp(out)

  array = functools.partial(
    jax.ShapeDtypeStruct, dtype=jnp.dtype(cli.DTYPE.value or _DTYPES[0])
  )
  weights = [array((groups, shape.k, shape.n))] * (2 if gated else 1)
  return step, {
    "group_sizes": jax.ShapeDtypeStruct((groups,), jnp.int32),
    "arrays": [array((shape.m, shape.k)), *weights],
  }


def shapes_of_flags() -> tuple[shapes_lib.Shape, ...]:
  """What to tune, each shape once."""
  shapes = list(cli.parse_shapes(cli.SHAPES.value))
  for name in _SUITE.value:
    try:
      shapes += shapes_lib.suite(name)
    except ValueError as error:
      raise cli.FlagError(f"--suite: {error}") from None
  if not shapes:
    if compat.targets_gpu():
      raise cli.FlagError("want --suite or --shapes")
    shapes += shapes_lib.suite("one")
  return tuple(dict.fromkeys(shapes))


def rows_of(tuned: autotune.Tuned) -> list[dict[str, Any]]:
  """A row for each config that was tried."""
  return [
    {
      "experiment": EXPERIMENT,
      "kernel": "sm90_ragged" if tuned.problem.groups else "sm90_dense",
      **tuned.problem.row(),
      "config": dataclasses.asdict(config),
      "ms_median": None if seconds is None else 1e3 * seconds,
      "ms_model": 1e3
      * tuning.model_of(tuned.problem).predict(Plan.of(tuned.problem, config)),
      "fastest": config == tuned.config,
      "chosen_by_model": config == tuned.model_config,
      "failed": reason,
      "interpreted": not compat.targets_gpu(),
      "utc": provenance.utc(),
      **provenance.versions(),
    }
    for config, seconds, reason in tuned.tried
  ]


def failures(tuned: autotune.Tuned) -> int:
  """How many configs failed."""
  return sum(reason is not None for _, _, reason in tuned.tried)


def cells_of(tuned: autotune.Tuned) -> list[str]:
  """A line of the table."""
  times = tuned.seconds, tuned.model_seconds
  gain = times[1] / times[0] if all(times) else None
  return [
    autotune.describe(tuned.problem),
    *(tables.EMPTY if x is None else f"{1e6 * x:.1f}" for x in times),
    tables.factor(gain),
    str(failures(tuned)),
    "none works" if tuned.config is None else short(tuned),
  ]


def short(tuned: autotune.Tuned) -> str:
  """The fastest config, or what of it the model chose otherwise."""
  if tuned.config == tuned.model_config:
    return "the model's"
  found, chosen = map(dataclasses.asdict, (tuned.config, tuned.model_config))
  return " ".join(
    f"{name}={value}" for name, value in found.items() if value != chosen[name]
  )


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  if (cli.DTYPE.value or _DTYPES[0]) not in _DTYPES:
    raise cli.FlagError(
      f"--dtype={cli.DTYPE.value}: the kernel takes {' and '.join(_DTYPES)}"
    )
  if _FREEZE.value is not None:
    path = pathlib.Path(_FREEZE.value)
    cli.check_file("freeze", path)
    path.write_text(freeze.table_of(hardware.current().name))
    return 0
  console = cli.Console()
  shapes = shapes_of_flags()
  path = None
  if cli.OUTPUT_DIR.value:
    device = provenance.device_name()
    path = rows_lib.results_file(device, EXPERIMENT, cli.OUTPUT_DIR.value)
  done: list[autotune.Tuned] = []
  interrupt = cli.Interrupt()
  try:
    with interrupt, console.progress(len(shapes)):
      for shape in shapes:
        for tuned in tune(shape, console):
          if interrupt.pressed:  # taken for the failure of a config
            raise KeyboardInterrupt
          for row in rows_of(tuned) if path else ():
            rows_lib.append(path, row)
          done.append(tuned)
          console.line(str(tuned), bad=failures(tuned) > 0)
        console.step()
  except KeyboardInterrupt:
    pass  # what is done is kept, and shown
  console.line()
  title = f"Tuned on {provenance.device_name()}"
  console.table(title, _HEADER, [cells_of(t) for t in done], _NUMERIC)
  if not compat.targets_gpu():
    console.line("no NVIDIA GPU here: interpreted, and nothing was remembered")
  elif any(t.config is not None for t in done):
    console.line(f"remembered in {cache.path_of()}")
  if path is not None and done:
    console.line(f"rows: {path}")
  if interrupt.pressed:
    console.line(f"interrupted after {len(done)} of {len(shapes)} shapes")
    return 130
  return int(any(map(failures, done)))


def tune(
  shape: shapes_lib.Shape, console: cli.Console
) -> Iterator[autotune.Tuned]:
  """Tunes one shape; what is left to XLA has nothing to tune, and is said so.

  Raises:
    cli.FlagError: this GPU has no Hopper kernel to tune.
  """
  fn, operands = call_of(shape)
  try:
    cases = autotune.find(fn, **operands)
  except RuntimeError as error:
    raise cli.FlagError(str(error)) from None
  except ValueError as error:  # XLA's kernels compute it, or it is empty
    console.line(f"{shape}  not tuned: {error}")
    return
  for case in cases:
    yield autotune.tune(case, top=_TOP.value, doing=console.doing)


if __name__ == "__main__":
  cli.run(main)
