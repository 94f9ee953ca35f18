"""quantize=Recipe(): results and gradients, against float64 at the bits used.

Where nothing is applied to sums the cotangent that is quantised is known, bit
by bit, so derivatives are held to the bound of float32 sums of the very
operands. Behind an activation it is known but for some roundings, after which
another 8-bit number may be the nearest: there what a derivative may be off is
what quantising takes from the cotangent, |q s - x| <= u |x| + v s.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import numerics, quantization
from pallas_gemm.ops import recipes
from pallas_gemm.quantization import Quantized, Recipe, quantize
from tests.support.eight_bit_calls import assert_right
from tests.support.eight_bit_recipes import (
  E4M3,
  E5M2,
  FEW,
  RECIPES,
  SCALINGS,
  backward,
  each,
  exact,
  of,
  pulled,
)
from tests.support.products import float64, normal

# What rounding takes of x and of its scale.
ERRORS = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17), "int8": (2**-20, 0.5)}
ERRORS[None] = (2**-8, 0.0)  # bfloat16's


@each(RECIPES)
def test_matmul(recipe):
  dtype = "bfloat16" if RECIPES.index(recipe) % 2 else "float32"
  a, b = normal(150, 140, dtype=dtype), normal(140, 131, dtype=dtype)
  bias, ct = normal(131), normal(150, 131, seed=2, dtype=dtype)
  f = functools.partial(pallas_gemm.matmul, quantize=recipe)
  out, d_a, d_b, d_bias = pulled(
    lambda a, b, bias: f(a, b, bias=bias), ct, a, b, bias
  )
  assert_right(out, exact(of(recipe, a, 1)), exact(of(recipe, b, 0, True)),
               bias=np.asarray(bias))  # fmt: skip
  of_a, of_b = backward(recipe, ct, a, b)
  assert d_a.dtype == d_b.dtype == dtype
  assert_right(d_a, *of_a)
  assert_right(d_b, *of_b)
  assert_right(d_bias[None], np.ones((1, 150)), float64(ct))


@each(FEW[:4])
def test_two_contracted_dimensions(recipe):
  a, b, ct = normal(70, 2, 90), normal(2, 90, 60), normal(70, 60)
  numbers = ((1, 2), (0, 1)), ((), ())
  f = functools.partial(
    pallas_gemm.dot_general, dimension_numbers=numbers, quantize=recipe
  )
  _, d_a, d_b = pulled(f, ct, a, b)
  flat = a.reshape(70, 180), b.reshape(180, 60)
  of_a, of_b = backward(recipe, ct, *flat)
  assert_right(d_a.reshape(70, 180), *of_a)
  assert_right(d_b.reshape(180, 60), *of_b)


# Behind an activation.

# The largest second derivative of tanh, rounded up; the first is at most 1.
_CURVATURE = 0.77


def product(recipe: Recipe, x: np.ndarray, w: np.ndarray):
  """A sum in float64, and what float32's may be off."""
  size = np.abs(x) @ np.abs(w)
  return x @ w, numerics.gamma(x.shape[1] + 6, 2.0**-24) * (size + 1)


def assert_derivatives(recipe: Recipe, got, a, b, cts) -> None:
  """Of A, and of each B.

  Args:
    recipe: of all.
    got: the derivatives of A, and of each of the B's.
    a: A, in float32.
    b: the B's.
    cts: of each product its cotangent, and how far off that may be, before it
      is quantised.
  """
  u, v = ERRORS[recipe.gradient]
  most = quantization.largest(recipe.gradient) if recipe.gradient else 1.0
  is_row = recipe.scaling == "row" and recipe.gradient
  is_anew = recipe.scaling == "block" and recipe.gradient
  along = of(recipe, a, 0 if is_anew else 1)
  want_a, room_a = 0.0, 0.0
  for d_b, w, (ct, ct_off) in zip(got[1:], b, cts, strict=True):
    q = of(recipe, w, 0, weight=True)
    found = []
    # Scales that go into the cotangent come out of it again.
    for other, factors in (
      (exact(q).T, q.scale),
      (exact(along).T, along.scale),
    ):
      inside = float64(factors) if is_row else np.ones((1, 1))
      size = np.abs(ct) + ct_off
      off = ct_off + u * size + v * (size * inside).max() / most / inside
      x, y = (ct, other) if not found else (other, ct)
      x_off, y_off = (off, 0 * y) if not found else (0 * x, off)
      room = x_off @ np.abs(y) + np.abs(x) @ y_off
      if recipe.gradient is None:  # so is the other operand
        room = room + u * (np.abs(x) + x_off) @ (np.abs(y) + y_off)
      sums = (np.abs(x) + x_off) @ (np.abs(y) + y_off)
      found.append(
        (x @ y, room + numerics.gamma(x.shape[1] + 6, 2.0**-24) * sums)
      )
    (of_a, off_a), (of_b, off_b) = found
    want_a, room_a = want_a + of_a, room_a + off_a
    assert np.all(np.abs(float64(d_b) - of_b) <= off_b)
  assert np.all(np.abs(float64(got[0]) - want_a) <= room_a)


