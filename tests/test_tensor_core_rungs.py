"""The tensor-core rungs: rings that run on across tiles, edges, clusters."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import hardware, numerics
from pallas_gemm.ladder import (
  contract,
  k09_tensor_cores,
  k10_warp_specialized,
  k11_persistent,
  k12_cluster_multicast,
  k13_tensor_memory,
)
from pallas_gemm.ladder import tensor_core_common as common
from tests.support import interpret, problems

Config = contract.TensorCoreConfig
RUNGS = (
  k09_tensor_cores.RUNG,
  k10_warp_specialized.RUNG,
  k11_persistent.RUNG,
  k12_cluster_multicast.RUNG,
)
RING_RUNGS = RUNGS[1:]
ROWS = Config(128, 64, 64, stages=2, consumers=2, epilogue_n=32)
COLUMNS = Config(64, 128, 64, stages=3, consumers=2, split="n", epilogue_n=64)
ONE = Config(64, 64, 64, stages=2, epilogue_n=64)


def changed(config: Config, **fields) -> Config:
  """`config` with some fields changed."""
  return Config(**(vars(config) | fields))


def gemm(rung, shape, config, *, dtype="bfloat16", alpha=1.0, beta=0.0):
  """Runs a rung with race detection; asserts numbers and silence."""
  m, n, k = shape
  a, b, c = problems.operands(m, n, k, dtype)
  c = c if beta else None
  out, report = interpret.run(
    lambda: rung.gemm(a, b, c, alpha=alpha, beta=beta, config=config),
    detect_races=True,
  )
  assert out.shape == (m, n) and out.dtype == a.dtype
  result = numerics.check(out, a, b, c, alpha=alpha, beta=beta)
  assert result.passed, result
  assert report.kernels == 1
  assert not report.races_found
  return out


@pytest.fixture(name="two_sms")
def _two_sms(monkeypatch):
  """Few SMs, so that each block of a persistent grid has several tiles."""
  monkeypatch.setattr(hardware, "sm_count", lambda: 2)


@pytest.mark.parametrize("rung", RING_RUNGS, ids=lambda r: r.name)
@pytest.mark.parametrize(
  "config", [ROWS, COLUMNS, ONE], ids=["rows", "columns", "one"]
)
def test_a_ring_longer_than_k(rung, config, two_sms):
  gemm(rung, (130, 70, 1), config)


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("config", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_clusters_with_tiles_to_spare(cluster, config, two_sms):
  cluster_m, cluster_n = cluster
  config = changed(config, cluster_m=cluster_m, cluster_n=cluster_n)
  gemm(RUNGS[3], (260, 270, 130), config, beta=1.0)


@pytest.mark.parametrize("side", ["cluster_m", "cluster_n"])
def test_cluster_of_four(side, monkeypatch):
  monkeypatch.setattr(hardware, "sm_count", lambda: 4)
  gemm(RUNGS[3], (260, 270, 130), changed(ROWS, **{side: 4}))


def test_a_cluster_lies_along_one_side():
  config = changed(ROWS, cluster_m=2, cluster_n=2)
  problem = contract.Problem(256, 256, 256, "bfloat16")
  assert "along one side" in RUNGS[3].is_legal(config, problem)


@pytest.mark.parametrize("rung", RING_RUNGS[1:], ids=lambda r: r.name)
@pytest.mark.parametrize("raster,raster_dim", [(2, "m"), (3, "n"), (99, "m")])
def test_every_order_visits_every_tile(rung, raster, raster_dim, two_sms):
  config = changed(ONE, raster=raster, raster_dim=raster_dim)
  gemm(rung, (200, 250, 64), config)


def test_snake_visits_each_tile_once():
  for raster, dim in itertools.product((1, 2, 3, 8), "mn"):
    config = changed(ONE, raster=raster, raster_dim=dim)
    order = jax.vmap(lambda i, c=config: common.tile_at(i, (5, 7), c))
    rows, columns = order(jnp.arange(35, dtype=jnp.int32))
    seen = {(int(i), int(j)) for i, j in zip(rows, columns)}
    assert seen == set(itertools.product(range(5), range(7)))


def test_result_does_not_depend_on_the_schedule(two_sms):
  """Each sum is accumulated in the order of k, whoever computes it."""
  shape = (129, 130, 200)
  configs = (ROWS, COLUMNS, changed(ROWS, cluster_m=2), ONE)
  first, *others = (gemm(RUNGS[3], shape, config) for config in configs)
  for out in others:
    np.testing.assert_array_equal(problems.bits(first), problems.bits(out))


@pytest.mark.parametrize(
  ("m", "n", "fields"),
  [
    (4096, 8192, {"block_m": 128, "block_n": 256}),
    (8192, 8192, {"block_m": 128, "block_n": 256}),
    # 32 tiles of 128 x 256 would leave most of the SMs idle.
    (1024, 1024, {"block_m": 128, "block_n": 64}),
    # A partner along the short side would be idle.
    (16, 8192, {"cluster_m": 1}),
    (8192, 16, {"cluster_n": 1}),
    # XLA pads 64 columns to 128: tiles of 128 x 64 would be twice as many.
    (16896, 64, {"block_m": 128, "block_n": 128}),
  ],
)
def test_default_config(m, n, fields):
  problem = contract.Gemm(m, n, 4096, "bfloat16")
  config = k12_cluster_multicast.RUNG.default_config(problem)
  assert changed(config, **fields) == config


@pytest.mark.parametrize(
  "rung,fields,reason",
  [
    (0, {"stages": 2}, "stages"),
    (0, {"block_m": 256}, "at most"),
    (0, {"epilogue_n": 64}, "epilogue_n"),
    (1, {"raster": 2}, "raster"),
    (1, {"stages": 1}, "stages must be at least 2"),
    (1, {"stages": 9}, "bytes of shared memory"),
    (1, {"consumers": 3}, "consumers must be 1 or 2"),
    (1, {"block_k": 32}, "block_k"),
    (1, {"block_n": 96}, "multiples of 64 rows"),
    (1, {"block_m": 64}, "multiples of 64 rows"),
    (1, {"block_m": 384}, "multiples of 64 rows and 64 columns|at most"),
    (1, {"epilogue_n": 0}, "epilogue_n must be an int >= 1"),
    (1, {"epilogue_n": 48}, "epilogue_n must be 16, 32"),
    (1, {"epilogue_n": 192}, "epilogue_n must divide"),
    (2, {"cluster_m": 2}, "cluster_m"),
    (2, {"block_n": 192, "epilogue_n": 64}, "even number of subtiles"),
    (3, {"cluster_m": 4, "cluster_n": 4}, "at most 8 blocks"),
    (3, {"cluster_m": 2, "cluster_n": 2}, "along one side"),
    (3, {"cluster_m": 3}, "block_k must be a multiple"),
  ],
)
def test_illegal_configs_say_why(rung, fields, reason):
  rung = RUNGS[rung]
  base = rung.default_config(contract.Gemm(128, 256, 64, "bfloat16"))
  if rung is not RUNGS[0]:
    base = changed(
      base, block_m=128, block_n=256, split="m", cluster_m=1, cluster_n=1
    )
  a = jnp.zeros((8, 64), jnp.bfloat16)
  b = jnp.zeros((64, 64), jnp.bfloat16)
  with pytest.raises(ValueError, match=reason):
    rung.gemm(a, b, config=changed(base, **fields))


def test_a_tile_in_tensor_memory_has_two_subtiles():
  """Of one, the next tile's would be written over it while it is sent."""
  rung, problem = k13_tensor_memory.RUNG, contract.Gemm(128, 64, 64, "bfloat16")
  config = changed(ONE, block_m=128, epilogue_n=32)
  assert rung.is_legal(config, problem) is None
  reason = rung.is_legal(changed(config, epilogue_n=64), problem)
  assert "divide 64 / 2, got 64" in reason


def test_other_architectures_are_refused():
  problem = contract.Gemm(128, 128, 128, "bfloat16")
  with hardware.assume("A100-SXM4-80GB"):
    for rung in RUNGS:
      reason = rung.is_legal(rung.default_config(problem), problem)
      assert "compute capability 9.0" in reason
