"""What finds NaNs and leaks, and Taylor series, as they are of jnp."""

import functools
import math

import jax
from jax import lax
from jax.experimental import checkify, jet
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from tests.support import oldest, products, ragged
from tests.support.mesh_ops import ROWS, SUMS
from tests.support.ops import MATMUL, OPS, RAGGED, SIZES, Op, dense
from tests.support.products import normal

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(name="x64")
def _x64():
  with jax.enable_x64(True):
    yield


class DropIn(Op):
  """Of 16 bits: other dtypes are passed on to lax."""

  def args(self, seed=0):
    return tuple(x.astype("bfloat16") for x in super().args(seed))


def _dot_general(a, b):
  return pallas_gemm.dot_general(a, b, (((1,), (0,)), ((), ())))


def _ragged_dot_general(a, b):
  return pallas_gemm.ragged_dot_general(a, b, SIZES, ROWS)


def _ragged(a, b):
  return ragged.plain(a, b, SIZES)


_DROP_INS = {
  "dot_general": DropIn(_dot_general, jnp.matmul, MATMUL.shapes),
  "ragged_dot_general": DropIn(_ragged_dot_general, _ragged, RAGGED.shapes),
}
EVERY = OPS | _DROP_INS
_NAMES = oldest.half(list(EVERY))
each_op = pytest.mark.parametrize("op", [EVERY[n] for n in _NAMES], ids=_NAMES)


def _calls(f):
  """A function of the same arguments for each way to call one."""

  def not_compiled(*args):
    with jax.disable_jit():
      return f(*args)

  def looped(*args):
    step = lambda i, _: (i, f(*args))  # noqa: E731
    return lax.scan(step, 0, None, length=2)[1]

  def branching(*args):
    return lax.cond(
      args[1][0].sum() < math.inf, f, lambda *args: -f(*args), *args
    )

  slopes = jax.grad(lambda *args: (f(*args) ** 2).sum(), 1)
  return {
    "eager": f,
    "jit": jax.jit(f),
    "disable_jit": not_compiled,
    "grad": slopes,
    "jit of grad": jax.jit(slopes),
    "jvp": lambda *args: jax.jvp(f, args, args),
    "vmap": lambda *args: jax.vmap(f)(*[x[None] for x in args]),
    "scan": looped,
    "cond": branching,
  }


def assert_same(got, want):
  """Trees that are one, of 16 bits too."""
  wide = functools.partial(jax.tree.map, lambda x: x.astype("float64"))
  products.assert_same(wide(got), wide(want))


def _with(op: Op, value: float) -> tuple[jax.Array, ...]:
  """Arguments, a number of each row of which is that one."""
  first, *rest = map(jnp.abs, op.args())
  return first.at[:, 0].set(value), *rest


# jax.debug_nans and jax.debug_infs.


@each_op
def test_debug_nans(op):
  bad = _with(op, math.nan)
  for name, f in _calls(op.ours).items():
    want = f(*op.args())
    with jax.debug_nans(True), jax.debug_infs(True):
      got = f(*op.args())
    assert_same(got, want)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
      print(name, f(*bad))


@pytest.mark.parametrize("name", ("matmul", "ragged_dot", *_DROP_INS))
def test_debug_infs(name):
  op = EVERY[name]
  bad = _with(op, math.inf)
  for name, f in _calls(op.ours).items():
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
      print(name, f(*bad))


def test_debug_nans_names_the_product():
  a, b = _with(MATMUL, math.nan)
  wanted = "encountered in pallas_gemm"
  with jax.debug_nans(True), pytest.raises(FloatingPointError, match=wanted):
    jax.jit(lambda a: jnp.exp(dense(a, b)))(a)


def test_debug_nans_of_a_gradient_alone():
  """The root of zero: 0 x inf."""
  a, b = jnp.zeros((2, 3)), jnp.ones((3, 4))
  f = functools.partial(dense, activation=jnp.sqrt)
  slopes = jax.grad(lambda a: (f(a, b) ** 2).sum())
  with jax.debug_nans(True):
    assert not f(a, b).any()
    for step in (slopes, jax.jit(slopes)):
      with pytest.raises(FloatingPointError, match="nan"):
        step(a)


def test_debug_nans_of_what_does_not_leave_the_kernel():
  a, b = (x.astype("bfloat16") for x in MATMUL.args())
  f = lambda x: jnp.where(x > 0, jnp.log(x), 0)  # noqa: E731
  want = f(jnp.matmul(a, b, preferred_element_type=jnp.float32))
  for name in ("xla", "sm90"):
    with jax.debug_nans(True), jax.enable_x64(False):
      out = dense(a, b, activation=f, implementation=name)
    assert (np.asarray(out != 0) == np.asarray(want != 0)).all()


def test_debug_nans_of_the_interpreted_kernel():
  with jax.enable_x64(False):
    a, b = normal(16, 64, dtype="bfloat16"), normal(64, 64, dtype="bfloat16")
    f = jax.jit(functools.partial(dense, implementation="sm90"))
    with jax.debug_nans(True):
      products.assert_product(f(a, b), a, b)
      with pytest.raises(FloatingPointError, match="nan"):
        f(a.at[0, 0].set(math.nan), b)


