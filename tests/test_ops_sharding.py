"""What a device does of a sharded product, and what tells products apart."""

import dataclasses
import itertools
import math
import os
from pathlib import Path
import subprocess
import sys
from types import SimpleNamespace

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from pallas_gemm import tuning
from pallas_gemm.kernels import activations
from pallas_gemm.ops import mesh_plan, sharding, xla_parts
from pallas_gemm.ops.spec import Operands, Spec

MESH = {"x": 4, "y": 2}
SIZE = {"m": 16, "n": 32, "k": 64, "g": 8, "o": 9}
DENSE = Spec(words=Operands("mk", "kn"), out="mn", out_dtype=jnp.float32)
GROUPED = Spec(
  words=Operands("mk", "gkn", bias="gn", offsets="o"),
  out="mn",
  out_dtype=jnp.float32,
  ragged="m",
)
SUMS = Spec(
  words=Operands("km", "kn", offsets="o"),
  out="gmn",
  out_dtype=jnp.float32,
  ragged="k",
)


GATED = dataclasses.replace(DENSE, words=Operands("mk", "kn", "kn"))
GATED_GROUPED = dataclasses.replace(
  GROUPED, words=Operands("mk", "gkn", "gkn", offsets="o")
)
BATCHED = dataclasses.replace(DENSE, words=Operands("bmk", "bkn"), out="bmn")
# What is applied to the product has the parts of the result, not those of the
# sums, which are scattered first.
ADDED = dataclasses.replace(
  DENSE, words=Operands("mk", "kn", bias="n", c="mn", alpha="")
)
X, Y, XY, NO = ("x",), ("y",), ("x", "y"), ()


def _plan(spec, out, *have, mesh=MESH, **size):
  return mesh_plan.plan_of(spec, spec.named(have), out, mesh, SIZE | size)


def _row(name, spec, have, out, reads, *, size=None, **wanted):
  """A product of operands that lie so, what a device reads, and the plan."""
  return pytest.param(spec, have, out, reads, size or {}, wanted, id=name)