def of_tanh(ct, z, z_off, beside=1.0, beside_off=0.0):
  """The cotangent of z, of tanh(z) times what is beside it; what it is off."""
  ct, slope = float64(ct), 1 - np.tanh(z) ** 2
  own = numerics.gamma(64, 2.0**-24) * (1 + np.abs(z))
  off = (np.abs(beside) + beside_off) * (_CURVATURE * z_off + own)
  return ct * beside * slope, np.abs(ct) * (off + beside_off)


@each(FEW[:4])
def test_behind_an_activation(recipe):
  a, b, bias = normal(40, 140), normal(140, 50) / 12, normal(50)
  ct = normal(40, 50, seed=3)
  f = functools.partial(
    pallas_gemm.matmul, activation=jnp.tanh, quantize=recipe
  )
  out, d_a, d_b, _ = pulled(lambda *x: f(*x[:2], bias=x[2]), ct, a, b, bias)
  qa, qb = exact(of(recipe, a, 1)), exact(of(recipe, b, 0, weight=True))
  assert_right(out, qa, qb, bias=np.asarray(bias), activation=jnp.tanh)
  z, z_off = product(recipe, qa, qb)
  cts = [of_tanh(ct, z + float64(bias), z_off + 2.0**-22 * np.abs(bias))]
  assert_derivatives(recipe, (d_a, d_b), a, (b,), cts)


@each(FEW[:4])
@pytest.mark.parametrize("grouped", (False, True))
def test_gated(recipe, grouped):
  x, gate, up = normal(40, 140), normal(140, 50) / 12, normal(140, 50, seed=4)
  ct, how = normal(40, 50, seed=3), {"activation": jnp.tanh, "quantize": recipe}
  op = pallas_gemm.gated_matmul
  if grouped:
    op = lambda x, *w, **how: pallas_gemm.gated_ragged_dot(  # noqa: E731
      x, *[v[None] for v in w], jnp.array([40]), **how
    )
  out, *got = pulled(functools.partial(op, **how), ct, x, gate, up)
  qx = exact(of(recipe, x, 1))
  both = [exact(of(recipe, v, 0, weight=True)) for v in (gate, up)]
  assert_right(out, qx, *both, activation=jnp.tanh)
  (z, z_off), beside = (product(recipe, qx, q) for q in both)
  of_up = np.tanh(z) * float64(ct)
  off = np.abs(ct) * (z_off + numerics.gamma(64, 2.0**-24))
  cts = [of_tanh(ct, z, z_off, *beside), (of_up, off)]
  assert_derivatives(recipe, got, x, (gate, up), cts)


# Who has a derivative.


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("op", ("matmul", "dot_general", "ragged_dot"))
def test_frozen_weights(op, scaling):
  """They are taken as they are: the same product, added in any order."""
  recipe = Recipe(scaling=scaling)
  a, b, ct = normal(40, 140), normal(140, 50), normal(40, 50, seed=3)
  frozen, rest = of(recipe, b, 0, weight=True), ()
  if op == "ragged_dot":
    b, rest = b[None], (jnp.array([40]),)
    frozen = jax.tree.map(lambda v: v[None], frozen)
  f = functools.partial(getattr(pallas_gemm, op), quantize=recipe)
  how = {"out_dtype" if op == "matmul" else "preferred_element_type": "float32"}
  both = pulled(lambda a, b: f(a, b, *rest), ct, a, b)
  one = pulled(lambda a: f(a, frozen, *rest, **how), ct, a)
  # |x - y| <= 2 gamma |A| |B|, of norms; quantising adds 2^-4 to those.
  left = max(map(np.linalg.norm, (a, ct)))
  off = 2.3 * numerics.gamma(140, 2.0**-24) * left * np.linalg.norm(b)
  for x, y in zip(one, both):
    assert np.linalg.norm(float64(x) - float64(y)) <= off
  assert f(a, frozen, *rest).dtype == "bfloat16"


