"""Tier B: every rung lowers for Hopper, on a machine without a GPU.

Lowering decides what Mosaic GPU accepts: register layouts, wgmma shapes,
swizzles, TMA boxes and strides, shared memory.
"""

import jax
import pytest

from experiments.harness import suites
from pallas_gemm import hardware
from pallas_gemm.ladder import LADDER, contract, with_variants
from tests.support import oldest, problems

each_rung = pytest.mark.parametrize(
  "rung", with_variants(), ids=lambda r: r.name
)
GPU = "NVIDIA H200"


def _lower(rung, m, n, k, dtype, *, beta=0.0, config=None) -> str:
  shapes = [(m, k), (k, n)] + ([(m, n)] if beta else [])
  operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

  def gemm(*operands):
    return rung.gemm(*operands, beta=beta, config=config)

  with hardware.assume(GPU):
    traced = jax.jit(gemm).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _id(x) -> str:
  return getattr(x, "name", str(x))


_SHAPES = [
  shape for name in ("ladder", "edges", "large") for shape in suites.suite(name)
]


@pytest.mark.parametrize(
  ("rung", "shape"), oldest.half_of_product(with_variants(), _SHAPES), ids=_id
)
def test_default_config(rung, shape):
  """Of each rung, half of its shapes with each dtype."""
  index = _SHAPES.index(shape) // 2
  dtype = rung.dtypes[index % len(rung.dtypes)]
  assert "mosaic_gpu" in _lower(rung, *shape, dtype)


@pytest.mark.parametrize(
  ("rung", "shape"),
  oldest.half_of_product(with_variants(), suites.suite("unaligned")),
  ids=_id,
)
def test_unaligned_rows_with_c(rung, shape):
  assert "mosaic_gpu" in _lower(rung, *shape, rung.dtypes[-1], beta=2.0)


@each_rung
def test_small_configs(rung):
  m, n, k = 200, 264, 200
  problem = contract.Problem(m, n, k, rung.dtypes[0], beta=1.0)
  for config in problems.small_configs(rung, problem):
    text = _lower(rung, m, n, k, rung.dtypes[0], beta=1.0, config=config)
    assert "mosaic_gpu" in text


@each_rung
def test_what_is_legal_lowers(rung):
  """`is_legal` promises it; a sample of the legal candidates, evenly taken."""
  problem = contract.Problem(512, 512, 512, rung.dtypes[0])
  legal = [
    config
    for config in problems.candidate_configs(rung)
    if rung.is_legal(config, problem) is None
  ]
  assert legal
  for config in oldest.half(legal[:: max(1, len(legal) // 12)]):
    text = _lower(rung, 512, 512, 512, rung.dtypes[0], config=config)
    assert "mosaic_gpu" in text, config


def test_the_classics_blocks_lower():
  """16^3 in 4 x 4 blocks, as the texts draw it."""
  config = contract.SimtConfig(block_m=4, block_n=4)
  for rung in LADDER[:2]:
    assert "mosaic_gpu" in _lower(rung, 16, 16, 16, "float32", config=config)
  config = contract.SimtConfig(block_m=4, block_n=4, block_k=4)
  assert "mosaic_gpu" in _lower(LADDER[2], 16, 16, 16, "float32", config=config)


def test_names_of_kernels_are_the_rungs():
  """Profiles and counters find a rung's kernel by its name."""
  for rung in with_variants():
    assert rung.name in _lower(rung, 256, 256, 256, rung.dtypes[0])