# Nothing is summed over but what is said.
PLANS = [
  _row("rows and columns", DENSE, [P("x"), P(None, "y")], P("x", "y"),
    [P("x", None), P(None, "y")]),
  # However they lie, they are read as the result is sharded.
  _row("as the result", DENSE, [P(None, "y"), P("x")], P("x", "y"),
    [P("x", None), P(None, "y")]),
  _row("K alike", DENSE, [P(None, "x"), P("x")], P(),
    [P(None, "x"), P("x", None)], psum=X, said="psum ['x']"),
  _row("scattered", DENSE, [P(None, "x"), P("x")], P("x"),
    [P(None, "x"), P("x", None)], psum=X, scatter={"m": X},
    said="psum_scatter {'m': ('x',)}"),
  _row("two axes, one scattered", DENSE, [P(None, XY), P(XY)], P(None, "y"),
    [P(None, XY), P(XY, None)], psum=XY, scatter={"n": Y},
    said="psum_scatter {'n': ('y',)}, psum ['x']"),
  # What is scattered varies fastest; the rest is multiplied in parts.
  _row("scattered within a part", DENSE, [P("x", "y"), P("y")], P(XY),
    [P("x", "y"), P("y", None)], psum=Y, scatter={"m": Y}),
  _row("not what varies slowest", DENSE, [P(None, "y"), P("y")],
    P(("y", "x")), [P(("y", "x"), None), P(None, None)]),
  # K of the weights alone is sharded, over the axis of the rows.
  _row("FSDP", DENSE, [P("x"), P("x")], P("x"), [P("x", None), P(None, None)],
    said="a P('x', None), b P(None, None) from [16, 32]"),
  _row("K over other axes", DENSE, [P(None, "x"), P("y")], P(),
    [P(None, None), P(None, None)]),
  _row("K in another order", DENSE, [P(None, "x"), P(("y", "x"))], P(),
    [P(None, None), P(None, None)]),
  _row("K as far as alike", DENSE, [P(None, "x"), P(XY)], P(),
    [P(None, "x"), P("x", None)], psum=X),
  # M is no multiple of the axis x: over y the sums are added up still.
  _row("one axis is not summed", DENSE, [P(None, XY), P(XY)], P("x"),
    [P("x", "y"), P("y", None)], psum=Y, size={"m": 6}),
  _row("uneven K", DENSE, [P(None, "x"), P("x")], P(),
    [P(None, None), P(None, None)], size={"k": 30}),
  # XLA pads them.
  _row("uneven M and N", DENSE, [P("x"), P(None, "y")], P("x", "y"),
    [P("x", None), P(None, "y")], size={"m": 10, "n": 31}),
  _row("axes of size 1", DENSE, [P("y", "x"), P("x")], P(("y", "x")),
    [P("y", None), P(None, None)], size={"mesh": {"x": 1, "y": 2}}),
  _row("batch", BATCHED, [P("x", None, "y"), P("x", "y")], P("x"),
    [P("x", None, "y"), P("x", "y", None)], psum=Y, size={"b": 8}),
  _row("what is added", ADDED, [P(None, "x"), P("x"), P(), P("x"), P()],
    P(None, "x"), [P(None, "x"), P("x", None), P("x"), P(None, "x"), P()],
    psum=X, scatter={"n": X}),
  _row("gates alike", GATED, [P(None, "x"), P("x"), P("x")], P(),
    [P(None, "x"), *[P("x", None)] * 2], psum=X),
  _row("gates not alike", GATED, [P(None, "x"), P("x"), P(None, "x")], P(),
    [P(None, None)] * 3),
  # One operand lies whole on an axis: it is cut where results are few, else
  # the other one is gathered, which is less to send.
  _row("few results", DENSE, [P(None, "x"), P()], P(),
    [P(None, "x"), P("x", None)], psum=X, size={"k": 2**16}),
  _row("many results", DENSE, [P(None, "x"), P()], P(),
    [P(None, None), P(None, None)]),
  # A device multiplies the rows of its groups; the others are zero.
  _row("experts", GROUPED, [P(), P("x"), P(), P()], P(),
    [P(None, None), P("x", None, None), P(None, None), P(None)],
    psum=X, groups=X),
  # All rows are multiplied, and their sums scattered.
  _row("experts and rows over one axis", GROUPED,
    [P("x"), P("x"), P(), P()], P("x"),
    [P(None, None), P("x", None, None), P(None, None), P(None)],
    psum=X, scatter={"m": X}, groups=X, rows=(NO, X)),
  _row("experts and rows", GROUPED, [P("y"), P("x"), P(), P()], P("y"),
    [P("y", None), P("x", None, None), P(None, None), P(None)],
    psum=X, groups=X, rows=(Y, Y)),
  _row("experts and K", GROUPED, [P(None, "y"), P("x", "y"), P(), P()], P(),
    [P(None, "y"), P("x", "y", None), P(None, None), P(None)],
    psum=XY, groups=X),
  _row("uneven experts", GROUPED, [P(), P("x"), P(), P()], P(),
    [P(None, None), P(None, None, None), P(None, None), P(None)],
    size={"g": 6, "o": 7}),
  _row("gated experts alike", GATED_GROUPED, [P(), P("x"), P("x"), P()], P(),
    [P(None, None), *[P("x", None, None)] * 2, P(None)], psum=X, groups=X),
  _row("gated experts not alike", GATED_GROUPED, [P(), P("x"), P(), P()], P(),
    [P(None, None), *[P(None, None, None)] * 2, P(None)]),
  _row("rows of groups", GROUPED, [P("x"), P(None, None, "y"), P(), P()],
    P("x", "y"), [P("x", None), P(None, None, "y"), P(None, "y"), P(None)],
    rows=(X, X)),
  _row("sums", SUMS, [P("x"), P("x"), P()], P(),
    [P("x", None), P("x", None), P(None)], psum=X, rows=(X, NO)),
  _row("few sums", SUMS, [P("x"), P(), P()], P(),
    [P("x", None), P("x", None), P(None)], psum=X, rows=(X, NO),
    size={"k": 2**16}),
  _row("many sums", SUMS, [P("x"), P(), P()], P(),
    [P(None, None), P(None, None), P(None)]),
  _row("sums; the axis is taken", SUMS, [P("x"), P(None, "x"), P()],
    P(None, None, "x"), [P(None, None), P(None, "x"), P(None)]),
  # A device would hold those of all groups: it gathers the rows instead.
  _row("sums of all groups", SUMS, [P("x"), P("x"), P()], P("x"),
    [P(None, None), P(None, None), P(None)], groups=X),
  _row("sums, groups over one axis", SUMS, [P(XY), P(XY), P()], P("x"),
    [P("y", None), P("y", None), P(None)], psum=Y, groups=X, rows=(Y, NO)),
]  # fmt: skip


