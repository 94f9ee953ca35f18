"""dot_general and ragged_dot_general: as jax.lax has them, and in libraries."""

import itertools
import re

from flax import nnx
import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import report
from tests.support import ops, products, ragged
from tests.support.mistakes import INTS, LHS, RHS, SIZES, SQUARE, A, B
from tests.support.ops import NUMBERS, ROWS, n64, ragged_numbers
from tests.support.products import normal


def _outcome(f, arguments, **keywords):
  """What the function returns or raises."""
  try:
    return jax.block_until_ready(f(*arguments, **keywords))
  except Exception as error:
    return error


def assert_like_lax(op, *arguments, valid=True, **keywords):
  """The op gives what that of jax.lax does; it raises so if not `valid`."""
  want, got = (
    _outcome(getattr(of, op), arguments, **keywords)
    for of in (lax, pallas_gemm)
  )
  if isinstance(want, jax.errors.JaxRuntimeError):
    return  # a backend without int4, say: what runs instead may have it
  if not valid and isinstance(want, Exception):
    assert type(got) is type(want), repr(got)
    return
  for found in want, got:
    assert not isinstance(found, Exception), repr(found)
  types = [(x.shape, x.dtype, x.weak_type) for x in (got, want)]
  assert types[0] == types[1]
  got, want, dtype = np.asarray(got), np.asarray(want), want.dtype
  if not jnp.issubdtype(dtype, jnp.inexact):
    np.testing.assert_array_equal(got, want)
    return
  wide = np.complex128 if dtype.kind == "c" else np.float64
  # Sums are exact in float32; 16 bits and 8 are rounded once.
  info, roundings = jnp.finfo(dtype), 2**4 if dtype.itemsize >= 4 else 1
  np.testing.assert_allclose(
    got.astype(wide),
    want.astype(wide),
    rtol=roundings * float(info.eps),
    atol=float(info.smallest_subnormal),
  )


def _numbers(lhs, rhs, batch="b"):
  """Of operands with these labels: r is ragged, g of groups, others free."""
  both = [label for label in lhs if label in rhs]
  contract, batched = (
    tuple(
      tuple(side.index(label) for label in both if (label in batch) == wanted)
      for side in (lhs, rhs)
    )
    for wanted in (False, True)
  )
  group = (rhs.index("g"),) if "g" in rhs else ()
  return ragged_numbers(contract, (lhs.index("r"),), group, batched)


def _small(*shape, dtype="bfloat16", seed=0):
  """Small integers, whose products and sums are exact."""
  return jnp.round(2 * normal(*shape, seed=seed)).astype(dtype)


NONE = (((), ()), ((), ()))
# Shapes and dimension numbers.
CASES = (
  ((4, 5), (5, 6), (((1,), (0,)), ((), ()))),
  ((5, 4), (5, 6), (((0,), (0,)), ((), ()))),
  ((4, 5), (6, 5), (((1,), (1,)), ((), ()))),
  ((5, 4), (6, 5), (((0,), (1,)), ((), ()))),
  ((2, 3, 5), (5, 6), (((2,), (0,)), ((), ()))),
  ((2, 3, 5), (5, 6, 7), (((2,), (0,)), ((), ()))),
  ((3, 4, 5), (3, 5, 6), (((2,), (1,)), ((0,), (0,)))),
  ((3, 5, 4), (3, 6, 5), (((1,), (2,)), ((0,), (0,)))),
  ((2, 3, 4, 5), (2, 3, 5, 6), (((3,), (2,)), ((0, 1), (0, 1)))),
  # These are transposed, or copied.
  ((2, 3, 5), (3, 5, 6), (((1, 2), (0, 1)), ((), ()))),
  ((2, 3, 5), (5, 3, 6), (((1, 2), (1, 0)), ((), ()))),
  ((2, 3, 5), (3, 5, 6), (((2, 1), (1, 0)), ((), ()))),
  ((2, 3, 4, 5), (3, 2, 5, 6), (((3,), (2,)), ((0, 1), (1, 0)))),
  ((4, 3, 5), (5, 6, 3), (((2,), (0,)), ((1,), (2,)))),
  ((2, 4, 3, 5), (2, 6, 3, 5), (((3,), (3,)), ((0, 2), (0, 2)))),
  ((2, 5, 4, 7), (5, 7, 6), (((1, 3), (0, 1)), ((), ()))),
  ((2, 4, 3, 5), (2, 3, 5, 6), (((0, 3), (0, 2)), ((), ()))),
  ((5,), (5,), (((0,), (0,)), ((), ()))),
  ((5,), (5, 6), (((0,), (0,)), ((), ()))),
  ((3, 5), (3, 5), (((1,), (1,)), ((0,), (0,)))),
  ((4,), (6,), NONE),
  ((3, 4), (3, 6), (((), ()), ((0,), (0,)))),
  ((3,), (3,), (((), ()), ((0,), (0,)))),
  ((), (6,), NONE),
  ((0, 5), (5, 6), (((1,), (0,)), ((), ()))),
  ((4, 0), (0, 6), (((1,), (0,)), ((), ()))),
)


