"""Transformations of the ops, against those of the same thing in jnp."""

import functools

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm.quantization import Recipe
from tests.support import gradients, products, ragged
from tests.support.cases import pairs
from tests.support.ops import (
  ADDED,
  BIASED,
  GATED,
  GATED_RAGGED,
  MATMUL,
  OPS,
  PART,
  RAGGED,
  SIZES,
  TWO,
  dense,
  each,
  grouped,
  n64,
  plain,
  plain_grouped,
  squared,
  value_and_gradients,
  x64,  # noqa: F401
)
from tests.support.products import normal

# Rules of derivatives do not depend on the dtype.
pytestmark = pytest.mark.usefixtures("x64")

MANY_SIZES = jnp.array([[3, 0, 2, 1], [7, 0, 0, 0], [0, 0, 0, 0]])


def assert_same_gradients(ours, plain, args):
  """The value, and the derivatives of all arguments."""
  both = jax.jit(lambda *x: [value_and_gradients(f, x) for f in (ours, plain)])
  products.assert_same(*both(*args))


# Of every op.


@each(OPS)
def test_gradients(op):
  """Of all arguments, and of each alone."""

  @jax.jit
  def all_ways(*args):
    alone = [jax.grad(squared(op.ours), i)(*args) for i in range(len(args))]
    return *(value_and_gradients(f, args) for f in op[:2]), tuple(alone)

  got, want, alone = all_ways(*op.args())
  products.assert_same(got, want)
  products.assert_same(alone, want[1])


@each(OPS)
def test_second_order(op):
  wrt = tuple(range(len(op.words)))
  both = [jax.hessian(squared(f), wrt) for f in op[:2]]
  got, want = jax.jit(lambda *args: [f(*args) for f in both])(*op.args())
  products.assert_same(got, want)


@each(OPS)
def test_forward_mode(op):
  args, dots = op.args(), op.args(seed=1)
  want = jax.jvp(op.plain, args, dots)
  products.assert_same(jax.jvp(op.ours, args, dots), want)
  out, tangents = jax.linearize(op.ours, *args)
  products.assert_same((out, tangents(*dots)), want)


@each(TWO | {"gated_matmul": GATED, "gated_ragged_dot": GATED_RAGGED})
def test_linear_transpose(op):
  """Of the last argument: gated products are linear in it."""
  *args, last = op.args()
  ct = op.ours(*args, last)
  ours, plain = (functools.partial(f, *args) for f in op[:2])
  want = jax.vjp(plain, last)[1](ct)
  products.assert_same(jax.linear_transpose(ours, last)(ct), want)


def vmaps(op):
  """Each two arguments have the new dimension, or one, or neither."""
  args = op.args()
  for axes in pairs(*[(None, 0)] * len(args)):
    if any(axis == 0 for axis in axes):
      given = [
        x if axis is None else n64(3, *x.shape, seed=i)
        for i, (axis, x) in enumerate(zip(axes, args))
      ]
      both = [jax.vmap(f, axes) for f in op[:2]]
      got, want = jax.jit(lambda *x, both=both: [f(*x) for f in both])(*given)
      products.assert_same(got, want)


@each(OPS)
def test_vmap(op):
  vmaps(op)


def test_vmap_with_a_bias_along_m():
  shapes = ADDED._replace(words=("mk", "kn", "m1", "mn")).of(**{"1": 1})
  vmaps(shapes.given(activation=jnp.tanh, beta=0.5))


@each({x: OPS[x] for x in OPS if "epilogue" in x or "gated" in x})
def test_gradients_of_nested_vmap_and_vmap_of_gradients(op):
  a, b, *rest = op.args()
  a, b = jnp.stack([a, 2 * a, -a]), jnp.stack([b, 3 * b])

  def both(f):
    inner = jax.vmap(lambda a, b: f(a, b, *rest), (None, 0))
    return jax.vmap(inner, (0, None))

  assert_same_gradients(both(op.ours), both(op.plain), (a, b))
  slopes = lambda f: jax.grad(squared(lambda a, b: f(a, b, *rest)), 1)  # noqa: E731
  mapped = [jax.vmap(slopes(f), (0, None)) for f in op[:2]]
  got, want = jax.jit(lambda *args: [f(*args) for f in mapped])(a, b[0])
  products.assert_same(got, want)


