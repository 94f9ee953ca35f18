"""Shapes, configs and operands that the tests of the ladder share."""

from collections.abc import Iterator
import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np

from experiments.harness import shapes
from pallas_gemm import hardware
from pallas_gemm.ladder import contract

SimtConfig = contract.SimtConfig
TensorCoreConfig = contract.TensorCoreConfig

# Small enough to be interpreted, none a multiple of a tile.
SMALL_SHAPES = shapes.suite("edges") + shapes.suite("primes")[1:-1]
# No dimension fits any tile, and each is more than one.
ODD = shapes.suite("odd")[0]
# The same to the first rungs, whose blocks are small: the interpreter needs a
# second for every few of theirs.
ODD_FOR_SMALL_BLOCKS = shapes.suite("odd_small")[0]
# One shape for what does not depend on the shape, and one for small blocks.
ONE_SHAPE = shapes.suite("one")[0]
ONE_SHAPE_FOR_SMALL_BLOCKS = shapes.suite("one_small")[0]

# (alpha, beta): what a BLAS test has to tell apart.
FACTORS = (
  (1.0, 0.0),
  (2.5, 0.0),
  (1.0, 1.0),
  (-0.5, 2.0),
  (0.0, 1.5),
  (0.0, 0.0),
)


def operands(
  m: int, n: int, k: int, dtype: str, *, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """A [m, k], B [k, n] and C [m, n], drawn from N(0, 1) on the host."""
  rng = np.random.default_rng((seed, m, n, k))
  dtype = jnp.dtype(dtype)
  shapes = ((m, k), (k, n), (m, n))
  return tuple(
    rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes
  )


def assume_sms(monkeypatch, count: int) -> None:
  """Makes grids those of a GPU with as many SMs, for the rest of a test."""
  gpu = dataclasses.replace(hardware.current(), sm_count=count)
  monkeypatch.setattr(hardware, "current", lambda: gpu)


def one_shape(rung: contract.Rung) -> shapes.Shape:
  """A shape for what does not depend on the shape.

  For the first rungs' small blocks it is smaller.
  """
  return ONE_SHAPE_FOR_SMALL_BLOCKS if rung.number <= 4 else ONE_SHAPE


def bits(x) -> np.ndarray:
  """The bytes of an array: equal only where every bit is."""
  return np.ascontiguousarray(np.asarray(x)).view(np.uint8)


def small_configs(
  rung: contract.Rung, problem: contract.Problem
) -> list[contract.Config]:
  """Configs with tiles so small that a small problem has several of each.

  Of most SIMT rungs, the default: their blocks are small as they are.
  """
  if rung.config_type is SimtConfig:
    small = SimtConfig(32, 128, 16, thread_m=4, thread_n=4, vector=4, stages=2)
    for config in (small, dataclasses.replace(small, block_n=64)):
      if rung.is_legal(config, problem) is None:
        return [config]
    return [rung.default_config(problem)]
  found = [
    config
    for config in _SMALL_TENSOR_CORE
    if rung.is_legal(config, problem) is None
    and (config.cluster_m, config.cluster_n) in _clusters(rung)
  ]
  if not found:
    raise LookupError(f"no small config is legal for {rung.name}, {problem}")
  return found


def _clusters(rung: contract.Rung) -> tuple[tuple[int, int], ...]:
  """The rung about clusters is tested with clusters, the others without."""
  if rung.name == "cluster_multicast":
    return ((2, 1), (1, 2))
  return ((1, 1),)


_SMALL_TENSOR_CORE = (
  # One warpgroup, one buffer; two; slabs as `mma` wants them.
  TensorCoreConfig(64, 64, 64),
  TensorCoreConfig(64, 64, 64, stages=2),
  # Rung 13, whose tiles have all rows of tensor memory.
  TensorCoreConfig(128, 64, 64, stages=2, epilogue_n=32),
  TensorCoreConfig(64, 64, 32),
  # The ring of 9c, as short as can be.
  TensorCoreConfig(64, 64, 32, stages=2, raster=2),
  # Two consumers that split rows, the ring as short as can be, two subtiles
  # of the epilogue.
  TensorCoreConfig(128, 64, 64, stages=2, consumers=2, epilogue_n=32),
  # Three stages, so that ring and k-steps go out of step.
  TensorCoreConfig(
    128, 128, 64, stages=3, consumers=2, epilogue_n=64, raster=2
  ),
  TensorCoreConfig(
    64,
    128,
    64,
    stages=2,
    consumers=2,
    split="n",
    epilogue_n=64,
    raster_dim="m",
  ),
  TensorCoreConfig(
    128, 64, 64, stages=2, consumers=2, epilogue_n=32, cluster_m=2
  ),
  TensorCoreConfig(
    128, 64, 64, stages=2, consumers=2, epilogue_n=32, cluster_n=2
  ),
)


def candidate_configs(rung: contract.Rung) -> Iterator[contract.Config]:
  """Configs, legal and not, around those that a tuner would try."""
  if rung.config_type is SimtConfig:
    for bm, bn, bk, stages in itertools.product(
      (32, 64, 128), (32, 64, 128, 256), (0, 8, 16, 32), (1, 2, 3)
    ):
      for tm, tn, vector in ((1, 1, 1), (8, 1, 1), (8, 8, 1), (8, 8, 4)):
        yield SimtConfig(bm, bn, bk, tm, tn, vector, stages)
    return
  for bm, bn, bk, stages, consumers in itertools.product(
    (64, 128, 192, 256),
    (64, 128, 192, 256),
    (32, 64, 128),
    (1, 2, 4, 7),
    (1, 2),
  ):
    for split, epilogue, cluster in (
      ("m", 0, (1, 1)),
      ("m", 64, (1, 1)),
      ("n", 64, (1, 1)),
      ("m", 64, (2, 1)),
      ("m", 32, (1, 2)),
    ):
      yield TensorCoreConfig(
        bm,
        bn,
        bk,
        stages,
        consumers,
        split,
        epilogue,
        cluster_m=cluster[0],
        cluster_n=cluster[1],
      )
