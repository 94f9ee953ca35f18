"""float32 in planes of bfloat16: ops on the Hopper kernel, interpreted."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import autotuning, hardware, tuning
from pallas_gemm.ops import implementations, sm90
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import choose, trial
from tests.support import plane_calls, products
from tests.support.plane_calls import ON_KERNEL, X3

X6 = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
SIZES = jnp.array([5, 0, 20], jnp.int32)
normal = products.normal


def assert_product(out, a, b, planes=3, **epilogue):
  assert out.dtype == epilogue.pop("out_dtype", jnp.float32)
  products.assert_product(out, a, b, planes=planes, **epilogue)


@pytest.mark.parametrize(
  ("precision", "planes"),
  [("highest", 3), ("float32", 3), (("highest",) * 2, 3), (X6, 3), (X3, 2)],
)
def test_precisions(precision, planes):
  a, b = normal(37, 70), normal(70, 45)
  how = ON_KERNEL | {"precision": precision}
  assert_product(pallas_gemm.matmul(a, b, **how), a, b, planes)


def test_nine_products_on_a_cpu():
  a, b = normal(37, 70), normal(70, 45)
  found = pallas_gemm.matmul(a, b, precision="BF16_BF16_F32_X9")
  assert_product(found, a, b)


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_random_calls(seed):
  plane_calls.check(seed, most=7)


def test_two_planes_are_not_three():
  """Errors tell them apart."""
  a, b = normal(37, 70), normal(70, 45)
  exact = products.float64(a) @ products.float64(b)
  of_two, of_three = (
    np.linalg.norm(
      pallas_gemm.matmul(a, b, **ON_KERNEL | {"precision": x}) - exact
    )
    for x in (X3, X6)
  )
  assert of_two > 10 * of_three


@pytest.mark.parametrize("transposed", (False, True))
def test_everything_after_the_product(transposed):
  a, b, c, bias = normal(2, 33, 40), normal(40, 24), normal(33, 24), normal(24)
  given = (jnp.swapaxes(a, 1, 2), b.T) if transposed else (a, b)
  out = pallas_gemm.matmul(
    *given,
    c=c,
    alpha=0.5,
    beta=jnp.float32(-2.0),
    bias=bias,
    activation=jax.nn.gelu,
    out_dtype=jnp.bfloat16,
    transpose_a=transposed,
    transpose_b=transposed,
    **ON_KERNEL,
  )
  after = {"alpha": 0.5, "beta": -2.0, "bias": bias, "c": c}
  after |= {"activation": jax.nn.gelu, "out_dtype": jnp.bfloat16}
  assert_product(out, a, b, **after)


def test_gated():
  x, gate, up = normal(20, 40), normal(40, 24), normal(40, 24, seed=1)
  how = ON_KERNEL | {"activation": jax.nn.silu}
  out = pallas_gemm.gated_matmul(x, gate, up, **how)
  products.assert_gated(out, x, gate, up, jax.nn.silu, planes=3)


def test_groups():
  x, w, bias = normal(25, 40), normal(3, 40, 24), normal(3, 24)
  out = pallas_gemm.ragged_dot(x, w, SIZES, bias=bias, **ON_KERNEL)
  for group, rows in ((0, slice(5)), (2, slice(5, 25))):
    assert_product(out[rows], x[rows], w[group], bias=bias[group])


@pytest.mark.parametrize("precision", (None, "default", "high", X3))
def test_groups_below_highest_are_multiplied_in_two_planes(precision):
  how = ON_KERNEL | {"precision": precision}
  x, w, y = normal(25, 40), normal(3, 40, 24), normal(25, 24)
  f = functools.partial(pallas_gemm.ragged_dot, group_sizes=SIZES, **how)
  out, pull = jax.vjp(f, x, w)
  dx, dw = pull(y)
  for group, rows in ((0, slice(5)), (2, slice(5, 25))):
    assert_product(out[rows], x[rows], w[group], 2)
    assert_product(dx[rows], y[rows], w[group].T, 2)
    assert_product(dw[group], x[rows].T, y[rows], 2)
  kept = pallas_gemm.split(w, planes=2)
  np.testing.assert_array_equal(f(x, kept), out)


@pytest.mark.parametrize(
  ("how", "runs_on"),
  [
    ({}, "sm90"),
    ({"precision": ("highest", "default")}, "xla"),
    ({"precision": lax.DotAlgorithmPreset.TF32_TF32_F32}, "xla"),
    ({"quantize": pallas_gemm.Recipe()}, "sm90"),
  ],
  ids=str,
)
def test_groups_are_the_kernels(how, runs_on):
  def loss(x, w):
    return pallas_gemm.ragged_dot(x, w, SIZES, **how).sum()

  for ran in products_of(
    jax.grad(loss, (0, 1)), normal(25, 40), normal(3, 40, 24)
  ):
    assert ran.implementation == runs_on, ran


def test_groups_along_k():
  x, y = normal(25, 40), normal(25, 24)
  numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
  out = pallas_gemm.ragged_dot_general(x, y, SIZES, numbers, **ON_KERNEL)
  for group, rows in ((0, slice(5)), (2, slice(5, 25))):
    assert_product(out[group], x[rows].T, y[rows])
  assert not out[1].any()


def products_of(fn, *args):
  """What computes each product, on CUDA."""
  return pallas_gemm.explain(fn, *args, platform="cuda").products


def _loss(a, b, **how):
  return pallas_gemm.matmul(a, b, implementation="sm90", **how).sum()


def test_derivatives_are_as_precise_as_the_product():
  a, b, y = normal(33, 40), normal(40, 24), normal(33, 24)
  _, pull = jax.vjp(functools.partial(pallas_gemm.matmul, **ON_KERNEL), a, b)
  da, db = pull(y)
  assert_product(da, y, b.T)
  assert_product(db, a.T, y)


def test_derivatives_remember_the_context_of_the_product():
  def grad(a, b):
    with jax.default_matmul_precision("highest"):
      out, pull = jax.vjp(_loss, a, b)
    return pull(jnp.ones_like(out))

  ran = products_of(grad, normal(64, 64), normal(64, 64))
  assert [x.implementation for x in ran] == ["sm90"] * 2


def test_second_derivatives_and_tangents():
  a, b, d = normal(16, 40), normal(40, 24), normal(16, 40, seed=1)

  def square(a):
    return (pallas_gemm.matmul(a, b, **ON_KERNEL) ** 2).sum() / 2

  def exact(v):
    b64 = products.float64(b)
    return products.float64(v) @ b64 @ b64.T

  got = jax.jvp(jax.grad(square), (a,), (d,))[1]
  bound = np.abs(products.float64(d)) @ np.abs(products.float64(b))
  bound = bound @ np.abs(products.float64(b)).T
  assert (np.abs(got - exact(d)) <= 2 * 2.0**-16 * bound).all()


def test_vmap_and_jit():
  a, b = normal(2, 16, 40), normal(2, 40, 24)
  f = jax.jit(jax.vmap(functools.partial(pallas_gemm.matmul, **ON_KERNEL)))
  assert_product(f(a, b), a, b)


def test_empty_sums():
  out = pallas_gemm.matmul(normal(4, 0), normal(0, 8), **ON_KERNEL)
  assert out.shape == (4, 8) and not out.any()


@pytest.mark.parametrize("narrow", "ab")
def test_by_bfloat16(narrow):
  """It is one plane, and its gradient is rounded to it."""
  a, b, y = normal(33, 40), normal(40, 24), normal(33, 24)
  a = a.astype(jnp.bfloat16) if narrow == "a" else a
  b = b.astype(jnp.bfloat16) if narrow == "b" else b
  f = functools.partial(pallas_gemm.matmul, **ON_KERNEL)
  out, pull = jax.vjp(f, a, b)
  assert_product(out, a, b)
  da, db = pull(y)
  assert_product(da, y, b.T, out_dtype=a.dtype)
  assert_product(db, a.T, y, out_dtype=b.dtype)
  (ran,) = products_of(f, a, b)
  assert f"{a.dtype} x {b.dtype} to float32" in ran.product


def test_groups_by_bfloat16():
  x, w, y = normal(25, 40), normal(3, 40, 24, dtype="bfloat16"), normal(25, 24)
  f = functools.partial(pallas_gemm.ragged_dot, **ON_KERNEL)
  out, pull = jax.vjp(lambda x, w: f(x, w, SIZES), x, w)
  dx, dw = pull(y)
  for group, rows in ((0, slice(5)), (2, slice(5, 25))):
    assert_product(out[rows], x[rows], w[group])
    assert_product(dx[rows], y[rows], w[group].T)
    assert_product(dw[group], x[rows].T, y[rows], out_dtype=jnp.bfloat16)


@pytest.mark.parametrize(
  ("shape", "runs_on"),
  [
    ((1024, 1024, 1024), "sm90"),
    ((4096, 2049, 777), "sm90"),
    ((64, 64, 64), "xla"),  # three launches
    ((64, 4096, 4096), "sm90"),
    ((4, 8192, 8192), "xla"),  # memory binds
  ],
)
def test_the_kernel_is_chosen_where_it_is_faster(shape, runs_on):
  m, n, k = shape
  a, b = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((m, k), (k, n)))
  f = functools.partial(pallas_gemm.matmul, precision="highest")
  with hardware.assume("H100"):
    (ran,) = pallas_gemm.explain(f, a, b, platform="cuda").products
  assert ran.implementation == runs_on


@pytest.mark.parametrize("gpu", ("H100", "H200"))
@pytest.mark.parametrize(
  ("words", "moves"),
  [
    ({"m": 64}, True),
    ({"m": 256, "transpose_b": True}, True),
    ({"m": 128, "gated": True, "activation": "silu"}, True),
    ({"m": 8192, "ragged": "m", "groups": 64}, True),
    ({"m": 4096}, False),
    ({"m": 8192, "ragged": "m", "groups": 8}, False),
    ({"m": 8192, "ragged": "k", "groups": 64, "transpose_a": True}, False),
    ({"m": 128, "n": 2050}, False),  # TMA can't address it
    ({"m": 128, "planes_b": 1}, False),
  ],
  ids=str,
)
def test_threads_make_planes_of_what_few_rows_are_multiplied_with(
  words, moves, gpu
):
  sizes = {"n": 2048, "k": 4096, "planes_a": 3, "planes_b": 3}
  types = {"dtype": "bfloat16", "out_dtype": "float32"}
  with hardware.assume(gpu):
    problem = Problem.flat(**sizes | types | words)
    found = next(choose.ranked(problem, xla_too=False))
    assert found.how.moves == moves
    if problem.along != "k":
      same = next(choose.ranked(problem, batch_invariant=True))
      assert not same.how.moves


@pytest.mark.parametrize("words", [{}, {"c_dtype": "float32"}, {"bias": "n"}])
@pytest.mark.parametrize("planes", [(3, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("gated", [False, True])
def test_large_products_have_a_config_whatever_follows(words, planes, gated):
  """Beside slabs in three planes there is little room for C."""
  words = words | dict(zip(("planes_a", "planes_b"), planes))
  words |= {"gated": True, "activation": "silu"} if gated else {}
  sizes = dict.fromkeys("mnk", 4096)
  types = {"dtype": "bfloat16", "out_dtype": "float32"}
  with hardware.assume("H100"):
    found = next(choose.ranked(Problem.flat(**sizes, **types, **words)))
  assert found.how.block_m * found.how.block_n * (1 + gated) == 128 * 128


@pytest.mark.parametrize(
  "precision",
  (None, "default", "high", "tensorfloat32", ("highest", "default")),
)
def test_other_precisions_are_xlas(precision):
  how = {"implementation": "sm90", "precision": precision}
  words = "float32 is XLA's except at precision HIGHEST, .* got"
  with pytest.raises(NotImplementedError, match=words):
    pallas_gemm.matmul(normal(8, 8), normal(8, 8), **how)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"block_k": 128}, "block_k must be 32 or 64 for operands in planes"),
    (
      {"block_n": 256},
      r"at most 256 columns and 8192 accumulators, got 64x256",
    ),
    (
      {"block_k": 32, "moves": True},
      "moves makes planes of what TMA can address, got rows of 200",
    ),
  ],
)
def test_a_config_that_is_not_for_planes(fields, words):
  config = tuning.Config(
    **{"block_n": 128, "block_k": 64, "stages": 2} | fields
  )
  with pytest.raises(ValueError, match=words):
    pallas_gemm.matmul(
      normal(200, 200), normal(200, 200), config=config, **ON_KERNEL
    )


def test_explain_says_the_arithmetic():
  f = functools.partial(pallas_gemm.matmul, **ON_KERNEL)
  (ran,) = products_of(f, normal(64, 64), normal(64, 64))
  assert ran.product.endswith("NN, precision HIGHEST")


@pytest.mark.parametrize("planes", (2, 3))
def test_a_trial_of_autotune_is_held_to_the_bound(planes):
  flat = {"dtype": "bfloat16", "out_dtype": "float32"}
  problem = tuning.Problem.flat(
    m=40, n=72, k=100, planes_a=planes, planes_b=planes, **flat
  )
  attempt = trial.Trial(trial.Case(problem, None))
  (config,) = autotuning.candidates(problem, 1)
  kernel = trial.compiled(attempt.case, config, attempt.operands)
  (out,) = results = attempt.call(kernel)()
  assert attempt.error(results) is None
  off = (out * (1 + 2.0 ** (-8 if planes == 2 else -14)),)
  assert "wrong result" in attempt.error(off)


@pytest.mark.parametrize("narrow", (None, "a", "b"))
def test_xla_takes_what_the_kernel_does_not(narrow, monkeypatch):
  """As on another GPU: bfloat16 beside float32 too."""
  refuses = lambda spec, x: "not here"  # noqa: E731
  kernel = implementations.IMPLEMENTATIONS["sm90"]._replace(refuses=refuses)
  monkeypatch.setitem(implementations.IMPLEMENTATIONS, "sm90", kernel)
  monkeypatch.setattr(sm90, "refuses", refuses)
  jax.clear_caches()
  a, b, y = normal(33, 40), normal(40, 24), normal(33, 24)
  a = a.astype(jnp.bfloat16) if narrow == "a" else a
  b = b.astype(jnp.bfloat16) if narrow == "b" else b
  how = ON_KERNEL | {"implementation": ("sm90", "xla")}
  out, pull = jax.vjp(functools.partial(pallas_gemm.matmul, **how), a, b)
  da, db = pull(y)
  jax.clear_caches()
  assert_product(out, a, b, None)
  assert_product(da, y, b.T, None, out_dtype=a.dtype)
  assert_product(db, a.T, y, None, out_dtype=b.dtype)
