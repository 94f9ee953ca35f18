"""Compares grouped products with what a JAX user writes without them.

  python -m experiments.ragged                      a short list, about a minute
  python -m experiments.ragged --suite=mixtral
  python -m experiments.ragged --suite=deepseek,qwen --passes=forward
  python -m experiments.ragged --suite=all          published ones, some minutes
  python -m experiments.ragged --suite=sizes,odd,experts   rows a group, widths
  python -m experiments.ragged --implementation=xla --unseen=40   XLA's loop

A case is one pass (forward; dx and dw, the derivatives for rows and weights;
gated; a whole mixture-of-experts layer) on one shape with one distribution of
group sizes. It is computed by pallas_gemm with the config that it picks by
itself, by jax.lax.ragged_dot without and with XLA's experimental fusion, by the
grouped matmuls that JAX ships as examples (the fastest of a few configs), by
tokamax where it is installed, and by one jnp.dot of the same FLOPs, which no
grouped product can be expected to beat where TMA can address the rows. What
can't run, is wrong, would take too long, or ran other kernels than its name
says, is left out with its reason. The first result is checked against float64
on sampled groups, rows and columns; then all are timed, interleaved (CUPTI,
every kernel that a call launches, cold L2).

One line a case is printed as the run goes:

  implementation, time, TFLOP/s of the rows in groups, share (the least time
  that arithmetic or memory allow, over the time), speed relative to each of the
  others, PASSED or FAILED, and the largest error over the bound that correct
  arithmetic obeys; for the suite decode also GB/s, over a copy's.

Rows go to experiments/results/<device>/ragged.jsonl as they are measured, those
of --implementation=xla to ragged_xla.jsonl, so an interrupted run keeps what it
finished. `python -m experiments.report` prints
tables of them. Without an NVIDIA GPU a few tiny cases are checked,
and nothing is timed; `--unseen` draws its own passes and dtypes.

Exit status: 0; 1 if a case FAILED or could not run; 2 for a command that can't
be carried out; 130 after Ctrl-C.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from absl import flags

from experiments.harness import (
  before,
  cli,
  dense_tables,
  ragged_cases,
  ragged_peers,
  ragged_tables,
  shapes,
)
from experiments.harness import rows as rows_lib
from experiments.harness import run as run_lib
from experiments.harness import session as session_lib
from pallas_gemm import compat

EXPERIMENT, OF_XLA = "ragged", "ragged_xla"

for _name in ("dtype", "seed", "output_dir", "base", *cli.TIMED):
  flags.declare_key_flag(_name)
_SUITE = flags.DEFINE_list(
  "suite",
  [],
  f"What to measure, separated by commas: {', '.join(ragged_cases.NAMES)}."
  " Default: quick on a GPU, interpret without.",
  # Other programs have flags of these names; the tests import several.
  allow_override=True,
)
_UNSEEN = flags.DEFINE_integer(
  "unseen",
  0,
  "Measure as many problems that are drawn at random by --seed: 2 to 256"
  " groups of 1 to 1,024 rows, in bfloat16 and float32.",
  lower_bound=0,
  allow_override=True,
)
_PASSES = flags.DEFINE_list(
  "passes",
  [],
  "Of the suites, only the cases of these passes, separated by commas:"
  f" {', '.join(shapes.PASSES)}. Default: all.",
)
_IMPLEMENTATION = flags.DEFINE_enum(
  "implementation",
  None,
  ("sm90", "xla"),
  "Passed to the ops. Default: they choose.",
  allow_override=True,
)
_BESIDE = flags.DEFINE_list(
  "beside",
  ["all"],
  "What the op is compared with, separated by commas:"
  f" {', '.join(ragged_cases.BESIDE)}; all or none.",
)
_TUNE_TOKAMAX = flags.DEFINE_boolean(
  "tune_tokamax",
  False,
  "Whether tokamax, where it is measured, is so again with the config that its"
  f" own tuner finds in about {ragged_peers.TUNING_S} s, for each shape and"
  " pass.",
)


def chosen(on_gpu: bool) -> list[ragged_cases.Case]:
  """The cases that the flags name.

  Raises:
    cli.FlagError: no such suite or pass, none left, or not without a GPU.
  """
  passes = [name.strip() for name in _PASSES.value]
  if unknown := [x for x in passes if x not in shapes.PASSES]:
    raise cli.FlagError(
      f"--passes: no pass {unknown[0]!r}; there are {', '.join(shapes.PASSES)}"
    )
  if _UNSEEN.value:
    return ragged_cases.draw(cli.SEED.value, _UNSEEN.value)
  names = [name.strip() for name in _SUITE.value]
  names = names or ["quick" if on_gpu else "interpret"]
  cases = session_lib.parse_suites(
    names,
    ragged_cases.suite,
    None if on_gpu else ["interpret"],
    float32=_IMPLEMENTATION.value == "xla",
  )
  # A suite that "all" has too is measured once.
  found = [
    dataclasses.replace(x, tune_tokamax=_TUNE_TOKAMAX.value)
    for x in dict.fromkeys(cases)
    if not passes or x.pass_ in passes
  ]
  if not found:
    raise cli.FlagError(
      f"--passes={','.join(passes)}: {', '.join(names)} has no such case"
    )
  return found


def arms() -> list[str] | None:
  """The arms, other than the op, that the flags name; None for all.

  Raises:
    cli.FlagError: no arm has that name.
  """
  names = [name.strip() for name in _BESIDE.value]
  if names in (["all"], ["none"]):
    return None if names == ["all"] else []
  if unknown := [name for name in names if name not in ragged_cases.BESIDE]:
    raise cli.FlagError(
      f"--beside: no {unknown[0]!r}; there are"
      f" {', '.join(ragged_cases.BESIDE)}, all and none"
    )
  tuned = ragged_cases.TUNED
  return [*names, *(tuned[name] for name in names if name in tuned)]


def measure(
  session: session_lib.Session, bench: run_lib.Bench, case: run_lib.Prepared
) -> dict[str, Any]:
  """The row of a case, with its speed over lax's and over even groups'.

  Raises:
    Exception: what kept the op from being compiled or run.
  """
  row = bench.measure(case)
  lax = row["arms"].get("lax.ragged_dot")
  if lax and row["ms_median"]:
    row["ratio_to_lax"] = lax["ms_median"] / row["ms_median"]
  same = ("m", "n", "k", "dtype", "groups", "pass", "top_k")
  even = rows_lib.find(
    [*session.rows, row],
    passed=True,
    group_sizes="even",
    **{name: row.get(name) for name in same},
  )
  if even is not None and row["ms_median"] and even["ms_median"]:
    row["ratio_to_even"] = even["ms_median"] / row["ms_median"]
  return row


def main(argv: Sequence[str]) -> int:
  """Measures what the flags say; returns the exit status."""
  del argv
  on_gpu, how = compat.targets_gpu(), _IMPLEMENTATION.value
  cases, peers = chosen(on_gpu), arms()
  experiment = OF_XLA if how == "xla" else EXPERIMENT
  session = session_lib.start(experiment, on_gpu, name_width=66)
  bench = session_lib.bench(experiment, on_gpu)
  with session.measuring():
    if on_gpu:
      line = dense_tables.host_line
      session.host_rows("bandwidth", bench.measure_bandwidth, line)
    session.suites(
      cases,
      functools.partial(
        run_lib.prepare,
        implementation=how,
        peers=peers,
        more=functools.partial(before.arms, "ragged"),
      ),
      functools.partial(measure, session, bench),
      ragged_tables.label,
      ragged_tables.measured_parts,
    )
  title = f"Grouped products on {session.device}"
  session.table(title, ragged_tables.summary(session.rows))
  return session.finish()


if __name__ == "__main__":
  cli.run(main)
