"""What the fitted constants are: a dataclass for each part of a file.

Each says what its constants mean; their values are in the JSON files beside
this one, a file a kind of GPU. What was measured of single ones, on an H200, is
told here.
"""

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Model:
  """Of `model`; cycles at `clock`, and microseconds.

  Attributes:
    clock: cycles a microsecond under load.
    mma: multiplication, as a part of the time at peak rate.
    columns: the same with columns shared out: shorter wgmmas read A again.
    small: what the smallest tile costs in clock, beside 128 x 256.
    third: the same with three consumers, as a multiple; tall: with more than
      64 rows a consumer.
    shared: shared memory, likewise.
    writes: part of TMA's writes that gets in the way of wgmma's reads.
    narrow: loads of atoms of 32 columns, as a multiple of those of 64.
    narrow_dram, narrow_mma: the same for device memory, and for wgmma.
    swapped: multiplication and device memory where operands are swapped;
      streams: device memory with 256 columns a tile, slabs of 128, or a batch
      of few rows;
      scattered: as much more for what of it are results.
    deep: device memory with slabs of 128 of [N, K], in several rounds.
    leaving: part of the peak rate of device memory at which the results of a
      single round leave, all at once.
    l2: bytes a cycle and SM from L2; barrier: cycles of a slab's barriers;
      share_m, share_n: as many more where blocks along M, or N, share it.
    arrival: cycles until a slab that is asked for has arrived.
    epilogue: microseconds until the first results leave.
    store: bytes a microsecond and SM of results.
    subtile: microseconds for each subtile of a consumer's tile.
    activation, with_c: the epilogue with an activation and with C, as
      multiples; by_rows: stored row by row in whole sectors, likewise, but what
      it adds is added. cut: microseconds for each row of a tile, or of a
      consumer's share, whose last sector another one ends.
    hidden: part of the epilogue that the next work tile does not hide.
    packed: microseconds of the epilogue where results are stored beside the
      next work tile's slabs; of 128 x 256 results, besides, applied: of an
      activation; added: of C; ahead: of C in buffers of its own; wide: of twice
      the bytes; saved: of two results.
    awaited: microseconds in which C arrives; drain: in which 128 x 256 results
      of 16 bits leave, beside the slabs of a work tile; busy: with an
      activation they leave beside one part of the slabs in so many.
    pingpong: microseconds of the epilogue of 128 x 256 results where consumers
      ping-pong; pingpong_applied, pingpong_added: of an activation and of C,
      besides.
    slivers: microseconds that a subtile of 16 columns holds up one consumer.
    dram: part of the peak rate of device memory.
    blend: exponent of the sum of overlapping parts.
    launch: microseconds until the first block runs and after the last ends.
    reduce: microseconds of the kernel that sums partial products.
    reduce_rate: its bytes a microsecond.
    exchange: microseconds in which two blocks of a cluster wait for each
      other's sums of parts of K, four or eight half as much longer each time;
      exchange_rate: bytes a microsecond that one sends.
    apart: loads from L2, as a multiple, where blocks of a cluster sum parts of
      K: those at the same rows of K are further apart.
  """

  clock: float
  mma: float
  small: float
  third: float
  tall: float
  columns: float
  shared: float
  writes: float
  narrow: float
  narrow_dram: float
  narrow_mma: float
  swapped: float
  streams: float
  scattered: float
  deep: float
  leaving: float
  share_m: float
  share_n: float
  l2: float
  barrier: float
  arrival: float
  epilogue: float
  store: float
  subtile: float
  activation: float
  with_c: float
  by_rows: float
  cut: float
  hidden: float
  packed: float
  applied: float
  added: float
  ahead: float
  wide: float
  saved: float
  awaited: float
  drain: float
  busy: float
  pingpong: float
  pingpong_applied: float
  pingpong_added: float
  slivers: float
  dram: float
  blend: float
  launch: float
  reduce: float
  reduce_rate: float
  exchange: float
  exchange_rate: float
  apart: float