@pytest.mark.parametrize(
  ("spec", "have", "out", "reads", "size", "wanted"), PLANS
)
def test_plan(spec, have, out, reads, size, wanted):
  plan = _plan(spec, out, *have, **size)
  wanted = {"said": ""} | wanted
  nothing = {"psum": NO, "scatter": {}, "groups": NO, "rows": (NO, NO)}
  assert plan.operands.present() == reads
  assert str(plan).endswith(wanted.pop("said"))
  assert {name: getattr(plan, name) for name in nothing} == nothing | wanted


_ONE = [(), ("x",), ("y",), ("x", "y"), ("y", "x")]
_PAIRS = [
  P(*pair)
  for pair in itertools.product(_ONE, _ONE)
  if not {*pair[0]} & {*pair[1]}
]


@pytest.mark.parametrize("size", ({}, {"k": 6}, {"m": 6}, {"n": 6, "k": 30}))
def test_every_dense_plan_is_one(size):
  """A device's parts make its part of the result, whatever lies where."""
  sizes = SIZE | size
  for a, b, out in itertools.product(_PAIRS, repeat=3):
    plan = _plan(DENSE, out, a, b, **size)
    read = *plan.operands.a, *plan.operands.b
    m, k, k_of_b, n = map(mesh_plan._axes, read)
    said = f"{a} x {b} -> {out}: {plan}"
    assert k == k_of_b, said
    assert len({*m, *k, *n}) == len(m + k + n), said  # an axis once
    assert {*plan.psum} == {*k}, said
    assert sizes["k"] % math.prod(MESH[x] for x in k) == 0, said
    scattered = sum(plan.scatter.values(), ())
    assert {*scattered} <= {*k}, said
    for letter, axes, want in (("m", m, out[0]), ("n", n, out[1])):
      hit = plan.scatter.get(letter, ())
      assert axes + hit == mesh_plan._axes(want), said
      if hit:
        assert sizes[letter] % math.prod(MESH[x] for x in hit) == 0, said


# Digests.


def _with(function=None, **changes):
  """The digest of a dense product with an activation, and `changes`."""
  f32 = jnp.zeros((), jnp.float32)
  activation = function and activations.of(function, f32, f32, jnp.float32)
  changes = {"activation": activation} | changes
  return sharding.digest(dataclasses.replace(DENSE, **changes))


_TWO, _THREE = jnp.float32(2), jnp.float32(3)
DIFFERENT = {
  "plain": lambda: _with(),
  "relu": lambda: _with(jax.nn.relu),
  "silu": lambda: _with(jax.nn.silu),
  "gelu": lambda: _with(jax.nn.gelu),
  "twice": lambda: _with(lambda z: z * 2),
  "three times": lambda: _with(lambda z: z * 3),
  "closes over 2": lambda: _with(lambda z: z - _TWO),
  "closes over 3": lambda: _with(lambda z: z - _THREE),
  "config": lambda: _with(config=tuning.Config()),
  "stages": lambda: _with(config=tuning.Config(stages=3)),
  "precision": lambda: _with(precision=lax.Precision.HIGHEST),
  "out_dtype": lambda: _with(out_dtype=jnp.bfloat16),
  "reduce_dtype": lambda: _with(reduce_dtype=jnp.dtype("bfloat16")),
  "transposed": lambda: _with(words=Operands("km", "kn")),
  "bias": lambda: _with(words=Operands("mk", "kn", bias="n")),
  "save": lambda: _with(jax.nn.relu, save=True),
  "sm90": lambda: _with(implementation=("sm90",)),
  "batch invariant": lambda: _with(batch_invariant=True),
}


def test_digests_differ():
  found = {name: of().tobytes() for name, of in DIFFERENT.items()}
  for (one, a), (other, b) in itertools.combinations(found.items(), 2):
    assert a != b, f"{one} and {other}"


