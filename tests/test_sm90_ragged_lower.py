"""Tier B: what the cost model may choose for grouped products lowers."""

import itertools

import jax
import pytest

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import fitted, grouped
from tests.support import ragged_kernels

_SILU = {"activation": "silu"}
_KINDS = (
  {"ragged": "m"},
  {"ragged": "k", "transpose_a": True},
  {"ragged": "m", "transpose_b": True, "bias": "n", "activation": "gelu"},
  {"ragged": "m", "gated": True, "save_preactivation": True} | _SILU,
  {"ragged": "k", "transpose_a": True, "out_dtype": "float32"},
  {"ragged": "m", "transpose_b": True, "out_dtype": "float32"},
  {"ragged": "m", "gated": True, "transpose_b": True} | _SILU,
)
# Aligned, and no multiple of an atom in any dimension.
_SIZES = ({"m": 2048, "n": 4096, "k": 4096}, {"m": 515, "n": 1000, "k": 2004})


def _problem(kind: dict, sizes: dict) -> Problem:
  dtypes = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
  return Problem.flat(**sizes, groups=5, **dtypes | kind)


def _lower(problem: Problem, config: Config) -> str:
  kernel, arguments = ragged_kernels.example(problem, config)
  with hardware.assume("NVIDIA H200"):
    traced = jax.jit(kernel).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _legal(problem: Problem) -> list[Config]:
  with hardware.assume("NVIDIA H200"):
    return [
      config
      for config in grouped.candidates(problem)
      if legal.reason(Plan.of(problem, config)) is None
    ]


@pytest.mark.parametrize("index", range(len(_KINDS)))
def test_the_chosen_config(index):
  problem = _problem(_KINDS[index], _SIZES[index % 2])
  assert "mosaic_gpu" in _lower(problem, _legal(problem)[0])


# Subtiles of rows that groups share out are 128 bytes wide, and groups along K
# read B along N: neither goes with columns in steps of 16.
_TILES = [tile for tile in fitted.TILES if tile[1] % 32 == 0]


@pytest.mark.parametrize("tile", _TILES, ids=str)
def test_every_tile_of_some_problem(tile):
  """The kinds of products in turn, beginning with another one each time."""
  turn = itertools.islice(itertools.cycle(_KINDS), _TILES.index(tile), None)
  for kind in itertools.islice(turn, len(_KINDS)):
    problem = _problem(kind, _SIZES[0])
    for c in _legal(problem):
      if (c.block_m, c.block_n, c.consumers, c.split) == tile:
        assert "mosaic_gpu" in _lower(problem, c)
        return
  pytest.fail(f"no problem has a legal config with {tile}")


@pytest.mark.parametrize("n", (3921, 3922, 3924))
@pytest.mark.parametrize("gated", (False, True))
def test_tiles_of_weights_that_threads_load(n, gated):
  """Of few elements at a time chunks are small, but whole swizzle atoms."""
  sizes = {"m": 100, "n": n, "k": 200, "ragged": "m", "gated": gated}
  problem = _problem(sizes | (_SILU if gated else {}), {})
  config = next(c for c in _legal(problem) if c.split == "n")
  assert (config.block_m, config.block_n) == (64, 256)
  assert any(Plan.of(problem, config).loader.operands)
  assert "mosaic_gpu" in _lower(problem, config)