@each(RECIPES)
def test_scales_along_what_the_backward_pass_sums_over(recipe):
  """Of B's columns, and of A's rows."""
  a, b, ct = normal(40, 140), normal(140, 50), normal(40, 50, seed=3)
  a, b = a * jnp.geomspace(0.1, 10, 40)[:, None], b * jnp.geomspace(10, 0.1, 50)
  f = functools.partial(pallas_gemm.matmul, quantize=recipe)
  q_a, q_b = (
    quantize(v, recipe.forward, block=block)
    for v, block in ((a, (1, None)), (b, (None, 1)))
  )
  _, d_a = pulled(lambda a: f(a, q_b, out_dtype="float32"), ct, a)
  _, d_b = pulled(lambda b: f(q_a, b, out_dtype="float32"), ct, b)
  wants = float64(ct) @ exact(q_b).T, exact(q_a).T @ float64(ct)
  for got, want in zip((d_a, d_b), wants):
    off = np.linalg.norm(float64(got) - want)
    assert off <= 2.0**-3 * np.linalg.norm(want)


@pytest.mark.parametrize("of_scale", (False, True))
@pytest.mark.parametrize("side", (0, 1))
def test_no_derivative_by_8_bits(side, of_scale):
  x = [quantize(normal(8, 8, seed=i), block=(1, None)) for i in range(2)]

  def loss(v):
    operands = [*x]
    operands[side] = (
      Quantized(x[side].values, v) if of_scale else Quantized(v, x[side].scale)
    )
    return pallas_gemm.matmul(*operands).astype("float32").sum()

  v = x[side].scale if of_scale else x[side].values
  with pytest.raises(TypeError, match=r"quantize=pallas_gemm\.Recipe"):
    jax.grad(loss)(v)


@pytest.mark.parametrize("recipe", (None, Recipe()))
@pytest.mark.parametrize("op", ("matmul", "ragged_dot"))
def test_no_derivative_by_8_bits_beside_an_array(op, recipe):
  x, rest = normal(8, 8), ()
  q = quantize(x, block=(1, None))
  if op == "ragged_dot":
    rest, x = (jnp.array([5, 3]),), jnp.stack([x, x])
  f = functools.partial(getattr(pallas_gemm, op), quantize=recipe)

  def loss(values, scale, x):
    return f(Quantized(values, scale), x, *rest).astype(jnp.float32).sum()

  for i in range(2):
    with pytest.raises(TypeError, match="by operands of 8 bits nor by their"):
      jax.grad(loss, i)(q.values, q.scale, x)
  assert np.any(jax.grad(loss, 2)(q.values, q.scale, x))


def test_groups_of_integers_are_refused_by_a_recipe():
  x, w, sizes = jnp.ones((2, 2), "int32"), normal(1, 2, 2), jnp.array([2])
  with pytest.raises(TypeError, match=r"quantize= needs lhs .* got int32"):
    pallas_gemm.ragged_dot(x, w, sizes, quantize=Recipe())


@pytest.mark.parametrize(
  "shapes", (((3, 1, 40, 8), (2, 8, 50)), ((2, 3, 1, 1, 8), (2, 8, 5)))
)
def test_batches_that_broadcast_across_each_other(shapes):
  """As where every example has both operands of its own."""
  a, b = (normal(*shape) for shape in shapes)
  lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
  f = functools.partial(pallas_gemm.matmul, quantize=Recipe())

  def pull(a, b, spread):
    def of(a, b):
      if spread:
        a, b = (jnp.broadcast_to(v, lead + v.shape[-2:]) for v in (a, b))
      return f(a, b)

    return jax.vjp(of, a, b)[1](jnp.ones((*lead, a.shape[-2], b.shape[-1])))

  for got, want in zip(pull(a, b, False), pull(a, b, True)):
    off = 2**-3 * float(jnp.linalg.norm(want))
    assert float(jnp.linalg.norm(got - want)) <= off


def test_derivative_by_what_is_added():
  x = quantize(normal(8, 8), block=(1, None))
  bias, c = normal(8), normal(8, 8, seed=2)

  def loss(bias, c, alpha):
    return pallas_gemm.matmul(
      x, x, bias=bias, c=c, alpha=alpha, out_dtype="float32"
    ).sum()

  d_bias, d_c, d_alpha = jax.grad(loss, (0, 1, 2))(bias, c, 0.5)
  assert np.array_equal(d_bias, 8 * np.ones(8))
  assert np.array_equal(d_c, np.ones((8, 8)))
  q = exact(x)
  bound = 2.0**-20 * (np.abs(q) @ np.abs(q)).sum()
  assert abs(d_alpha - (q @ q).sum()) <= bound