# jax.experimental.checkify.


@each_op
def test_checkify(op):
  """NaNs are reported, by checks of floating-point numbers alone."""
  calls, bad = _calls(op.ours), _with(op, math.nan)
  for f in map(calls.get, ("eager", "jit of grad", "vmap", "scan", "cond")):
    error, out = checkify.checkify(f, checkify.float_checks)(*op.args())
    assert error.get() is None
    assert_same(out, f(*op.args()))
    error, _ = checkify.checkify(f, checkify.float_checks)(*bad)
    assert "nan generated by primitive: pallas_gemm" in error.get()
    others = checkify.all_checks - checkify.float_checks
    error, _ = checkify.checkify(f, others)(*bad)
    assert error.get() is None


def test_checkify_of_users():
  """A check of the user's beside a product is found, with its own message."""

  def f(a, b):
    out = dense(a, b)
    checkify.check(out[0, 0] < 0, "positive")
    return out

  a, b = map(jnp.abs, MATMUL.args())
  for args, wanted in (((a, b), "positive"), ((-a, b), "")):
    error, out = checkify.checkify(jax.jit(f), checkify.all_checks)(*args)
    products.assert_same(out, jnp.matmul(*args))
    assert (error.get() or "").startswith(wanted)


# jax.experimental.jet.


def _series(op, order):
  """Of each argument, its first derivatives."""
  seeds = [op.args(seed=10 * i) for i in range(1, order + 1)]
  return tuple(map(list, zip(*seeds)))


def _derivatives(f, args, series):
  """The same by derivatives of one curve, one after the other."""

  def curve(t):
    return f(
      *[
        x + sum(v * t**i / math.factorial(i) for i, v in enumerate(terms, 1))
        for x, terms in zip(args, series)
      ]
    )

  found = [curve]
  for _ in series[0]:
    found.append(jax.jacfwd(found[-1]))
  first, *rest = (f(0.0) for f in found)
  return first, rest


@pytest.mark.parametrize(
  ("name", "order"), oldest.half_of_product(OPS, (1, 2, 3)), ids=str
)
def test_jet(name, order):
  op = OPS[name]
  args, series = op.args(), _series(op, order)
  want = _derivatives(op.plain, args, series)
  taylor = functools.partial(jet.jet, op.ours)
  products.assert_same(taylor(args, series), want)
  products.assert_same(jax.jit(taylor)(args, series), want)


@pytest.mark.parametrize(
  "activation", (jax.nn.relu, jax.nn.silu, jax.nn.gelu, jnp.square)
)
def test_jet_of_activations(activation):
  op = MATMUL.given(activation=activation)
  args, series = op.args(), _series(op, 2)
  want = _derivatives(op.plain, args, series)
  products.assert_same(jet.jet(op.ours, args, series), want)


def test_jet_of_one_operand_and_of_a_derivative():
  a, b = MATMUL.args()
  terms = _series(MATMUL, 2)[:1]
  for f in (lambda f, a: f(a, b), lambda f, a: jax.grad(_square(f))(a, b)):
    ours, plain = (functools.partial(f, g) for g in MATMUL[:2])
    want = _derivatives(plain, (a,), terms)
    products.assert_same(jet.jet(ours, (a,), terms), want)


def _square(f):
  return lambda a, b: (f(a, b) ** 2).sum()


@pytest.mark.parametrize("numbers", (ROWS, SUMS), ids=("rows", "sums"))
def test_jet_of_ragged_dot_general(numbers):
  """Of small integers, whose products and sums are exact in 16 bits."""
  shapes = ((7, 2), (4, 2, 3)) if numbers is ROWS else ((7, 2), (7, 3))
  args = [normal(*shape, seed=1).round().astype("bfloat16") for shape in shapes]
  series = tuple([x[::-1]] for x in args)
  f = lambda a, b: pallas_gemm.ragged_dot_general(a, b, SIZES, numbers)  # noqa: E731
  plain = lambda a, b: lax.ragged_dot_general(a, b, SIZES, numbers)  # noqa: E731
  out, (slope,) = jet.jet(f, args, series)
  want, tangent = jax.jvp(plain, args, [x for (x,) in series])
  np.testing.assert_array_equal(out, want)
  np.testing.assert_array_equal(slope, tangent)


# jax.checking_leaks.


@pytest.mark.parametrize("name", ("matmul", "ragged_dot", *_DROP_INS))
def test_nothing_leaks(name):
  op = EVERY[name]
  for f in _calls(op.ours).values():
    with jax.checking_leaks():
      f(*op.args())


def test_nothing_leaks_from_the_kernel():
  """Of which Pallas keeps tracers itself."""
  with jax.enable_x64(False):
    a, b = normal(16, 64, dtype="bfloat16"), normal(64, 72, dtype="bfloat16")
    f = jax.jit(functools.partial(dense, implementation="sm90"))
    with jax.checking_leaks():
      products.assert_product(f(a, b), a, b)
      f.trace(a, b).lower(lowering_platforms=("cuda",))
