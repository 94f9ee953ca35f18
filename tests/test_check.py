"""check and sampling: parts of fused results against float64."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import check, sampling
from pallas_gemm.kernels import epilogues
from pallas_gemm.problem import Problem
from tests.support.products import normal


def identity(out_dtype, m=64, n=16):
  """A product whose sums are those of A."""
  return normal(m, n, dtype=out_dtype), jnp.eye(n, dtype=out_dtype)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu, jnp.tanh])
def test_the_kernels_forms_pass_and_less_exact_ones_do_not(
  activation, out_dtype
):
  a, b = identity(out_dtype)
  want, _ = check.expected(a, b, activation=activation)
  problem = Problem.flat(m=64, n=16, k=16, dtype=out_dtype, out_dtype=out_dtype)
  form = epilogues.fusible(activation, problem)
  exact = np.asarray(form(a.astype(jnp.float32)))
  assert want.check(exact.astype(a.dtype)).passed
  # Twice as much as rounding and evaluating may be off.
  unit = float(jnp.finfo(out_dtype).eps)
  off = 4 * (unit + check.ACTIVATION_ERROR[out_dtype])
  found = want.check((exact * (1 + off)).astype(a.dtype))
  assert not found.passed and found.worst_ratio > 1


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_products_of_few_bits_are_activated_too(dtype):
  a, b = np.eye(8).astype(dtype), (2 * normal(8, 4)).astype(dtype)
  want, _ = check.expected(a, b, activation=jax.nn.relu)
  positive = np.maximum(b.astype(np.float32), 0)
  assert want.check(positive.astype(jnp.bfloat16)).passed
  assert not want.check((positive + 1).astype(jnp.bfloat16)).passed


def test_all_that_follows_a_product():
  a, b, b_up = normal(33, 40), normal(40, 24), normal(40, 24, seed=1)
  c, bias = normal(33, 24), normal(33, 1)

  def passes(out, *operands, **epilogue):
    found = check.expected(*operands, **epilogue)
    results = out if isinstance(out, tuple) else (out,)
    return [x.check(result).passed for x, result in zip(found, results)]

  dot = jax.jit(lambda a, b: jnp.dot(a, b, precision="highest"))
  product, up = dot(a, b), dot(a, b_up)
  epilogue = {"bias": bias, "c": c, "alpha": 2.0, "beta": -0.5}
  z = 2 * product - 0.5 * c + bias
  assert passes(z, a, b, **epilogue) == [True]
  assert passes(z, a, b, **epilogue | {"beta": 0.5}) == [False]
  assert passes((jnp.tanh(z), z), a, b, activation=jnp.tanh, **epilogue) == [
    True,
    True,
  ]
  gated = jax.nn.silu(product) * up
  results = gated, product, up
  silu = {"activation": jax.nn.silu}
  assert passes(results, a, b, b_up, **silu) == [True] * 3
  assert passes(results, a, b_up, b, **silu) == [False] * 3
  nan = jnp.full_like(c, jnp.nan)
  assert passes(product, a, b, c=nan, beta=0.0) == [True]


def test_terms_that_cancel_leave_their_errors():
  """A sum of almost nothing is off by what its terms are."""
  a, b = identity("float32")
  want, _ = check.expected(a, b, c=-a, activation=jnp.tanh)
  off = jnp.abs(a) * 2.0**-23
  assert want.check(off).passed
  assert not want.check(2**8 * off).passed


def test_an_activation_of_float32_alone():
  a, b = identity("float32")

  def strict(x):
    return lax.max(x, jnp.float32(0))

  want, _ = check.expected(a, b, activation=strict)
  assert want.check(strict(a)).passed and not want.check(a).passed


def test_the_worst_element_is_named():
  a, b = identity("float32")
  want, _ = check.expected(a, b)
  found = want.check(a.at[5, 7].add(1.0))
  assert not found.passed and found.worst == (5, 7)


def test_parts_of_groups_meet_the_extremes_and_an_empty_one():
  sizes = np.array([0, 5, 3, 40, 3, 7, 1, 3])
  rng = np.random.default_rng(0)
  parts = list(sampling.of_groups((8, 9, 20), sizes, 4, 2, rng))
  groups = [part.matrix for part in parts]
  assert {1, 3, 6, 7} <= set(groups) and groups[-1] == 0
  assert parts[-1].k == slice(0, 0)
  for part in sampling.of_groups((62, 20), sizes, 4, 2, rng):
    start = sizes[: part.matrix].sum()
    assert part.rows[0] == start
    assert part.rows[-1] == start + sizes[part.matrix] - 1


def test_a_part_picks_its_operands_as_they_are_stored():
  rng = np.random.default_rng(0)
  a, b = normal(3, 40, 33), normal(1, 24, 40)
  bias, column, c = normal(24), normal(33, 1), normal(3, 33, 24)
  for part in sampling.of_batch((3, 33, 24), 5, 2, rng):
    arrays = {"a": a, "b": b, "bias": bias, "c": c}
    x = part.operands(arrays, "TT")
    rows, columns = part.rows, part.columns
    np.testing.assert_array_equal(x["a"], a[part.matrix].T[rows])
    np.testing.assert_array_equal(x["b"], b[0].T[:, columns])
    np.testing.assert_array_equal(x["bias"], bias[None, columns])
    np.testing.assert_array_equal(x["c"], c[part.matrix][rows][:, columns])
    np.testing.assert_array_equal(part.of(column), column[rows])
