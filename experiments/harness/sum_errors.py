"""How far off sums are, by whoever adds them up: of 8-bit floats, of float32.

Operands are drawn from N(0, 1), whose losses partly cancel, and from [0, 1),
whose losses are all of one sign. Those of 8 bits are float8_e4m3fn without
scales, so what is off is the sum alone.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from experiments.harness.case import OURS, XLA, Call, Claim
from experiments.harness.run import Bench
import pallas_gemm
from pallas_gemm import numerics

SUITE = "errors"
FAST = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
X3 = lax.DotAlgorithmPreset.BF16_BF16_F32_X3
X6 = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
X9 = lax.DotAlgorithmPreset.BF16_BF16_F32_X9
_KERNEL = Claim("^sm90_dense", "it needs the Hopper kernel")
# By the operands' dtype: who adds, whether it is this package, its precision.
_ARMS: dict[str, dict[str, tuple[bool, Any]]] = {
  "float8_e4m3fn": {
    f"{OURS} promoted": (True, None),
    f"{OURS} fast": (True, FAST),
    "xla default": (False, None),
    "xla HIGHEST": (False, "highest"),
  },
  "float32": {
    f"{OURS} HIGHEST": (True, "highest"),
    f"{OURS} x3": (True, X3),
    "xla HIGHEST": (False, "highest"),
    "xla x6": (False, X6),
    "xla x3": (False, X3),
  },
}
_LENGTHS = {
  "float8_e4m3fn": (1024, 4096, 16384),
  "float32": (256, 4096, 65536),
}
CLAIMS = {
  dtype: {name: _KERNEL if own else XLA for name, (own, _) in arms.items()}
  for dtype, arms in _ARMS.items()
}
# By what rows call them.
_DRAWN: dict[str, Callable] = {
  "normal(0,1)": jax.random.normal,
  "uniform[0,1)": jax.random.uniform,
}


@dataclasses.dataclass(frozen=True)
class Sums:
  """A [M, K] times B [N, K]; a result in float32.

  Attributes:
    m, n, k: the product's dimensions.
    distribution: of the operands.
    dtype: likewise.
  """

  m: int
  n: int
  k: int
  distribution: str
  dtype: str = "float8_e4m3fn"

  @property
  def name(self) -> str:
    return f"matmul {self.m} {self.n} {self.k} {self.distribution}"

  def draw(self, seed: int) -> dict[str, jax.Array]:
    """A and B."""
    keys = jax.random.split(jax.random.key(seed))
    draw = functools.partial(_DRAWN[self.distribution], dtype=jnp.float32)
    shapes = (self.m, self.k), (self.n, self.k)
    x = (
      draw(key, shape).astype(self.dtype) for key, shape in zip(keys, shapes)
    )
    return dict(zip("ab", x))

  def arms(self) -> dict[str, Call]:
    """By the kernel where there is a GPU: tests have XLA's product."""
    ours = functools.partial(
      pallas_gemm.matmul,
      transpose_b=True,
      out_dtype=jnp.float32,
      implementation="sm90" if pallas_gemm.compat.targets_gpu() else None,
    )
    xla = functools.partial(
      lax.dot_general,
      dimension_numbers=(((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
    )

    def arm(own: bool, how: Any) -> Call:
      fn = ours if own else xla
      return jax.jit(lambda a, b: fn(a, b, precision=how))

    return {name: arm(*of) for name, of in _ARMS[self.dtype].items()}


def cases(dtype: str) -> Iterator[Sums]:
  """512 x 512 results of sums of some lengths."""
  for distribution in _DRAWN:
    for k in _LENGTHS[dtype]:
      yield Sums(512, 512, k, distribution, dtype)


def row(bench: Bench, case: Sums) -> dict[str, Any]:
  """Of each arm the Frobenius norm of its error over that of the result.

  The check is of the first arm. Of an arm that did not run what it claims the
  reason is kept.
  """
  operands, fns = case.draw(bench.seed), case.arms()
  a, b = (np.asarray(x).astype(np.float64) for x in operands.values())
  want = a @ b.T
  how = {"planes": 3} if case.dtype == "float32" and bench.timed else {}
  dtypes = (jnp.dtype(case.dtype),) * 2
  bound = numerics.bound_of_sum(a, b.T, dtypes=dtypes, **how)
  outs = {name: np.asarray(fn(**operands)) for name, fn in fns.items()}
  times = bench.times(fns, operands) if bench.timed else {}
  arms, skipped = {}, {}
  for name, out in outs.items():
    kernels = list(times[name].kernel_names) if times else []
    claim = CLAIMS[case.dtype][name]
    if times and (why := claim.refuted(kernels)):
      skipped[name] = why
      continue
    off = np.linalg.norm(out - want) / np.linalg.norm(want)
    arms[name] = {"frobenius": float(off), "kernel_names": kernels}
  check = numerics.compare(outs[next(iter(fns))], want, bound)
  return bench.row(
    check=check,
    passed=check.passed,
    kernel="matmul",
    suite=SUITE,
    m=case.m,
    n=case.n,
    k=case.k,
    dtype=case.dtype,
    out_dtype="float32",
    layout="NT",
    # What tells rows of one shape apart.
    epilogue=case.distribution,
    distribution=case.distribution,
    arms=arms,
    skipped=skipped,
  )


def parts(found: dict[str, Any]) -> list[str]:
  """The error of each arm, and why there is none."""
  errors = [f"{name} {x['frobenius']:.2g}" for name, x in found["arms"].items()]
  return errors + [f"{name}: {why}" for name, why in found["skipped"].items()]