@dataclasses.dataclass(frozen=True)
class OddSizes:
  """Of `odd_sizes`.

  8192^2 x 336 NT takes 75.0 us, x 328 110.3, and 82.5 where blocks of a cluster
  share what straddles sectors. Such results are written at half the rate: 8192
  x 8208 x 128 NT 41.8 us, 8192 x 8200 x 128 61.3.

  Attributes:
    copy: microseconds of a copy into or out of padded matrices.
    copy_rate: its bytes a microsecond, into them.
    slice_of_1, slice_of_2, slice_of_4: the same out of them. A thread of XLA's
      kernels writes as many results at a time, up to four, as divide their
      number: 4097^2 are copied at 0.8 TB/s, 2048 x 50257 at 2.8.
    odd_sums: to add an odd number of partial sums, as a multiple.
    misaligned: loads of rows that do not start at multiples of 128 bytes, as a
      multiple; straddling: of rows that start at odd multiples of 16, and so
      straddle sectors of 32, four cycles each.
    by_copies, by_moves: loads of B by threads, as a multiple (`weights`); of
      such that are moved, for each 128 columns that are begun. beside: what of
      the shorter loads is added to the longer ones, of TMA and of threads.
    straddling_results: device memory's time for such results, as a multiple,
      if they are stored 128 bytes of a row at a time.
    short: cycles that a slab takes longer where rows of a matrix that is stored
      along N or M are shorter than 128 bytes; uneven: and no multiples of 32.
    move, move_row: cycles that a slab takes longer for an operand that threads
      bring (`moves`), and for each 128 bytes of a row of it.
    element_rate: bytes a microsecond of results that threads store from
      registers, in runs of 16 bytes.
  """

  copy: float
  copy_rate: float
  slice_of_1: float
  slice_of_2: float
  slice_of_4: float
  odd_sums: float
  misaligned: float
  straddling: float
  by_copies: float
  by_moves: float
  beside: float
  straddling_results: float
  short: float
  uneven: float
  move: float
  move_row: float
  element_rate: float


@dataclasses.dataclass(frozen=True)
class Xla:
  """Of `xla`: seconds, and rates as parts of the peak of device memory.

  Attributes:
    least_gain: part of XLA's predicted time that the kernel may take.
    most, most_beside: a multiple and seconds, what rows of odd lengths may cost
      where XLA has a kernel for them. Small products take it longer: 256 x 512
      x 784 with bias 10.1 us (3.6 here), 128 x 160 x 5120 6.8 (4.9), 128 x 1000
      x 2048 7.1 (6.3).
    launch, per_k, flops: its kernels for rows that do not start at multiples of
      16 bytes: a launch, what a step of K waits for, and FLOP a second. Within
      11 % (mean) of 14 products of up to 60 us, hence `least_gain`. words: part
      of that where all start at multiples of 4 bytes, which are loaded as
      words: above what 22 of 24 such products took it.
    short_launch, one_step_launch, short_rate: its kernels where rows are short,
      for a sum over K that is cut in parts, and for K below 32. Within 11 %
      (mean) of 39 products. short_per_k: what a step of K takes longer: 3 x 256
      x 32000 TN 21.3 us, 11.8 here (H100). short_most_k: up to which K: it has
      more parts of longer sums, 16 x 16 x 262144 9.6 us, 11.7 here (H100).
      short_padded: what padding K takes longer, which it does from padded_k on
      if that is no multiple of 64: 48 x 56 x 6424 TN 8.6 us, this kernel 4.9
      (H100).
    split_k, split_tiles: K from which, and tiles of 128 x 128 an SM up to
      which, it cuts sums in parts and pads: 1000^3 it does not, 760 x 728 x
      2960 it does (7 and 20 us, H200).
    few_odd_rows: of few rows of A that are stored as columns and start at
      multiples of 4 bytes, what they take of the time that launch, steps of K
      and bytes do: regrets least of 51 products of an H100 and 13 of an H200.
      few_rows: how many are few; few_flops: FLOP a second of their products.
    epilogue_launch, epilogue_rate: what follows a product it computes in a
      kernel of its own, from float32 sums: a launch, and eight bytes a result,
      much of which stays in L2. (`jnp.dot(a, b) + bias`, which rounds the
      product first, is one kernel.) That is 0.4 to 1.3 times what nine products
      took longer for a bias or C.
    few_results: up to which its kernel for a sum of one slab, and no more than
      that, is done sooner: it has no barriers to make ready and no ring to
      fill. 13 of 14 such products took it 1 to 45 % less, 1.3 to 2.7 us. With
      an epilogue they are faster here, and some larger ones: 1024 x 1024 x 64
      takes 2.75 us, XLA 2.9; 1024 times 32^3 4.3 and 3.0.
    few_short_results: the same where rows are short as well, of A or B along a
      K below 64, or of a result of fewer than 64 columns: XLA took 8 to 45 %
      less for 13 of 13 products of up to 3.3 million results, up to 14 % more
      for 4096 x 4096 x 32.
    vector_launch, vector_rate: its reduction for a vector times a matrix stored
      along K. Within 23 % of 18 products of 0.5 to 50 MB, 7 % in the mean;
      along N it takes up to five times as long.
    fewest_wide_slabs, most_wide_slabs, wide_work_tiles, wide_results: slabs of
      64, the fewest work tiles a block, and more results than so many, with
      which its kernels, whose consumers ping-pong at sums of any length, are
      faster if results are float32: only half of those find room to wait in
      registers here. 20 of 23 such products took XLA 0.2 to 15 % less, the
      others up to 4 % more.
  """

  least_gain: float
  most: float
  most_beside: float
  launch: float
  per_k: float
  flops: float
  words: float
  short_launch: float
  one_step_launch: float
  short_per_k: float
  short_most_k: float
  short_padded: float
  short_rate: float
  padded_k: float
  split_k: float
  split_tiles: float
  few_odd_rows: float
  few_rows: float
  few_flops: float
  epilogue_launch: float
  epilogue_rate: float
  few_results: float
  few_short_results: float
  vector_launch: float
  vector_rate: float
  fewest_wide_slabs: float
  most_wide_slabs: float
  wide_work_tiles: float
  wide_results: float


