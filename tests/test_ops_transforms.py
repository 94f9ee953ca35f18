"""Transformations of the ops, against those of the same thing in jnp."""

import jax
from jax import export
import jax.numpy as jnp
import pytest

import pallas_gemm
from tests.support import gradients, products
from tests.support.products import normal

# Rules of derivatives do not depend on the dtype. In float64, right and wrong
# are far apart.
pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(name="x64")
def _x64():
  with jax.enable_x64(True):
    yield


def n64(*shape, seed=0):
  return normal(*shape, dtype="float64", seed=seed)


def plain(a, b, bias=None, c=None, *, alpha=1.0, beta=1.0, activation=None):
  """`matmul` in jnp."""
  out = alpha * jnp.matmul(a, b)
  out = out if c is None else out + beta * c
  out = out if bias is None else out + bias
  return out if activation is None else activation(out)


def ours(a, b, bias=None, c=None, **epilogue):
  return pallas_gemm.matmul(a, b, bias=bias, c=c, **epilogue)


def gated(x, gate, up):
  return pallas_gemm.gated_matmul(x, gate, up)


def plain_gated(x, gate, up):
  return jax.nn.silu(x @ gate) * (x @ up)


def loss(f, **static):
  """A scalar whose cotangents are no constants."""
  return lambda *args: (f(*args, **static) ** 2).sum()


EPILOGUES = (
  {},
  {"alpha": 0.5},
  {"activation": jax.nn.gelu},
  {"activation": jax.nn.silu, "alpha": -2.0, "beta": 0.3},
)


@pytest.mark.parametrize(
  "epilogue", EPILOGUES, ids=lambda x: "+".join(x) or "none"
)
@pytest.mark.parametrize("bias", (None, (6,), (4, 1)), ids=str)
@pytest.mark.parametrize("with_c", (False, True))
def test_gradients(epilogue, bias, with_c):
  args = [n64(4, 5), n64(5, 6)]
  args.append(None if bias is None else n64(*bias))
  args.append(n64(4, 6) if with_c else None)
  if not with_c:
    epilogue = {k: v for k, v in epilogue.items() if k != "beta"}
  wrt = tuple(i for i, x in enumerate(args) if x is not None)
  got = jax.value_and_grad(loss(ours, **epilogue), wrt)(*args)
  want = jax.value_and_grad(loss(plain, **epilogue), wrt)(*args)
  products.assert_same(got, want)


@pytest.mark.parametrize("transpose_a", (False, True))
@pytest.mark.parametrize("transpose_b", (False, True))
@pytest.mark.parametrize(
  "batches", (((), ()), ((3,), ()), ((), (3,)), ((3,), (3,))), ids=str
)
def test_gradients_of_layouts(transpose_a, transpose_b, batches):
  a, b = n64(*batches[0], 4, 5), n64(*batches[1], 5, 6)
  a = jnp.swapaxes(a, -1, -2) if transpose_a else a
  b = jnp.swapaxes(b, -1, -2) if transpose_b else b

  def reference(a, b):
    a = jnp.swapaxes(a, -1, -2) if transpose_a else a
    return jnp.matmul(a, jnp.swapaxes(b, -1, -2) if transpose_b else b)

  flags = {"transpose_a": transpose_a, "transpose_b": transpose_b}
  got = jax.grad(loss(ours, **flags), (0, 1))(a, b)
  products.assert_same(got, jax.grad(loss(reference), (0, 1))(a, b))


def test_operands_are_read_in_place():
  """No derivative transposes an operand."""
  a, b = n64(4, 5), n64(6, 5)
  step = jax.grad(loss(ours, transpose_b=True), (0, 1))
  jaxpr = str(jax.make_jaxpr(jax.grad(lambda a: step(a, b)[1].sum()))(a))
  assert "pallas_gemm" in jaxpr and "transpose[" not in jaxpr


def test_gated_gradients():
  args = n64(4, 5), n64(5, 6), n64(5, 6, seed=1)
  for wrt in ((0, 1, 2), (1,), (2,), (0,)):
    got = jax.grad(loss(gated), wrt)(*args)
    products.assert_same(got, jax.grad(loss(plain_gated), wrt)(*args))


@pytest.mark.parametrize(
  ("f", "reference", "shapes"),
  (
    (ours, plain, ((2, 3), (3, 2))),
    (gated, plain_gated, ((2, 3), (3, 2), (3, 2))),
    (
      lambda *x: ours(*x, activation=jnp.tanh, alpha=2.0),
      lambda *x: plain(*x, activation=jnp.tanh, alpha=2.0),
      ((2, 3), (3, 2), (2,), (2, 2)),
    ),
  ),
  ids=("plain", "gated", "epilogue"),
)
def test_second_order(f, reference, shapes):
  args = [n64(*shape, seed=i) for i, shape in enumerate(shapes)]
  wrt = tuple(range(len(args)))
  got = jax.jit(jax.hessian(loss(f), wrt))(*args)
  want = jax.jit(jax.hessian(loss(reference), wrt))(*args)
  products.assert_same(got, want)


