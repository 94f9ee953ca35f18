"""ragged_dot and its family: values and gradients, group by group."""

import dataclasses
import functools

from absl import logging
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import report, tuning
from pallas_gemm.ops import grouped
from tests.support import problems, products, ragged
from tests.support.cases import pairs
from tests.support.products import normal
from tests.support.ragged import Case

# Small tiles, so that a small product has several.
SMALL = tuning.Config(
  block_m=64, block_n=64, block_k=64, stages=2, consumers=1, epilogue_n=64
)
FEW = Case(m=9, n=4, k=3, sizes=(2, 3))
SEVERAL = Case(m=20, n=7, k=5, sizes=(3, 4, 0, 6), groups=2, offset=1)


def check(case: Case, seed: int = 0, **options) -> None:
  """Forward pass and all gradients."""
  x, ct = case.operands(seed), cotangent(case, seed)
  out, gradients = derivatives(case, x, ct, **options)
  case.assert_right(out, x)
  case.assert_gradients(gradients, ct, x)


def cotangent(case: Case, seed: int = 0) -> jax.Array:
  dtype = case.out_dtype or case.dtype
  return normal(case.m, case.n, dtype=dtype, seed=seed + 9)


def derivatives(case: Case, x, ct, **options):
  """The result, and the gradients by the names of the operands."""
  sizes = jnp.asarray(case.sizes, case.sizes_dtype)
  any_sizes = dataclasses.replace(
    case, sizes=(), offset=None, groups=case.local
  )
  step = compiled(any_sizes, tuple(options.items()))
  return step(x, ct, sizes, case.offset)


@functools.cache
def compiled(case: Case, options):
  """Of a case with any sizes and offset, which are known at run time."""

  @jax.jit
  def step(x, ct, sizes, offset):
    call = lambda x: case(x, sizes, offset, **dict(options))  # noqa: E731
    out, pullback = jax.vjp(call, x)
    return out, *pullback(ct)

  return step


@pytest.mark.parametrize("seed", range(8))
def test_random(seed):
  check(ragged.draw(seed), seed)


