"""Why a rung can't run a config: reasons that several rungs have."""

from pallas_gemm import hardware
from pallas_gemm.ladder import contract


def at_most(what: str, value: int, most: int) -> str | None:
  """Reason if there are too many of something."""
  return f"{what}: {value}, at most {most}" if value > most else None


def at_least(what: str, value: int, least: int) -> str | None:
  """Reason if there are too few of something."""
  return f"{what}: {value}, at least {least}" if value < least else None


def block_is(
  config: contract.SimtConfig, rows: int, columns: int
) -> str | None:
  """Reason if the block is not what its threads make up."""
  got = config.block_m, config.block_n
  if got == (rows, columns):
    return None
  return (
    f"block_m x block_n must be {rows} x {columns} with thread_m x thread_n ="
    f" {config.thread_m} x {config.thread_n}, got {got[0]} x {got[1]}"
  )


def vectors_fit(
  config: contract.SimtConfig, consumers: int = 1, least_depth: int = 1
) -> str | None:
  """Reason if threads can't move and hold the tiles in vectors of 4.

  Args:
    config: the tile sizes.
    consumers: warpgroups that share out the block's columns.
    least_depth: of a slab.
  """
  rows, columns, depth = config.thread_m, config.thread_n, config.block_k
  if config.vector != 4 or min(rows, columns) < 4:
    return (
      "vector must be 4, and thread_m and thread_n at least that, got"
      f" {config.vector}, {rows} and {columns}"
    )
  if depth < least_depth:
    return f"block_k must be at least {least_depth}, got {depth}"
  if depth * config.block_n % 512:
    return (
      f"block_k * block_n must be a multiple of 512, got"
      f" {depth * config.block_n}"
    )
  return first(
    block_is(config, 8 * rows, 16 * columns * consumers),
    at_most("outputs a thread", rows * columns, 128),
    at_most("block_k", depth, 32),
    fits(4 * config.stages * depth * (config.block_m + config.block_n)),
  )


def fits(need: int) -> str | None:
  """Reason if a block can't have so many bytes of shared memory."""
  have = hardware.current().shared_bytes_per_block
  if need > have:
    return f"tiles need {need} bytes of shared memory, a block has {have}"
  return None


def first(*reasons: str | None) -> str | None:
  """The first reason that is one."""
  return next((r for r in reasons if r is not None), None)
