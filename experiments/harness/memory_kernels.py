"""Small kernels that touch one level of the memory hierarchy, and their data.

`chase` and `chase_shared` take one step after another along a ring: each load
waits for the one before, whose result is its address. `read` and `read_shared`
load tiles again and again, 128 bits a thread; `copy` moves an array once.

Trip counts are arguments: one kernel serves any length, and no compiler can
take a loop apart. So is the number of tiles, without which the loads of a ring
of few tiles would be the same in each round, and leave the loop.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_gemm import compat
from pallas_gemm.ladder.register_layouts import LANE, THREADS

WORD_BYTES = 4
LINE_BYTES = 128
LINE_WORDS = LINE_BYTES // WORD_BYTES
# A load instruction of 128 bits takes a vector of the warpgroup, and a step of
# `read` a tile: eight loads on their way at once.
VECTOR = 4 * THREADS
LOADS = 8
TILE = LOADS * VECTOR
TILE_BYTES = TILE * WORD_BYTES
# Blocks begin so many tiles apart. Where 8 blocks share an SM, none meets in L1
# what another has just brought there, whichever way blocks are dealt to SMs.
_APART = 37
_VECTOR_LAYOUT = plgpu.Layout.WG_STRIDED((VECTOR,), vec_size=4)


def order(lines: int, seed: int) -> np.ndarray:
  """The order in which a chase visits the lines: from line 0, at random."""
  others = np.arange(1, lines, dtype=np.int32)
  others = np.random.default_rng(seed).permutation(others)
  return np.concatenate([np.zeros(1, np.int32), others])


def ring(visits: np.ndarray, lines: int) -> jax.Array:
  """int32 [lines * LINE_WORDS]: the first word of a line says where to go on.

  Args:
    visits: each line of the ring once, in order.
    lines: of the array; those beyond the ring are never read.
  """
  following = np.zeros(lines, np.int32)
  following[visits] = np.roll(visits, -1) * LINE_WORDS
  return _spread(following)


@jax.jit
def _spread(following):
  # On the device: a ring of GiB is but MiB of links.
  return jnp.pad(following[:, None], ((0, 0), (0, LINE_WORDS - 1))).reshape(-1)


def end(visits: np.ndarray, steps: int) -> int:
  """The word that a chase of so many steps arrives at."""
  return int(visits[steps % len(visits)]) * LINE_WORDS


@jax.jit
def chase(links: jax.Array, steps: jax.Array) -> jax.Array:
  """int32 [THREADS], all alike: where `steps` [1] steps through GMEM lead."""

  def body(links_ref, steps_ref, out_ref):
    out_ref[...] = _walk(links_ref, steps_ref[0])

  return _one_block(body, "chase")(links, steps)


@jax.jit
def chase_shared(links: jax.Array, steps: jax.Array) -> jax.Array:
  """`chase` through a copy of the links in shared memory."""

  def body(links_ref, steps_ref, out_ref, shared):
    shared[...] = _load(links_ref, _whole(links))
    out_ref[...] = _walk(shared, steps_ref[0])

  scratch = (plgpu.SMEM(links.shape, links.dtype),)
  return _one_block(body, "chase_shared", scratch)(links, steps)


def _walk(ref: Any, steps: jax.Array) -> jax.Array:
  at = lax.fori_loop(0, steps, lambda _, at: ref[at], jnp.int32(0))
  return jnp.full((THREADS,), at)


def _one_block(body: Callable, name: str, scratch: tuple = ()) -> Callable:
  return compat.kernel(
    body,
    name=name,
    out_type=jax.ShapeDtypeStruct((THREADS,), jnp.int32),
    grid=(1,),
    grid_names=("block",),
    scratch_types=scratch,
    compiler_params=LANE,
  )


@functools.partial(jax.jit, static_argnames="blocks")
def read(words: jax.Array, steps: jax.Array, *, blocks: int) -> jax.Array:
  """Each block sums tiles of GMEM, one a step, round and round.

  Args:
    words: int32, a power of two of tiles.
    steps: int32 [2], steps and the number of tiles less one.
    blocks: thread blocks.

  Returns:
    int32 [blocks, VECTOR]: sums, modulo 2^32, of the words of whole vectors.
  """

  def body(words_ref, steps_ref, out_ref):
    _sum_tiles(words_ref, steps_ref, out_ref)

  return _all_blocks(body, "read", blocks)(words, steps)


@functools.partial(jax.jit, static_argnames="blocks")
def read_shared(
  words: jax.Array, steps: jax.Array, *, blocks: int
) -> jax.Array:
  """`read` from a copy of the words in each block's shared memory."""

  def body(words_ref, steps_ref, out_ref, shared):
    shared[...] = _load(words_ref, _whole(words))
    _sum_tiles(shared, steps_ref, out_ref)

  scratch = (plgpu.SMEM(words.shape, words.dtype),)
  return _all_blocks(body, "read_shared", blocks, scratch)(words, steps)


