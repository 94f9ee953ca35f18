"""One grouped problem, ready to be run with any config; see `trial`.

How large the groups are is not part of a problem. Here they are between half
and one and a half times as large as each other would make them: none ends with
a tile, and no config can win by suiting sizes that are all the same.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.kernels.sm90 import launch
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import trial

# Groups whose results are checked.
_SAMPLE = 4


class GroupedTrial(trial.Trial):
  """A case of a grouped product."""

  def __init__(self, case: trial.Case):
    problem = case.problem
    rows = problem.m if problem.ragged == "m" else problem.k
    self._offsets = _offsets(rows, problem.groups.count)
    super().__init__(case)

  def _make_operands(self) -> dict[str, jax.Array]:
    p = self.case.problem
    found = trial.operands(_as_batch(p))
    if p.ragged == "k":
      found |= {name: found[name].reshape(p.k, -1) for name in ("a", "b")}
    else:
      found["a"] = found["a"][0]
    if p.bias:
      size = (p.groups.count, p.n)
      found["bias"] = trial.normal(jax.random.key(1), size, p.dtype, 1.0)
    return found | {"offsets": jnp.asarray(self._offsets, jnp.int32)}

  def _make_expected(self) -> list[list[trial.Expected]]:
    """Of each result, what is checked: some rows or all of some groups."""
    p = self.case.problem
    found: list[list[trial.Expected]] = []
    for group in _some(p.groups.count):
      start, end = self._offsets[group : group + 2]
      if start == end:
        continue
      dense = dataclasses.replace(p, groups=None, **{p.along: int(end - start)})
      case = dataclasses.replace(self.case, problem=dense)
      part = _of_group(self.operands, p, group, slice(start, end))
      results = trial.expected(case, part)
      found = found or [[] for _ in results]
      for parts, of_group in zip(found, results):
        parts += [_moved(x, p, group, start) for x in of_group]
    return found

  def _kernel(self, config: Config) -> Callable[..., trial.Results]:
    return functools.partial(
      launch.grouped,
      problem=self.case.problem,
      config=config,
      activation=self.case.activation,
    )

  def error(self, results: trial.Results) -> str | None:
    if self.case.problem.ragged == "m":
      results = tuple(x[None] for x in results)
    return super().error(results)


def _offsets(rows: int, groups: int) -> np.ndarray:
  """[groups + 1]: where groups of different sizes start, without a gap."""
  weights = np.random.default_rng(0).uniform(0.5, 1.5, groups)
  ends = np.cumsum(weights) / weights.sum() * rows
  return np.concatenate([[0], np.round(ends)]).astype(np.int32)


def _some(groups: int) -> Iterator[int]:
  """Numbers of some groups, the first and the last among them."""
  picked = np.linspace(0, groups - 1, min(_SAMPLE, groups))
  return iter(dict.fromkeys(picked.astype(int).tolist()))


def _as_batch(p: Problem) -> Problem:
  """A dense problem with the operands of the grouped one, but for the bias."""
  dense = p.changed(ragged=None, groups=0, bias=None)
  if p.along == "k":
    return dense
  count = p.groups.count
  return dense.changed(batch=count, batched_b=count > 1)


def _of_group(
  x: Mapping[str, jax.Array], p: Problem, group: int, rows: slice
) -> dict[str, jax.Array]:
  """The operands of the dense product that one group is."""
  part = {"a": x["a"][rows][None]}
  if p.ragged == "k":
    return part | {"b": x["b"][rows][None]}
  names = [name for name in ("b", "b_up") if name in x]
  part |= {name: x[name][group][None] for name in names}
  return part | ({"bias": x["bias"][group]} if p.bias else {})


def _moved(
  part: trial.Expected, p: Problem, group: int, start: int
) -> trial.Expected:
  """What is expected of a group, where it is in the result of all."""
  if p.ragged == "k":
    return dataclasses.replace(part, index=group)
  return dataclasses.replace(part, rows=part.rows + start)
