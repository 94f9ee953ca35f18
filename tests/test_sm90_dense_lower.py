"""Tier B: the dense Hopper kernel lowers, on a machine without a GPU.

Lowering decides what Mosaic GPU accepts: register layouts, wgmma shapes,
swizzles, TMA boxes and strides, shared memory. What the cost model may choose
must lower, and so must whatever an activation is made of.
"""

import collections
from collections.abc import Callable
import dataclasses
import functools
import itertools
import re
import zlib

import jax
from jax import lax
import jax.numpy as jnp
import pytest

import pallas_gemm
from pallas_gemm import hardware, jaxprs
from pallas_gemm.kernels import epilogues
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import fitted, model
from tests.support import cases, dense

GPU = "NVIDIA H200"
CONFIG = Config(block_m=64, block_n=64, stages=2, consumers=1)
X = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)

# What the kernel branches on, beside the config.
_LAYOUTS = ("nn", "nt", "tn", "tt")
_EPILOGUES = (
  {},
  {"bias": "n", "activation": "gelu"},
  {"c_dtype": "bfloat16"},
  {"c_dtype": "float32", "bias": "m"},
  {"activation": "silu", "save_preactivation": True},
  {"activation": "gelu", "save_preactivation": True, "c_dtype": "bfloat16"},
  {"activation": "silu", "gated": True},
  {"activation": "silu", "gated": True, "save_preactivation": True},
)
_OUT_DTYPES = ("bfloat16", "float16", "float32")
_SHAPES = ((520, 1032, 1000), (500, 777, 3000), (513, 4096, 520))
_PROBLEMS = tuple(itertools.product(_SHAPES, _LAYOUTS, _OUT_DTYPES, _EPILOGUES))


def _problem(shape, layout, out_dtype, epilogue) -> Problem:
  m, n, k = shape
  return Problem.flat(
    m=m,
    n=n,
    k=k,
    dtype="float16" if out_dtype == "float16" else "bfloat16",
    out_dtype=out_dtype,
    transpose_a=layout[0] == "t",
    transpose_b=layout[1] == "t",
    **epilogue,
  )


def _hash(*key) -> int:
  """The same in every run."""
  return zlib.crc32(repr(key).encode())


def _some_problem_with(tile) -> tuple[Problem, Config]:
  """A problem and one of the model's configs with that tile, by hash."""
  start = _hash(tile) % len(_PROBLEMS)
  for i in range(len(_PROBLEMS)):
    problem = _problem(*_PROBLEMS[(start + 31 * i) % len(_PROBLEMS)])
    found = [
      c
      for c in model.candidates(problem)
      if (c.block_m, c.block_n, c.consumers, c.split) == tile
      and legal.reason(Plan.of(problem, c)) is None
    ]
    if found:
      return problem, found[_hash(tile, "config") % len(found)]
  raise LookupError(f"no problem for tile {tile}")


def _lower(problem: Problem, config: Config, factors=(), gpu=GPU) -> str:
  kernel, arguments = dense.example(problem, config, factors)
  with hardware.assume(gpu):
    traced = jax.jit(kernel).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _candidate(problem: Problem, suits: Callable[[Config], bool]) -> Config:
  """The first legal one of the model that suits."""
  return next(
    c
    for c in model.candidates(problem)
    if suits(c) and legal.reason(Plan.of(problem, c)) is None
  )


@pytest.mark.parametrize("tile", fitted.TILES, ids=str)
def test_what_the_model_may_choose(tile):
  problem, config = _some_problem_with(tile)
  assert "mosaic_gpu" in _lower(problem, config), (problem, config)


