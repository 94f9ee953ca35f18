"""What a device does of a sharded product, and what tells products apart."""

import dataclasses
import itertools
import math
import os
from pathlib import Path
import subprocess
import sys

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from pallas_gemm import tuning
from pallas_gemm.kernels import activations
from pallas_gemm.ops import mesh_plan, sharding
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


def _plan(spec, out, *have, mesh=MESH, **size):
  return mesh_plan.plan_of(spec, spec.named(have), out, mesh, SIZE | size)


def _dense(a, b, out, **how):
  """The parts of A and B that a device reads, and the plan."""
  plan = _plan(DENSE, out, a, b, **how)
  return plan.operands.a, plan.operands.b, plan


# Dense products.


def test_rows_and_columns():
  """Nothing is summed over: a device has its part of the result."""
  a, b, plan = _dense(P("x"), P(None, "y"), P("x", "y"))
  assert (a, b) == (P("x", None), P(None, "y"))
  assert (plan.psum, plan.scatter) == ((), {})
  assert (plan.rows, plan.groups) == (((), ()), ())


def test_operands_follow_the_result():
  """However they lie, they are read as the result is sharded."""
  a, b, plan = _dense(P(None, "y"), P("x"), P("x", "y"))
  assert (a, b) == (P("x", None), P(None, "y"))
  assert plan.psum == ()


def test_k_alike_is_added_up():
  a, b, plan = _dense(P(None, "x"), P("x"), P())
  assert (a, b) == (P(None, "x"), P("x", None))
  assert (plan.psum, plan.scatter) == (("x",), {})
  assert str(plan).endswith("psum ['x']")


def test_sums_are_scattered_where_the_result_has_the_axis():
  a, b, plan = _dense(P(None, "x"), P("x"), P("x"))
  assert (a, b) == (P(None, "x"), P("x", None))
  assert (plan.psum, plan.scatter) == (("x",), {"m": ("x",)})
  assert str(plan).endswith("psum_scatter {'m': ('x',)}")


def test_sums_over_two_axes_are_scattered_over_one():
  a, b, plan = _dense(P(None, ("x", "y")), P(("x", "y")), P(None, "y"))
  assert (a, b) == (P(None, ("x", "y")), P(("x", "y"), None))
  assert (plan.psum, plan.scatter) == (("x", "y"), {"n": ("y",)})
  assert str(plan).endswith("psum_scatter {'n': ('y',)}, psum ['x']")


def test_scattered_within_a_part():
  """What is scattered varies fastest; the rest is multiplied in parts."""
  a, b, plan = _dense(P("x", "y"), P("y"), P(("x", "y")))
  assert (a, b) == (P("x", "y"), P("y", None))
  assert (plan.psum, plan.scatter) == (("y",), {"m": ("y",)})


def test_not_scattered_over_what_varies_slowest():
  a, b, plan = _dense(P(None, "y"), P("y"), P(("y", "x")))
  assert (a, b) == (P(("y", "x"), None), P(None, None))
  assert plan.psum == ()


def test_fsdp_gathers_weights():
  """K of the weights alone is sharded, over the axis of the rows."""
  a, b, plan = _dense(P("x"), P("x"), P("x"))
  assert (a, b) == (P("x", None), P(None, None))
  assert plan.psum == ()
  assert str(plan) == "a P('x', None), b P(None, None) from [16, 32]"


@pytest.mark.parametrize("other", (P("y"), P(("y", "x"))))
def test_k_not_alike_is_gathered(other):
  a, b, plan = _dense(P(None, "x"), other, P())
  assert (a, b) == (P(None, None), P(None, None))
  assert plan.psum == ()


def test_k_is_summed_as_far_as_it_is_alike():
  a, b, plan = _dense(P(None, "x"), P(("x", "y")), P())
  assert (a, b) == (P(None, "x"), P("x", None))
  assert plan.psum == ("x",)


def test_an_axis_that_cannot_be_summed_over_takes_no_other_along():
  """M is no multiple of the axis x: over y the sums are added up still."""
  both = ("x", "y")
  a, b, plan = _dense(P(None, both), P(both), P("x"), m=6)
  assert (a, b) == (P("x", "y"), P("y", None))
  assert (plan.psum, plan.scatter) == (("y",), {})


def test_uneven_k_is_gathered():
  a, b, plan = _dense(P(None, "x"), P("x"), P(), k=30)
  assert (a, b) == (P(None, None), P(None, None))
  assert plan.psum == ()


def test_uneven_rows_and_columns_are_left_in_parts():
  """XLA pads them."""
  a, b, _ = _dense(P("x"), P(None, "y"), P("x", "y"), m=10, n=31)
  assert (a, b) == (P("x", None), P(None, "y"))


def test_axes_of_size_1_are_none():
  mesh = {"x": 1, "y": 2}
  a, b, plan = _dense(P("y", "x"), P("x"), P(("y", "x")), mesh=mesh)
  assert (a, b) == (P("y", None), P(None, None))
  assert (plan.psum, plan.scatter) == ((), {})


def test_batch():
  spec = Spec(words=Operands("bmk", "bkn"), out="bmn", out_dtype=jnp.float32)
  plan = _plan(spec, P("x"), P("x", None, "y"), P("x", "y"), b=8)
  assert plan.operands.a == P("x", None, "y")
  assert plan.operands.b == P("x", "y", None)
  assert plan.psum == ("y",)