@dataclasses.dataclass(frozen=True)
class Stages:
  """Of `stages`; seconds.

  Attributes:
    streamed_rows: up to which a product takes as long as its weights take to
      arrive.
    answer: until memory has answered: 6.7 MB on an H200. The fastest config has
      5.9 to 7.9 MB on its way, beside the slab that is multiplied, in 20 of 24
      problems of 16 to 128 rows; in two more no further stage fits. 64 x 6144 x
      4096 14.5 -> 13.8 us, 128 x 8192 x 28672 113.7 -> 110.5.
    even_answer: the same where each SM has a block or more, counting what no
      other block asks for: 82 KB an SM. Batches with all stages that find room:
      64 of 512 x 64 x 512 11.3 -> 10.9 us, 96 15.7 -> 15.1, 32 of 1 x 8192 x
      128 (NT) 18.0 -> 17.3; the worst of 35 configs is 0.8 % slower.
    most_uneven: blocks for each pair of SMs from which on all have as much to
      do; below it, and with more than one, some pairs have one and some two.
  """

  streamed_rows: float
  answer: float
  even_answer: float
  most_uneven: float


@dataclasses.dataclass(frozen=True)
class Grouped:
  """Of `grouped`.

  Attributes:
    l2: bytes a cycle and SM from L2 where blocks that run at a time read
      different groups' B. Tiles of 128 x 256 then suit 100 rows a group and
      more: 160 groups of 205 rows, 5120 x 1536 weights, 1209 -> 862 us; 64 of
      128, 7168 x 2048, 684 -> 577.
    tall: device memory along K with tiles of more than 64 rows, as a multiple.
      64 groups of 128 rows, 7168 x 2048 results: 893 us with 128 x 256, 762
      with 64 x 128, 767 with 64 x 256 (H100). Why is not known.
  """

  l2: float
  tall: float


@dataclasses.dataclass(frozen=True)
class Constants:
  """All of a kind of GPU, for operands of one width."""

  model: Model
  odd_sizes: OddSizes
  xla: Xla
  stages: Stages
  grouped: Grouped

  @functools.cached_property
  def of_groups_of_rows(self) -> "Constants":
    """The same where each group of rows reads a B of its own."""
    model = dataclasses.replace(self.model, l2=self.grouped.l2)
    return dataclasses.replace(self, model=model)

  @functools.cached_property
  def of_tall_tiles_along_k(self) -> "Constants":
    """The same for groups along K, and tiles of more than 64 rows."""
    dram = self.model.dram / self.grouped.tall
    model = dataclasses.replace(self.model, dram=dram)
    return dataclasses.replace(self, model=model)
