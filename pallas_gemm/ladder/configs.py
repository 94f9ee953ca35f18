"""Tile sizes of a rung: of CUDA cores, and of tensor cores."""

from collections.abc import Sequence
import dataclasses


@dataclasses.dataclass(frozen=True)
class SimtConfig:
  """Tile sizes of an fp32 rung (1-8), in elements.

  Attributes:
    block_m: rows of the output block that one thread block computes.
    block_n: columns of that block.
    block_k: depth of one slab of A and B in shared memory (0: no slab, the
      rung reads global memory in its inner loop).
    thread_m: rows of the block that one thread holds in registers.
    thread_n: columns that one thread holds.
    vector: elements a thread moves with one load (4 floats = 128 bits).
    stages: slabs in flight between global and shared memory.
    raster: output blocks of one column strip visited together, so that
      thread blocks that run at the same time share operands in L2.
  """

  block_m: int
  block_n: int
  block_k: int = 0
  thread_m: int = 1
  thread_n: int = 1
  vector: int = 1
  stages: int = 1
  raster: int = 1


@dataclasses.dataclass(frozen=True)
class TensorCoreConfig:
  """Tile sizes of a tensor-core rung (9-13), in elements.

  Attributes:
    block_m: rows of the output tile that one thread block computes.
    block_n: columns of that tile.
    block_k: depth of one stage of A and B in shared memory.
    stages: stages of the ring between global and shared memory.
    consumers: warpgroups that issue wgmma; they share the tile.
    split: "m" or "n": which side of the tile the consumers share out.
    epilogue_n: columns of one subtile of the tile, on its way through shared
      memory to global memory (0: the tile is written whole).
    raster: tiles of `raster_dim` visited together before the other dimension
      advances (the width of the snake).
    raster_dim: "m" or "n".
    cluster_m: thread blocks of a cluster along M (they share a tile of B).
    cluster_n: thread blocks of a cluster along N (they share a tile of A).
  """

  block_m: int
  block_n: int
  block_k: int
  stages: int = 1
  consumers: int = 1
  split: str = "m"
  epilogue_n: int = 0
  raster: int = 1
  raster_dim: str = "n"
  cluster_m: int = 1
  cluster_n: int = 1


Config = SimtConfig | TensorCoreConfig
SIMT_FIELDS = tuple(f.name for f in dataclasses.fields(SimtConfig))
TENSOR_CORE_FIELDS = tuple(f.name for f in dataclasses.fields(TensorCoreConfig))


def check_fields(config: Config, uses: Sequence[str]) -> str | None:
  """The first field that the rung could not use, or None.

  The sizes of fp32 rungs are powers of two, whatever the rung.
  """
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if field.name not in uses:
      default = field.default
      if value != default or type(value) is not type(default):
        return (
          f"{field.name} has no meaning here and must stay {default!r},"
          f" got {value!r}"
        )
    elif field.name in ("split", "raster_dim"):
      if value not in ("m", "n"):
        return f"{field.name} must be 'm' or 'n', got {value!r}"
    elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
      return f"{field.name} must be an int >= 1, got {value!r}"
    elif value >= 2**31:
      return f"{field.name} must be less than 2**31, got {value}"
    elif isinstance(config, SimtConfig) and field.name != "raster":
      if value & (value - 1):
        return f"{field.name} must be a power of two, got {value}"
      # Slabs are released once what comes of the next has been loaded.
      if field.name == "stages" and value < 2:
        return f"stages must be at least 2, got {value}"
  return None