@each({
  name: OPS[name]
  for name in ("matmul, factors", "matmul, epilogue", "gated_matmul",
               "ragged_dot, epilogue")
})  # fmt: skip
def test_gradients_of_what_a_vmap_shares(op):
  """Where one argument is mapped, by each argument alone."""
  count = len(op.words)

  def all_ways(f, i, args):
    axes = [0 if j == i else None for j in range(count)]
    args = [jnp.stack([x, 2 * x]) if j == i else x for j, x in enumerate(args)]
    loss = squared(jax.vmap(f, axes))
    return [jax.grad(loss, j)(*args) for j in range(count)]

  both = jax.jit(
    lambda *args: [[all_ways(f, i, args) for i in range(count)] for f in op[:2]]
  )
  products.assert_same(*both(*op.args()))


@pytest.mark.parametrize(
  ("policy", "op"),
  [(("nothing", "everything", "dots")[i % 3], op) for i, op in enumerate(OPS)],
)
def test_checkpoint(op, policy):
  policy = getattr(jax.checkpoint_policies, f"{policy}_saveable")
  remat = jax.checkpoint(OPS[op].ours, policy=policy)
  assert_same_gradients(remat, OPS[op].plain, OPS[op].args())


@each({name: OPS[name] for i, name in enumerate(OPS) if i % 2})
def test_export(op):
  """For two platforms, of which the second can't run here."""
  args, platforms = op.args(), ("cpu", "cuda")
  exported = export.export(jax.jit(op.ours), platforms=platforms)(*args)
  again = export.deserialize(exported.serialize(vjp_order=1))
  assert_same_gradients(again.call, op.plain, args)


@each({
  name: OPS[name]
  for name in ("matmul", "gated_matmul", "ragged_dot, part", "gated_ragged_dot")
})  # fmt: skip
def test_export_with_symbolic_rows(op):
  (m,) = export.symbolic_shape("m")
  first, *rest = op.args()
  shape = jax.ShapeDtypeStruct((m, first.shape[1]), first.dtype)
  exported = export.export(jax.jit(op.ours))(shape, *rest)
  for rows in (6, 9):
    args = n64(rows, first.shape[1]), *rest
    products.assert_same(exported.call(*args), op.plain(*args))


@pytest.mark.parametrize("scaling", ("tensor", "row", "block"))
@pytest.mark.parametrize("platform", ("cpu", "cuda"))
def test_export_of_a_recipe_with_symbolic_rows(platform, scaling):
  (m,) = export.symbolic_shape("m")
  sizes, how = jnp.array([3, 2]), {"quantize": Recipe(scaling=scaling)}

  def pulled(x, w, experts):
    y = pallas_gemm.matmul(x, w, **how)
    y = pallas_gemm.ragged_dot(y, experts, sizes, **how)
    return jnp.sum(y.astype(jnp.float32))

  f, rest = (
    jax.jit(jax.grad(pulled, (0, 1, 2))),
    (normal(256, 8), normal(2, 8, 4)),
  )
  shape = jax.ShapeDtypeStruct((m, 256), jnp.float32)
  exported = export.export(f, platforms=[platform])(shape, *rest)
  if platform == "cpu":
    for rows in (5, 130):
      args = normal(rows, 256), *rest
      jax.tree.map(
        np.testing.assert_array_equal, exported.call(*args), f(*args)
      )