@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_a_checkpoint_keeps(scaling):
  recipe = Recipe(scaling=scaling)
  a, b = normal(40, 140), normal(140, 50)
  f = functools.partial(pallas_gemm.matmul, quantize=recipe)
  loss = lambda a, b: f(a, b).sum()  # noqa: E731
  names = jax.checkpoint_policies.save_only_these_names(recipes.CHECKPOINT_NAME)
  kept = jax.checkpoint(loss, policy=names)
  text = str(jax.make_jaxpr(jax.grad(kept, (0, 1)))(a, b))
  again = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss), (0, 1)))(a, b))
  rounded = re.compile("name=_quantize|pallas_gemm_both_orders")
  assert len(rounded.findall(text)) < len(rounded.findall(again))
  got, want = (jax.grad(x, (0, 1))(a, b) for x in (kept, loss))
  assert all(map(np.array_equal, got, want))


def test_in_einsum():
  a, b = normal(3, 20, 140), normal(140, 50)
  dot = functools.partial(pallas_gemm.dot_general, quantize=Recipe())
  out = jnp.einsum("bmk,kn->bmn", a, b, _dot_general=dot)
  want = pallas_gemm.matmul(a, b, quantize=Recipe())
  assert np.array_equal(out, want)


def test_in_flax():
  nnx = pytest.importorskip("flax.nnx", reason="needs flax")
  dot = functools.partial(pallas_gemm.dot_general, quantize=Recipe())
  layer = nnx.Linear(140, 50, dot_general=dot, rngs=nnx.Rngs(0))
  x = normal(20, 140)
  want = pallas_gemm.matmul(x, layer.kernel[...], quantize=Recipe())
  assert np.array_equal(layer(x), want + layer.bias[...])
  slopes = nnx.grad(lambda layer: (layer(x) ** 2).sum())(layer)
  assert all(np.isfinite(v).all() for v in jax.tree.leaves(slopes))


@pytest.mark.parametrize(
  "words",
  ("mlk,knl", "mkl,knl", "klm,nkl", "mkbp,bkn", "kbmp,nbk", "bmckp,kcnb"),
)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_several_dimensions(scaling, words):
  """Wherever they lie; of positive numbers, so that 2^-4 of each adds up."""
  size = {"m": 20, "n": 12, "k": 140, "l": 2, "b": 2, "c": 3, "p": 7}
  words = words.split(",")
  batch = "".join(c for c in "bc" if c in words[1])
  summed = "".join(c for c in "kl" if c in words[0])
  numbers = [
    tuple(tuple(map(w.index, letters)) for w in words)
    for letters in (summed, batch)
  ]
  a, b = (0.5 + jnp.abs(jnp.sin(normal(*[size[c] for c in w]))) for w in words)

  def pull(*x, **how):
    how["dimension_numbers"] = numbers
    out, back = jax.vjp(functools.partial(pallas_gemm.dot_general, **how), *x)
    return out, *back(jnp.ones_like(out))

  both = jax.jit(
    lambda *x: (pull(*x, quantize=Recipe(scaling=scaling)), pull(*x))
  )
  for ours, plain in zip(*both(a, b)):
    off = (1 + 2.0**-4) ** 2 - 1 + numerics.gamma(300, 2.0**-24)
    assert bool((jnp.abs(ours - plain) <= off * plain).all())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_results_of_8_bits(scaling):
  """Their cotangents are made bfloat16 first."""
  a, b = normal(8, 16), normal(16, 24)
  f = functools.partial(pallas_gemm.matmul, quantize=Recipe(scaling=scaling))

  def gradients(out_dtype):
    loss = lambda a, b: f(a, b, out_dtype=out_dtype).astype("float32").sum()  # noqa: E731
    return jax.grad(loss, (0, 1))(a, b)

  for got, want in zip(gradients(E4M3), gradients("bfloat16")):
    assert np.array_equal(got, want)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_vmap_over_nothing(scaling):
  f = functools.partial(pallas_gemm.matmul, quantize=Recipe(scaling=scaling))
  w = normal(16, 8)
  assert jax.vmap(lambda a: f(a, w))(jnp.ones((0, 3, 16))).shape == (0, 3, 8)
