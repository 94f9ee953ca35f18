"""What follows from a problem and a config, and which configs are refused."""

import dataclasses
import itertools
import math

from jax.experimental.pallas import mosaic_gpu as plgpu
import pytest

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import layout, legal, loaders, producer
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.loaders import Buffer
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import odd_sizes

SMALL = Config(block_m=64, block_n=64, stages=2, consumers=1)
NARROW = Config(block_m=64, block_n=96, stages=2, consumers=1, epilogue_n=32)
SWAPPED = dataclasses.replace(NARROW, block_n=48, epilogue_n=16, swap_ab=True)
IN_PARTS = dataclasses.replace(SMALL, cluster_k=4, epilogue_n=16)
PINGPONG = Config(block_m=64, block_n=64, stages=4, split="pingpong")


def plan(m, n, k, config=SMALL, **fields) -> Plan:
  known = {"dtype": "bfloat16", "out_dtype": "bfloat16"} | fields
  return Plan.of(Problem.flat(m=m, n=n, k=k, **known), config)


def test_a_plan_is_made_once_for_each_gpu():
  found = plan(4096, 4096, 4096)
  assert plan(4096, 4096, 4096) is found
  with hardware.assume("H100 PCIe") as gpu:
    assert (
      plan(4096, 4096, 4096).tiling.clusters
      <= gpu.sm_count
      < found.tiling.clusters
    )


def test_operands_that_are_swapped():
  """All is of the transposed problem, stored as the problem says."""
  found = plan(70, 600, 256, SWAPPED, bias="n", transpose_b=True)
  assert (found.problem.m, found.problem.n) == (600, 70)
  biases = found.problem.epilogue.bias, found.tiling.given.epilogue.bias
  assert biases == ("m", "n")
  assert found.tiling.grid == (10, 2)
  assert found.matrices.operand_shapes == ((600, 256), (70, 256))
  assert found.matrices.subtile_shape == (16, 64)
  assert found.matrices.result_shape == (70, 600)


def test_a_stored_along_m_is_transposed_if_operands_are_swapped():
  found = plan(200, 640, 704, SWAPPED, transpose_a=True)
  assert found.tiling.transposed == (False, True)
  assert found.problem.b.k_last
  assert found.matrices.operand_shapes[1] == (200, 704)
  into, _ = odd_sizes.copied_bytes(found)
  assert into == [2 * 2 * 200 * 704]
  assert plan(200, 640, 704, SMALL, transpose_a=True).tiling.transposed == (
    False,
    False,
  )