@pytest.mark.parametrize(
  ("op", "kept"),
  (
    (MATMUL, [(2, 3), (2, 4), (3, 4)]),
    (RAGGED, [(4, 2, 3), (5,), (7, 2), (7, 3)]),
  ),
  ids=TWO,
)
def test_what_is_kept_for_derivatives(op, kept):
  """Operands, what the activation is applied to, and where groups start."""
  f = op.given(activation=jax.nn.gelu).ours
  found = jax.tree.leaves(jax.vjp(f, *op.args())[1])
  shapes = [tuple(n for n in x.shape if n > 1) for x in found]
  assert sorted(shape for shape in shapes if shape) == kept


@each(TWO)
def test_saving_is_dropped_where_nobody_reads_it(op):
  a, b = op.args()
  f = lambda a: op.ours(a, b, activation=jnp.tanh)  # noqa: E731
  jaxpr = jax.make_jaxpr(lambda a: jax.jvp(f, (a,), (a,))[0])(a)
  assert "save=True" in str(jaxpr)
  step = jax.make_jaxpr(jax.grad(lambda a: jax.checkpoint(f)(a).sum()))(a)
  assert str(step).count("save=True") <= 1


@each({
  "matmul": MATMUL._replace(words=("mk", "nk")).given(transpose_b=True),
  "ragged_dot": BIASED.given(activation=jnp.tanh),
})  # fmt: skip
def test_operands_are_read_in_place(op):
  """No derivative transposes an operand, or scatters."""
  step = jax.grad(squared(op.ours), tuple(range(len(op.words))))
  second = jax.grad(lambda *x: step(*x)[1].sum(), (0, 1))
  jaxpr = str(jax.make_jaxpr(second)(*op.args()))
  assert "pallas_gemm[" in jaxpr and "transpose[" not in jaxpr
  assert "scatter" not in jax.jit(second).lower(*op.args()).as_text()


# Dense products.


@pytest.mark.parametrize(
  ("layout", "a", "b"),
  pairs(("nn", "nt", "tn", "tt"), ((), (3,)), ((), (3,))),
  ids=str,
)
def test_gradients_of_layouts(layout, a, b):
  left, right = (side == "t" for side in layout)
  a, b = n64(*a, 4, 5), n64(*b, 5, 6)
  a, b = a.mT if left else a, b.mT if right else b
  ours = functools.partial(dense, transpose_a=left, transpose_b=right)
  plain = lambda a, b: (a.mT if left else a) @ (b.mT if right else b)  # noqa: E731
  assert_same_gradients(ours, plain, (a, b))


VMAPS = (
  ((4, 3, 5), (5, 6), (1, None)),
  ((4, 5), (5, 6, 3), (None, 2)),
  ((3, 4, 5), (5, 3, 6), (0, 1)),
  ((3, 2, 4, 5), (5, 6), (0, None)),
  ((3, 2, 4, 5), (2, 5, 6), (0, None)),
  ((2, 4, 5), (3, 2, 5, 6), (None, 0)),
  ((3, 2, 4, 5), (3, 5, 6), (0, 0)),
)


@pytest.mark.parametrize(("a", "b", "axes"), VMAPS, ids=str)
def test_vmap_of_batches_and_other_axes(a, b, axes):
  a, b = n64(*a), n64(*b)
  for activation in (None, jax.nn.gelu):
    got, want = (
      jax.vmap(functools.partial(f, activation=activation), axes)(a, b)
      for f in (dense, plain)
    )
    products.assert_same(got, want)


def test_vmap_of_one_operand_is_one_product_without_batch():
  a, b = n64(3, 4, 5), n64(5, 6)
  text = jax.jit(jax.vmap(dense, (0, None))).lower(a, b).as_text()
  assert "(tensor<12x5xf64>, tensor<5x6xf64>)" in text