@pytest.mark.parametrize(
  ("shape", "layout", "epilogue"),
  cases.pairs(_SHAPES, ("nn", "nt"), _EPILOGUES[1:3]),
  ids=str,
)
def test_swapped_operands(shape, layout, epilogue):
  """The model's candidates, for each height of a tile."""
  problem = _problem(shape, layout, "bfloat16", epilogue)
  found = {
    c.block_n: c
    for c in model.candidates(problem)
    if c.swap_ab and legal.reason(Plan.of(problem, c)) is None
  }
  assert len(found) > 3
  for config in list(found.values())[:: max(1, len(found) // 3)]:
    assert "mosaic_gpu" in _lower(problem, config), config


@pytest.mark.parametrize("cluster", fitted.CLUSTERS, ids=str)
@pytest.mark.parametrize("layout", ("nt", "tn"))
def test_clusters(cluster, layout):
  problem = _problem((4104, 4104, 4104), layout, "bfloat16", {})
  config = _candidate(problem, lambda c: (c.cluster_m, c.cluster_n) == cluster)
  assert "mosaic_gpu" in _lower(problem, config), config


@pytest.mark.parametrize("epilogue", _EPILOGUES, ids=str)
@pytest.mark.parametrize("shape", ((49, 43, 112), (300, 4096, 64)), ids=str)
def test_one_work_tile_a_block(shape, epilogue):
  """There is no loop over work tiles, and no slot of the ring is used again."""
  layout = _LAYOUTS[_hash(shape, epilogue) % len(_LAYOUTS)]
  problem = _problem(shape, layout, "bfloat16", epilogue)
  config = _candidate(
    problem, lambda c: Plan.of(problem, c).tiling.work_tiles_of_a_block == 1
  )
  in_cluster = config.cluster_m * config.cluster_n > 1
  assert Plan.of(problem, config).tiling.refills == in_cluster
  assert "mosaic_gpu" in _lower(problem, config), config


@pytest.mark.parametrize(
  ("n", "slabs", "out_dtype", "epilogue"),
  cases.pairs((512, 4096), (1, 2), ("bfloat16", "float32"), _EPILOGUES),
  ids=str,
)
def test_consumers_that_ping_pong(n, slabs, out_dtype, epilogue):
  """Tiles of one slab have no loop; a consumer may have one or several."""
  layout = _LAYOUTS[_hash(slabs, out_dtype, epilogue) % len(_LAYOUTS)]
  problem = _problem((2048, n, 64 * slabs), layout, out_dtype, epilogue)
  config = _candidate(problem, lambda c: c.split == "pingpong")
  assert "mosaic_gpu" in _lower(problem, config), config


@pytest.mark.parametrize("epilogue", _EPILOGUES[:3], ids=str)
def test_work_tiles_of_one_slab(epilogue):
  problem = _problem((64, 64, 64), "nn", "bfloat16", epilogue)
  problem = problem.changed(batch=512, batched_a=True, batched_b=True)
  config = model.choose(problem)
  plan = Plan.of(problem, config)
  assert plan.tiling.work_tiles_of_a_block > 1
  assert not plan.tiling.refills
  assert "mosaic_gpu" in _lower(problem, config), config


@pytest.mark.parametrize("name", cases.FACTORS)
def test_factors_known_at_run_time(name):
  case = cases.FACTORS[name]
  # Blocks have several work tiles.
  gpu = dataclasses.replace(hardware.lookup(GPU), sm_count=2)
  text = _lower(case.problem, case.config, ("alpha", "beta"), gpu)
  assert "mosaic_gpu" in text


def test_a_factor_is_no_kernel_of_its_own():
  """It is an argument of the kernel as it comes."""
  problem = _problem((2048, 4096, 1024), "nt", "bfloat16", _EPILOGUES[2])
  without, with_factors = (
    re.findall(r"stablehlo\.\w+", _lower(problem, CONFIG, factors))
    for factors in ((), ("alpha", "beta"))
  )
  added = collections.Counter(with_factors) - collections.Counter(without)
  assert added == {"stablehlo.reshape": 2}


def test_sums_over_parts_of_k():
  """The model's candidates that split K, for few rows and a long sum."""
  problem = _problem((24, 520, 8192), "nt", "bfloat16", {"bias": "n"})
  split = [c for c in model.candidates(problem) if c.split_k > 1]
  for config in split[:: max(1, len(split) // 3)]:
    assert "mosaic_gpu" in _lower(problem, config), config


@pytest.mark.parametrize(
  ("shape", "activation", "c_dtype", "bias"),
  cases.pairs(
    ((16, 512, 512), (300, 1000, 777), (1024, 4096, 64), (4096, 4096, 4096)),
    (None, "gelu"),
    (None, "bfloat16", "float32"),
    (False, True),
  ),
  ids=str,
)
def test_gradients(shape, activation, c_dtype, bias):
  """Of every operand, with the configs that the model picks.

  With an activation the forward pass also stores what that is applied to.
  """
  m, n, k = shape
  function = activation and getattr(jax.nn, activation)

  def loss(x):
    out = pallas_gemm.matmul(**x, activation=function, implementation="sm90")
    return out.astype(jnp.float32).sum()

  x = {"a": jax.ShapeDtypeStruct((m, k), "bfloat16")}
  x["b"] = jax.ShapeDtypeStruct((k, n), "bfloat16")
  if bias:
    x["bias"] = jax.ShapeDtypeStruct((n,), "bfloat16")
  if c_dtype:
    x["c"] = jax.ShapeDtypeStruct((m, n), c_dtype)
  with hardware.assume(GPU):
    traced = jax.jit(jax.value_and_grad(loss)).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == 3


# An activation for each primitive that the kernel says it can compute.
ACTIVATIONS = {
  "abs": jnp.abs,
  "add": lambda x: x + 1,
  "and": lambda x: jnp.where((x > 0) & (x < 1), x, 0),
  "broadcast_in_dim": lambda x: jnp.where(x > 0, x, 0.5),
  "clamp": lambda x: lax.clamp(0.0, x, 6.0),
  "convert_element_type": lambda x: x * (x > 0),
  "copy": lambda x: jnp.array(x, copy=True),
  "cos": jnp.cos,
  "div": lambda x: x / (1 + x * x),
  "eq": lambda x: jnp.where(x == 0, 1.0, x),
  "erf": lax.erf,
  "erfc": functools.partial(jax.nn.gelu, approximate=False),
  "exp": jnp.exp,
  "exp2": jnp.exp2,
  "expm1": jnp.expm1,
  "ge": lambda x: jnp.where(x >= 0, x, -x),
  "gt": lambda x: jnp.where(x > 0, x, -x),
  "integer_pow": lambda x: x**3,
  "le": lambda x: jnp.where(x <= 0, x, -x),
  "log": lambda x: jnp.log(1 + x * x),
  "log1p": jnp.log1p,
  "log2": lambda x: jnp.log2(1 + x * x),
  "logistic": jax.nn.sigmoid,
  "lt": lambda x: jnp.where(x < 0, x, -x),
  "max": lambda x: jnp.maximum(x, 0.5),
  "min": lambda x: jnp.minimum(x, 0.5),
  "mul": lambda x: x * 3,
  "ne": lambda x: jnp.where(x != 0, x, 1.0),
  "neg": lambda x: -x,
  "or": lambda x: jnp.where((x < 0) | (x > 1), x, 0),
  "round": jnp.round,
  "rsqrt": lambda x: lax.rsqrt(1 + x * x),
  "select_n": lambda x: jnp.where(x > 1, x, 1.0),
  "sign": jnp.sign,
  "sin": jnp.sin,
  "sqrt": lambda x: jnp.sqrt(1 + x * x),
  "square": jnp.square,
  "sub": lambda x: x - 1,
  "tanh": jnp.tanh,
}


def _lower_op(activation, **keywords) -> str:
  def op(a, b):
    return pallas_gemm.matmul(a, b, activation=activation, **keywords)

  return jax.jit(op).trace(X, X).lower(lowering_platforms=("cuda",)).as_text()


def test_every_primitive_has_an_activation():
  replaced = {"copy", "erf", "erfc", "expm1", "log1p"}
  assert set(ACTIVATIONS) == epilogues.PRIMITIVES | replaced


@pytest.mark.parametrize("primitive", ACTIVATIONS)
def test_primitives_of_activations(primitive):
  activation = ACTIVATIONS[primitive]
  some = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  assert primitive in jaxprs.primitives_of(activation, some)
  # Approximate, where the result is bfloat16, and exact.
  for out_dtype in ("bfloat16", "float32"):
    text = _lower_op(
      activation, implementation="sm90", config=CONFIG, out_dtype=out_dtype
    )
    assert "mosaic_gpu" in text


# Others are made of these primitives.
@pytest.mark.parametrize("name", ("gelu", "silu", "hard_tanh", "squareplus"))
def test_activations_of_jax_nn(name):
  activation = getattr(jax.nn, name)
  text = _lower_op(activation, implementation="sm90", config=CONFIG)
  assert "mosaic_gpu" in text


@pytest.mark.parametrize("activation", (jnp.floor, lax.lgamma))
def test_what_a_kernel_can_not_compute_is_left_to_xla(activation):
  with pytest.raises(NotImplementedError, match="the activation contains"):
    _lower_op(activation, implementation="sm90", config=CONFIG)
  text = _lower_op(activation)
  assert "mosaic_gpu" not in text and "dot_general" in text
