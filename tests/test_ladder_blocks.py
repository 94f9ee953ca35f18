"""Blocks by BlockSpec: what a rung's specs say is what its kernel moves."""

import collections
import dataclasses
import functools
import importlib
import itertools

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import numpy as np
import pytest

from experiments.harness import rung_text
from pallas_gemm import hardware, ladder, numerics
from pallas_gemm.ladder import blocks, contract
from tests.support import interpret, problems

each_rung = pytest.mark.parametrize(
  "rung", ladder.with_variants(), ids=lambda r: r.label
)


# The index maps decide: with i and j exchanged, the product is another.


def _exchanged(spec: plgpu.BlockSpec) -> plgpu.BlockSpec:
  """The blocks of (i, j) and of (j, i) in each other's place."""
  index_map = spec.index_map
  return dataclasses.replace(spec, index_map=lambda i, j, k: index_map(j, i, k))


def _exchange(specs, which: str, *args, **kwargs) -> blocks.Specs:
  """A rung's `specs` with one operand's blocks exchanged.

  C is read and written by one spec.
  """
  (a, b, *_), c = specs(*args, **kwargs)
  of = {"A": a, "B": b, "C": c}
  of[which] = _exchanged(of[which])
  return blocks.Specs(in_specs=(of["A"], of["B"], of["C"]), out_specs=of["C"])


@each_rung
def test_other_blocks_are_another_product(rung, monkeypatch):
  monkeypatch.setattr(hardware, "sm_count", lambda: 2)
  some = contract.Gemm(512, 512, 512, rung.dtypes[0], beta=1.0)
  config = problems.small_configs(rung, some)[-1]
  (a_spec, *_), c_spec = rung.specs(some, config)
  # Two blocks each way, so that those of (j, i) are there too; two steps.
  block = *c_spec.block_shape, a_spec.block_shape[1] or 1
  a, b, c = problems.operands(*(2 * size for size in block), some.dtype)

  def is_right() -> bool:
    def product():
      return rung.gemm(a, b, c, beta=1.0, config=config)

    out, report = interpret.run(product)
    assert report.kernels == 1
    return numerics.check(out, a, b, c, beta=1.0).passed

  assert is_right()
  module = importlib.import_module(rung.module)
  specs = module.specs
  for which in "ABC":
    changed = functools.partial(_exchange, specs, which)
    monkeypatch.setattr(module, "specs", changed)
    assert not is_right(), which
  monkeypatch.setattr(module, "specs", specs)


# Grids and specs.

SHAPES = [(1, 1, 1), (65, 130, 67), (129, 257, 65)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def _problem(rung, shape, beta=0.0) -> contract.Gemm:
  return contract.Gemm(*shape, rung.dtypes[0], beta=beta)


def _configs(rung, problem):
  return [rung.default_config(problem), *problems.small_configs(rung, problem)]


def _covered(spec, points, shape) -> np.ndarray:
  """How many blocks hold each element, a block for each point."""
  counts = np.zeros(shape, int)
  for starts in {spec.index_map(*point) for point in points}:
    window = tuple(
      slice(start * (size or 1), (start + 1) * (size or 1))
      for start, size in zip(starts, spec.block_shape)
    )
    assert counts[window].size, "a block outside of the matrix"
    counts[window] += 1
  return counts


@each_rung
@each_shape
def test_blocks_cover_each_matrix_once(rung, shape):
  for config in _configs(rung, _problem(rung, shape)):
    problem = rung.padded(_problem(rung, shape, beta=1.0), config)
    m, n, k = problem.m, problem.n, problem.k
    grid = rung.grid(problem, config)
    (a, b, c), out = rung.specs(problem, config)
    points = set(itertools.product(*map(range, grid)))
    for spec, matrix in ((a, (m, k)), (b, (k, n)), (c, (m, n)), (out, (m, n))):
      assert (_covered(spec, points, matrix) == 1).all(), (config, matrix)
    for i, j, k in points:
      # Blocks that meet are of the same terms, and of this block's elements.
      row, term = a.index_map(i, j, k)
      assert b.index_map(i, j, k) == (term, out.index_map(i, j, k)[1])
      assert out.index_map(i, j, k)[0] == row


@each_rung
@each_shape
def test_a_grid_is_the_problem_in_blocks(rung, shape):
  for config in _configs(rung, _problem(rung, shape)):
    for beta in (0.0, 1.0):
      problem = _problem(rung, shape, beta)
      inputs, out = rung.specs(problem, config)
      assert all(isinstance(x, plgpu.BlockSpec) for x in (*inputs, out))
      assert len(inputs) == (3 if beta else 2)
      sizes = config.block_m, config.block_n, config.block_k or 1
      assert out.block_shape == sizes[:2]
      assert (inputs[0].block_shape[1] or 1) == sizes[2]
      assert rung.grid(problem, config) == tuple(map(pl.cdiv, shape, sizes))


@each_rung
@pytest.mark.parametrize("shape", [SHAPES[1], (999_999,) * 3], ids=str)
def test_a_page_tells_of_grid_and_blocks(rung, shape):
  """`--explain` in print: a line for a dimension, a line for a matrix."""
  problem = _problem(rung, shape, beta=1.0)
  config = rung.default_config(problem)
  dimensions = rung_text.grid_lines(rung, problem, config)[1:4]
  padded = rung.padded(problem, config)
  counts = [int(line.split()[1].replace(",", "")) for line in dimensions]
  assert tuple(counts) == rung.grid(padded, config)
  lines = rung_text.block_lines(rung, problem, config)
  for line, at in zip(lines[1:], ("(i, k)", "(k, j)", "(i, j)", "(i, j)")):
    assert at in line
  assert lines[3].endswith("read once")
  assert lines[4].endswith("written once") and len(lines) == 5
  both = rung_text.grid_lines(rung, problem, config) + lines
  assert max(map(len, both)) <= 80
  without = dataclasses.replace(problem, beta=0.0)
  assert len(rung_text.block_lines(rung, without, config)) == 4


def test_a_page_tells_who_shares_a_block():
  rung, naive = ladder.find(12), ladder.find(1)
  problem = contract.Gemm(4096, 4096, 4096, "bfloat16")
  config = contract.TensorCoreConfig(
    128, 256, 64, 3, 2, epilogue_n=64, cluster_m=2
  )
  _, a, b, *_ = rung_text.block_lines(rung, problem, config)
  assert a.endswith("SMEM    16,384  read 16 times")
  assert b.endswith("SMEM    32,768  read 16 times, multicast")
  *_, started = rung_text.grid_lines(rung, problem, config)
  assert "started: 66 clusters of 2 x 1 blocks" in started
  config = naive.default_config(problem)
  *_, k = rung_text.grid_lines(naive, problem, config)  # and nothing more
  assert k.split() == ["k", "4,096", "K"]


A = plgpu.BlockSpec((8, 4), lambda i, j, k: (i, k))
# A row of B, in blocks of 16 columns.
ROW = plgpu.BlockSpec((None, 16), lambda i, j, k: (k, j))


@pytest.mark.parametrize("grid", [(3, 4, 5), (1, 1, 2), (2, 3, 1)], ids=str)
@pytest.mark.parametrize("spec", [A, ROW], ids=["A", "B"])
def test_times_read_by_counting(spec, grid):
  points = itertools.product(*map(range, grid))
  counts = collections.Counter(spec.index_map(*point) for point in points)
  assert set(counts.values()) == {blocks.times_read(spec, grid)}
