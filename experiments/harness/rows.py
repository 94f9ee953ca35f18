"""Result rows: what they hold, and how they get to disk and back.

One JSON object a line (JSONL), one line a measured kernel and problem. A line
is on disk before the next kernel starts, so an interrupted run keeps what it
finished. Files are appended to; where several rows describe the same kernel
and problem, the last one counts.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import math
import os
import pathlib
import re
import types
import typing
from typing import Any

from absl import logging

from experiments.harness import cli


def _results(programs: pathlib.Path) -> pathlib.Path:
  """Where rows go: next to the programs of a checkout, else to ./results."""
  if (programs.parent / "pyproject.toml").exists():
    return programs / "results"
  return pathlib.Path("results")


RESULTS = _results(pathlib.Path(__file__).resolve().parents[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One kernel on one problem, measured.

  Attributes:
    experiment: the program: "ladder", "dense", "ragged".
    kernel: a rung's name, a baseline ("jnp.dot HIGHEST"), a peer, or an op.
    number: the rung's number; None for baselines and peers.
    m, n, k, dtype, alpha, beta: the problem.
    config: fields of the config that ran.
    ms_median, ms_p25, ms_p75: GPU kernel time of a call, all its kernels.
    tflops: 2*m*n*k / time, in 1e12/s; None where no GPU was timed. Of groups,
      m is the number of rows in them.
    gbytes_per_s: A, B and C read once and the result written once / time, in
      1e9/s: the least traffic, not what the kernel caused.
    baseline_ms_median: time of jnp.dot, or of the expression written with it
      (of groups, with jax.lax.ragged_dot), interleaved with this kernel.
    ratio_to_jnp_dot: baseline_ms_median / ms_median; above 1 is faster.
    max_error: |result - float64 reference| at the element where it is the
      largest part of its bound; None if not finite.
    error_bound: the bound at that element.
    passed: max_error <= error_bound, so every element is within its own
      bound; None for a baseline that rounds more often than the bound allows.
    repeats, warmup: timed and untimed calls.
    distribution, seed: of the inputs.
    device, driver, cuda, jax, jaxlib: what it ran on; None if unknown.
    sm_clock_mhz, power_w, temperature_c: medians over samples under load.
    kernel_names, baseline_kernel_names: GPU kernels of one call.
    commit, utc: of the code, and when the row was made.
  """

  experiment: str
  kernel: str
  number: int | None
  m: int
  n: int
  k: int
  dtype: str
  alpha: float
  beta: float
  config: dict[str, Any] | None
  ms_median: float | None
  ms_p25: float | None
  ms_p75: float | None
  tflops: float | None
  gbytes_per_s: float | None
  baseline_ms_median: float | None
  ratio_to_jnp_dot: float | None
  max_error: float | None
  error_bound: float | None
  passed: bool | None
  repeats: int
  warmup: int
  distribution: str
  seed: int
  device: str | None
  driver: str | None
  cuda: str | None
  jax: str | None
  jaxlib: str | None
  sm_clock_mhz: float | None
  power_w: float | None
  temperature_c: float | None
  kernel_names: list[str]
  baseline_kernel_names: list[str]
  commit: str | None
  utc: str


FIELDS = tuple(field.name for field in dataclasses.fields(Row))
# In a row only where they apply, with their types.
OPTIONAL_FIELDS: dict[str, Any] = {
  # Of a variant of a rung: its letter.
  "variant": str,
  # Of the compiled kernel: registers of a thread, bytes of a thread that they
  # spill, shared memory of a block, what of it an SM holds at once, and what
  # keeps it from holding more.
  "registers": int,
  "spill_bytes": int,
  "shared_bytes": int,
  "blocks_per_sm": int,
  "warps_per_sm": int,
  "occupancy_limit": str,
  # Host time, where an arm takes less than 20 us or more than 24 kernels.
  "wall_ms_median": float,
  "baseline_wall_ms_median": float,
  # Of the dense ops: what is computed, next to the product's dimensions.
  "suite": str,
  "layout": str,
  "epilogue": str,
  "batch": int,
  "out_dtype": str,
  # Of grouped products: the pass, groups, and how rows are shared out; what
  # was measured of each arm, and why one was left out; speed over that of the
  # same pass on groups of one size.
  "pass": str,
  "groups": int,
  "group_sizes": str,
  "top_k": int,
  "arms": dict[str, Any],
  "skipped": dict[str, Any],
  "ratio_to_even": float,
  "ratio_to_lax": float,
  # What ran, and where its config came from: "model", "shipped", "cache".
  "implementation": str,
  "config_origin": str,
  # The fastest of the measured configs.
  "tuned_ms_median": float,
  "tuned_config": dict[str, Any],
  # The op of another checkout.
  "before_ms_median": float,
  # What this run's copy (read and written) and sum (read) reached.
  "copy_gbytes_per_s": float,
  "read_gbytes_per_s": float,
  # Host time: a first call with its compilation, an eager call until it
  # returns, and the cost model's choice of a config.
  "first_call_ms": float,
  "baseline_first_call_ms": float,
  "dispatch_us": float,
  "baseline_dispatch_us": float,
  "choose_us": float,
}
_TYPES = typing.get_type_hints(Row) | OPTIONAL_FIELDS
# What makes two rows rows of the same thing.
PROBLEM_FIELDS = ("kernel", "m", "n", "k", "dtype", "alpha", "beta")
VARIANT_FIELDS = (
    "variant", "suite", "layout", "epilogue", "batch", "out_dtype", "pass",
    "groups", "group_sizes", "top_k", "measure", "level", "working_set_bytes",
)  # fmt: skip


