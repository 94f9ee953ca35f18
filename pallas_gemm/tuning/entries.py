"""What is known of a problem without a model: one form in memory and as JSON.

    {"config": {"block_m": 64, "stages": 6}, "seconds": 9.1e-6,
     "xla_seconds": 1.1e-5}

Of a problem and of a config the fields are written that differ from their
defaults: a field that is added later changes nothing of what is there.
"""

import dataclasses
import json
import re
from typing import Any, NamedTuple

from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem


class Entry(NamedTuple):
  """The fastest config of a problem, beside XLA's product.

  Attributes:
    config: the fastest that was right; None leaves the problem to XLA.
    seconds: its time; None if it is not known.
    xla_seconds: of XLA's product with all that follows it; None if it is not
      known.
  """

  config: Config | None
  seconds: float | None = None
  xla_seconds: float | None = None

  @property
  def is_xla_faster(self) -> bool:
    """Whether XLA's product is the winner."""
    if self.config is None:
      return True
    is_known = self.seconds is not None and self.xla_seconds is not None
    return is_known and self.xla_seconds < self.seconds


def file_stem(device: str) -> str:
  """The name of a kind of GPU in names of files, "NVIDIA H200" -> nvidia_h200.

  Args:
    device: as the driver names it.
  """
  return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") or "unknown"


# The row of a problem of which nothing is said.
_PLAIN = Problem.flat(m=0, n=0, k=0, dtype="", out_dtype="").row()


def short_row(problem: Problem) -> dict[str, Any]:
  """The fields of a problem's row that differ from their defaults."""
  row = problem.row()
  return {name: row[name] for name in row if row[name] != _PLAIN.get(name)}


def key_of(problem: Problem, **more: Any) -> str:
  """A problem as text, with `more` beside its fields."""
  fields = short_row(problem) | more
  return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def to_json(entry: Entry) -> dict[str, Any]:
  """What `from_json` makes an entry of."""
  config = entry.config and {
    field.name: getattr(entry.config, field.name)
    for field in dataclasses.fields(Config)
    if getattr(entry.config, field.name) != field.default
  }
  times = {"seconds": entry.seconds, "xla_seconds": entry.xla_seconds}
  return {"config": config} | {k: v for k, v in times.items() if v is not None}


def from_json(value: Any) -> Entry:
  """The entry that a value read from a file stands for.

  Raises:
    ValueError: it stands for none.
  """
  if not isinstance(value, dict) or "config" not in value:
    raise ValueError("it holds no config")
  config = value["config"]
  if config is not None:
    types = {f.name: type(f.default) for f in dataclasses.fields(Config)}
    if not isinstance(config, dict) or any(
      type(x) is not types.get(name) for name, x in config.items()
    ):
      raise ValueError("its config has other fields than one of this version")
    config = Config(**config)
  times = [value.get(name) for name in ("seconds", "xla_seconds")]
  if any(type(x) not in (float, int, type(None)) for x in times):
    raise ValueError("its times are no numbers")
  return Entry(config, *times)
