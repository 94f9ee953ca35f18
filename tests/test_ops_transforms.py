"""Transformations of the ops, against those of the same thing in jnp."""

import functools
import itertools

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import gradients, oldest, products, ragged
from tests.support.ops import (
  ADDED,
  BIASED,
  MATMUL,
  OPS,
  PART,
  RAGGED,
  SIZES,
  Op,
  dense,
  grouped,
  n64,
  plain,
  plain_grouped,
)
from tests.support.products import normal

# Rules of derivatives do not depend on the dtype. In float64, right and wrong
# are far apart.
pytestmark = pytest.mark.usefixtures("x64")

MANY_SIZES = jnp.array([[3, 0, 2, 1], [7, 0, 0, 0], [0, 0, 0, 0]])


@pytest.fixture(name="x64")
def _x64():
  with jax.enable_x64(True):
    yield


# Dense and grouped ones, gated ones and epilogues, of either half.
_NAMES = oldest.half(OPS)
each_op = pytest.mark.parametrize(
  "op", [OPS[name] for name in _NAMES], ids=_NAMES
)


def loss(f):
  """A scalar whose cotangents are no constants."""
  return lambda *args: (f(*args) ** 2).sum()


def assert_same_gradients(ours, plain, args):
  """The value, and the derivatives of all arguments."""
  step = lambda f: jax.value_and_grad(loss(f), tuple(range(len(args))))  # noqa: E731
  products.assert_same(jax.jit(step(ours))(*args), step(plain)(*args))


# Of every op.


@each_op
def test_gradients(op):
  """Of all arguments, and of each alone."""
  assert_same_gradients(op.ours, op.plain, op.args())
  for i in range(len(op.shapes)):
    got, want = (jax.grad(loss(f), i)(*op.args()) for f in op[:2])
    products.assert_same(got, want)


@each_op
def test_second_order(op):
  wrt = tuple(range(len(op.shapes)))
  got, want = (jax.jit(jax.hessian(loss(f), wrt))(*op.args()) for f in op[:2])
  products.assert_same(got, want)


@each_op
def test_forward_mode(op):
  args, dots = op.args(), op.args(seed=1)
  want = jax.jvp(op.plain, args, dots)
  products.assert_same(jax.jvp(op.ours, args, dots), want)
  out, tangents = jax.linearize(op.ours, *args)
  products.assert_same((out, tangents(*dots)), want)


@pytest.mark.parametrize(
  "op",
  (MATMUL, RAGGED, OPS["gated_matmul"], OPS["gated_ragged_dot"]),
  ids=("matmul", "ragged_dot", "gated_matmul", "gated_ragged_dot"),
)
def test_linear_transpose(op):
  """Of the last argument: gated products are linear in it."""
  *args, last = op.args()
  ct = op.ours(*args, last)
  f = functools.partial(op.ours, *args)
  want = jax.vjp(functools.partial(op.plain, *args), last)[1](ct)
  products.assert_same(jax.linear_transpose(f, last)(ct), want)


@each_op
def test_vmap(op):
  """Every choice of which arguments have the new dimension."""
  for mapped in itertools.product((None, 0), repeat=len(op.shapes)):
    if not any(axis == 0 for axis in mapped):
      continue
    args = [
      n64(*([] if axis is None else [3]), *shape, seed=i)
      for i, (axis, shape) in enumerate(zip(mapped, op.shapes))
    ]
    got, want = (jax.vmap(f, mapped)(*args) for f in op[:2])
    products.assert_same(got, want)


@each_op
def test_gradients_of_nested_vmap_and_vmap_of_gradients(op):
  a, b, *rest = op.args()
  a, b = jnp.stack([a, 2 * a, -a]), jnp.stack([b, 3 * b])

  def both(f):
    inner = jax.vmap(lambda a, b: f(a, b, *rest), (None, 0))
    return jax.vmap(inner, (0, None))

  assert_same_gradients(both(op.ours), both(op.plain), (a, b))
  step = lambda f: jax.grad(loss(lambda a, b: f(a, b, *rest)), 1)  # noqa: E731
  got, want = (jax.vmap(step(f), (0, None))(a, b[0]) for f in op[:2])
  products.assert_same(got, want)