def test_digest_is_an_operand():
  """Of a type that every platform has."""
  digest = _with(jax.nn.relu)
  assert (digest.shape, digest.dtype) == ((4,), np.int32)


def test_equal_products_have_equal_digests():
  for name, of in DIFFERENT.items():
    np.testing.assert_array_equal(of(), of(), name)


def test_digests_are_those_of_another_process():
  """Nothing in them is an address or a hash of this process."""
  here = {name: of().tolist() for name, of in DIFFERENT.items()}
  program = (
    "from tests.test_ops_sharding import DIFFERENT;"
    "print({name: of().tolist() for name, of in DIFFERENT.items()})"
  )
  assert _run(["-c", program], PYTHONHASHSEED="1") == str(here)


# What XLA says.


def _parts(mesh, spec, shape=(8, 8), *, of=None):
  """Those of an array that lies so over a mesh of 8; told of `of`, if given."""
  devices = np.array([jax.devices()[0]] * 8)
  of = of or mesh
  mesh, of = (
    jax.sharding.Mesh(devices.reshape(*x.values()), [*x]) for x in (mesh, of)
  )
  hlo = NamedSharding(mesh, spec)._to_xla_hlo_sharding(len(shape))
  told = SimpleNamespace(
    shape=shape, sharding=SimpleNamespace(_hlo_sharding=hlo)
  )
  return xla_parts.parts_of(told, of)


def test_parts_are_what_was_sharded():
  for count in range(4):
    for axes in itertools.permutations("xyz", count):
      for cut in range(count + 1):
        spec = P(axes[:cut], axes[cut:])
        assert _parts(dict.fromkeys("xyz", 2), spec) == (spec if axes else P())


@pytest.mark.parametrize(
  ("spec", "size", "wanted"),
  [
    ("a", 8, ("y",)),  # the major part of y: each has a part of what it had
    ("a", 6, ()),
    ("b", 8, ()),  # the minor part
    (("x", "a"), 8, ("x", "y")),
    (("a", "x"), 8, ()),
    (("a", "b"), 6, ("y",)),
  ],
)
def test_parts_of_an_axis(spec, size, wanted):
  fine = {"x": 2, "a": 2, "b": 2}
  found = _parts(fine, P(None, spec), (8, size), of={"x": 2, "y": 4})
  assert found == P((), wanted)


@pytest.mark.parametrize(
  ("kinds", "takes"),
  [
    ("E", True), ("EM", True), ("EA", True), ("MEA", True), ("AME", True),
    ("A", False), ("MA", False), ("EMA", False), ("EAM", False), ("AEM", False),
  ],
)  # fmt: skip
def test_meshes_that_take_a_shard_map(kinds, takes):
  """Beside Auto axes, none of Explicit axes before manual ones."""
  of = {kind.name[0]: kind for kind in AxisType}
  assert sharding._takes_shard_map([of[x] for x in kinds]) == takes


# The persistent cache.

_PRODUCTS = ("relu", "silu", "twice", "three times")


def test_persistent_cache_tells_products_of_equal_shapes_apart(tmp_path):
  """In one process each is compiled, in another each is found."""
  for found in ("miss", "hit"):
    lines = _cached(str(tmp_path), *_PRODUCTS)
    assert lines == [f"{found} right"] * len(_PRODUCTS)


def test_without_digests_the_cache_gives_the_program_of_another(tmp_path):
  """So the test above can fail."""
  lines = _cached(str(tmp_path), "--same-digest", *_PRODUCTS)
  assert lines == ["miss right"] + ["hit wrong"] * (len(_PRODUCTS) - 1)


def _cached(*arguments: str) -> list[str]:
  return _run(
    ["-W", "error", "-m", "tests.support.cached_products", *arguments],
    XLA_FLAGS="--xla_force_host_platform_device_count=8",
    JAX_ENABLE_COMPILATION_CACHE="true",
  ).splitlines()


def _run(arguments: list[str], **variables: str) -> str:
  """What a Python process prints."""
  done = subprocess.run(
    [sys.executable, *arguments],
    cwd=Path(__file__).parent.parent,
    env=os.environ | {"JAX_PLATFORMS": "cpu"} | variables,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout.strip()
