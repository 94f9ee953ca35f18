"""What rungs need of a GPU, in a sentence."""

from collections.abc import Sequence
import re

import jax

from pallas_gemm import hardware


def lacks(
  label: str, needs: Sequence[str], gpu: hardware.Gpu | None
) -> str | None:
  """None, or what a GPU lacks of a rung's needs, and the rungs that run on it.

  Args:
    label: the rung's.
    needs: of `hardware.FEATURES`.
    gpu: None is the one that a trace made now is for.
  """
  reason = _why_not(f"rung {label}", needs, gpu)
  if reason is None:
    return None
  # The ladder imports this.
  from pallas_gemm import ladder  # pylint: disable=g-import-not-at-top

  every = ladder.with_variants(ladder.LADDER + ladder.BLACKWELL)
  fit = [x for x in every if not _why_not("", x.needs, gpu)]
  if not fit:
    return reason
  return f"{reason}; rungs {_in_words([x.label for x in fit])} run on it"


def _why_not(
  who: str, needs: Sequence[str], gpu: hardware.Gpu | None
) -> str | None:
  """`hardware.why_not`, or that this JAX makes calls of a GPU's TMA."""
  if reason := hardware.why_not(who, needs, gpu):
    return reason
  have = (gpu or hardware.current()).compute_capability
  if "tma" in needs and have >= (12, 0) and jax.__version_info__ < (0, 12):
    return (
      f"{who} needs JAX 0.12 on compute capability 12, not {jax.__version__}"
    )
  return None


def _in_words(labels: list[str]) -> str:
  """Numbers that follow each other as a range: "1-7, 8a and 9c"."""
  plain = [int(x) for x in labels if x.isdecimal()]
  parts = [
    f"{first}-{last}" if (last := _end(first, plain)) > first else str(first)
    for first in plain
    if first - 1 not in plain
  ]
  parts += [x for x in labels if not x.isdecimal()]
  parts.sort(key=lambda x: (int(re.match(r"\d+", x)[0]), x))
  return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _end(first: int, numbers: list[int]) -> int:
  return _end(first + 1, numbers) if first + 1 in numbers else first