def test_what_is_applied_has_the_parts_of_the_result():
  """Not those of the sums, which are scattered first."""
  spec = Spec(
    words=Operands("mk", "kn", bias="n", c="mn", alpha=""),
    out="mn",
    out_dtype=jnp.float32,
  )
  have = P(None, "x"), P("x"), P(), P("x"), P()
  plan = _plan(spec, P(None, "x"), *have)
  assert plan.operands.a == P(None, "x")
  assert plan.operands.b == P("x", None)
  assert plan.operands.bias == P("x")
  assert plan.operands.c == P(None, "x")
  assert plan.operands.alpha == P()
  assert plan.scatter == {"n": ("x",)}


@pytest.mark.parametrize("up, psum", ((P("x"), ("x",)), (P(None, "x"), ())))
def test_both_weights_of_a_gated_product_lie_alike(up, psum):
  spec = Spec(words=Operands("mk", "kn", "kn"), out="mn", out_dtype=jnp.float32)
  plan = _plan(spec, P(), P(None, "x"), P("x"), up)
  assert plan.psum == psum
  assert plan.operands.b == plan.operands.b_up


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
    read_a, read_b, plan = _dense(a, b, out, **size)
    m, k, k_of_b, n = map(mesh_plan._axes, (*read_a, *read_b))
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


# Grouped products.


def _grouped(x, w, out, **how):
  return _plan(GROUPED, out, x, w, P(), P(), **how)


def test_experts_are_summed_over():
  """A device multiplies the rows of its groups; the others are zero."""
  plan = _grouped(P(), P("x"), P())
  assert plan.operands.a == P(None, None)
  assert plan.operands.b == P("x", None, None)
  assert plan.operands.offsets == P(None)
  assert (plan.psum, plan.scatter) == (("x",), {})
  assert (plan.groups, plan.rows) == (("x",), ((), ()))


def test_experts_with_rows_over_the_same_axis():
  """All rows are multiplied, and their sums scattered."""
  plan = _grouped(P("x"), P("x"), P("x"))
  assert plan.operands.a == P(None, None)
  assert (plan.psum, plan.scatter) == (("x",), {"m": ("x",)})
  assert (plan.groups, plan.rows) == (("x",), ((), ("x",)))


def test_experts_with_rows_over_another_axis():
  plan = _grouped(P("y"), P("x"), P("y"))
  assert plan.operands.a == P("y", None)
  assert plan.operands.b == P("x", None, None)
  assert (plan.psum, plan.groups) == (("x",), ("x",))
  assert plan.rows == (("y",), ("y",))


def test_experts_and_k():
  plan = _grouped(P(None, "y"), P("x", "y"), P())
  assert plan.operands.a == P(None, "y")
  assert plan.operands.b == P("x", "y", None)
  assert (plan.psum, plan.groups) == (("x", "y"), ("x",))


def test_uneven_experts_are_gathered():
  plan = _grouped(P(), P("x"), P(), g=6, o=7)
  assert plan.operands.b == P(None, None, None)
  assert (plan.psum, plan.groups) == ((), ())


@pytest.mark.parametrize("up, groups", ((P("x"), ("x",)), (P(), ())))
def test_both_weights_of_gated_experts_lie_alike(up, groups):
  spec = dataclasses.replace(
    GROUPED, words=Operands("mk", "gkn", "gkn", offsets="o")
  )
  plan = _plan(spec, P(), P(), P("x"), up, P())
  assert (plan.psum, plan.groups) == (groups, groups)
  assert plan.operands.b == plan.operands.b_up == P(groups or None, None, None)


def test_rows_of_groups():
  plan = _grouped(P("x"), P(None, None, "y"), P("x", "y"))
  assert plan.operands.a == P("x", None)
  assert plan.operands.b == P(None, None, "y")
  assert plan.operands.bias == P(None, "y")
  assert (plan.psum, plan.groups) == ((), ())
  assert plan.rows == (("x",), ("x",))


def _sums(a, b, out, **how):
  plan = _plan(SUMS, out, a, b, P(), **how)
  return plan.operands.a, plan.operands.b, plan


def test_sums_over_rows_of_groups():
  a, b, plan = _sums(P("x"), P("x"), P())
  assert (a, b) == (P("x", None), P("x", None))
  assert (plan.psum, plan.rows, plan.groups) == (("x",), (("x",), ()), ())


def test_what_one_operand_lies_whole_on_is_cut_where_results_are_few():
  """Else the other operand is gathered, which is less to send."""
  for of in (_sums, _dense):
    at = P("x") if of is _sums else P(None, "x")
    a, b, plan = of(at, P(), P(), k=2**16)
    assert (a, b) == (at if of is _dense else P("x", None), P("x", None))
    assert plan.psum == ("x",)
    a, b, plan = of(at, P(), P())
    assert (a, b) == (P(None, None), P(None, None))
    assert plan.psum == ()


def test_rows_are_not_cut_over_an_axis_that_is_taken():
  a, b, plan = _sums(P("x"), P(None, "x"), P(None, None, "x"))
  assert (a, b) == (P(None, None), P(None, "x"))
  assert plan.psum == ()


def test_sums_of_all_groups_are_not_scattered():
  """A device would hold those of all groups: it gathers the rows instead."""
  a, b, plan = _sums(P("x"), P("x"), P("x"))
  assert (a, b) == (P(None, None), P(None, None))
  assert (plan.psum, plan.scatter, plan.groups) == ((), {}, ("x",))


def test_groups_take_no_other_axis_of_rows_along():
  both = ("x", "y")
  a, b, plan = _sums(P(both), P(both), P("x"))
  assert (a, b) == (P("y", None), P("y", None))
  assert (plan.psum, plan.groups) == (("y",), ("x",))
  assert plan.rows == (("y",), ())


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
