"""What the fitted constants are: a dataclass for each part of a file.

Each says what its constants mean; their values are in the JSON files of this
folder, a file a kind of GPU. What is measured of single ones is of an H200, if
nothing else is said.
"""

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Model:
  """Of `model`; cycles at `clock`, and microseconds.

  Attributes:
    clock: cycles a microsecond under load.
    mma: multiplication, as a part of the time at peak rate.
    small: what the smallest tile costs in clock, more than 128 x 256.
    mma_three_consumers, mma_many_rows: multiplication, as a multiple, with
      three consumers, and with more than 64 rows a consumer.
    columns: the same with columns shared out: shorter wgmmas read A again.
    shared: shared memory, likewise.
    writes: part of TMA's writes that gets in the way of wgmma's reads.
    narrow, narrow_dram, narrow_mma: loads of atoms of 32 columns, as a multiple
      of those of 64; device memory and wgmma of these.
    swapped: multiplication and device memory where operands are swapped.
    streams: device memory with 256 columns a tile, slabs of 128, or a batch of
      few rows, where operands are swapped.
    scattered: as much more of that for what are results.
    deep: device memory with slabs of 128 of [N, K], in several rounds.
    leaving: part of the peak rate of device memory at which the results of a
      single round leave, all at once.
    share_m, share_n: cycles of a slab's barriers where blocks along M, or N,
      share it, more than `barrier`.
    l2: bytes a cycle and SM from L2.
    barrier: cycles of a slab's barriers.
    arrival: cycles until a slab that is asked for has arrived.
    epilogue: microseconds until the first results leave.
    store: bytes a microsecond and SM of results.
    subtile: microseconds for each subtile of a consumer's tile.
    activation, with_c: the epilogue with an activation and with C, as
      multiples.
    by_rows: stored row by row in whole sectors, likewise, but added.
    cut: microseconds for each row of a tile, or of a consumer's part of it,
      whose last sector another one ends.
    hidden: part of the epilogue that the next work tile does not hide.
    deferred_us: microseconds of the epilogue where results are stored while the
      next work tile is multiplied. Of 128 x 256 results, more than that:
      applied, added, c_buffered_us, wide, saved: microseconds of an activation;
      of C; of C in buffers of its own; of twice the bytes; of two results.
    c_latency_us: microseconds in which C arrives.
    drain: microseconds in which 128 x 256 results of 16 bits leave, while a
      work tile is multiplied.
    busy: with an activation they leave during one part of that in so many.
    pingpong, pingpong_applied, pingpong_added: microseconds of the epilogue of
      128 x 256 results where consumers ping-pong; of an activation and of C.
    narrow_subtile_us: microseconds that a subtile of 16 columns holds up one
      consumer.
    dram: part of the peak rate of device memory.
    blend: exponent of the sum of overlapping parts.
    launch: microseconds until the first block runs and after the last ends.
    reduce: microseconds of the kernel that sums partial products.
    reduce_rate: its bytes a microsecond.
    exchange: microseconds in which two blocks of a cluster wait for each
      other's sums of parts of K; four or eight half as much longer each time.
    exchange_rate: bytes a microsecond that one sends.
    l2_cluster_k: loads from L2, as a multiple, where blocks of a cluster sum
      parts of K: those at the same rows of K are further from each other.
  """

  clock: float
  mma: float
  small: float
  mma_three_consumers: float
  mma_many_rows: float
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
  deferred_us: float
  applied: float
  added: float
  c_buffered_us: float
  wide: float
  saved: float
  c_latency_us: float
  drain: float
  busy: float
  pingpong: float
  pingpong_applied: float
  pingpong_added: float
  narrow_subtile_us: float
  dram: float
  blend: float
  launch: float
  reduce: float
  reduce_rate: float
  exchange: float
  exchange_rate: float
  l2_cluster_k: float