def _sum_tiles(ref: Any, steps_ref: Any, out_ref: Any) -> None:
  block, last = lax.axis_index("block"), steps_ref[1]

  def step(s, total):
    tile = (block * _APART + s) & last
    starts = [
      pl.multiple_of(tile * TILE + i * VECTOR, VECTOR) for i in range(LOADS)
    ]
    loaded = [_load(ref.at[pl.ds(at, VECTOR)], _VECTOR_LAYOUT) for at in starts]
    # Pairwise: the loop carries one sum, and no load waits for another's.
    while len(loaded) > 1:
      loaded = [a + b for a, b in zip(loaded[::2], loaded[1::2], strict=True)]
    return total + loaded[0]

  zero = plgpu.layout_cast(jnp.zeros((VECTOR,), jnp.int32), _VECTOR_LAYOUT)
  compat.store(out_ref.at[block], lax.fori_loop(0, steps_ref[0], step, zero))


def _all_blocks(
  body: Callable, name: str, blocks: int, scratch: tuple = ()
) -> Callable:
  return compat.kernel(
    body,
    name=name,
    out_type=jax.ShapeDtypeStruct((blocks, VECTOR), jnp.int32),
    grid=(blocks,),
    grid_names=("block",),
    scratch_types=scratch,
    compiler_params=LANE,
  )


def sums(words: np.ndarray, rounds: int) -> np.ndarray:
  """int32 [VECTOR]: what each block of `read` gives after whole rounds."""
  total = words.reshape(-1, VECTOR).sum(0, dtype=np.int64) * rounds
  return total.astype(np.int32)  # modulo 2^32, as the kernel


@jax.jit
def copy(words: jax.Array) -> jax.Array:
  """The same int32 words, copied a tile a block by way of registers."""

  def body(words_ref, out_ref):
    at = pl.ds(lax.axis_index("block") * TILE, TILE)
    tile = plgpu.Layout.WG_STRIDED((TILE,), vec_size=4)
    compat.store(out_ref.at[at], _load(words_ref.at[at], tile))

  return compat.kernel(
    body,
    name="copy",
    out_type=jax.ShapeDtypeStruct(words.shape, words.dtype),
    grid=(words.size // TILE,),
    grid_names=("block",),
    compiler_params=LANE,
  )(words)


def _whole(words: jax.Array) -> Any:
  return plgpu.Layout.WG_STRIDED(words.shape, vec_size=4)


def _load(ref: Any, layout: Any) -> jax.Array:
  return plgpu.load(ref, layout=layout)


def example(name: str, words: int, blocks: int | None = None):
  """A kernel as a function, and its arguments; see `compiled`."""
  kernel = {
    f.__name__: f for f in (chase, chase_shared, read, read_shared, copy)
  }
  data = jax.ShapeDtypeStruct((words,), jnp.int32)
  if name == "copy":
    return copy, [data]
  if blocks is None:
    return kernel[name], [data, jax.ShapeDtypeStruct((1,), jnp.int32)]
  steps = jax.ShapeDtypeStruct((2,), jnp.int32)
  return functools.partial(kernel[name], blocks=blocks), [data, steps]
