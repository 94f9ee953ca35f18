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
from tests.support.eight_bit_calls import assert_right, spread
from tests.support.products import float64, normal

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SCALINGS = "block", "row", "tensor"
DTYPES = (E4M3, E4M3), (E4M3, E5M2), ("int8", "int8"), (E4M3, None)
RECIPES = [
  Recipe(forward=x, gradient=y, scaling=scaling)
  for scaling in SCALINGS
  for x, y in DTYPES
]
# Each two of a scaling and dtypes meet in `test_matmul`.
FEW = [RECIPES[i] for i in (0, 5, 10, 3, 6, 8, 7)]


def _named(recipe: Recipe) -> str:
  return f"{recipe.scaling}-{recipe.forward}-{recipe.gradient}"


each = functools.partial(pytest.mark.parametrize, "recipe", ids=_named)


# What rounding takes of x and of its scale.
ERRORS = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17), "int8": (2**-20, 0.5)}
ERRORS[None] = (2**-8, 0.0)  # bfloat16's


def of(recipe: Recipe, x, along: int, weight: bool = False, dtype=None):
  """A matrix, quantised along a dimension that is summed over."""
  block = [None, None]
  if recipe.scaling != "tensor":
    size = 128 if recipe.scaling == "block" else None
    block = [size if i == along else 1 for i in range(2)]
    if recipe.scaling == "block" and weight:
      block = [128, 128]
  x = jnp.asarray(x, jnp.float32) if x.dtype == np.float64 else x
  return quantize(x, dtype or recipe.forward, block=tuple(block))


def exact(q: Quantized) -> np.ndarray:
  return float64(q.values) * spread(float64(q.scale), q.shape)


def factors_of(recipe: Recipe, ct, spans, a, qas, qbs):
  """The factors of both derivatives of each group's A @ B, in float64.

  Args:
    recipe: of all.
    ct: the cotangent, of all groups.
    spans: the rows of each.
    a: of all; qas, qbs: both operands of each in 8 bits.
  """
  to_a = to_b = jnp.asarray(ct[: spans[-1].stop], jnp.float32)
  is_row, is_block = recipe.scaling == "row", recipe.scaling == "block"
  if is_row:  # scales go into the cotangent
    to_a, to_b = (
      jnp.concatenate([ct[s] * q.scale for s, q in zip(spans, qs)])
      for qs in (qbs, qas)
    )
  if recipe.gradient is None:
    rounded = lambda v: float64(v.astype(jnp.bfloat16))  # noqa: E731
    to_a, to_b = rounded(to_a), rounded(to_b)
    numbers = lambda q: rounded(q.values if is_row else q.dequantized())  # noqa: E731
  else:
    cast = functools.partial(of, recipe, dtype=recipe.gradient)
    to_a = exact(cast(to_a, 1))
    # A group has blocks of rows of its own.
    parts = [to_b[s] for s in spans] if is_block else [to_b]
    to_b = np.concatenate([exact(cast(v, 0)) for v in parts])
    numbers = lambda q: float64(q.values) if is_row else exact(q)  # noqa: E731
    if is_block:  # A anew, along its rows
      qas = [of(recipe, a[s], 0) for s in spans]
  return [
    ((to_a[s], numbers(qb).T), (numbers(qa).T, to_b[s]))
    for s, qa, qb in zip(spans, qas, qbs)
  ]


def backward(recipe: Recipe, ct, a, b):
  """The same of one product: dA's, and dB's."""
  qa, qb = of(recipe, a, 1), of(recipe, b, 0, weight=True)
  return factors_of(recipe, ct, [slice(0, len(a))], a, [qa], [qb])[0]


def pulled(f, ct, *x):
  """Result and cotangents."""

  def both(ct, *x):
    out, pull = jax.vjp(f, *x)
    return out, *pull(ct)

  return jax.jit(both)(ct, *x)


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


SIZES = np.array([130, 0, 1, 127])
SPANS = [slice(*x) for x in zip([0, 130, 130, 131], [130, 130, 131, 258])]


def quantized_groups(recipe: Recipe, a, w):
  """A and B of each group; a scale of a tensor is of all groups."""
  if recipe.scaling != "tensor":
    qs = [of(recipe, a[s], 1) for s in SPANS]
    return qs, [of(recipe, v, 0, weight=True) for v in w]
  qa = of(recipe, a[: SPANS[-1].stop], 1)
  qw = quantize(w, recipe.forward, block=(None,) * 3)
  qs = [Quantized(qa.values[s], qa.scale) for s in SPANS]
  return qs, [Quantized(v, qw.scale[0]) for v in qw.values]


@each(FEW)
def test_ragged_dot(recipe):
  """What rows of no group hold reaches nothing."""
  a, w, bias = normal(266, 140), normal(4, 140, 60), normal(4, 60)
  ct = normal(266, 60, seed=2)
  a, ct = (v.at[258:262].set(np.nan).at[262:].set(1e6) for v in (a, ct))
  f = functools.partial(
    pallas_gemm.ragged_dot, group_sizes=jnp.asarray(SIZES), quantize=recipe
  )
  out, d_a, d_w, d_bias = pulled(
    lambda a, w, bias: f(a, w, bias=bias), ct, a, w, bias
  )
  assert not out[258:].any() and not d_a[258:].any()
  qs, qws = quantized_groups(recipe, a, w)
  factors = factors_of(recipe, ct, SPANS, a, qs, qws)
  for g, (s, q, qw) in enumerate(zip(SPANS, qs, qws)):
    assert_right(out[s], exact(q), exact(qw), bias=np.asarray(bias[g]))
    of_a, of_w = factors[g]
    assert_right(d_a[s], *of_a)
    assert_right(d_w[g], *of_w)
    rows = s.stop - s.start
    assert_right(d_bias[g][None], np.ones((1, rows)), float64(ct[s]))


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


@pytest.mark.parametrize("words", ("mlk,knl", "mkl,knl", "klm,nkl"))
@pytest.mark.parametrize("scaling", SCALINGS)
def test_sums_over_two_dimensions(scaling, words):
  """Wherever they lie; of positive numbers, so that 2^-4 of each adds up."""
  size, words = {"m": 20, "n": 12, "k": 140, "l": 2}, words.split(",")
  numbers = tuple(tuple(map(w.index, "kl")) for w in words), ((), ())
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


@pytest.mark.parametrize("block", ((1, None), (1, 128), (128, None), (1, 1)))
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frozen_rows_of_groups(scaling, block):
  """The derivative by weights of rows that are `Quantized`, in any groups."""
  sizes, ct = jnp.array([7, 0, 20]), jnp.abs(normal(40, 12, seed=3)) + 0.5
  x = quantize(jnp.abs(normal(40, 140)) + 0.5, block=block)
  w = jnp.abs(normal(3, 140, 12)) + 0.5
  f = functools.partial(pallas_gemm.ragged_dot, group_sizes=sizes)
  recipe = Recipe(scaling=scaling)
  how = {"quantize": recipe, "preferred_element_type": "float32"}

  @jax.jit
  def slopes(x, w):
    by_8_bits = jax.vjp(lambda w: f(x, w, **how), w)[1](ct)
    return *by_8_bits, *jax.vjp(lambda w: f(x.dequantized(), w), w)[1](ct)

  # Of positive numbers 2^-4 of the cotangent, and of its scaled bits, add up.
  off = 2.0**-4 + 2.0**-10 + numerics.gamma(300, 2.0**-24)
  ours, want = slopes(x, w)
  assert bool((jnp.abs(ours - want) <= off * want).all())