@dataclasses.dataclass(frozen=True)
class OddSizes:
  """Of `odd_sizes`.

  Attributes:
    copy: microseconds of a copy into or out of padded matrices.
    copy_rate: its bytes a microsecond, into them.
    slice_of_1, slice_of_2, slice_of_4: the same out of them. A thread of XLA's
      kernels writes as many results at a time, up to four, as divide their
      number: 4097^2 are copied at 0.8 TB/s, 2048 x 50257 at 2.8.
    odd_sums: to add an odd number of partial sums, as a multiple.
    misaligned: loads of rows that do not start at multiples of 128 bytes, as a
      multiple.
    straddling: of rows that start at odd multiples of 16, and so straddle
      sectors of 32, four cycles each: 8192^2 x 336 NT 75.0 us, x 328 110.3.
    by_copies, by_moves: loads of B by threads, as a multiple (`by_threads`); of
      those that are moved, for each 128 columns that are begun.
    shorter_loads: of loads by TMA and by threads at the same time, what of the
      shorter is added to the longer.
    straddling_results: device memory's time for results that straddle sectors,
      as a multiple, if they are stored 128 bytes of a row at a time: 8192 x
      8208 x 128 NT 41.8 us, 8192 x 8200 x 128 61.3.
    short: cycles that a slab takes longer where rows of a matrix that is stored
      along N or M are shorter than 128 bytes.
    uneven: and no multiples of 32.
    threads_cycles, threads_row_cycles: cycles that a slab takes longer for an
      operand that threads load, and for each 128 bytes of a row of it.
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
  shorter_loads: float
  straddling_results: float
  short: float
  uneven: float
  threads_cycles: float
  threads_row_cycles: float
  element_rate: float


@dataclasses.dataclass(frozen=True)
class Xla:
  """Of `xla`: seconds, and rates as parts of the peak of device memory.

  Attributes:
    least_gain: part of XLA's predicted time that the kernel may take.
    most, most_added_s: a multiple and seconds, what rows of no whole atoms may
      cost where XLA has a kernel for them. Small products take it longer: 128 x
      160 x 5120 6.8 us, 4.9 here.
    launch, per_k, flops: its kernels for rows that do not start at multiples of
      16 bytes: a launch, what a step of K waits for, and FLOP a second. Within
      11 % (mean) of 14 products of up to 60 us, hence `least_gain`.
    words: part of that where all start at multiples of 4 bytes, which are
      loaded as words.
    short_launch, one_step_launch, short_rate: its kernels where rows are short,
      for a sum over K that is cut in parts, and for K below 32. Within 11 %
      (mean) of 39 products.
    short_per_k: what a step of K takes longer: 3 x 256 x 32000 TN 21.3 us, 11.8
      here (H100).
    short_most_k: up to which K: it has more parts of longer sums.
    short_padded, padded_k: what padding K takes longer, which it does from
      padded_k on if that is no multiple of 64: 48 x 56 x 6424 TN 8.6 us, 4.9
      here (H100).
    split_k, split_tiles: K from which, and tiles of 128 x 128 an SM up to
      which, it cuts sums in parts and pads: 1000^3 it does not, 760 x 728 x
      2960 it does (7 and 20 us, H200).
    few_odd_rows: of few rows of A that are stored as columns and start at
      multiples of 4 bytes, what they take of the time that launch, steps of K
      and bytes do: regrets least of 51 products of an H100 and 13 of an H200.
    few_rows, few_flops: how many are few; FLOP a second of their products.
    epilogue_launch, epilogue_rate: its epilogue, a kernel of its own, from
      float32 sums: a launch, and eight bytes a result, much of which stays in
      L2. (`jnp.dot(a, b) + bias`, which rounds the product first, is one
      kernel.) Nine products took 0.4 to 1.3 times that for a bias or C.
    few_results: up to which its kernel for a sum of one slab is done sooner: it
      has no barriers to make ready and no ring to fill. 13 of 14 of these
      products took it 1 to 45 % less. With an epilogue they are faster here.
    few_short_results: the same where rows are short as well, of A or B along a
      K below 64, or of a result of fewer than 64 columns: 8 to 45 % less for 13
      of 13 products of up to 3.3 million results.
    least_float32_gain: as least_gain, of products in planes: of those 56 that
      it leaves to the kernel none took XLA less than 0.99 of its time.
    float32_launch, float32_per_k, float32_most_k, float32_flops, float32_rate:
      its product at HIGHEST, on CUDA cores: a launch, what a step of K waits
      for, up to which K, and parts of the peaks of float32 and of device
      memory. Within 13 % (mean) of 56 products of an H100.
    float32_x3: how many times as fast it is at BF16_BF16_F32_X3: four large
      products 2.3, 3.3, 3.7 and 4.2.
    vector_launch, vector_rate: its reduction for a vector times a matrix stored
      along K. Within 23 % of 18 products of 0.5 to 50 MB, 7 % in the mean.
  """

  least_gain: float
  most: float
  most_added_s: float
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
  least_float32_gain: float
  float32_launch: float
  float32_per_k: float
  float32_most_k: float
  float32_flops: float
  float32_rate: float
  float32_x3: float
  vector_launch: float
  vector_rate: float


@dataclasses.dataclass(frozen=True)
class Stages:
  """Of `stages`; seconds.

  Attributes:
    streamed_rows: up to which a product takes as long as its weights take to
      arrive.
    latency_s: until memory has answered: 6.7 MB on an H200. The fastest config
      has 5.9 to 7.9 MB on its way, and the slab that is multiplied, in 20 of 24
      problems of 16 to 128 rows. 64 x 6144 x 4096 14.5 -> 13.8 us.
    even_latency_s: the same where each SM has a block or more, counting what no
      other block asks for: 82 KB an SM. The worst of 35 configs is 0.8 % slower
      than with all stages that find room.
    most_uneven: blocks for each pair of SMs from which on all have as much to
      do; below it, and with more than one, some pairs have one and some two.
  """

  streamed_rows: float
  latency_s: float
  even_latency_s: float
  most_uneven: float


@dataclasses.dataclass(frozen=True)
class Grouped:
  """Of `grouped`.

  Attributes:
    l2: bytes a cycle and SM from L2 where blocks that run at a time read
      different groups' B. Tiles of 128 x 256 then suit 100 rows a group and
      more: 64 groups of 128 rows, 7168 x 2048 weights, 684 -> 577 us.
    dram_many_rows: device memory along K with tiles of more than 64 rows, as a
      multiple. 64 groups of 128 rows, 7168 x 2048 results: 893 us with 128 x
      256, 767 with 64 x 256 (H100). Why is not known.
  """

  l2: float
  dram_many_rows: float


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
  def of_many_rows_along_k(self) -> "Constants":
    """The same for groups along K, and tiles of more than 64 rows."""
    dram = self.model.dram / self.grouped.dram_many_rows
    model = dataclasses.replace(self.model, dram=dram)
    return dataclasses.replace(self, model=model)
