"""Tier A: every rung's numbers, in Pallas' GPU interpreter, on any machine."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import numerics
from pallas_gemm.ladder import BLACKWELL, LADDER, contract, with_variants
from tests.support import problems
from tests.support.programs import ROOT

RUNGS = with_variants(LADDER + BLACKWELL)
each_rung = pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)


def _dtype_of(rung, index: int) -> str:
  """Dtypes in turn, so that a list of shapes meets them all."""
  return rung.dtypes[index % len(rung.dtypes)]


def _assert_right(out, a, b, c=None, *, alpha=1.0, beta=0.0):
  __tracebackhide__ = True
  assert out.dtype == a.dtype
  check = numerics.check(np.asarray(out), a, b, c, alpha=alpha, beta=beta)
  assert check.passed, check


def _shapes():
  """One shape has it all; of the others each rung has every third one.

  test_ladder_properties draws more.
  """
  for i, rung in enumerate(RUNGS):
    yield pytest.param(
      rung,
      problems.ODD,
      marks=pytest.mark.smoke,
      id=f"{rung.name}-{problems.ODD}",
    )
    others = [x for x in problems.SMALL_SHAPES if x != problems.ODD]
    if rung.number <= 4:  # larger ones are slow to interpret
      others = [x for x in others if x.m * x.n <= 2048]
    for shape in others[i % 3 :: 3]:
      yield pytest.param(rung, shape, id=f"{rung.name}-{shape}")


@pytest.mark.parametrize(("rung", "shape"), list(_shapes()))
def test_shapes(rung, shape):
  index = problems.SMALL_SHAPES.index(shape)
  if shape == problems.ODD and rung.number <= 4:
    shape = problems.ODD_FOR_SMALL_BLOCKS
  a, b, c = problems.operands(*shape, _dtype_of(rung, index))
  c[:] = np.nan  # which nobody reads
  _assert_right(rung.gemm(a, b, c, beta=0.0), a, b)


@each_rung
def test_alpha_and_beta(rung):
  """No tile fits C. Other factors are what other tests here have."""
  a, b, c = problems.operands(67, 61, 13, rung.dtypes[-1])
  out = rung.gemm(a, b, c, alpha=-0.5, beta=2.0)
  _assert_right(out, a, b, c, alpha=-0.5, beta=2.0)


@each_rung
def test_alpha_of_zero_does_not_read_a_and_b(rung):
  a, b, c = problems.operands(*problems.one_shape(rung), rung.dtypes[0])
  a[:], b[:] = np.nan, np.inf
  out = rung.gemm(a, b, c, alpha=0.0, beta=2.0)
  _assert_right(out, a, b, c, alpha=0.0, beta=2.0)
  assert not np.asarray(rung.gemm(a, b, alpha=0.0)).any()


# NumPy, in which the interpreter computes, remarks on inf - inf.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@each_rung
def test_nan_stays_in_its_row_and_column(rung):
  a, b, _ = problems.operands(37, 41, 9, rung.dtypes[0])
  a[5, 3] = np.nan
  b[7, 40] = np.inf
  out = np.asarray(rung.gemm(a, b)).astype(np.float32)
  assert np.isnan(out[5]).all()
  assert not np.isfinite(out[:, 40]).any()
  others = np.delete(np.delete(out, 5, axis=0), 40, axis=1)
  assert np.isfinite(others).all()


@each_rung
@pytest.mark.parametrize(
  "shape", [(5, 7, 0), (0, 7, 3), (5, 0, 3), (0, 0, 0)], ids=str
)
def test_dimensions_of_zero(rung, shape):
  m, n, _ = shape
  a, b, c = problems.operands(*shape, rung.dtypes[0])
  out = rung.gemm(a, b)
  assert out.shape == (m, n) and out.dtype == a.dtype
  assert not np.asarray(out).any()
  out = rung.gemm(a, b, c, alpha=3.0, beta=-2.0)
  _assert_right(out, a, b, c, alpha=3.0, beta=-2.0)


@each_rung
def test_the_same_bits_each_time(rung):
  """Also under jit, and of NumPy arrays reversed or cut out of larger ones."""
  a, b, c = problems.operands(*problems.one_shape(rung), rung.dtypes[0])
  plain = rung.gemm(a, b, c, alpha=0.7, beta=1.0)
  wide = np.zeros((2 * a.shape[0], a.shape[1] + 3), a.dtype)
  wide[::2, 1:-2] = a
  strided = (
    wide[::2, 1:-2],
    np.asfortranarray(b),
    np.ascontiguousarray(c[::-1])[::-1],
  )
  assert not any(x.flags.c_contiguous for x in strided)
  gemm = jax.jit(rung.gemm, static_argnames=("alpha", "beta", "config"))
  for f, operands in (
    (rung.gemm, strided),
    (gemm, tuple(map(jnp.asarray, (a, b, c)))),
  ):
    out = f(*operands, alpha=0.7, beta=1.0)
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(problems.bits(out), problems.bits(plain))


@each_rung
def test_a_sum_longer_than_the_ring(rung):
  """K that is many slabs, and no whole number of them; a factor, no C."""
  k = 131 if rung.config_type is contract.SimtConfig else 515
  a, b, _ = problems.operands(8, 16, k, rung.dtypes[0])
  _assert_right(rung.gemm(a, b, alpha=2.5), a, b, alpha=2.5)


@pytest.mark.parametrize("rung", LADDER[:3], ids=lambda r: r.name)
def test_the_worked_example(rung):
  """16x16x16 in 4x4 blocks, as the textbooks draw it."""
  a, b, _ = problems.operands(16, 16, 16, "float32")
  default = rung.default_config(contract.Gemm(16, 16, 16))
  slab = 4 if default.block_k else 0
  config = dataclasses.replace(default, block_m=4, block_n=4, block_k=slab)
  _assert_right(rung.gemm(a, b, config=config), a, b)


# A user's own program.


def _run(program: str) -> subprocess.CompletedProcess[str]:
  env = {k: v for k, v in os.environ.items() if k != "PJRT_NPROC"}
  return subprocess.run(
    [sys.executable, "-c", program],
    cwd=ROOT,
    env=env | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=120,
  )


def test_a_program_on_few_cores_does_not_stand_still():
  # The three warpgroups of each block wait for one another.
  done = _run(
    "import jax.numpy as jnp\n"
    "from pallas_gemm.ladder import LADDER\n"
    "a = jnp.ones((100, 77), jnp.bfloat16)\n"
    "b = jnp.ones((77, 51), jnp.bfloat16)\n"
    "c = jnp.ones((100, 51), jnp.bfloat16)\n"
    "print(float(LADDER[11].gemm(a, b, c, beta=2.0)[99, 50]))\n"
  )
  assert (done.returncode, done.stdout) == (0, "79.0\n"), done.stderr


def test_a_program_that_starts_jax_first_is_warned():
  done = _run(
    "import os\n"
    "os.cpu_count = lambda: 2\n"
    "import jax.numpy as jnp\n"
    "a = jnp.ones((4, 4))\n"
    "from pallas_gemm.ladder import LADDER\n"
    "LADDER[0].gemm(a, a), LADDER[1].gemm(a, a)\n"
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr.count("set PJRT_NPROC=32") == 1