KINDS = {
  "dense": {"bias": "n", "c_dtype": "float32", "batch": 3},
  "gated": {"gated": True, "activation": "silu", "save_preactivation": True},
  "rows": {"ragged": "m", "groups": 4, "gated": True, "bias": "n"},
  "slabs": {"ragged": "k", "groups": 4, "transpose_a": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_allocated_is_what_is_accounted_for(kind):
  config = Config(block_n=64, stages=3, cluster_n=2)
  found = plan(4096, 4096, 4096, config, **KINDS[kind])
  types = found.memory.scratch_types("bfloat16")
  assert list(types) == list(found.memory.shared)
  size = 0
  for name, item in found.memory.shared.items():
    if not isinstance(item, Buffer):
      is_shared = isinstance(item, plgpu.ClusterBarrier)
      assert is_shared == (name == "empty")
      continue
    kinds = types[name]
    for x in kinds if isinstance(kinds, list) else [kinds]:
      assert bool(x.transforms) == bool(item.swizzle)
      size += math.prod(x.shape) * x.dtype.itemsize
  # But for barriers, and a bias in float32.
  assert size <= found.memory.shared_bytes <= size + 2048


@pytest.mark.parametrize(
  ("shape", "fields", "transposed", "copies"),
  (
    ((19, 640, 704), {"transpose_a": True}, (True, False), 1),
    ((640, 19, 704), {}, (False, True), 1),
    ((640, 19, 704), {"swap": True}, (True, False), 1),
    ((19, 640, 704), {}, (False, False), 0),
    # TMA can address these.
    ((24, 640, 704), {"transpose_a": True}, (False, False), 0),
    ((67, 640, 704), {"transpose_a": True}, (False, False), 1),
    # Two MiB and a little more.
    ((19, 640, 2**16), {"transpose_a": True}, (False, False), 1),
    # No copy.
    ((1, 640, 2**22), {"transpose_a": True}, (True, False), 0),
  ),
)
def test_short_rows_that_must_be_copied_are_transposed(
  shape, fields, transposed, copies
):
  fields = dict(fields)
  config = SWAPPED if fields.pop("swap", False) else SMALL
  found = plan(*shape, config, **fields)
  assert found.tiling.transposed == transposed
  into, _ = odd_sizes.copied_bytes(found)
  assert len(into) == copies


def test_results_stored_by_rows_are_not_padded():
  found = plan(64, 131, 64, dataclasses.replace(SMALL, block_n=128))
  assert found.tiling.by_rows
  assert found.matrices.result_shapes == [(64, 131)]


def test_bias_and_c_of_parts_of_k_are_not_the_kernels():
  config = dataclasses.replace(SMALL, split_k=2)
  found = plan(64, 64, 256, config, bias="n", c_dtype="bfloat16")
  assert not {"bias", "c", "c_loaded"} & set(found.memory.scratch_types())
  assert found.matrices.stored_dtype == "float32"


def test_what_is_loaded_of_a_tile():
  """Rows in steps of 8, of the last tile too, unless it is shared."""
  assert plan(200, 64, 64).tiling.loaded_a == (64, 8, 192)
  assert plan(9, 64, 64).tiling.loaded_a == (16, 16, 0)
  shared = dataclasses.replace(SMALL, cluster_n=2)
  assert plan(200, 64, 64, shared).tiling.loaded_a == (64, 64, 0)
  # Stored along K: columns of a tile are no part of shared memory by itself.
  assert plan(9, 64, 64).tiling.loaded_b == (64, 64, 0)
  assert plan(200, 70, 64, transpose_b=True).tiling.loaded_b == (64, 8, 64)


_ROWS = {"ragged": "m", "groups": 2}
_SLABS = {"ragged": "k", "groups": 2, "transpose_a": True}
_SAVED = {"activation": "silu", "save_preactivation": True}
_F32 = {"out_dtype": "float32"}

# What is asked of a config that is legal, of 64 x 256 x 256, and why not.
REFUSED = (
  (SWAPPED, {"gated": True, "activation": "silu"}, {}, "gated"),
  (SWAPPED, {"c_dtype": "float32"}, {}, "C of 16 bits, got float32"),
  (SWAPPED, _F32 | _SAVED, {}, "no pre-activation beside results in float32"),
  (SWAPPED, {}, {"split_k": 2}, "no split_k and no cluster"),
  (SWAPPED, {}, {"cluster_m": 2}, "no split_k and no cluster"),
  (SWAPPED, {}, {"cluster_k": 2}, "no split_k and no cluster"),
  (IN_PARTS, {}, {"cluster_k": 3}, "must be 1, 2, 4 or 8, got 3"),
  (IN_PARTS, {}, {"cluster_k": 8}, "must be in 1..4, got 8"),
  (IN_PARTS, {"transpose_b": True}, {"block_n": 40}, "in eights, got 4 for 40"),
  (IN_PARTS, {}, {"epilogue_n": 32}, "must divide 16"),
  (IN_PARTS, {}, {"cluster_m": 2}, "no other cluster"),
  (IN_PARTS, {}, {"split_k": 2}, "no other parts of K"),
  (IN_PARTS, _ROWS, {}, "no groups"),
  (NARROW, {}, {"epilogue_n": 128}, "must divide 96, or be less"),
  (NARROW, {}, {"epilogue_n": 8}, "must divide 96"),
  (NARROW, {}, {"epilogue_n": 48}, "16, 32 or a multiple of 64, got 48"),
  # 256 bytes of a row are two swizzle atoms, which do not start anywhere.
  (NARROW, _F32, {"epilogue_n": 64}, "128 bytes"),
  (NARROW, {"c_dtype": "float32"}, {"epilogue_n": 64}, "128 bytes"),
  (NARROW, {}, {"epilogue_n": 64, "split_k": 2}, "128 bytes"),
  (SMALL, {}, {"cluster_m": 2, "cluster_n": 2}, "1, 2 or 4 blocks"),
  (SMALL, {}, {"cluster_n": 3}, "1, 2 or 4 blocks"),
  (SMALL, {}, {"block_m": 512, "consumers": 2}, "at most 256"),
  (SMALL, {}, {"block_m": 320}, "one copy by TMA"),
  (SMALL, {}, {"block_n": 512, "consumers": 2, "split": "n"}, "at most 256"),
  # A slot that is refilled needs another, to be read in the meantime.
  (SMALL, {"k": 64}, {"stages": 1}, None),
  (SMALL, {"k": 65}, {"stages": 1}, "stages must be at least 2, got 1"),
  (SMALL, {"k": 64, "n": 1 << 16}, {"stages": 1}, "at least 2, got 1"),
  (PINGPONG, {"k": 128}, {}, None),
  (PINGPONG, {"k": 192}, {}, "with pingpong stages must be 6 or more, got 4"),
  (PINGPONG, {"k": 64}, {"stages": 3}, "of the consumers, at least two, got 3"),
  (PINGPONG, {"k": 64}, {"consumers": 1}, "at least two, got 4 and 1"),
  (PINGPONG, {"k": 128}, {"split_k": 2}, "pingpong takes no split_k, got 2"),
  (PINGPONG, {"k": 64}, {"split": "k"}, "m, n or pingpong, got 2 and 'k'"),
  (SMALL, _ROWS, {"split_k": 2}, "split_k"),
  (SMALL, _ROWS, {"cluster_m": 2}, "cluster_m"),
  (SMALL, _ROWS, {"block_k": 128}, "block_k"),
  (SMALL, _ROWS, {"epilogue_n": 32}, "epilogue_n"),
  (SMALL, _SLABS, {"block_n": 96}, "must divide 96"),
  (SMALL, _SLABS | {"m": 2**24}, {}, "at most 8388608 columns, got 16777216"),
  (SMALL, {"n": 2**30 + 1}, {}, "below 2^31 bytes, got 2147483650"),
  # A's atoms would be as narrow as B's, and A's copies two atoms wide.
  (SMALL, _ROWS | _F32, {"block_n": 32, "epilogue_n": 32}, "columns"),
)


@pytest.mark.parametrize(("config", "fields", "change", "reason"), REFUSED)
def test_what_a_config_does_not_do_is_said(config, fields, change, reason):
  of = {"m": 64, "n": 256, "k": 256} | fields
  changed = dataclasses.replace(config, **change)
  found = legal.reason(plan(**of, config=changed))
  assert found is None if reason is None else reason in found


def test_parts_of_k_in_a_cluster():
  """Each block has a part of the slabs, and of the columns that it stores."""
  found = plan(130, 200, 1000, IN_PARTS, bias="n")
  assert legal.reason(found) is None
  assert (found.tiling.grid, found.tiling.clusters, found.tiling.slabs) == (
    (3, 4),
    12,
    4,
  )
  assert found.tiling.work_tiles_of_a_block == 1
  assert (found.tiling.warpgroup_tile, found.tiling.stored_tile) == (
    (64, 64),
    (64, 16),
  )
  assert found.tiling.subtiles == ((0, 0),)
  parts = found.memory.shared["parts"]
  assert (parts.shape, parts.dtype) == ((1, 1, 4, 64 * 16), "float32")
  # Results that TMA can't store are padded.
  assert not plan(130, 201, 1000, IN_PARTS).tiling.by_rows


def test_tiles_overlap_where_rows_of_results_start_anywhere():
  config = dataclasses.replace(SMALL, block_n=128)
  for n, overlaps in ((256, False), (257, True)):
    found = plan(256, n, 64, config, transpose_b=True)
    assert found.tiling.tiles_overlap == overlaps


@pytest.mark.parametrize("block_k", (64, 128))
def test_copies_of_a_last_slab_make_up_any_number_of_blocks(block_k):
  """With the block that is left, of any number of rows that TMA copies."""
  sizes = layout.last_slab_copies(block_k)
  assert sum(sizes) + layout.ATOM_ROWS == block_k
  blocks = {sum(some) for some in _subsets(sizes)}
  assert blocks == set(range(0, block_k, layout.ATOM_ROWS))


def _subsets(sizes):
  return itertools.chain.from_iterable(
    itertools.combinations(sizes, count) for count in range(len(sizes) + 1)
  )


@pytest.mark.parametrize(
  ("fields", "changes", "moved"),
  [
    ({}, {}, (False, True)),
    ({"n": 256}, {}, (False, False)),  # whole atoms
    ({"n": 204}, {}, (False, False)),  # rows that TMA can't address
    ({"k": 204}, {}, (False, False)),  # no whole blocks of 8 rows
    ({"n": 112}, {}, (False, False)),  # less than a tile
    # Rows at odd multiples of 16 bytes: small ones are sooner copied.
    ({"n": 200}, {}, (False, False)),
    ({"n": 1000, "k": 4096}, {}, (False, True)),
    ({"transpose_b": True}, {}, (False, False)),  # rows along K
    ({"transpose_a": True, "m": 208}, {}, (True, True)),
    ({}, {"block_n": 64}, (False, False)),  # copies that are one atom wide
    ({"out_dtype": "float32"}, {}, (False, False)),  # subtiles that are wider
    ({"out_dtype": "float32"}, {"epilogue_n": 32}, (False, True)),
    ({}, {"split_k": 2, "epilogue_n": 32}, (False, True)),
    ({}, {"cluster_m": 2}, (False, True)),
    ({"batch": 3, "batched_a": True}, {}, (False, True)),
  ],
  ids=str,
)
def test_last_tiles_are_shifted_inward_rather_than_operands_padded(
  fields, changes, moved
):
  config = Config(**{"block_m": 128, "block_n": 128} | changes)
  found = plan(**{"m": 144, "n": 208, "k": 200} | fields, config=config)
  assert found.matrices.shifted_inward == moved
  for is_moved, shape, padded in zip(
    moved, found.matrices.operand_shapes, found.matrices.operand_paddings
  ):
    assert not is_moved or shape == padded


def test_groups_along_k_are_read_from_any_row():
  found = plan(
    70, 72, 203, ragged="k", groups=3, transpose_a=True, config=SMALL
  )
  assert [rows for rows, _ in found.matrices.operand_paddings] == [203, 203]
  last = found.memory.shared["last_full"]
  assert last.num_arrivals == 2 * (1 + len(layout.last_slab_copies(64)))


@pytest.mark.parametrize(
  ("fields", "changes", "pairs"),
  [
    ({}, {}, True),
    ({"m": 320}, {}, True),  # 80 rows a group
    ({"m": 400}, {}, False),  # 100: two row tiles
    ({"m": 400}, {"block_m": 128}, True),
    ({"m": 1200}, {"block_m": 256}, False),  # 300: the tensor cores bind
    ({"transpose_b": False}, {}, False),  # rows along N
    ({"k": 204}, {}, False),  # the last slab apart
    ({"k": 203}, {}, False),  # loaded by threads
    ({}, {"stages": 2}, False),  # the pair would wait for its second slot
    ({}, {"stages": 5, "split": "pingpong"}, False),
    ({}, {"stages": 6, "split": "pingpong"}, True),
  ],
  ids=str,
)
def test_slabs_of_weights_along_k_come_in_pairs_where_memory_binds(
  fields, changes, pairs
):
  config = Config(**{"block_m": 64, "block_n": 64, "stages": 3} | changes)
  of = {"m": 120, "n": 256, "k": 640, "transpose_b": True} | fields
  found = plan(**of, ragged="m", groups=4, config=config)
  assert producer.loads_pairs(found) == pairs


@pytest.mark.parametrize(
  ("fields", "changes", "kind"),
  [
    ({}, {}, loaders.Loader),
    ({"n": 204}, {}, loaders.Copies),  # rows of whole words
    ({"n": 203}, {}, loaders.Shifts),
    ({"k": 204, "transpose_b": True}, {}, loaders.Shifts),  # along K
    ({"n": 200}, {}, loaders.Loader),  # which TMA can address
    ({"n": 203, "k": 64}, {}, loaders.Loader),  # one slab, which is copied
    ({"n": 40, "k": 204}, {"block_n": 64}, loaders.Loader),  # less than a tile
    ({"n": 203}, {"cluster_n": 2}, loaders.Loader),
    ({"n": 203}, {"moves": True}, loaders.SlabShifts),
  ],
  ids=str,
)
def test_who_loads_weights_of_groups(fields, changes, kind):
  of = {"m": 120, "n": 256, "k": 640, "ragged": "m", "groups": 4} | fields
  found = plan(
    **of, config=dataclasses.replace(SMALL, **changes)
  ).matrices.loader
  assert type(found) is kind
  assert found.operands[1] == (kind is not loaders.Loader)
  assert (found.why_not is None) == (not changes.get("moves", False))


@pytest.mark.parametrize(
  ("fields", "changes", "evicts"),
  [
    ({}, {}, True),  # 134 MB
    ({"n": 4096}, {}, False),  # 67 MB, of an L2 of 52
    ({"n": 4096, "out_dtype": "float32"}, {"epilogue_n": 32}, True),
    ({"n": 4096, "batch": 2, "batched_a": True}, {}, True),
    ({}, {"split_k": 2, "epilogue_n": 32}, False),  # sums are read again
    ({"ragged": "m", "groups": 8}, {}, False),
    (
      {"m": 2048, "n": 2048, "ragged": "k", "groups": 8, "transpose_a": True},
      {},
      True,
    ),
  ],
  ids=str,
)
def test_results_of_more_than_the_l2_leave_it_first(fields, changes, evicts):
  config = Config(**{"block_m": 128, "block_n": 128} | changes)
  found = plan(**{"m": 8192, "n": 8192, "k": 256} | fields, config=config)
  assert found.matrices.evicts_results == evicts