SIZES = {
  "one group": (20,),
  "one group of some rows": (13,),
  "first empty": (0, 9, 7, 4),
  "last empty": (9, 7, 4, 0),
  "empty in between": (9, 0, 0, 11),
  "all empty": (0, 0, 0, 0),
  "single rows": (1, 1, 1, 1),
  "too few": (3, 4, 5, 6),
  "too many": (15, 15, 15, 15),
  "the first is too large": (100, 3, 4, 0),
  "negative": (-5, 7, -1, 4),
  "sum overflows": (2**31 - 1, 5, 2**31 - 1, 2**31 - 1),
  "sum overflows late": (4, 5, 2**31 - 1, 2**31 - 1),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
  check(Case(m=20, n=7, k=5, sizes=SIZES[name], bias=True))


@pytest.mark.parametrize("offset", (-3, 0, 1, 2, 9))
def test_offsets(offset):
  """One that leaves fewer than G groups is cut off."""
  check(dataclasses.replace(SEVERAL, offset=offset, bias=True))


def test_offset_of_one_entry():
  x, sizes = SEVERAL.operands(), jnp.asarray(SEVERAL.sizes)
  for offset in (jnp.array([1]), jnp.uint8(1), np.int64(1)):
    SEVERAL.assert_right(SEVERAL(x, sizes, offset), x)


def test_many_groups():
  rng = np.random.default_rng(0)
  sizes = rng.multinomial(90, np.full(512, 1 / 512))
  sizes = tuple(int(size) for size in sizes)
  part = {"offset": 100, "groups": 64}
  case = Case(m=100, n=6, k=8, sizes=sizes, transpose=True, bias=True)
  for one in case, dataclasses.replace(case, **part):
    check(one)


@pytest.mark.parametrize("dtype", ("int8", "uint8", "int16", "uint32"))
def test_integers_of_any_width(dtype):
  check(Case(m=300, n=4, k=3, sizes=(100, 0, 90, 120), sizes_dtype=dtype))


def test_wide_integers():
  with jax.enable_x64(True):
    sizes = jnp.array([3, 2**40, -(2**40), 5])
    bounds = grouped.bounds(sizes, None, 20, 4)
    assert bounds.dtype == jnp.int32
    np.testing.assert_array_equal(bounds, (0, 3, 20, 20, 20))
    sizes = jnp.array([1, 2**40], jnp.uint64)
    bounds = grouped.bounds(sizes, jnp.array(2**40), 20, 1)
    np.testing.assert_array_equal(bounds, (1, 20))


@pytest.mark.parametrize(
  ("dtype", "activation", "gated"),
  pairs(ragged.DTYPES, products.ACTIVATIONS, (False, True)),
)
def test_epilogues(dtype, activation, gated):
  """Those of gated products, of some of the groups."""
  how = {"m": 20, "n": 7, "k": 30, "dtype": dtype, "activation": activation}
  how |= {"groups": 3, "offset": 1, "gated": True} if gated else {"bias": True}
  case = Case(**how, sizes=(3, 0, 9, 4))
  x = case.operands()
  case.assert_right(case(x), x)


def test_rows_of_no_group_are_zeros_whatever_the_epilogue():
  case = Case(m=9, n=4, k=3, sizes=(2, 3, 2), groups=1, offset=1, bias=True)
  for activation in (jnp.cos, jnp.exp, lambda x: 1 / x):
    x = case.operands()
    out = dataclasses.replace(case, activation=activation)(x)
    assert np.asarray(out[2:5]).all()
    case.assert_zero_outside(np.asarray(out))


def test_nan_in_rows_of_no_group_is_not_read():
  case = Case(m=20, n=4, k=3, sizes=(3, 10, 5), offset=1, groups=1)
  x, ct, outside = case.operands(), cotangent(case), np.r_[0:3, 13:20]
  spoilt = x | {"lhs": x["lhs"].at[outside].set(jnp.nan)}
  out, gradients = derivatives(case, spoilt, ct.at[outside].set(jnp.nan))
  case.assert_right(out, x)
  case.assert_gradients(gradients, ct, x)


def test_other_numbers():
  rng = np.random.default_rng(0)
  sizes = jnp.array([3, 0, 4])
  lhs, rhs = (
    jnp.asarray(rng.integers(-9, 9, shape), "int8")
    for shape in ((9, 5), (3, 5, 4))
  )
  out = pallas_gemm.ragged_dot(lhs, rhs, sizes, preferred_element_type="int32")
  want = lax.ragged_dot(lhs, rhs, sizes, preferred_element_type="int32")
  assert out.dtype == jnp.int32
  np.testing.assert_array_equal(out, want)
  lhs, rhs = (x.astype("complex64") * (1 + 2j) for x in (lhs, rhs))
  out = pallas_gemm.ragged_dot(lhs, rhs, sizes)
  np.testing.assert_array_equal(out, lax.ragged_dot(lhs, rhs, sizes))


def test_mixed_dtypes_are_promoted():
  x = FEW.operands()
  x["lhs"] = x["lhs"].astype("bfloat16")
  FEW.assert_right(FEW(x), x | {"lhs": x["lhs"].astype("float32")})


# Nothing to multiply.


@pytest.mark.parametrize(
  ("m", "n", "k", "groups"),
  ((0, 4, 3, 2), (6, 0, 3, 2), (6, 4, 3, 0), (0, 0, 0, 0)),
  ids=str,
)
def test_empty(m, n, k, groups):
  case = Case(m=m, n=n, k=k, sizes=(2,) * groups, dtype="bfloat16", bias=True)
  check(case, implementation="sm90")


@pytest.mark.parametrize("implementation", ("xla", "sm90"))
def test_k_of_zero(implementation):
  case = Case(m=6, n=4, k=0, sizes=(2, 0, 3), bias=True, activation=jnp.tanh)
  x = case.operands()
  case.assert_right(case(x, implementation=implementation), x)
  case = Case(m=6, n=4, k=0, sizes=(2, 3), gated=True, activation=jax.nn.silu)
  x = case.operands()
  assert not np.asarray(case(x, implementation=implementation)).any()


# The Hopper kernel, interpreted.


@pytest.fixture(name="few_sms")
def _few_sms(monkeypatch):
  """A persistent grid of few blocks."""
  problems.assume_sms(monkeypatch, 2)


PART = {"offset": 1, "groups": 1, "transpose": True}
PART |= {"dtype": "float16", "out_dtype": "float32"}


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize(
  "case",
  (
    Case(m=40, n=42, k=64, sizes=(9, 0, 24), dtype="bfloat16", bias=True),
    Case(m=40, n=64, k=72, sizes=(5, 22, 9), **PART),
  ),
  ids=("bias", "offset"),
)
def test_sm90(case):
  check(case, implementation="sm90")


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("gated", (False, True))
def test_sm90_epilogues(gated):
  sizes, how = (9, 0, 33, 20), {"gated": gated, "bias": not gated}
  how |= {"dtype": "bfloat16", "activation": jax.nn.silu}
  case = Case(m=72, n=64, k=64, sizes=sizes, **how)
  x = case.operands()
  out = case(x, implementation="sm90", config=SMALL)
  case.assert_right(out, x)
  again = case(x, implementation="sm90", config=SMALL)
  np.testing.assert_array_equal(again, out)


@pytest.mark.usefixtures("few_sms")
def test_sm90_keeps_nan_in_its_group():
  """Of every operand, forward and in every gradient."""
  case = Case(
    m=40, n=64, k=64, sizes=(3, 17, 12), offset=1, groups=2, dtype="bfloat16"
  )
  x, ct = case.operands(), cotangent(case)
  want, want_grads = derivatives(case, x, ct, implementation="sm90")
  spoilt = np.r_[0:3, 10, 32:40]  # one of a group's rows, and those of none
  nan = {"lhs": x["lhs"].at[spoilt].set(jnp.nan)}
  nan["rhs"] = x["rhs"].at[0].set(jnp.nan)
  nan_ct = ct.at[spoilt].set(jnp.nan)
  out, grads = derivatives(case, nan, nan_ct, implementation="sm90")
  assert np.isnan(np.asarray(out[10], float)).all()
  case.assert_zero_outside(np.asarray(out))
  case.assert_zero_outside(np.asarray(grads["lhs"]))
  others = np.r_[20:32]
  np.testing.assert_array_equal(out[others], want[others])
  for name, rows in (("lhs", others), ("rhs", 1)):
    np.testing.assert_array_equal(grads[name][rows], want_grads[name][rows])


@pytest.mark.usefixtures("few_sms")
def test_sm90_rows_do_not_depend_on_the_others():
  case = Case(m=70, n=64, k=80, sizes=(9, 40, 20), dtype="bfloat16")
  x = case.operands()
  with pallas_gemm.batch_invariant():
    want = case(x, implementation="sm90")
    fewer = dataclasses.replace(case, m=12, sizes=(9, 0, 3))
    some = x["lhs"][np.r_[0:9, 49:52]]
    got = fewer(x | {"lhs": some}, implementation="sm90")
  np.testing.assert_array_equal(got, want[np.r_[0:9, 49:52]])


# Which implementation runs.


def test_says_why_once(monkeypatch):
  """In the log; in an error where "sm90" alone is asked for."""
  said = []
  monkeypatch.setattr(report, "_said", set())
  monkeypatch.setattr(
    logging, "info", lambda form, *args: said.append(form % args)
  )
  case = Case(m=9, n=8, k=6, sizes=(2, 3, 4))
  x, reason = case.operands(), "sm90: float32 is XLA's"
  how = {"precision": lax.DotAlgorithmPreset.F32_F32_F32}
  jax.clear_caches()
  for _ in range(2):
    case(x, implementation=("sm90", "xla"), **how)
    jax.clear_caches()
  (message,) = said
  assert (
    "groups 3 along M, M 9, N 8, K 6, NN, precision F32_F32_F32 runs on"
    in message
  )
  assert reason in message
  with pytest.raises(NotImplementedError, match=reason):
    case(x, implementation="sm90", **how)


@pytest.mark.parametrize(
  ("wide", "bias", "promotion"),
  (
    (False, True, "standard"),
    (True, False, "standard"),
    (False, True, "strict"),
  ),
)
def test_lowers_for_cuda(wide, bias, promotion):
  """Ahead of time: kernels alone, two forward and two for each gradient.

  One of two makes the tables. Rows of a float32 bias are added by a kernel,
  too.
  """
  of = Case(m=256, n=128, k=64, sizes=(100, 0, 56), dtype="bfloat16", bias=bias)
  with jax.enable_x64(wide), jax.numpy_dtype_promotion(promotion):
    x = of.operands()
    step = jax.jit(jax.value_and_grad(lambda x: of(x).astype("float32").sum()))
    traced = step.trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2 + 2 * len(x)
    assert "chlo.ragged_dot" not in text and "dot_general" not in text
    text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "mosaic_gpu" not in text


@pytest.mark.parametrize("dtype", ("int8", "uint8"))
def test_offsets_of_few_bits(dtype):
  """Of more groups than they count."""
  x, w, sizes = jnp.ones((300, 4)), jnp.ones((2, 4, 3)), jnp.ones(300, "int32")
  offset = jnp.asarray(100, dtype)
  out = pallas_gemm.ragged_dot(x, w, sizes, group_offset=offset)
  assert np.flatnonzero(out[:, 0]).tolist() == [100, 101]


def test_nan_in_a_large_matrix_of_few_rows_stays_in_its_group():
  w = jnp.ones((2, 256, 1024)).at[1].set(jnp.nan)
  out = pallas_gemm.ragged_dot(jnp.ones((4, 256)), w, jnp.array([2, 2]))
  assert jnp.isnan(out).all(1).tolist() == [False, False, True, True]


def test_cotangents_beyond_float32():
  with jax.enable_x64(True):
    w, sizes = jnp.full((2, 3, 5), 1e-10, "float32"), jnp.array([2, 2])
    f = functools.partial(pallas_gemm.ragged_dot, rhs=w, group_sizes=sizes)
    f = functools.partial(f, preferred_element_type="float64")
    _, pull = jax.vjp(f, jnp.ones((4, 3), "float32"))
    (got,) = pull(jnp.full((4, 5), 1e40))
  np.testing.assert_allclose(got, 5e30, rtol=1e-6)
