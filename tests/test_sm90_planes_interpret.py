"""Tier A: numbers of the Hopper kernels with operands in planes, interpreted.

The cases of test_sm90_dense_races are checked there.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import numerics
from pallas_gemm.kernels.sm90 import legal, mainloops, planes
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from tests.support import dense, mutations, plane_cases, problems, special


@pytest.mark.parametrize("name", plane_cases.VALUES)
def test_values(name, monkeypatch):
  case = plane_cases.VALUES[name]
  problems.assume_sms(monkeypatch, max(2, case.config.blocks))
  assert legal.reason(Plan.of(case.problem, case.config)) is None
  run, check = case.prepare()
  check(run())


# NumPy, which multiplies in the interpreter, warns of infinities.
@pytest.mark.filterwarnings(
  "ignore:.*value encountered in", "ignore:overflow encountered in"
)
@pytest.mark.parametrize("name", ("edges_nn", "pairs_moved"))
@pytest.mark.parametrize("kind", special.KINDS)
def test_special_values_are_those_of_float32(kind, name, monkeypatch):
  problems.assume_sms(monkeypatch, 2)
  case = plane_cases.VALUES[name]
  a, b = special.KINDS[kind](case.problem)
  x = {"a": jnp.asarray(a[None]), "b": jnp.asarray(b[None])}
  (out,) = dense.run(case.problem, case.config, x)
  found = numerics.check(np.asarray(out[0]), a, b, planes=3)
  assert found.passed, found


@pytest.mark.parametrize("name", ("moved_gated", "moved_groups", "pairs_moved"))
def test_bits_are_those_of_planes_that_xla_makes(name, monkeypatch):
  problems.assume_sms(monkeypatch, 2)
  case = (plane_cases.VALUES | plane_cases.RACES)[name]
  by_xla = dataclasses.replace(
    case, config=dataclasses.replace(case.config, moves=False)
  )
  found, wanted = (x.prepare()[0]() for x in (case, by_xla))
  for got, want in zip(found, wanted, strict=True):
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
  ("fields", "changes", "words"),
  [
    ({}, {"swap_ab": True}, "no planes of groups along K, swap_ab and"),
    ({}, {"cluster_m": 2}, "in no cluster of several tiles"),
    ({"planes_b": 1}, {}, "of float32 B, in no cluster"),
    ({"n": 100}, {}, "of what TMA can address, got rows of 100"),
    (
      {"transpose_b": True},
      {"block_n": 72},
      "splits a multiple of 16 columns, got 72",
    ),
  ],
)
def test_what_threads_make_no_planes_of(fields, changes, words):
  of = plane_cases.X6 | {"m": 200, "n": 256, "k": 256} | fields
  config = dataclasses.replace(plane_cases.MOVED, **changes)
  found = Plan.of(Problem.flat(dtype="bfloat16", **of), config)
  assert words in found.loader.why_not


@pytest.mark.parametrize("count", (2, 3))
def test_planes_add_up_to_what_they_were_made_of(count):
  rng = np.random.default_rng(count)
  x = np.ldexp(rng.standard_normal(10_000), rng.integers(-80, 120, 10_000))
  x = np.append(x, [0.0, -0.0, 3.4028235e38, -3.4e38, 2.0**128 * (1 - 2**-9)])
  x = x.astype(np.float32)
  got = sum(np.float64(y) for y in planes.split(jnp.asarray(x), count))
  error = np.abs(got - x)
  assert (error <= (0 if count == 3 else 2.0**-16) * np.abs(x)).all()


def test_one_plane_is_the_operand_itself():
  x = jnp.ones((2, 2), jnp.bfloat16)
  assert planes.split(x, 1) == [x]


@pytest.mark.parametrize(
  "value", (np.inf, -np.inf, np.nan, np.uint32(0x7F800001).view(np.float32))
)
def test_what_is_not_finite_is_in_the_first_plane_alone(value):
  first, *others = planes.split(jnp.full((3,), value, jnp.float32), 3)
  np.testing.assert_array_equal(np.float32(first), np.full(3, value))
  assert not any(np.asarray(other).any() for other in others)


# NumPy, which multiplies in the interpreter, warns of infinities.
@pytest.mark.filterwarnings(
  "ignore:.*value encountered in", "ignore:overflow encountered in"
)
@pytest.mark.parametrize("kind", ("infinity", "overflow", "infinity_by_exact"))
def test_sums_that_are_kept_though_not_finite_are_found(kind, monkeypatch):
  problems.assume_sms(monkeypatch, 2)
  kept = "jnp.where(jnp.abs(x) < jnp.inf, x, 0.0)", "x"
  mutations.plant_rewrite(mainloops.OfPlanes, [kept], monkeypatch)
  case = plane_cases.VALUES["edges_nn"]
  a, b = special.KINDS[kind](case.problem)
  x = {"a": jnp.asarray(a[None]), "b": jnp.asarray(b[None])}
  (out,) = dense.run(case.problem, case.config, x)
  assert not numerics.check(np.asarray(out[0]), a, b, planes=3).passed
