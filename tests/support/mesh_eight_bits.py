"""Checks of `meshes`: operands of 8 bits, with scales, and recipes."""

import contextlib
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np

import pallas_gemm
from pallas_gemm.ops import sharding
from pallas_gemm.quantization import Quantized, Recipe, quantize
from tests.support import mesh_checks
from tests.support.mesh_calls import AUTO, EXPLICIT, MANUAL
from tests.support.mesh_checks import register
from tests.support.ops import SUMS
from tests.support.products import normal

_SIZES = jnp.array([70, 0, 1, 127, 30, 2, 2, 20])
_GROUPED = functools.partial(
  pallas_gemm.ragged_dot,
  group_sizes=_SIZES,
  preferred_element_type="float32",
)
_DENSE = functools.partial(pallas_gemm.matmul, out_dtype="float32")
_SUMS = functools.partial(
  pallas_gemm.ragged_dot_general,
  group_sizes=_SIZES,
  ragged_dot_dimension_numbers=SUMS,
  preferred_element_type="float32",
)
# Op, shapes and shardings of both operands and of the result. Of K four shards
# of 128, and of 64, which cut blocks.
_ROWS = P("x", None), P(None, "y"), P("x", "y")
_K = P(None, "x"), P("x", None), P()
CASES = {
  "rows, columns": (_DENSE, (256, 300), (300, 256), *_ROWS),
  "K in whole blocks": (_DENSE, (40, 512), (512, 64), *_K),
  "K in halves of blocks": (_DENSE, (40, 256), (256, 64), *_K),
  "columns that cut blocks": (_DENSE, (40, 256), (256, 128), *_ROWS),
  "groups": (
    *(_GROUPED, (256, 140), (8, 140, 60)),
    *(P(None, None), P("x", None, None), P()),
  ),
  "rows of groups": (
    *(_GROUPED, (256, 140), (8, 140, 60)),
    *(P("x", None), P(None, None, "y"), P("x", "y")),
  ),
  "sums": (
    *(_SUMS, (256, 140), (256, 60)),
    *(P(None, "x"), P(None, "y"), P(None, "x", "y")),
  ),
}


def _block(scaling: str, rank: int, k: int):
  """Of an operand: blocks, or all, of K and of the other dimension."""
  lead = (1,) * (rank - 2)
  if scaling == "tensor":
    return *lead, None, None
  if scaling == "block":
    return *lead, 1 if k % rank and not lead else 128, 128
  return *lead, *((1, None) if k == rank - 1 else (None, 1))


def _quantized(case: str, scaling: str, dtype: str):
  op, *shapes = CASES[case][:3]
  along = (0, 0) if op is _SUMS else (1, len(shapes[1]) - 2)
  return [
    quantize(
      normal(*shape, seed=i), dtype, block=_block(scaling, len(shape), k)
    )
    for i, (shape, k) in enumerate(zip(shapes, along))
  ]


def _placed(mode, q: Quantized, spec: P) -> Quantized:
  """A scale is sharded as its operand, where it has as many."""
  sizes = dict(zip(mode.mesh.axis_names, mode.mesh.axis_sizes))
  own = [
    part if part and n % sizes[part] == 0 else None
    for part, n in zip(spec, q.scale.shape)
  ]
  return Quantized(mode.place(q.values, spec), mode.place(q.scale, P(*own)))


@contextlib.contextmanager
def _on(arm, mode):
  """Context: on the mesh; the stand-in is no interpreted kernel."""
  refusal = None if arm.kernel else sharding._INTERPRETED
  with mock.patch.object(sharding, "_INTERPRETED", refusal), mode.context():
    yield


def _ask(mode, out):
  return {"out_sharding": out} if mode.explicit else {}


@register(
  "quantize | {mode} | {block}",
  ("default",),
  mode=(EXPLICIT, AUTO),
  block=((1, 128), (128, 128), (1, None)),
)
def _quantized_where_it_lies(arm, mode, block):
  """The same bits, back again too; of 512 in four shares, and 300 in none."""

  def there_and_back(x):
    q = quantize(x, block=block)
    return q, q.dequantized()

  for shape, spec in (((512, 512), P("x", "y")), ((256, 300), P("x", "y"))):
    x = normal(*shape)
    want = there_and_back(x)
    with mode.context():
      got = jax.jit(there_and_back)(mode.place(x, spec))
    assert got[0].values.sharding.spec == spec or not mode.explicit
    jax.tree.map(np.testing.assert_array_equal, got, want)
  if mode.explicit:  # and where one of the axes is manual
    x = normal(512, 512)
    with mode.context():
      f = jax.shard_map(
        lambda x: there_and_back(x)[1],
        in_specs=P("x"), out_specs=P("x"), axis_names={"x"},
      )  # fmt: skip
      got = jax.jit(f)(mode.place(x, P("x", "y")))
    np.testing.assert_array_equal(got, there_and_back(x)[1])


@register(
  "8 bits: {case} | {mode} | {scaling}, {dtype}",
  case=CASES,
  mode=(EXPLICIT, AUTO),
  scaling=("row", "tensor", "block"),
  dtype=("float8_e4m3fn", "int8"),
)
def _scaled(arm, case, mode, scaling, dtype):
  """As on one device."""
  op, _, _, *specs, out = CASES[case]
  operands = _quantized(case, scaling, dtype)
  want = jax.jit(op)(*operands)
  arm.calls.clear()
  with _on(arm, mode):
    given = [_placed(mode, q, spec) for q, spec in zip(operands, specs)]
    got = jax.jit(functools.partial(op, **_ask(mode, out)))(*given)
  mesh_checks.same_values(got, want)
  assert arm.calls or not arm.kernel, "no kernel"