def as_dict(row: Row, **optional: Any) -> dict[str, Any]:
  """The row as it is written; optional fields that are None are left out.

  Numbers that JSON can't hold (NaN, infinities) become None.

  Raises:
    ValueError: an optional field of an unknown name.
  """
  if unknown := set(optional) - set(OPTIONAL_FIELDS):
    raise ValueError(
      f"optional fields must be of {tuple(OPTIONAL_FIELDS)}, got"
      f" {sorted(unknown)}"
    )
  found = dataclasses.asdict(row)
  found |= {k: v for k, v in optional.items() if v is not None}
  return _finite(found)


def _finite(x: Any) -> Any:
  if isinstance(x, float) and not math.isfinite(x):
    return None
  if isinstance(x, Mapping):
    return {k: _finite(v) for k, v in x.items()}
  if isinstance(x, list | tuple):
    return [_finite(v) for v in x]
  return x


def validate(row: Mapping[str, Any]) -> None:
  """Checks that a dict is a result row.

  Raises:
    ValueError: a field is missing, unknown, or of the wrong type; the message
      names it.
  """
  if missing := [name for name in FIELDS if name not in row]:
    raise ValueError(f"row lacks {', '.join(missing)}")
  if unknown := [name for name in row if name not in _TYPES]:
    raise ValueError(f"row has unknown fields {', '.join(unknown)}")
  for name, value in row.items():
    kind = _TYPES[name]
    kinds = (
      typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    )
    allowed = tuple(typing.get_origin(t) or t for t in kinds)
    # JSON writes 1.0 and 1 alike, and bool is an int to Python.
    fits = isinstance(value, allowed) or (
      float in allowed and isinstance(value, int)
    )
    if not fits or (isinstance(value, bool) and bool not in allowed):
      raise ValueError(f"row field {name} must be {kind}, got {value!r}")


def slug(device: str) -> str:
  """A device's name as a folder: "NVIDIA H200" -> "nvidia_h200"."""
  return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def results_file(
  device: str, experiment: str, folder: str | os.PathLike[str] | None = None
) -> pathlib.Path:
  """<experiment>.jsonl in `folder`; by default the device's in `RESULTS`.

  Raises:
    cli.FlagError: no rows can be written there.
  """
  place = RESULTS / slug(device) if folder is None else pathlib.Path(folder)
  path = place / f"{experiment}.jsonl"
  cli.check_folder(place)
  try:
    if path.exists():
      open(path, "ab").close()
  except OSError as error:
    raise cli.FlagError(
      f"--output_dir: can't write to {path}: {error.strerror}"
    ) from None
  return path


def append(path: str | os.PathLike[str], row: Mapping[str, Any]) -> None:
  """Adds one line and waits until it is on disk.

  A last line that an earlier process left unfinished stays a line of its own.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  line = json.dumps(row, allow_nan=False) + "\n"
  with open(path, "a+b") as f:
    if f.tell() > 0:
      f.seek(-1, os.SEEK_END)
      if f.read(1) != b"\n":
        line = "\n" + line
    f.write(line.encode())
    f.flush()
    os.fsync(f.fileno())


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The rows of a file, oldest first; none if there is no file.

  A line that is no JSON object (cut short when a process was killed) is
  skipped; if there are others, with a warning.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return []
  found, skipped = [], []
  text = path.read_text(errors="replace")
  for number, line in enumerate(text.splitlines(), start=1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
    except json.JSONDecodeError:
      row = None
    if isinstance(row, dict):
      found.append(row)
    else:
      skipped.append(number)
  # A file of nothing else is no file of rows; who wants some will say so.
  for number in skipped if found else ():
    logging.warning("%s:%d is not a row; skipped", path, number)
  return found


def latest(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """The last row of each kernel and problem, in order of first appearance."""
  found: dict[tuple, dict[str, Any]] = {}
  for row in rows:
    key = tuple(row.get(name) for name in PROBLEM_FIELDS + VARIANT_FIELDS)
    found[key] = dict(row)
  return list(found.values())


def find(
  rows: Iterable[Mapping[str, Any]], **fields: Any
) -> dict[str, Any] | None:
  """The last row whose fields equal the ones given, or None."""
  found = None
  for row in rows:
    if all(row.get(name) == value for name, value in fields.items()):
      found = dict(row)
  return found
