"""matmul and gated_matmul: values, over layouts, batches, epilogues, dtypes."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import numerics, tuning
from pallas_gemm.ops import sm90
from tests.support import ops, products
from tests.support.calls import Call
from tests.support.cases import pairs
from tests.support.products import normal

FLOATS = ("float32", "bfloat16", "float16")
BOTH = (False, True)
BATCHES = (
  *(((3,), ()), ((2, 3), ()), ((), (3,)), ((3,), (3,))),
  *(((2, 3), (3,)), ((3,), (2, 3)), ((2, 1), (2, 3)), ((2, 3), (2, 1))),
  *(((2, 3), (1, 1)), ((1, 3), (2, 1)), ((1,), (1,))),
)
# Small tiles, so that a small product has several.
SMALL = tuning.Config(
  block_m=64, block_n=64, block_k=64, stages=2, consumers=1, epilogue_n=64
)


def each(m, n, k, batches=(((), ()),), **values):
  """Calls in which each two values of two fields meet."""
  calls = []
  for (a, b), *chosen in pairs(batches, *values.values()):
    fields = dict(zip(values, chosen))
    if fields.get("c_dtype"):
      fields["beta"] = 1.7
    calls.append(Call(m=m, n=n, k=k, batch_a=a, batch_b=b, **fields))
  return calls


FLOAT32 = ("float32",)
FLAGS = {"transpose_a": BOTH, "transpose_b": BOTH}
GATES = {"activation": (jax.nn.silu, jax.nn.gelu), "gated": (True,)}
CALLS = [
  *each(7, 12, 33, dtype=FLOATS, **FLAGS),
  *each(
    *(4, 5, 9, BATCHES),
    dtype=FLOAT32,
    transpose_a=BOTH,
    c_dtype=(None, "float32"),
    bias=(None, "n", "m"),
  ),
  *each(5, 8, 20, dtype=FLOATS, out_dtype=FLOATS, alpha=(1.0, 0.5)),
  *each(
    *(6, 10, 40),
    dtype=FLOATS,
    bias=(None, "n"),
    bias_dtype=FLOATS,
    c_dtype=(None, *FLOATS),
    alpha=(0.3,),
    activation=(None, *products.ACTIVATIONS),
  ),
  *each(6, 8, 20, (((), ()), BATCHES[1]), dtype=FLOATS, **GATES),
]


@pytest.mark.parametrize("call", CALLS)
def test_values(call):
  x = call.operands()
  call.assert_right(call(x), x)


VECTORS = ((6,), (6,)), ((6,), (6, 4)), ((3, 6), (6,)), ((6,), (2, 6, 4))


@pytest.mark.parametrize("shapes", VECTORS, ids=str)
def test_vectors(shapes):
  a, b = (normal(*shape) for shape in shapes)
  want = jnp.matmul(a, b).shape
  c = normal(*want, seed=1)
  out = pallas_gemm.matmul(a, b, c=c)
  assert out.shape == want
  two_a = a[None] if a.ndim == 1 else a
  two_b = b[:, None] if b.ndim == 1 else b
  shape = np.matmul(two_a, two_b).shape
  products.assert_product(out.reshape(shape), two_a, two_b, c=c.reshape(shape))


@pytest.mark.parametrize("dtype", ("int8", "int32", "uint8", "bool"))
@pytest.mark.parametrize("shapes", (((4, 9), (9, 5)), ((2, 4, 9), (2, 9, 5))))
def test_integers_are_those_of_jnp(dtype, shapes):
  rng = np.random.default_rng(0)
  a, b = (
    jnp.asarray(rng.integers(0, 2 if dtype == "bool" else 100, shape), dtype)
    for shape in shapes
  )
  out = pallas_gemm.matmul(a, b)
  assert out.dtype == dtype
  np.testing.assert_array_equal(out, jnp.matmul(a, b))


def test_complex():
  a = normal(4, 9) + 1j * normal(4, 9, seed=1)
  b = normal(9, 5) + 1j * normal(9, 5, seed=1)
  np.testing.assert_array_equal(pallas_gemm.matmul(a, b), jnp.matmul(a, b))
  for alpha in (2j, jnp.array(2.0)):
    out = pallas_gemm.matmul(a, b, alpha=alpha)
    np.testing.assert_array_equal(out, jnp.matmul(a, b) * alpha)


def test_mixed_dtypes_are_promoted():
  a, b = normal(4, 9, dtype="bfloat16"), normal(9, 5)
  out = pallas_gemm.matmul(a, b)
  assert out.dtype == jnp.matmul(a, b).dtype == "float32"
  products.assert_product(out, a, b)
  assert pallas_gemm.matmul(np.ones((4, 9), np.int8), b).dtype == "float32"


@pytest.mark.parametrize(
  ("platform", "dtype"),
  (*itertools.product(("cuda", "rocm"), FLOATS), ("cpu", "float32")),
)
def test_no_epilogue_is_one_dot_general(platform, dtype):
  """What runs is what jnp.dot would run, and nothing else."""
  a, b = normal(64, 64, dtype=dtype), normal(64, 64, dtype=dtype)
  f = lambda a, b: pallas_gemm.matmul(a, b, implementation="xla")  # noqa: E731
  text = ops.lowered(f, a, b, platform=platform)
  assert text.count("stablehlo.dot_general") == 1
  for operation in ("transpose", "convert", "broadcast", "multiply"):
    assert f"stablehlo.{operation}" not in text


OF_A_VECTOR = (
  *(((1, 64), (64, 32)), ((32, 64), (64, 1)), ((64,), (64, 32))),
  *(((3, 1, 64), (3, 64, 32)), ((64,), (64,))),
)


@pytest.mark.parametrize("shapes", OF_A_VECTOR, ids=str)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_products_of_a_vector_are_not_rounded(shapes, dtype):
  """As XLA for GPUs does where it is asked for sums of 16 bits."""
  a, b = (normal(*shape, dtype=dtype) for shape in shapes)
  text = jax.jit(pallas_gemm.matmul).lower(a, b).as_text()
  (line,) = [x for x in text.splitlines() if "stablehlo.dot_general" in x]
  assert re.search(r"-> tensor<[^>]*f32>", line), line
  assert pallas_gemm.matmul(a, b).dtype == dtype


def test_rounded_products_are_beyond_the_bound():
  """In NumPy: what XLA would compute, of N(0, 1) and a K of some hundreds."""
  ratios = []
  for k in (64, 256):
    a, b = normal(1, k, dtype="bfloat16"), normal(k, 512, dtype="bfloat16")
    rounded = np.asarray(a * b.T, np.float32)
    out = rounded.sum(1)[None].astype("bfloat16")
    ratios.append(numerics.check(out, a, b).worst_ratio)
  assert ratios[0] > ratios[1] > 5


@ops.each(ops.ACTIVATED)
def test_precision_is_passed_on(op):
  args, wanted = op.args(dtype="float32"), "precision = [HIGHEST, HIGHEST]"
  count = len(args) - 1
  for precision in "highest", jax.lax.Precision.HIGHEST:
    f = op.given(precision=precision).ours
    assert ops.lowered(f, *args, platform="cpu").count(wanted) == count
  assert wanted not in ops.lowered(op.ours, *args, platform="cpu")
  with jax.default_matmul_precision("highest"):
    traced = jax.jit(op.ours).trace(*args)
  # Lowered outside of it: the op itself has read it.
  assert traced.lower().as_text().count(wanted) == count


def test_factors_of_zero_read_nothing():
  nan = jnp.full((4, 4), jnp.nan)
  a, b = normal(4, 4), normal(4, 4, seed=1)
  products.assert_product(pallas_gemm.matmul(a, b, c=nan, beta=0), a, b)
  out = pallas_gemm.matmul(nan, b, c=a, alpha=0, beta=2)
  np.testing.assert_array_equal(out, 2 * a)


def test_c_is_checked_whatever_its_factor():
  a, b = normal(4, 4), normal(4, 4, seed=1)
  for beta in (0, 1):
    with pytest.raises(ValueError, match="c must broadcast to the result"):
      pallas_gemm.matmul(a, b, c=jnp.ones((4, 5)), beta=beta)
    with pytest.raises(TypeError, match="c must have a dtype"):
      pallas_gemm.matmul(a, b, c=jnp.ones((4, 4), int), beta=beta)
  gradient = jax.grad(lambda c: pallas_gemm.matmul(a, b, c=c, beta=0).sum())
  np.testing.assert_array_equal(gradient(a), jnp.zeros_like(a))


def test_nan_spreads():
  a, b = normal(4, 4).at[1, 2].set(jnp.nan), normal(4, 4)
  out = pallas_gemm.matmul(a, b)
  assert np.isnan(out[1]).all() and np.isfinite(out[jnp.array([0, 2, 3])]).all()
  out = pallas_gemm.matmul(b, b, alpha=float("nan"))
  assert np.isnan(out).all()


def test_same_inputs_same_bits():
  a, b = normal(32, 64, dtype="bfloat16"), normal(64, 32, dtype="bfloat16")
  first = pallas_gemm.matmul(a, b)
  for _ in range(3):
    np.testing.assert_array_equal(pallas_gemm.matmul(a, b), first)


# The Hopper kernel, interpreted.

HALF = ("bfloat16",)
EPILOGUE = {"c_dtype": HALF, "bias": "m", "activation": (jnp.tanh,)}
# A column is computed transposed: TMA addresses none.
COLUMNS = [
  *each(70, 1, 40, transpose_b=(True,), **EPILOGUE),
  *each(70, 1, 40, (((3,), (3,)),), transpose_a=(True,), **EPILOGUE),
]
SILU = {"activation": (jax.nn.silu,)}
SCALED = {"alpha": (0.5,), "bias_dtype": HALF, "c_dtype": HALF}
SMALL_TILES = [
  *each(80, 72, 128, bias="n", transpose_a=(True,), **SCALED, **SILU),
  *each(*(64, 64, 64, BATCHES[3:4]), dtype=FLOATS[2:], gated=(True,), **SILU),
]


@pytest.mark.parametrize(
  ("call", "config"),
  [(call, None) for call in COLUMNS] + [(call, SMALL) for call in SMALL_TILES],
)
def test_sm90(call, config):
  x = call.operands()
  call.assert_right(call(x, implementation="sm90", config=config), x)


def test_columns_that_share_a_matrix_are_rows_of_one_product():
  a = normal(70, 40, dtype="bfloat16")
  b = normal(5, 40, 1, dtype="bfloat16")
  epilogue = {
    "bias": normal(70, 1),
    "c": normal(5, 70, 1, dtype="bfloat16"),
    "activation": jnp.tanh,
  }
  f = lambda b, c: pallas_gemm.matmul(  # noqa: E731
    a, b, implementation="sm90", **epilogue | {"c": c}
  )
  out = jax.jit(jax.vmap(f))(b, epilogue["c"])
  products.assert_product(out, a, b, **epilogue)
  x = sm90.Operands(a[None], b)
  words = sm90.Operands("bmk", "bkn")
  spec = sm90.Spec(words=words, out="bmn", out_dtype=jnp.bfloat16)
  problem = sm90.problem_of(x, spec)
  assert (problem.batch, problem.m, problem.n, problem.k) == (1, 5, 70, 40)


@pytest.mark.parametrize(
  ("shape", "out_dtype", "dtype", "left", "right"),
  pairs(
    ((1, 16, ()), (4, 16, ()), (16, 4, (3,)), (20, 16, ())),
    (None, "float32"),
    ("bfloat16", "float16"),
    *(BOTH, BOTH),
  ),
)
def test_transposed_results(shape, out_dtype, dtype, left, right, monkeypatch):
  """XLA may transpose within a product: any, also of few rows and columns."""
  monkeypatch.setattr(jax, "device_count", lambda: 8)
  m, n, batch = shape
  a, b = normal(*batch, m, 24, dtype=dtype), normal(*batch, 24, n, dtype=dtype)
  ct = normal(*batch, n, m, dtype=dtype)
  epilogue = {"bias": normal(n), "activation": jnp.tanh}

  def swapped(a, b, **how):
    a, b = a.mT if left else a, b.mT if right else b
    flags = {"transpose_a": left, "transpose_b": right}
    return pallas_gemm.matmul(a, b, out_dtype=out_dtype, **flags, **how).mT

  @jax.jit
  def every(a, b):
    out, vjp = jax.vjp(swapped, a, b)
    return out, swapped(a, b, **epilogue), *vjp(ct.astype(out.dtype))

  out, after, d_a, d_b = every(a, b)
  products.assert_product(out.mT, a, b)
  products.assert_product(after.mT, a, b, **epilogue)
  products.assert_product(d_a, ct.mT, b.mT)
  products.assert_product(d_b, a.mT, ct.mT)
