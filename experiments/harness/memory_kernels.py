"""Small kernels that touch one level of the memory hierarchy, and their data.

How often to load is an argument: one kernel serves any length, and no compiler
can take a loop apart. So is the number of tiles: loads of a ring of few tiles
would else be the same in each round, and leave the loop.
"""

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

WORD_BYTES, LINE_BYTES = 4, 128
LINE_WORDS = LINE_BYTES // WORD_BYTES
# A load instruction of 128 bits takes a vector of the warpgroup, and a step of
# `read` a tile: eight loads on their way at once.
VECTOR = 4 * THREADS
LOADS = 8
TILE = LOADS * VECTOR
TILE_BYTES = TILE * WORD_BYTES
# Blocks start so many tiles apart: of 8 blocks that share an SM none meets in
# L1 what another has just loaded, whichever way blocks are dealt to SMs.
_APART = 37


def order(lines: int, seed: int) -> np.ndarray:
  """The order in which a chase visits the lines: from line 0, at random."""
  others = np.random.default_rng(seed).permutation(lines - 1) + 1
  return np.concatenate([[0], others]).astype(np.int32)


def ring(visits: np.ndarray, lines: int) -> jax.Array:
  """int32 [lines * LINE_WORDS]: the first word of a line says where to go on.

  Lines that are not visited are never read.
  """
  links = np.roll(visits, -1) * LINE_WORDS
  # On the device: a ring of GiB is but MiB of links.
  words = jnp.zeros((lines, LINE_WORDS), jnp.int32)
  return words.at[visits, 0].set(links).reshape(-1)


def end(visits: np.ndarray, steps: int) -> int:
  """The word that a chase of so many steps arrives at."""
  return int(visits[steps % len(visits)]) * LINE_WORDS


@functools.partial(jax.jit, static_argnames="shared")
def chase(
  links: jax.Array, steps: jax.Array, *, shared: bool = False
) -> jax.Array:
  """int32 [THREADS], all alike: where steps [1] along the links lead.

  `shared`: goes through a copy of the links in shared memory.
  """

  def body(links_ref, steps_ref, out_ref):
    at = lax.fori_loop(0, steps_ref[0], lambda _, x: links_ref[x], jnp.int32(0))
    out_ref[...] = jnp.full((THREADS,), at)

  return _launch("chase", body, (THREADS,), 1, (links, steps), shared)


@functools.partial(jax.jit, static_argnames=("blocks", "shared"))
def read(
  words: jax.Array, steps: jax.Array, *, blocks: int, shared: bool = False
) -> jax.Array:
  """Each block sums tiles, one a step, round and round.

  Args:
    words: int32, a power of two of tiles.
    steps: int32 [2], steps and the number of tiles less one.
    blocks: thread blocks.
    shared: reads a copy of the words in each block's shared memory.

  Returns:
    int32 [blocks, VECTOR]: sums, modulo 2^32, of the words of whole vectors.
  """
  layout = plgpu.Layout.WG_STRIDED((VECTOR,), vec_size=4)

  def body(words_ref, steps_ref, out_ref):
    block, last = lax.axis_index("block"), steps_ref[1]

    def step(s, total):
      tile = (block * _APART + s) & last
      starts = [
        pl.multiple_of(tile * TILE + i * VECTOR, VECTOR) for i in range(LOADS)
      ]
      loaded = [_load(words_ref.at[pl.ds(at, VECTOR)]) for at in starts]
      # Pairwise: the loop carries one sum, and no load waits for another's.
      while len(loaded) > 1:
        loaded = [a + b for a, b in zip(loaded[::2], loaded[1::2], strict=True)]
      return total + loaded[0]

    zero = plgpu.layout_cast(jnp.zeros((VECTOR,), jnp.int32), layout)
    compat.store(out_ref.at[block], lax.fori_loop(0, steps_ref[0], step, zero))

  return _launch("read", body, (blocks, VECTOR), blocks, (words, steps), shared)


def sums(words: np.ndarray, steps: int) -> np.ndarray:
  """int32 [VECTOR]: what each block of `read` gives after whole rounds."""
  rounds = steps // (words.size // TILE)
  total = words.reshape(-1, VECTOR).sum(0, dtype=np.int64) * rounds
  return total.astype(np.int32)  # modulo 2^32, as the kernel


@jax.jit
def copy(words: jax.Array) -> jax.Array:
  """The same int32 words, copied a tile a block by way of registers."""

  def body(words_ref, out_ref):
    at = pl.ds(lax.axis_index("block") * TILE, TILE)
    compat.store(out_ref.at[at], _load(words_ref.at[at]))

  return _launch("copy", body, words.shape, words.size // TILE, (words,))


def _launch(name, body, out_shape, blocks, operands, shared=False) -> jax.Array:
  """Runs a body; if asked, on a copy of its first operand in shared memory."""

  def on_copy(source_ref, *refs):
    *refs, copied = refs
    copied[...] = _load(source_ref)
    body(copied, *refs)

  source = operands[0]
  return compat.kernel(
    on_copy if shared else body,
    name=f"{name}_shared" if shared else name,
    out_type=jax.ShapeDtypeStruct(out_shape, jnp.int32),
    grid=(blocks,),
    grid_names=("block",),
    scratch_types=(plgpu.SMEM(source.shape, source.dtype),) * shared,
    compiler_params=LANE,
  )(*operands)


def _load(ref: Any) -> jax.Array:
  layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=4)
  return plgpu.load(ref, layout=layout)


def example(name: str, words: int, **keywords: Any):
  """A kernel as a function, and its arguments; see `compiled`."""
  kernel, *lengths = {
    "chase": (chase, 1),
    "read": (read, 2),
    "copy": (copy,),
  }[name]
  return functools.partial(kernel, **keywords), [
    jax.ShapeDtypeStruct((size,), jnp.int32) for size in (words, *lengths)
  ]
