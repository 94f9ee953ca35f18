"""Transformations of the grouped ops, against the same thing in jnp."""

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from tests.support import products, ragged
from tests.support.products import normal

# Rules of derivatives do not depend on the dtype. In float64, right and wrong
# are far apart.
pytestmark = pytest.mark.usefixtures("x64")

# A group without rows, and rows without a group.
SIZES = jnp.array([3, 0, 2, 1])
# Of matrices 1 and 2.
PART = {"group_sizes": SIZES, "group_offset": 1}


@pytest.fixture(name="x64")
def _x64():
  with jax.enable_x64(True):
    yield


def n64(*shape, seed=0):
  return normal(*shape, dtype="float64", seed=seed)


def operands(groups=4):
  """lhs [7, 5], rhs [groups, 5, 6], bias [groups, 6]."""
  return n64(7, 5), n64(groups, 5, 6), n64(groups, 6)


def ours(lhs, rhs, bias=None, group_sizes=SIZES, **keywords):
  return pallas_gemm.ragged_dot(lhs, rhs, group_sizes, bias=bias, **keywords)


def plain(lhs, rhs, bias=None, group_sizes=SIZES, **keywords):
  return ragged.plain(lhs, rhs, group_sizes, bias, **keywords)


def gated(x, gate, up, **keywords):
  return pallas_gemm.gated_ragged_dot(x, gate, up, SIZES, **keywords)


def plain_gated(x, gate, up, **keywords):
  gate = ragged.plain(x, gate, SIZES, **keywords)
  return jax.nn.silu(gate) * ragged.plain(x, up, SIZES, **keywords)


def activated(lhs, rhs, bias=None):
  return ours(lhs, rhs, bias, activation=jax.nn.gelu)


def plain_activated(lhs, rhs, bias=None):
  return plain(lhs, rhs, bias, activation=jax.nn.gelu)


def loss(f, **static):
  """A scalar whose cotangents are no constants."""
  return lambda *args: (f(*args, **static) ** 2).sum()


def gradients(f, args, **static):
  wrt = tuple(range(len(args)))
  return jax.jit(jax.value_and_grad(loss(f, **static), wrt))(*args)


@pytest.mark.parametrize("activation", (None, jax.nn.gelu, jnp.tanh))
@pytest.mark.parametrize("with_bias", (False, True))
@pytest.mark.parametrize("part", (False, True))
def test_gradients(activation, with_bias, part):
  args = operands(2 if part else 4)[: 3 if with_bias else 2]
  static = {"activation": activation} | (PART if part else {})
  got = gradients(ours, args, **static)
  products.assert_same(got, gradients(plain, args, **static))


@pytest.mark.parametrize("part", (False, True))
def test_gradients_of_transposed(part):
  lhs, rhs, _ = operands(2 if part else 4)
  static = PART if part else {}
  value, (d_lhs, d_rhs) = gradients(
    ours, (lhs, jnp.swapaxes(rhs, 1, 2)), transpose_rhs=True, **static
  )
  got = value, (d_lhs, jnp.swapaxes(d_rhs, 1, 2))
  products.assert_same(got, gradients(plain, (lhs, rhs), **static))


@pytest.mark.parametrize("part", (False, True))
def test_gated_gradients(part):
  x, gate, _ = operands(2 if part else 4)
  static = {"group_offset": 1} if part else {}
  args = x, gate, n64(*gate.shape, seed=1)
  got = gradients(gated, args, **static)
  products.assert_same(got, gradients(plain_gated, args, **static))


def test_gradients_of_some_operands():
  args = operands()
  for wrt in (0, 1, 2, (1, 2)):
    got = jax.grad(loss(activated), wrt)(*args)
    products.assert_same(got, jax.grad(loss(plain_activated), wrt)(*args))


def test_operands_are_read_in_place():
  """No derivative transposes an operand, or scatters."""
  lhs, rhs, bias = operands()
  step = jax.grad(loss(ours, activation=jnp.tanh), (0, 1, 2))
  second = jax.grad(lambda *x: step(*x)[1].sum(), (0, 1))
  jaxpr = str(jax.make_jaxpr(second)(lhs, rhs, bias))
  assert "pallas_gemm[" in jaxpr and "transpose[" not in jaxpr
  lowered = jax.jit(second).lower(lhs, rhs, bias).as_text()
  assert "scatter" not in lowered


@pytest.mark.parametrize(
  ("f", "reference", "count"),
  ((ours, plain, 2), (activated, plain_activated, 3), (gated, plain_gated, 3)),
  ids=("plain", "epilogue", "gated"),
)
def test_second_order(f, reference, count):
  args = [n64(7, 2), n64(4, 2, 3), n64(4, 3)]
  if f is gated:
    args[2] = n64(4, 2, 3, seed=1)
  wrt = tuple(range(count))
  got = jax.jit(jax.hessian(loss(f), wrt))(*args[:count])
  want = jax.jit(jax.hessian(loss(reference), wrt))(*args[:count])
  products.assert_same(got, want)