@pytest.mark.parametrize(
  ("name", "policy"),
  oldest.half_of_product(OPS, ("nothing", "everything", "dots")),
)
def test_checkpoint(name, policy):
  op = OPS[name]
  policy = getattr(jax.checkpoint_policies, f"{policy}_saveable")
  remat = jax.checkpoint(op.ours, policy=policy)
  assert_same_gradients(remat, op.plain, op.args())


@pytest.mark.parametrize(
  ("name", "platforms"),
  oldest.half_of_product(OPS, (("cpu",), ("cpu", "cuda"))),
  ids=str,
)
def test_export(name, platforms):
  op = OPS[name]
  args = op.args()
  exported = export.export(jax.jit(op.ours), platforms=platforms)(*args)
  again = export.deserialize(exported.serialize(vjp_order=1))
  assert_same_gradients(again.call, op.plain, args)


@pytest.mark.parametrize(
  "name", ("matmul", "gated_matmul", "ragged_dot, part", "gated_ragged_dot")
)
def test_export_with_symbolic_rows(name):
  op = OPS[name]
  (m,) = export.symbolic_shape("m")
  first, *rest = op.args()
  shape = jax.ShapeDtypeStruct((m, first.shape[1]), first.dtype)
  exported = export.export(jax.jit(op.ours))(shape, *rest)
  for rows in (6, 9):
    args = n64(rows, first.shape[1]), *rest
    products.assert_same(exported.call(*args), op.plain(*args))


@pytest.mark.parametrize("op", (ADDED, RAGGED), ids=("matmul", "ragged_dot"))
def test_donation(op):
  """Of C, and of lhs, which is as large as the result."""
  args = op.args() if op is ADDED else (n64(7, 6), n64(4, 6, 6))
  given = 3 if op is ADDED else 0
  want = op.plain(*args)
  out = jax.jit(op.ours, donate_argnums=given)(*args)
  products.assert_same(out, want)
  assert args[given].is_deleted()


@pytest.mark.parametrize(
  ("op", "kept"),
  (
    (MATMUL, [(2, 3), (2, 4), (3, 4)]),
    (RAGGED, [(4, 2, 3), (5,), (7, 2), (7, 3)]),
  ),
  ids=("matmul", "ragged_dot"),
)
def test_what_is_kept_for_derivatives(op, kept):
  """Operands, what the activation is applied to, and where groups start."""
  f = op.given(activation=jax.nn.gelu).ours
  found = jax.tree.leaves(jax.vjp(f, *op.args())[1])
  shapes = [tuple(n for n in x.shape if n > 1) for x in found]
  assert sorted(shape for shape in shapes if shape) == kept


@pytest.mark.parametrize("op", (MATMUL, RAGGED), ids=("matmul", "ragged_dot"))
def test_saving_is_dropped_where_nobody_reads_it(op):
  a, b = op.args()
  f = lambda a: op.ours(a, b, activation=jnp.tanh)  # noqa: E731
  jaxpr = jax.make_jaxpr(lambda a: jax.jvp(f, (a,), (a,))[0])(a)
  assert "save=True" in str(jaxpr)
  step = jax.make_jaxpr(jax.grad(lambda a: jax.checkpoint(f)(a).sum()))(a)
  assert str(step).count("save=True") <= 1


@pytest.mark.parametrize(
  "op",
  (
    Op(functools.partial(dense, transpose_b=True), plain, ((2, 3), (4, 3))),
    BIASED.given(activation=jnp.tanh),
  ),
  ids=("matmul", "ragged_dot"),
)
def test_operands_are_read_in_place(op):
  """No derivative transposes an operand, or scatters."""
  step = jax.grad(loss(op.ours), tuple(range(len(op.shapes))))
  second = jax.grad(lambda *x: step(*x)[1].sum(), (0, 1))
  jaxpr = str(jax.make_jaxpr(second)(*op.args()))
  assert "pallas_gemm[" in jaxpr and "transpose[" not in jaxpr
  assert "scatter" not in jax.jit(second).lower(*op.args()).as_text()


# Dense products.


EPILOGUES = {
  "none": {},
  "alpha": {"alpha": 0.5},
  "activation": {"activation": jax.nn.gelu},
  "activation+alpha+beta": {
    "activation": jax.nn.silu,
    "alpha": -2.0,
    "beta": 0.3,
  },
}