@register(
  "recipe: {case} | {mode} | {scaling}",
  case=CASES,
  mode=(EXPLICIT, AUTO),
  scaling=("row", "tensor", "block"),
)
def _by_recipe(arm, case, mode, scaling):
  """Results and gradients; maxima go over devices."""
  op, *shapes, spec_a, spec_b, out = CASES[case]
  a, b = (normal(*shape, seed=i) for i, shape in enumerate(shapes))
  recipe = Recipe(scaling=scaling)

  def both(a, b, ct, **how):
    f = functools.partial(op, quantize=recipe, **how)
    result, pull = jax.vjp(f, a, b)
    return result, *pull(ct)

  ct = normal(*jax.eval_shape(op, a, b).shape, seed=3)
  want = jax.jit(both)(a, b, ct)
  with _on(arm, mode):
    given = map(mode.place, (a, b, ct), (spec_a, spec_b, out))
    got = jax.jit(functools.partial(both, **_ask(mode, out)))(*given)
  mesh_checks.same_values(got, want)


@register("8 bits: {case} | shard_map", case=("rows, columns", "sums"))
def _under_shard_map(arm, case):
  op, _, _, *specs, out = CASES[case]
  operands = _quantized(case, "row", "float8_e4m3fn")
  want = jax.jit(op)(*operands)
  in_specs = tuple(
    Quantized(s, P(*[p if n > 1 else None for p, n in zip(s, q.scale.shape)]))
    for q, s in zip(operands, specs)
  )
  with MANUAL.context():
    f = jax.shard_map(op, in_specs=in_specs, out_specs=out)
    got = jax.jit(f)(*operands)
  mesh_checks.same_values(got, want)


@register(
  "recipe: {case} | shard_map, replicated weights | {scaling}",
  ("default",),
  case=("rows, columns", "rows of groups", "sums"),
  scaling=("row", "tensor", "block"),
)
def _by_recipe_under_shard_map(arm, case, scaling):
  """Gradients of data parallelism: those of shards, added up."""
  op, *shapes = CASES[case][:3]
  a, b = (normal(*shape, seed=i) for i, shape in enumerate(shapes))
  op = functools.partial(op, quantize=Recipe(scaling=scaling))
  axis = int(case == "sums")  # of A; of groups each shard has its own
  spec, shards = P(*[None] * axis, "x"), MANUAL.mesh.shape["x"]

  def one_by_one(a, b):
    outs = [op(v, b) for v in jnp.split(a, shards, axis)]
    return jnp.concatenate(outs, axis)

  def gradients(f):
    loss = lambda a, b: jnp.sum(jnp.sin(f(a, b)))  # noqa: E731
    return jax.jit(jax.grad(loss, (0, 1)))(a, b)

  want = gradients(one_by_one)
  with MANUAL.context():
    got = gradients(jax.shard_map(op, in_specs=(spec, P()), out_specs=spec))
  mesh_checks.same_values(got, want)


@register(
  "FSDP by 8 bits | {mode} | {scaling}",
  ("kernel",),  # XLA's product for CPUs is one of float32
  mode=(EXPLICIT, AUTO),
  scaling=("row", "block"),
)
def _gathers_8_bits(arm, mode, scaling):
  """Of weights that are sharded over the axis of rows 8 bits are gathered."""
  # XLA for CPUs gathers no float8.
  recipe = Recipe("int8", "int8", scaling)
  x, w = normal(256, 512, dtype="bfloat16"), normal(512, 1024, dtype="bfloat16")
  specs = P("x", None), P("x", None)

  def f(x, w):
    return pallas_gemm.matmul(x, w, quantize=recipe, **_ask(mode, specs[0]))

  with _on(arm, mode):
    given = [mode.place(v, spec) for v, spec in zip((x, w), specs)]
    text = jax.jit(f).lower(*given).compile().as_text()
  gathered = re.findall(r"= \(?(\w+)\[([\d,]*)\][^=]* all-gather", text)
  sizes = [(t, np.prod([*map(int, s.split(","))])) for t, s in gathered if s]
  wide = [x for x in sizes if x[0] in ("bf16", "f32", "f16") and x[1] >= w.size]
  assert not wide, f"gathered: {sizes}"
  assert ("s8", w.size) in sizes, f"gathered: {sizes}"


@register("a scale on another mesh", ("default",))
def _scale_on_another_mesh(arm):
  """Is refused, as any operand is."""
  other = jax.make_mesh((8,), ("z",), (AxisType.Explicit,))
  x = quantize(normal(64, 64), block=(1, None))
  values = EXPLICIT.place(x.values, P("x", None))
  scale = jax.device_put(x.scale, jax.NamedSharding(other, P("z", None)))
  f = lambda: pallas_gemm.matmul(Quantized(values, scale), x)  # noqa: E731
  error = mesh_checks.raised(f)
  assert isinstance(error, TypeError | ValueError), repr(error)
  assert "mesh" in str(error), error
