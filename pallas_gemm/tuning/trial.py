"""One problem, ready to be run with any config, and what its result must be.

A config that makes the kernel wrong must never be remembered, however fast.
Each result is compared with float64 (see `check`) on rows and columns that meet
the tiles of all but the largest results (see `sampling`).

8-bit values that have scales are N(0, 1), of int8 a few times that, and scales
between a half and two; those of B make up for K.

How large groups are is not part of a problem. Here they are between half and
one and a half times as large as each other would make them: none ends with a
tile, and no config can win by suiting sizes that are all the same.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import check, sampling
from pallas_gemm.kernels.sm90 import layout
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem

Arrays = dict[str, jax.Array]
Outs = tuple[jax.Array, ...]

# Elements along K that have one scale; whole groups of 8 bits start at such.
_BLOCK = 128
# int8 of N(0, 1) times this many.
_INT8 = 8.0
# Rows, and columns, of which results are checked; and of how many groups.
_SAMPLE, _GROUPS = 256, 4
_CHECKED = "a", "b", "b_up", "bias", "c"
_SCALES = "scale_a", "scale_b", "scale_up"


@dataclasses.dataclass(frozen=True)
class Case:
  """A problem and what else a kernel needs to know to run it.

  Attributes:
    problem: what is tuned.
    activation: the function that the problem names.
    alpha, beta: factors of the product and of C.
  """

  problem: Problem
  activation: Callable[[jax.Array], jax.Array] | None = None
  alpha: float = 1.0
  beta: float = 1.0


class Trial:
  """A case with operands drawn from N(0, 1), scaled to results of that size.

  Attributes:
    case: what is run.
    operands: by the names that they have in `ops.spec.Operands`; scales as
      kernels take them.
  """

  def __init__(self, case: Case, sizes: np.ndarray | None = None):
    """`sizes`: rows of each group, if not as said above."""
    self.case = case
    self.operands = operands(case.problem, sizes)
    self._expected = [
      (part, self._of(part)) for part in _parts(case.problem, self.operands)
    ]

  def call(self, function: Callable[..., Outs]) -> Callable[[], Outs]:
    """The call of what `compiled` gives on the operands."""
    return functools.partial(function, **self.operands)

  def error(self, results: Outs) -> str | None:
    """None if the results are right, or what is wrong."""
    if not all(bool(jnp.isfinite(x).all()) for x in results):
      return "wrong result: not all of it is finite"
    for part, expected in self._expected:
      for out, of_result in zip(results, expected):
        found = of_result.check(part.of(out))
        if not found.passed:
          i, j = found.worst
          at = part.matrix, part.rows[i], part.columns[j]
          return (
            f"wrong result: element {[*map(int, at)][-out.ndim :]} is off by"
            f" {found.worst_error:.3g}, at most {found.error_bound:.3g} is"
            " rounding"
          )
    return None

  def _of(self, part: sampling.Part) -> tuple[check.Expected, ...]:
    """What a part of each result must be."""
    case, p = self.case, self.case.problem
    bias = p.epilogue.bias
    arrays = {k: v for k, v in self.operands.items() if k in _CHECKED}
    if bias == "m":
      arrays["bias"] = arrays["bias"][:, None]
    elif bias and p.groups:
      arrays["bias"] = arrays["bias"][:, None, :]
    layout = "TN"[p.a.k_last] + "NT"[p.b.k_last]
    return check.expected(
      **part.operands(arrays, layout),
      alpha=case.alpha,
      beta=case.beta,
      activation=case.activation,
      out_dtype=p.out_dtype,
      scales=[self._scale_of(part, name) for name in _SCALES],
      fast_accumulation=p.fast_accumulation,
      planes=p.planes if p.planes > 1 else None,
    )

  def _scale_of(self, part: sampling.Part, name: str) -> np.ndarray | None:
    """A number for each row or column of a part, or each of its elements."""
    if (scale := self.operands.get(name)) is None:
      return None
    p, is_a = self.case.problem, name == "scale_a"
    operand, at = (p.a, part.rows) if is_a else (p.b, part.columns)
    if operand.scale == "tensor":
      at = np.zeros_like(at)
    elif operand.scale == "block" and not is_a:
      at = at // _BLOCK
    scale = np.asarray(scale[min(part.matrix, len(scale) - 1)])
    if not p.has_blocks:
      return scale[at]
    k = np.arange(p.k)[part.k] // _BLOCK
    scale = scale[np.ix_(k, at)]
    return scale.T if is_a else scale


def compiled(case: Case, config: Config, arrays: Arrays) -> Callable[..., Outs]:
  """The kernel with a config, compiled for arrays like the operands."""
  # Which imports Mosaic GPU.
  from pallas_gemm.kernels.sm90 import launch
  from pallas_gemm.kernels.sm90.scales import Scales

  kernel, factors = launch.grouped, {}
  if case.problem.groups is None:
    kernel = launch.dense
    factors = {"alpha": case.alpha, "beta": case.beta}

  def run(**arrays):
    scales = Scales(*[arrays.pop(name, None) for name in _SCALES])
    return kernel(
      **arrays,
      scales=scales,
      problem=case.problem,
      config=config,
      activation=case.activation,
      **factors,
    )

  return jax.jit(run).lower(**arrays).compile()


def _parts(p: Problem, x: Arrays) -> Iterator[sampling.Part]:
  """Which parts of the results are checked."""
  rng = np.random.default_rng(0)
  if p.groups is None:
    yield from sampling.of_batch((p.batch, p.m, p.n), _SAMPLE, 2, rng)
    return
  shape = (p.m, p.n) if p.along == "m" else (p.groups.count, p.m, p.n)
  sizes = np.diff(x["offsets"])
  yield from sampling.of_groups(shape, sizes, _SAMPLE, _GROUPS, rng)


def _scale_shapes(p: Problem) -> dict[str, tuple[int, ...]]:
  """Of each scale, as kernels take it: [matrices, slabs of K, free]."""
  found, slabs = {}, [layout.cdiv(p.k, _BLOCK)] * p.has_blocks
  sides = (p.a, p.m), *[(p.b, p.n)] * p.products
  for name, (operand, size) in zip(_SCALES, sides):
    is_stack = p.along == "m" and name != "scale_a"
    count = p.groups.count if is_stack else p.matrices(operand)
    free = 1 if operand.scale == "tensor" else size
    if operand.scale == "block" and name != "scale_a":
      free = layout.cdiv(size, _BLOCK)
    if operand.scale:
      found[name] = count, *slabs, free
  return found


@functools.partial(jax.jit, static_argnums=(1, 2))
def _uniform(key, shape: tuple[int, ...], scale: float):
  return scale * jax.random.uniform(key, shape, minval=0.5, maxval=2.0)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key, shape: tuple[int, ...], dtype: str, scale: float):
  x = scale * jax.random.normal(key, shape, jnp.float32)
  return (jnp.round(x) if dtype == "int8" else x).astype(dtype)


def operands(p: Problem, sizes: np.ndarray | None = None) -> Arrays:
  """What the kernel takes, by the name of its argument, or of a scale.

  Args:
    p: the problem.
    sizes: rows of each group, if not as said above.
  """
  a, b = layout.operand_shapes(p)
  if p.groups is None:
    a, b = (p.matrices(p.a), *a), (p.matrices(p.b), *b)
  elif p.along == "m":
    b = (p.groups.count, *b)
  # A power of two: the bits of the significands are those of N(0, 1).
  scale = 2.0 ** -round(np.log2(p.k) / 2)
  one = _INT8 if p.a.dtype == "int8" else 1.0
  of_b = one if p.has_scales or p.a.dtype == "int8" else scale
  wanted = {"a": (a, p.a.value_dtype, one), "b": (b, p.b.value_dtype, of_b)}
  epilogue = p.epilogue
  if epilogue.gated:
    wanted["b_up"] = wanted["b"]
  if epilogue.bias:
    size = (p.n if epilogue.bias == "n" else p.m,)
    size = (p.groups.count, *size) if p.groups else size
    dtype = "bfloat16" if p.a.bits == 8 else p.a.value_dtype
    wanted["bias"] = (size, dtype, 1.0)
  if epilogue.c_dtype:
    wanted["c"] = ((p.batch, p.m, p.n), epilogue.c_dtype, 1.0)
  keys = jax.random.split(jax.random.key(0), len(wanted))
  found = {
    name: _normal(key, *how) for key, (name, how) in zip(keys, wanted.items())
  }
  for i, (name, shape) in enumerate(_scale_shapes(p).items()):
    size = (scale if name != "scale_a" or not p.b.scale else 1.0) / one
    found[name] = _uniform(jax.random.key(1 + i), shape, size)
  if p.groups:
    rows = p.m if p.along == "m" else p.k
    step = _BLOCK if p.has_whole_slabs else 1
    offsets = step * _offsets(rows // step, p.groups.count)
    if sizes is not None:
      ends = np.cumsum(step * -(-np.asarray(sizes) // step))
      offsets = np.concatenate([[0], ends]).astype(np.int32)
    found["offsets"] = jnp.asarray(offsets)
  return found


def _offsets(rows: int, groups: int) -> np.ndarray:
  """[groups + 1]: where groups of different sizes start, without a gap."""
  weights = np.random.default_rng(0).uniform(0.5, 1.5, groups)
  ends = np.cumsum(weights) / weights.sum() * rows
  return np.concatenate([[0], np.round(ends)]).astype(np.int32)