@pytest.mark.parametrize("out_dtype", ("bfloat16", "float32"))
def test_16_bit_gradients(out_dtype):
  """In the operands' dtype, to which cotangents are rounded."""
  a, b = normal(6, 20, dtype="bfloat16"), normal(20, 8, dtype="bfloat16")
  bias, ct = normal(8), normal(6, 8, dtype=out_dtype)
  f = functools.partial(dense, out_dtype=out_dtype)
  d_a, d_b, d_bias = jax.vjp(f, a, b, bias)[1](ct)
  assert (d_a.dtype, d_bias.dtype) == ("bfloat16", "float32")
  rounded = ct.astype("bfloat16")
  products.assert_product(d_a, rounded, b.T)
  products.assert_product(d_b, a.T, rounded)
  products.assert_product(d_bias[None], jnp.ones((1, 6), jnp.float32), ct)


def test_shared_weights_sum_in_float32():
  a, b = normal(64, 3, 4, dtype="bfloat16"), normal(4, 5, dtype="bfloat16")
  ct = normal(64, 3, 5, dtype="bfloat16")
  (d_b,) = jax.vjp(lambda b: dense(a.mT, b, transpose_a=True), b)[1](ct)
  products.assert_product(d_b, a.reshape(-1, 4).T, ct.reshape(-1, 5))


@pytest.mark.parametrize(
  "case",
  (
    ((72, 1, 40), "bfloat16", "none", True),  # of a vector
    ((72, 80, 40), "float16", "gelu", False),
  ),
)
def test_sm90_gradients(case):
  """Interpreted: forward and both products of the backward pass."""
  with jax.enable_x64(False):
    gradients.assert_right(*case, implementation="sm90")


# Grouped products.


@each({"all": BIASED, "part": PART})
def test_gradients_of_transposed(op):
  ours = lambda lhs, rhs: op.ours(lhs, rhs.mT, transpose_rhs=True)  # noqa: E731
  assert_same_gradients(ours, op.plain, op.args()[:2])


def test_tangents_of_rows_of_no_group_are_zeros():
  """Also where the activation's derivative at zero is infinite."""
  args = tuple(jnp.abs(x) for x in BIASED.args())
  f = BIASED.given(activation=jnp.sqrt).ours
  out, tangent = jax.jvp(f, args, args)
  assert np.isfinite(tangent).all() and np.asarray(tangent[:6]).all()
  assert not np.asarray(out[6:]).any() and not np.asarray(tangent[6:]).any()
  for grad in jax.grad(squared(f), (0, 1, 2))(*args):
    assert np.isfinite(grad).all()


def test_group_sizes_have_no_derivative():
  f = lambda lhs, rhs, sizes: grouped(lhs, rhs, group_sizes=sizes)  # noqa: E731
  grads = jax.grad(squared(f), (0, 2), allow_int=True)(*RAGGED.args(), SIZES)
  assert grads[1].dtype == jax.dtypes.float0


@pytest.mark.parametrize(
  "axes", ((None, None, 0), (1, 2, None), (0, 0, 0)), ids=str
)
def test_vmap_of_groups(axes):
  """Values, and gradients with respect to what is shared, too."""
  *args, sizes = (
    x if axis is None else jnp.stack([x, 2 * x, -x], axis)
    for x, axis in zip((*RAGGED.args(), SIZES), axes)
  )
  sizes = sizes if axes[2] is None else MANY_SIZES

  def mapped(f):
    one = lambda *x: f(*x[:2], group_sizes=x[2], activation=jnp.tanh)  # noqa: E731
    return lambda *x: jax.vmap(one, axes)(*x, sizes)

  assert_same_gradients(mapped(grouped), mapped(plain_grouped), args)


def test_vmap_of_offsets():
  lhs, rhs, _ = PART.args()
  offsets, biases = jnp.arange(3), n64(3, 2, 3)

  def mapped(f):
    one = lambda bias, at: f(lhs, rhs, bias, group_offset=at)  # noqa: E731
    return jax.vmap(one)(biases, offsets)

  products.assert_same(mapped(grouped), mapped(plain_grouped))


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