@pytest.mark.parametrize(
  ("name", "bias", "with_c"),
  oldest.half_of_product(EPILOGUES, (None, (4,), (2, 1)), (False, True)),
  ids=str,
)
def test_gradients_of_epilogues(name, bias, with_c):
  epilogue = EPILOGUES[name]
  there = {"bias": bias, "c": (2, 4) if with_c else None}
  names = [name for name, shape in there.items() if shape]
  if not with_c:
    epilogue = {k: v for k, v in epilogue.items() if k != "beta"}

  def of(f):
    return lambda a, b, *rest: f(a, b, **dict(zip(names, rest)), **epilogue)

  args = n64(2, 3), n64(3, 4), *[n64(*there[name]) for name in names]
  assert_same_gradients(of(dense), of(plain), args)


@pytest.mark.parametrize(
  ("transpose_a", "transpose_b", "batches"),
  oldest.half_of_product(
    (False, True),
    (False, True),
    (((), ()), ((3,), ()), ((), (3,)), ((3,), (3,))),
  ),
  ids=str,
)
def test_gradients_of_layouts(transpose_a, transpose_b, batches):
  a, b = n64(*batches[0], 4, 5), n64(*batches[1], 5, 6)
  a, b = a.mT if transpose_a else a, b.mT if transpose_b else b

  def reference(a, b):
    return (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)

  flags = {"transpose_a": transpose_a, "transpose_b": transpose_b}
  assert_same_gradients(functools.partial(dense, **flags), reference, (a, b))


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


def test_vmap_with_a_bias_along_m():
  """Every choice of which of a, b, bias and C have the new dimension."""
  shapes = (2, 3), (3, 4), (2, 1), (2, 4)
  test_vmap(ADDED._replace(shapes=shapes).given(activation=jnp.tanh, beta=0.5))


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
  out, pullback = jax.vjp(f, a, b, bias)
  d_a, d_b, d_bias = pullback(ct)
  assert d_a.dtype == d_b.dtype == "bfloat16"
  assert out.dtype == out_dtype and d_bias.dtype == "float32"
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
  ("activation", "dtype", "with_c"),
  oldest.half_of_product(
    ("none", "gelu"), ("bfloat16", "float16"), (False, True)
  ),
)
def test_sm90_gradients(activation, dtype, with_c):
  """Interpreted: forward and both products of the backward pass."""
  with jax.enable_x64(False):
    how = {"implementation": "sm90"}
    gradients.assert_right((72, 80, 40), dtype, activation, with_c, **how)


# Grouped products.


@pytest.mark.parametrize("part", (False, True))
def test_gradients_of_transposed(part):
  lhs, rhs = (PART if part else BIASED).args()[:2]
  how = {"group_offset": 1} if part else {}
  ours = lambda lhs, rhs: grouped(lhs, rhs.mT, transpose_rhs=True, **how)  # noqa: E731
  assert_same_gradients(
    ours, functools.partial(plain_grouped, **how), (lhs, rhs)
  )


def test_tangents_of_rows_of_no_group_are_zeros():
  """Also where the activation's derivative at zero is infinite."""
  args = tuple(jnp.abs(x) for x in BIASED.args())
  f = BIASED.given(activation=jnp.sqrt).ours
  out, tangent = jax.jvp(f, args, args)
  assert np.isfinite(tangent).all() and np.asarray(tangent[:6]).all()
  assert not np.asarray(out[6:]).any() and not np.asarray(tangent[6:]).any()
  for grad in jax.grad(loss(f), (0, 1, 2))(*args):
    assert np.isfinite(grad).all()


def test_group_sizes_have_no_derivative():
  f = lambda lhs, rhs, sizes: grouped(lhs, rhs, group_sizes=sizes)  # noqa: E731
  grads = jax.grad(loss(f), (0, 2), allow_int=True)(*RAGGED.args(), SIZES)
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


def test_sizes_are_known_at_run_time_alone():
  traced = []

  @jax.jit
  def f(sizes):
    traced.append(sizes)
    return grouped(*RAGGED.args(), group_sizes=sizes)

  for sizes in MANY_SIZES:
    want = plain_grouped(*RAGGED.args(), group_sizes=sizes)
    products.assert_same(f(sizes), want)
  assert len(traced) == 1


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
