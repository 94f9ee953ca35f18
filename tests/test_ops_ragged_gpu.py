"""Tier D: grouped products on an NVIDIA GPU of compute capability 9.0.

Run as `test_ops_gpu`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import tuning
from tests.support import canaries
from tests.support.ragged import Case

pytestmark = pytest.mark.gpu

# Most of a test's time is compiling: sizes and offsets are traced, and several
# are drawn for a program: 120 * 2 * 4 small and 10 * 4 large products.
CHUNKS, LARGE_CHUNKS = 120, 10
PROGRAMS, LARGE_PROGRAMS = 2, 1
DRAWS = 4
# Elements of all groups' matrices. With four times as many the float64 loop,
# which has a few arrays of as many for each draw, takes longer than 200 s.
MOST_ELEMENTS = 2**24
DTYPES = ("bfloat16", "float16")


def _draw(rng: np.random.Generator, most: int, groups: int) -> Case:
  """A random program, its sizes left out."""
  m, n, k = (int(x) for x in rng.integers(1, most + 1, 3))
  if rng.random() < 0.5:  # what TMA addresses without a copy
    n, k = -(-n // 64) * 64, -(-k // 64) * 64
  total = int(rng.integers(1, min(groups, MOST_ELEMENTS // (n * k)) + 1))
  dtype = str(rng.choice(DTYPES))
  return Case(
    m=m,
    n=n,
    k=k,
    sizes=(0,) * total,
    groups=int(rng.integers(1, total + 1)) if rng.random() < 0.5 else None,
    dtype=dtype,
    out_dtype=str(rng.choice((dtype, "float32"))),
    transpose=bool(rng.random() < 0.5),
    bias=bool(rng.random() < 0.3),
  )


def _draw_sizes(rng: np.random.Generator, case: Case) -> Case:
  """The program with sizes that are no multiples of anything."""
  total = len(case.sizes)
  share = rng.dirichlet(np.full(total, 0.5))
  taken = int(rng.integers(0, case.m + case.m // 8 + 1))  # may be too many
  sizes = tuple(int(size) for size in rng.multinomial(taken, share))
  offset = None
  if case.groups is not None:
    offset = int(rng.integers(0, total - case.groups + 1))
  return dataclasses.replace(case, sizes=sizes, offset=offset)


@functools.partial(jax.jit, static_argnums=(0,))
def _forward_and_back(case: Case, x, ct, sizes, offset):
  def forward(x):
    return case(x, sizes, offset, implementation="sm90")

  out, vjp = jax.vjp(forward, x)
  return out, vjp(ct)[0]


def _run(case: Case, x, ct):
  """The result and all gradients; compiled once for all sizes and offsets."""
  program = dataclasses.replace(case, sizes=(0,) * len(case.sizes), offset=None)
  sizes = jnp.asarray(case.sizes, jnp.int32)
  offset = None if case.offset is None else jnp.int32(case.offset)
  return _forward_and_back(program, x, ct, sizes, offset)


def _check(program: Case, rng: np.random.Generator, seed: int) -> None:
  """Results and gradients of a program, with some sizes."""
  x = program.operands(seed)
  ct = jax.random.normal(jax.random.key(seed), (program.m, program.n))
  ct = ct.astype(program.out_dtype or program.dtype)
  for _ in range(DRAWS):
    case = _draw_sizes(rng, program)
    out, gradients = _run(case, x, ct)
    try:
      case.assert_right(out, x)
      case.assert_gradients(gradients, ct, x)
    except AssertionError as error:
      raise AssertionError(f"operands({seed}) of {case}: {error}") from error


@pytest.mark.timeout(600, method="thread")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random(chunk):
  rng = np.random.default_rng((1, chunk))
  for seed in range(PROGRAMS):
    _check(_draw(rng, 400, 24), rng, seed)


@pytest.mark.timeout(600, method="thread")
@pytest.mark.parametrize("chunk", range(LARGE_CHUNKS))
def test_random_large(chunk):
  rng = np.random.default_rng((2, chunk))
  for seed in range(LARGE_PROGRAMS):
    _check(_draw(rng, 3000, 300), rng, seed)


def _random_sizes(rows: int, groups: int) -> tuple[int, ...]:
  share = np.random.default_rng(0).dirichlet(np.full(groups, 1.0))
  sizes = np.random.default_rng(1).multinomial(rows, share)
  return tuple(int(size) for size in sizes)


@pytest.mark.parametrize(
  ("gated", "transpose"), ((False, False), (False, True), (True, False))
)
def test_epilogues(gated, transpose):
  case = Case(
    m=2000,
    n=1024,
    k=1024,
    sizes=_random_sizes(1900, 8),
    dtype="bfloat16",
    transpose=transpose,
    activation=jax.nn.silu,
    bias=not gated,
    gated=gated,
  )
  x = case.operands()
  case.assert_right(jax.jit(case)(x), x)


_TILE = {"block_m": 128, "block_n": 128, "stages": 4, "epilogue_buffers": 1}
CONFIGS = {
  "model": None,
  "low": tuning.Config(block_m=64, block_n=64, stages=4, consumers=1),
  "columns": tuning.Config(block_m=64, block_n=256, stages=4, split="n"),
  "three": tuning.Config(
    block_m=192, block_n=128, stages=4, consumers=3, epilogue_buffers=1
  ),
  "cluster": tuning.Config(**_TILE, cluster_n=2),
  "high": tuning.Config(block_m=256, block_n=128, stages=3, epilogue_buffers=1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name):
  """Each gives the same, right bits 100 times."""
  case = Case(
    m=3000, n=1000, k=520, sizes=_random_sizes(2900, 12), dtype="bfloat16"
  )
  x = case.operands()
  compute = jax.jit(
    functools.partial(case, implementation="sm90", config=CONFIGS[name])
  )
  case.assert_right(canaries.assert_same_bits(compute, x), x)


def test_gradients_have_the_same_bits_every_time():
  case = Case(
    m=4000, n=512, k=768, sizes=_random_sizes(3900, 16), dtype="bfloat16"
  )
  x = case.operands()
  ct = jax.random.normal(jax.random.key(0), (case.m, case.n), jnp.bfloat16)
  canaries.assert_same_bits(functools.partial(_run, case), x, ct)


def test_rows_do_not_depend_on_the_others():
  sizes = _random_sizes(4000, 8)
  case = Case(m=4096, n=1024, k=2048, sizes=sizes, dtype="bfloat16")
  x = case.operands()
  with pallas_gemm.batch_invariant():
    want = np.asarray(case(x))
    for rows in (1, 2, 63, 64, 65, 300):
      few = tuple(min(size, rows) for size in sizes)
      starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
      kept = np.concatenate(
        [np.arange(start, start + n) for start, n in zip(starts, few)]
      )
      fewer = Case(m=len(kept), n=1024, k=2048, sizes=few, dtype="bfloat16")
      got = fewer(x | {"lhs": x["lhs"][kept]})
      np.testing.assert_array_equal(np.asarray(got), want[kept])


# Sizes that sum to less than M, to more, that are negative.
SIZES = {
  "less": (100, 0, 300),
  "more": (500, 500, 500),
  "negative": (100, -5, 300),
  "none": (0, 0, 0),
  "huge": (2**31 - 1, 2**31 - 1, 7),
}


@pytest.mark.parametrize("name", SIZES)
def test_nothing_is_written_outside(name):
  case = Case(m=768, n=1000, k=256, sizes=SIZES[name], dtype="bfloat16")
  x = case.operands()
  canaries.assert_written_inside(
    jax.jit(functools.partial(case, implementation="sm90")),
    x,
    check=lambda out: case.assert_right(out, x),
  )


@pytest.mark.parametrize("name", SIZES)
def test_no_weight_gradient_is_written_outside(name):
  case = Case(m=768, n=256, k=96, sizes=SIZES[name], dtype="bfloat16")
  x = case.operands()
  ct = jax.random.normal(jax.random.key(0), (case.m, case.n), jnp.bfloat16)

  @jax.jit
  def gradient(x, ct):
    return _run(case, x, ct)[1]["rhs"]

  def check(out):
    case.assert_gradients(dict(x, rhs=out) | {"lhs": lhs}, ct, x)

  lhs = _run(case, x, ct)[1]["lhs"]
  canaries.assert_written_inside(gradient, x, ct, check=check)