def test_forward_mode():
  args = operands()
  dots = tuple(n64(*x.shape, seed=1) for x in args)
  want = jax.jvp(plain_activated, args, dots)
  products.assert_same(jax.jvp(activated, args, dots), want)
  out, tangents = jax.linearize(activated, *args)
  products.assert_same((out, tangents(*dots)), want)


def test_tangents_of_rows_of_no_group_are_zeros():
  """Also where the activation's derivative at zero is infinite."""
  lhs, rhs, bias = (jnp.abs(x) for x in operands())
  f = lambda *x: ours(*x, activation=jnp.sqrt)  # noqa: E731
  out, tangent = jax.jvp(f, (lhs, rhs, bias), (lhs, rhs, bias))
  assert np.isfinite(tangent).all() and np.asarray(tangent[:6]).all()
  assert not np.asarray(out[6:]).any() and not np.asarray(tangent[6:]).any()
  for grad in jax.grad(loss(f), (0, 1, 2))(lhs, rhs, bias):
    assert np.isfinite(grad).all()


def test_linear_transpose():
  lhs, rhs, _ = operands()
  ct = n64(7, 6)
  transposed = jax.linear_transpose(lambda rhs: ours(lhs, rhs), rhs)
  want = jax.vjp(lambda rhs: plain(lhs, rhs), rhs)[1](ct)
  products.assert_same(transposed(ct), want)


def test_group_sizes_have_no_derivative():
  lhs, rhs, _ = operands()
  f = lambda *x: (ours(x[0], x[1], group_sizes=x[2]) ** 2).sum()  # noqa: E731
  grads = jax.grad(f, (0, 2), allow_int=True)(lhs, rhs, SIZES)
  assert grads[1].dtype == jax.dtypes.float0


def test_what_is_kept_for_derivatives():
  """Operands, what the activation is applied to, and where groups start."""
  lhs, rhs, _ = operands()
  _, pullback = jax.vjp(activated, lhs, rhs)
  shapes = sorted(x.shape for x in jax.tree.leaves(pullback))
  assert shapes == [(4, 5, 6), (5,), (7, 5), (7, 6)]


def test_saving_is_dropped_where_nobody_reads_it():
  lhs, rhs, _ = operands()
  f = lambda lhs: activated(lhs, rhs)  # noqa: E731
  step = jax.make_jaxpr(jax.grad(lambda x: jax.checkpoint(f)(x).sum()))(lhs)
  assert str(step).count("save=True") <= 1