def test_forward_mode():
  args = n64(4, 5), n64(5, 6), n64(6), n64(4, 6)
  dots = tuple(n64(*x.shape, seed=1) for x in args)
  epilogue = {"activation": jax.nn.gelu, "beta": 2.0}
  f = lambda *x: ours(*x, **epilogue)  # noqa: E731
  want = jax.jvp(lambda *x: plain(*x, **epilogue), args, dots)
  products.assert_same(jax.jvp(f, args, dots), want)
  out, tangents = jax.linearize(f, *args)
  products.assert_same((out, tangents(*dots)), want)


def test_linear_transpose():
  a, b, ct = n64(4, 5), n64(5, 6), n64(4, 6)
  transposed = jax.linear_transpose(lambda a: ours(a, b), a)
  products.assert_same(transposed(ct), (ct @ b.T,))


def test_what_is_kept_for_derivatives():
  """Operands and what the activation is applied to, and nothing else."""
  a, b = n64(4, 5), n64(5, 6)
  _, pullback = jax.vjp(lambda a, b: ours(a, b, activation=jax.nn.gelu), a, b)
  shapes = sorted(x.shape[-2:] for x in jax.tree.leaves(pullback) if x.ndim)
  assert shapes == [(4, 5), (4, 6), (5, 6)]


def test_saving_is_dropped_where_nobody_reads_it():
  a, b = n64(4, 5), n64(5, 6)
  f = lambda a: ours(a, b, activation=jnp.tanh)  # noqa: E731
  jaxpr = jax.make_jaxpr(lambda a: jax.jvp(f, (a,), (a,))[0])(a)
  assert "save=True" in str(jaxpr)
  step = jax.make_jaxpr(jax.grad(lambda a: jax.checkpoint(f)(a).sum()))(a)
  assert str(step).count("save=True") <= 1


VMAPS = (
  ((3, 4, 5), (5, 6), (0, None)),
  ((4, 3, 5), (5, 6), (1, None)),
  ((4, 5), (5, 6, 3), (None, 2)),
  ((3, 4, 5), (5, 3, 6), (0, 1)),
  ((3, 2, 4, 5), (5, 6), (0, None)),
  ((3, 2, 4, 5), (2, 5, 6), (0, None)),
  ((2, 4, 5), (3, 2, 5, 6), (None, 0)),
  ((3, 2, 4, 5), (3, 5, 6), (0, 0)),
)


@pytest.mark.parametrize(("a", "b", "axes"), VMAPS, ids=str)
def test_vmap(a, b, axes):
  a, b = n64(*a), n64(*b)
  for epilogue in EPILOGUES[::2]:
    got = jax.vmap(lambda a, b: ours(a, b, **epilogue), axes)(a, b)  # noqa: B023
    want = jax.vmap(lambda a, b: plain(a, b, **epilogue), axes)(a, b)  # noqa: B023
    products.assert_same(got, want)


@pytest.mark.parametrize("batched", range(1, 16))
@pytest.mark.parametrize("along", ("n", "m"))
def test_vmap_with_epilogue(batched, along):
  """Every choice of which of a, b, bias, c have the new dimension."""
  shapes = (4, 5), (5, 6), (6,) if along == "n" else (4, 1), (4, 6)
  new = [bool(batched & 1 << i) for i in range(4)]
  args = [n64(*([3] * b), *shape) for b, shape in zip(new, shapes)]
  axes = [0 if b else None for b in new]
  epilogue = {"activation": jnp.tanh, "beta": 0.5}
  got = jax.vmap(lambda *x: ours(*x, **epilogue), axes)(*args)
  want = jax.vmap(lambda *x: plain(*x, **epilogue), axes)(*args)
  products.assert_same(got, want)


@pytest.mark.parametrize("axes", ((0, None, None), (None, 0, None), (0, 0, 0)))
def test_vmap_of_gated(axes):
  args = [
    n64(*([] if axis is None else [3]), *shape, seed=i)
    for i, (axis, shape) in enumerate(zip(axes, ((4, 5), (5, 6), (5, 6))))
  ]
  got = jax.vmap(gated, axes)(*args)
  products.assert_same(got, jax.vmap(plain_gated, axes)(*args))


def test_nested_vmap_and_gradients_of_it():
  a, b = n64(3, 4, 5), n64(2, 5, 6)

  def both(f):
    inner = jax.vmap(f, (None, 0))
    return loss(jax.vmap(inner, (0, None)))

  activated = lambda a, b: ours(a, b, activation=jnp.tanh)  # noqa: E731
  want = jax.grad(both(lambda a, b: jnp.tanh(a @ b)), (0, 1))(a, b)
  products.assert_same(jax.grad(both(activated), (0, 1))(a, b), want)
  per_example = jax.vmap(jax.grad(loss(activated), 1), (0, None))(a, b[0])
  want = jax.vmap(
    jax.grad(lambda a, b: (jnp.tanh(a @ b) ** 2).sum(), 1), (0, None)
  )
  products.assert_same(per_example, want(a, b[0]))