DTYPES = (
  *("bfloat16", "float16", "float32", "int8", "int32", "bool", "int4"),
  *("uint8", "complex64", "float8_e4m3fn", "float8_e5m2"),
)
RESULTS = None, "float32", "int32", "bfloat16", "bool", "int8"


@pytest.mark.parametrize("index", range(len(DTYPES) * len(RESULTS)))
def test_dtypes_and_shapes_like_lax(index):
  """Each dtype of operands and of results; all else in turn."""
  dtype, to = [*itertools.product(DTYPES, RESULTS)][index]
  other = DTYPES[index % 7] if index % 5 == 4 else dtype
  precision = (None, "high", lax.DotAlgorithmPreset.F32_F32_F32)[index // 3 % 3]
  left, right, numbers = CASES[index % len(CASES)]
  with jax.enable_x64((index + index // len(RESULTS)) % 2 == 1):
    lhs = _small(*left, dtype=dtype, seed=index)
    rhs = np.asarray(_small(*right, dtype=other, seed=index))
    call = lhs, rhs, numbers, precision, to
    assert_like_lax("dot_general", *call, valid=False)


F, G, ONES = normal(3, 4), normal(4, 5), jnp.full((2, 2), 1.0)
THREES = jnp.full((2, 2), 3.0)
LIKE_LAX = [
  # Mixed dtypes, and weak ones.
  (F.astype("bfloat16"), G, NUMBERS),
  (F.astype("bfloat16"), G, NUMBERS, None, "float32"),
  (ONES, THREES, NUMBERS),
  (ONES, SQUARE[:2, :2], NUMBERS),
  (ONES, SQUARE[:2, :2].astype("bfloat16"), NUMBERS),
  (ONES, THREES, NUMBERS, None, "int32"),
  (jnp.full((2, 2), 1), jnp.full((2, 2), 3), NUMBERS),
  (2.0, ONES, NONE),
  (2, 3, NONE),
  # Dimension numbers of any spelling.
  (F, G, None),
  (F[0], F[0], None),
  (F, F[0], None),
  (F, G, (np.array([[1], [0]]), np.zeros((2, 0), int))),
  (F, G, ((np.array([1]), np.array([0])), ((), ()))),
  (normal(2, 3, 4), normal(2, 4, 5), np.array([[[2], [1]], [[0], [0]]])),
  (F, G, ((jnp.array([1]), jnp.array([0])), ((), ()))),
  (F, G, (((np.int64(1),), (np.uint8(0),)), ((), ()))),
  (F, G, ((range(1, 2), range(1)), (range(0), range(0)))),
]  # fmt: skip


@pytest.mark.parametrize(("index", "arguments"), [*enumerate(LIKE_LAX)])
def test_dot_general_like_lax(index, arguments):
  with jax.enable_x64(index % 2 == 1):
    assert_like_lax("dot_general", *arguments)


KINDS = (
  *(("int8", "float32"), ("int8", "int32"), ("int8", "uint8")),
  *(("uint8", "bfloat16"), ("int32", "float32"), ("bool", "int32")),
  *(("bfloat16", "int32"), ("float32", "int32"), ("float32", "bfloat16")),
  *(("float32", "complex64"), ("float8_e4m3fn", "float32")),
  ("int4", "float32"),
)
GROUPED = [
  ((_small(9, 5, dtype=x), _small(3, 5, 4, dtype=x)), to) for x, to in KINDS
]
WEAK_X, WEAK_W = jnp.full((9, 5), 1.0), jnp.full((3, 5, 4), 2.0)
STRONG_X, STRONG_W = normal(9, 5), normal(3, 5, 4)
GROUPED += [
  ((x, w), None)
  for x in (WEAK_X, STRONG_X)
  for w in (WEAK_W, STRONG_W)
]  # fmt: skip


@pytest.mark.parametrize(
  ("op", "operands", "to"),
  [(f"ragged_dot{'_general' * (i % 2)}", *x) for i, x in enumerate(GROUPED)],
)
def test_grouped_like_lax(op, operands, to):
  numbers = (ROWS,) if op == "ragged_dot_general" else ()
  how = {} if to is None else {"preferred_element_type": to}
  assert_like_lax(op, *operands, jnp.array([4, 0, 3]), *numbers, **how)


INT_GROUPS = LHS.astype(int), RHS.astype(int), SIZES
OF_LAX = {
  "dot_general": [
    (A, B, (((2,), (0,)), ((), ()))),
    (A, B, (((1,), (-2,)), ((), ()))),
    (A, B, (((1, 1), (0, 1)), ((), ()))),
    (A, B, (((1, 0), (0,)), ((), ()))),
    (A, B, (((1,), (0,)), ((1,), (0,)))),
    (A, B, (((1,), (0,)), ((0,), ()))),
    (A, B, (((1,), ()), ((), ()))),
    (A, B, (((), ()), ((0,), (0,)))),
    (A, SQUARE, NUMBERS),
    (A, B, (((0,), (0,)), ((0,), (0,)))),
    (INTS, INTS, NUMBERS, None, "bfloat16"),
    (INTS, INTS, NUMBERS, None, bool),
  ],
  "ragged_dot_general": [
    (LHS[:, 1:], RHS, SIZES, ROWS),
    (LHS, RHS, jnp.ones(3), ROWS),
    (LHS, RHS, SIZES > 0, ROWS),
    (LHS, RHS, SIZES[1:], ROWS),
    (LHS, RHS, SIZES, ragged_numbers(group=())),
    (LHS, LHS, SIZES, ragged_numbers(((0,), (0,)), group=(1,))),
    (LHS, RHS, SIZES, ragged_numbers(group=(1,))),
    (LHS, RHS, SIZES, ragged_numbers(rows=(0, 1))),
    (LHS, RHS, SIZES, ragged_numbers(rows=(5,))),
    (*INT_GROUPS, ROWS, None, "bfloat16"),
  ],
}


@pytest.mark.parametrize(
  ("op", "arguments"), [(op, call) for op in OF_LAX for call in OF_LAX[op]]
)
def test_errors_are_those_of_lax(op, arguments):
  want, got = (
    _outcome(getattr(of, op), arguments) for of in (lax, pallas_gemm)
  )
  assert isinstance(want, TypeError | ValueError)
  assert type(got) is type(want) and str(got) == str(want)


# dot_general: in 16 bits, for others are passed on to lax.


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case):
  *shapes, numbers = case
  lhs, rhs = (_small(*shape, seed=i) for i, shape in enumerate(shapes))

  def both(f):
    of = lambda *x: f(*x, numbers, None, "float32")  # noqa: E731
    out, vjp = jax.vjp(of, lhs, rhs)
    return out, vjp(_small(*out.shape, dtype="float32", seed=2))

  got, want = (
    jax.jit(lambda f=f: both(f))()
    for f in (pallas_gemm.dot_general, lax.dot_general)
  )
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("case", CASES[:9], ids=str)
def test_operands_are_read_in_place(case):
  *shapes, numbers = case
  lhs, rhs = (_small(*shape) for shape in shapes)
  f = lambda a, b: pallas_gemm.dot_general(a, b, numbers)  # noqa: E731
  assert "pallas_gemm[" in str(jax.make_jaxpr(f)(lhs, rhs))
  assert "stablehlo.transpose" not in ops.lowered(f, lhs, rhs, platform="cpu")


def test_precision():
  f = lambda *x: pallas_gemm.dot_general(*x, NUMBERS, ["high", "high"])  # noqa: E731
  assert "precision = [HIGH" in ops.lowered(f, F, G, platform="cpu")


def test_out_sharding_is_passed_on():
  explicit = (jax.sharding.AxisType.Explicit,)
  how = {"out_sharding": jax.sharding.PartitionSpec("d")}
  with jax.set_mesh(jax.make_mesh((1,), ("d",), axis_types=explicit)):
    out = pallas_gemm.dot_general(F, G, NUMBERS, **how)
    assert jax.typeof(out).sharding.spec[0] == "d"


def test_einsum():
  x, y = _small(2, 3, 4, 5), _small(2, 6, 4, 5)
  got, want = (
    jnp.einsum("bqhd,bkhd->bhqk", x, y, _dot_general=f)
    for f in (pallas_gemm.dot_general, lax.dot_general)
  )
  np.testing.assert_array_equal(got, want)


def test_flax_linen():
  with jax.enable_x64(True):
    x, sides = n64(2, 4, 5), {"axis": (-2, -1), "param_dtype": "float64"}
    how = {"dot_general": pallas_gemm.dot_general}
    plain, injected = (
      nn.DenseGeneral((2, 3), **sides, **given) for given in ({}, how)
    )
    variables = plain.init(jax.random.key(0), x)

    def loss(module):
      return lambda v: (module.apply(v, x) ** 2).sum()

    got = jax.jit(jax.value_and_grad(loss(injected)))(variables)
    want = jax.jit(jax.value_and_grad(loss(plain)))(variables)
    products.assert_same(got, want)
    # Both are called _dot_general: our own is compiled by itself.
    assert "name=_dot_general" in str(jax.make_jaxpr(loss(injected))(variables))


def test_flax_nnx():
  x, how = normal(2, 4, 5), {"dot_general": pallas_gemm.dot_general}
  plain, injected = (
    nnx.Linear(5, 6, rngs=nnx.Rngs(0), **given) for given in ({}, how)
  )
  np.testing.assert_array_equal(injected(x), plain(x))


def test_flax_variables_of_8_bits_and_of_planes():
  x, w = normal(4, 128), normal(128, 6)
  for op, v, how in (
    (pallas_gemm.matmul, pallas_gemm.quantize(w, block=(128, 1)), {}),
    (pallas_gemm.matmul, pallas_gemm.split(w), {"precision": "highest"}),
  ):
    got, want = (op(x, v, **how) for v in (nnx.Param(v), v))
    np.testing.assert_array_equal(got, want)


# ragged_dot_general: by the labels of dimensions, see `_numbers`.

DIMS = {"r": 9, "k": 5, "g": 3, "n": 4, "m": 6, "b": 2, "l": 2}
GENERAL = {
  "rows": ("rk", "gkn", False),
  "rhs transposed": ("rk", "gnk", False),
  "columns": ("kr", "gkn", True),
  "groups last": ("rk", "kng", True),
  "groups between": ("rk", "ngk", True),
  "sums": ("rm", "rn", False),
  "sums of columns": ("mr", "nr", True),
}
LEFT_TO_LAX = {
  "batch": ("brk", "gbkn", "b", "batch dimensions"),
  "ragged batch": ("rmk", "rkn", "r", "batch dimensions"),
  "two contracted": ("rkl", "gkln", "", "contracts 2"),
  "two free": ("rk", "gknl", "", r"must have ranks \(2, 3\), got \(2, 4\)"),
}


def _operands(*labels, **how):
  return [
    normal(*[DIMS[c] for c in word], seed=i, **how)
    for i, word in enumerate(labels)
  ]


@pytest.mark.parametrize("name", GENERAL)
def test_general(name):
  lhs, rhs, transposes = GENERAL[name]
  sizes, numbers = jnp.array([4, 0, 3]), _numbers(lhs, rhs)
  of_einsum = f"rg,{lhs},{rhs}->{'rn' if 'g' in rhs else 'gmn'}"
  with jax.enable_x64(True):
    args = _operands(lhs, rhs, dtype="float64")
    weights = ragged.membership(9, sizes).astype("float64")
    ours = lambda *x: pallas_gemm.ragged_dot_general(*x, sizes, numbers)  # noqa: E731
    plain = lambda *x: jnp.einsum(of_einsum, weights, *x)  # noqa: E731
    got, want = (
      jax.jit(lambda *x, f=f: ops.value_and_gradients(f, x))(*args)
      for f in (ours, plain)
    )
    products.assert_same(got, want)
    assert "pallas_gemm[" in str(jax.make_jaxpr(ours)(*args))
    text = ops.lowered(ours, *args, platform="cpu")
    assert ("stablehlo.transpose" in text) == transposes


@pytest.mark.parametrize("name", LEFT_TO_LAX)
def test_general_left_to_lax(name, monkeypatch):
  said = []
  monkeypatch.setattr(report, "log_once", said.append)
  jax.clear_caches()
  *labels, batch, reason = LEFT_TO_LAX[name]
  numbers = _numbers(*labels, batch)
  general = pallas_gemm.ragged_dot_general
  arguments = *_operands(*labels), jnp.array([4, 0, 3]), numbers
  want = lax.ragged_dot_general(*arguments)
  for implementation in (None, "xla", ["sm90", "xla"]):
    out = general(*arguments, implementation=implementation)
    np.testing.assert_array_equal(out, want)
  assert said
  for message in said:
    assert re.search(f"runs on jax.lax: .*{reason}", message)
  for keywords in ({"implementation": "sm90"}, {"group_offset": 0}):
    with pytest.raises(NotImplementedError, match=reason):
      general(*arguments, **keywords)


def test_general_with_sizes_of_each_batch():
  labels, sizes = ("brk", "gbkn"), jnp.array([[4, 0, 3], [1, 2, 3]])
  call = *_operands(*labels), sizes, _numbers(*labels)
  assert_like_lax("ragged_dot_general", *call)


def test_general_with_offset_and_dtypes():
  dtypes = {"dtype": "bfloat16", "out_dtype": "float32"}
  case = ragged.Case(
    m=20, n=7, k=5, sizes=(3, 4, 6), offset=1, groups=2, **dtypes
  )
  x = case.operands()
  out = pallas_gemm.ragged_dot_general(
    *x.values(), jnp.asarray(case.sizes), ROWS, "highest", "float32", 1
  )
  case.assert_right(out, x)
  mixed = x["lhs"], x["rhs"].astype("float32"), jnp.array([3, 4]), ROWS
  assert_like_lax("ragged_dot_general", *mixed)
