"""How far off sums of 8-bit floats are, by whoever adds them up.

Operands are drawn from N(0, 1), whose losses partly cancel, and from [0, 1),
whose losses are all of one sign. They are float8_e4m3fn without scales, so what
is off is the sum alone.
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

SUITE, DTYPE = "errors", "float8_e4m3fn"
LENGTHS = 1024, 4096, 16384
FAST = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
_KERNEL = Claim("^sm90_dense", "it needs the Hopper kernel")
CLAIMS = {
  f"{OURS} promoted": _KERNEL,
  f"{OURS} fast": _KERNEL,
  "xla default": XLA,
  "xla HIGHEST": XLA,
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
  """

  m: int
  n: int
  k: int
  distribution: str

  @property
  def name(self) -> str:
    return f"matmul {self.m} {self.n} {self.k} {self.distribution}"

  def draw(self, seed: int) -> dict[str, jax.Array]:
    """A and B."""
    keys = jax.random.split(jax.random.key(seed))
    draw = functools.partial(_DRAWN[self.distribution], dtype=jnp.float32)
    shapes = (self.m, self.k), (self.n, self.k)
    x = (draw(key, shape).astype(DTYPE) for key, shape in zip(keys, shapes))
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
    fns = [functools.partial(ours, precision=how) for how in (None, FAST)]
    fns += [functools.partial(xla, precision=how) for how in (None, "highest")]
    return {
      name: jax.jit(lambda a, b, fn=fn: fn(a, b))
      for name, fn in zip(CLAIMS, fns, strict=True)
    }


def cases() -> Iterator[Sums]:
  """512 x 512 results of sums of some lengths."""
  for distribution in _DRAWN:
    for k in LENGTHS:
      yield Sums(512, 512, k, distribution)


def row(bench: Bench, case: Sums) -> dict[str, Any]:
  """Of each arm the Frobenius norm of its error over that of the result.

  The check is of ours, promoted. Of an arm that did not run what it claims the
  reason is kept.
  """
  operands, fns = case.draw(bench.seed), case.arms()
  a, b = (np.asarray(x).astype(np.float64) for x in operands.values())
  want = a @ b.T
  bound = numerics.bound_of_sum(a, b.T, dtypes=(jnp.dtype(DTYPE),) * 2)
  outs = {name: np.asarray(fn(**operands)) for name, fn in fns.items()}
  times = bench.times(fns, operands) if bench.timed else {}
  arms, skipped = {}, {}
  for name, out in outs.items():
    kernels = list(times[name].kernel_names) if times else []
    if times and (why := CLAIMS[name].refuted(kernels)):
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
    dtype=DTYPE,
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