def test_vmap_of_one_operand_is_one_product_without_batch():
  a, b = n64(3, 4, 5), n64(5, 6)
  text = jax.jit(jax.vmap(ours, (0, None))).lower(a, b).as_text()
  assert "(tensor<12x5xf64>, tensor<5x6xf64>)" in text


def test_checkpoint():
  a, b = n64(4, 5), n64(5, 6)
  f = lambda a, b: ours(a, b, activation=jax.nn.gelu)  # noqa: E731
  want = jax.grad(loss(f), (0, 1))(a, b)
  for policy in (None, jax.checkpoint_policies.dots_saveable):
    remat = jax.checkpoint(f, policy=policy)
    products.assert_same(jax.grad(loss(remat), (0, 1))(a, b), want)


def test_scan():
  w = n64(3, 4, 4)
  step = lambda f: lambda x, w: (f(x, w, activation=jnp.tanh), None)  # noqa: E731
  run = lambda f: lambda x: jax.lax.scan(step(f), x, w)[0].sum()  # noqa: E731
  x = n64(2, 4)
  products.assert_same(jax.grad(run(ours))(x), jax.grad(run(plain))(x))


def test_donation():
  a, b, c = n64(4, 5), n64(5, 6), n64(4, 6)
  want = plain(a, b, c=c)
  out = jax.jit(lambda a, b, c: ours(a, b, c=c), donate_argnums=2)(a, b, c)
  products.assert_same(out, want)
  assert c.is_deleted()


@pytest.mark.parametrize("platforms", (("cpu",), ("cpu", "cuda")))
def test_export(platforms):
  f = jax.jit(lambda a, b: ours(a, b, activation=jnp.tanh))
  a, b = n64(4, 5), n64(5, 6)
  exported = export.export(f, platforms=platforms)(a, b)
  again = export.deserialize(exported.serialize(vjp_order=1))
  products.assert_same(again.call(a, b), jnp.tanh(a @ b))
  got = jax.grad(loss(again.call), (0, 1))(a, b)
  want = jax.grad(loss(lambda a, b: jnp.tanh(a @ b)), (0, 1))(a, b)
  products.assert_same(got, want)


def test_export_with_symbolic_rows():
  (m,) = export.symbolic_shape("m")
  a = jax.ShapeDtypeStruct((m, 5), jnp.float64)
  exported = export.export(jax.jit(ours))(a, n64(5, 6))
  for rows in (1, 7):
    a, b = n64(rows, 5), n64(5, 6)
    products.assert_same(exported.call(a, b), a @ b)


def test_16_bit_gradients():
  """In the operands' dtype, within the bound of the products they are."""
  a, b = normal(6, 20, dtype="bfloat16"), normal(20, 8, dtype="bfloat16")
  ct = normal(6, 8, dtype="bfloat16")
  bias = normal(8)
  out, pullback = jax.vjp(lambda a, b, bias: ours(a, b, bias), a, b, bias)
  d_a, d_b, d_bias = pullback(ct)
  assert out.dtype == d_a.dtype == d_b.dtype == "bfloat16"
  assert d_bias.dtype == "float32"
  products.assert_product(d_a, ct, b.T)
  products.assert_product(d_b, a.T, ct)
  products.assert_product(d_bias[None], jnp.ones((1, 6), jnp.float32), ct)


def test_cotangents_are_rounded_to_the_operands_dtype():
  a, b = normal(6, 20, dtype="bfloat16"), normal(20, 8, dtype="bfloat16")
  ct = normal(6, 8)
  _, pullback = jax.vjp(lambda a, b: ours(a, b, out_dtype="float32"), a, b)
  d_a, d_b = pullback(ct)
  assert d_a.dtype == d_b.dtype == "bfloat16"
  products.assert_product(d_a, ct.astype("bfloat16"), b.T)
  products.assert_product(d_b, a.T, ct.astype("bfloat16"))


def test_shared_weights_sum_in_float32():
  a, b = normal(64, 3, 4, dtype="bfloat16"), normal(4, 5, dtype="bfloat16")
  ct = normal(64, 3, 5, dtype="bfloat16")
  f = lambda b: ours(jnp.swapaxes(a, 1, 2), b, transpose_a=True)  # noqa: E731
  (d_b,) = jax.vjp(f, b)[1](ct)
  rows = a.reshape(-1, 4), ct.reshape(-1, 5)
  products.assert_product(d_b, rows[0].T, rows[1])


@pytest.mark.parametrize("activation", ("none", "gelu"))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("with_c", (False, True))
def test_sm90_gradients(activation, dtype, with_c):
  """Interpreted: forward and both products of the backward pass."""
  with jax.enable_x64(False):
    how = {"implementation": "sm90"}
    gradients.assert_right((72, 80, 40), dtype, activation, with_c, **how)