VMAPS = {
  "lhs": (0, None, None),
  "rhs": (None, 0, None),
  "sizes": (None, None, 0),
  "lhs and rhs": (1, 2, None),
  "all": (0, 0, 0),
}
MANY_SIZES = jnp.array([[3, 0, 2, 1], [7, 0, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("name", VMAPS)
def test_vmap(name):
  """Values, and gradients with respect to what is shared, too."""
  axes = VMAPS[name]
  lhs, rhs = (
    x if axis is None else jnp.moveaxis(n64(3, *x.shape), 0, axis)
    for x, axis in zip(operands()[:2], axes)
  )
  sizes = SIZES if axes[2] is None else MANY_SIZES

  def mapped(f):
    def one(lhs, rhs, sizes):
      return f(lhs, rhs, group_sizes=sizes, activation=jnp.tanh)

    return lambda lhs, rhs: jax.vmap(one, axes)(lhs, rhs, sizes)

  products.assert_same(mapped(ours)(lhs, rhs), mapped(plain)(lhs, rhs))
  got = gradients(mapped(ours), (lhs, rhs))
  products.assert_same(got, gradients(mapped(plain), (lhs, rhs)))


def test_vmap_of_offset_bias_and_gate():
  lhs, rhs, _ = operands(2)
  offsets, many = jnp.arange(3), n64(3, 2, 6)
  f = lambda ragged_dot: jax.vmap(  # noqa: E731
    lambda bias, offset: ragged_dot(lhs, rhs, bias, group_offset=offset)
  )
  products.assert_same(f(ours)(many, offsets), f(plain)(many, offsets))
  x, gate, _ = operands()
  ups = n64(3, *gate.shape, seed=1)
  got = jax.vmap(gated, (None, None, 0))(x, gate, ups)
  want = jax.vmap(plain_gated, (None, None, 0))(x, gate, ups)
  products.assert_same(got, want)


def test_nested_vmap_and_gradients_of_it():
  lhs, rhs = n64(3, 7, 5), n64(2, 4, 5, 6)

  def both(f):
    inner = jax.vmap(f, (None, 0))
    return jax.vmap(inner, (0, None))

  got = gradients(both(activated), (lhs, rhs))
  products.assert_same(got, gradients(both(plain_activated), (lhs, rhs)))
  step = lambda f: jax.vmap(jax.grad(loss(f), 1), (0, None))  # noqa: E731
  got = step(activated)(lhs, rhs[0])
  products.assert_same(got, step(plain_activated)(lhs, rhs[0]))


def test_checkpoint():
  args = operands()
  want = gradients(plain_activated, args)
  for policy in (None, jax.checkpoint_policies.everything_saveable):
    remat = jax.checkpoint(activated, policy=policy)
    products.assert_same(gradients(remat, args), want)


def test_scan():
  w = n64(3, 4, 5, 5)
  step = lambda f: lambda x, w: (f(x, w, activation=jnp.tanh), None)  # noqa: E731
  run = lambda f: lambda x, w: jax.lax.scan(step(f), x, w)[0]  # noqa: E731
  args = n64(7, 5), w
  got, want = gradients(run(ours), args), gradients(run(plain), args)
  products.assert_same(got, want)


def test_sizes_are_known_at_run_time_alone():
  lhs, rhs, _ = operands()
  traced = []

  @jax.jit
  def f(sizes):
    traced.append(sizes)
    return ours(lhs, rhs, group_sizes=sizes)

  for sizes in MANY_SIZES:
    products.assert_same(f(sizes), plain(lhs, rhs, group_sizes=sizes))
  assert len(traced) == 1


def test_donation():
  lhs, rhs = n64(7, 6), n64(4, 6, 6)
  want = plain(lhs, rhs)
  out = jax.jit(ours, donate_argnums=0)(lhs, rhs)
  products.assert_same(out, want)
  assert lhs.is_deleted()


@pytest.mark.parametrize("platforms", (("cpu",), ("cpu", "cuda")))
def test_export(platforms):
  f = lambda lhs, rhs, sizes: ours(  # noqa: E731
    lhs, rhs, group_sizes=sizes, activation=jnp.tanh
  )
  lhs, rhs, _ = operands()
  exported = export.export(jax.jit(f), platforms=platforms)(lhs, rhs, SIZES)
  again = export.deserialize(exported.serialize(vjp_order=1))
  want = plain(lhs, rhs, activation=jnp.tanh)
  products.assert_same(again.call(lhs, rhs, SIZES), want)
  got = gradients(lambda lhs, rhs: again.call(lhs, rhs, SIZES), (lhs, rhs))
  want = gradients(plain, (lhs, rhs), activation=jnp.tanh)
  products.assert_same(got, want)


def test_export_with_symbolic_rows():
  (m,) = export.symbolic_shape("m")
  lhs = jax.ShapeDtypeStruct((m, 5), jnp.float64)
  _, rhs, bias = operands(2)
  f = jax.jit(lambda *x: ours(*x, **PART))
  exported = export.export(f)(lhs, rhs, bias)
  for rows in (5, 9):
    args = n64(rows, 5), rhs, bias
    products.assert_same(exported.call(*args), plain(*args, **PART))


def test_16_bit_gradients():
  """In the operands' dtype; of a bias in its own, added in float32."""
  case = ragged.Case(
    m=20, n=8, k=9, sizes=(9, 0, 6), dtype="bfloat16", bias=True
  )
  x = case.operands()
  out, pullback = jax.vjp(case, x)
  ct = normal(20, 8, dtype="bfloat16")
  (grads,) = pullback(ct)
  assert out.dtype == grads["lhs"].dtype == grads["rhs"].dtype == "bfloat16"
  assert grads["bias"].dtype == "float32"
  case.assert_gradients(grads, ct, x)


def test_cotangents_are_rounded_to_the_operands_dtype():
  case = ragged.Case(
    m=20, n=8, k=9, sizes=(9, 0, 6), dtype="bfloat16", out_dtype="float32"
  )
  x, ct = case.operands(), normal(20, 8)
  (grads,) = jax.vjp(case, x)[1](ct)
  case.assert_gradients(grads, ct.astype("bfloat16"), x)


def test_sm90_vmap():
  """Interpreted: one kernel after the other."""
  with jax.enable_x64(False):
    case = ragged.Case(m=16, n=64, k=64, sizes=(5, 9), dtype="bfloat16")
    x = case.operands()
    many = jnp.stack([x["lhs"], normal(16, 64, dtype="bfloat16", seed=7)])
    outs = jax.jit(
      jax.vmap(lambda lhs: case(x | {"lhs": lhs}, implementation="sm90"))
    )(many)
    for lhs, out in zip(many, outs):
      case.assert_right(out, x | {"lhs": lhs})
