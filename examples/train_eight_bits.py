"""A small transformer on text, in bfloat16 and in 8 bits, side by side.

  python -m examples.train_eight_bits
  python -m examples.train_eight_bits --steps=1000 --seeds=5 --features=1024 \\
      --hidden=4096

The text is this project's own pages, and a token is a byte. Each recipe trains
the model of examples/transformer.py with the same batches and the same first
weights, once for each seed. Products with weights are of 8 bits, forwards and
backwards, the output layer's too; those of attention's scores, normalisation
and softmax are not. Weights and Adam's moments are float32.

Printed is the mean loss of the last 50 steps of each recipe, and how far the
seeds lie apart. A recipe trains as bfloat16 does if the means differ by no more
than the seeds do.
"""

import argparse
from collections.abc import Iterator, Sequence
import functools
import math
from pathlib import Path
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import transformer
from examples.flag_types import positive
import pallas_gemm
from pallas_gemm import Recipe

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {
  "bfloat16": None,
  "block": Recipe(scaling="block"),
  "row": Recipe(scaling="row"),
  "tensor": Recipe(scaling="tensor"),
}
_LAST = 50
_SIZES = {"layers": 2, "features": 128, "heads": 4, "hidden": 384}


def text() -> np.ndarray:
  """The bytes of all pages, one after the other."""
  pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
  # Without what is built.
  pages = [p for p in pages if not any(x[0] == "_" for x in p.parts)]
  found = b"".join(page.read_bytes() for page in pages)
  return np.frombuffer(found, np.uint8)


def batches(seed: int, batch: int, time: int) -> Iterator[np.ndarray]:
  """Pieces of the text, [batch, time + 1]; the same for the same seed."""
  data, random = text(), np.random.default_rng(seed)
  while True:
    first = random.integers(0, len(data) - time, (batch, 1))
    yield data[first + np.arange(time + 1)].astype(np.int32)


def products(recipe: Recipe | None) -> transformer.Products:
  """What multiplies: products with weights by the recipe."""

  def dot_general(lhs, rhs, dimension_numbers, *args, **kwargs):
    (contracted, _), (batch, _) = dimension_numbers
    if batch:  # no weight: scores, and what they weigh
      kwargs["quantize"] = None
      return pallas_gemm.dot_general(
        lhs, rhs, dimension_numbers, *args, **kwargs
      )
    # A weight as a matrix, so that blocks are 128 x 128 of that. Summed over
    # are the first dimensions of the weights here.
    count = len(contracted)
    rows, columns = lhs.shape[:-count], rhs.shape[count:]
    out = pallas_gemm.matmul(
      lhs.reshape(*rows, -1),
      rhs.reshape(-1, math.prod(columns)),
      quantize=recipe,
    )
    return out.reshape(*rows, *columns)

  return transformer.Products(
    functools.partial(pallas_gemm.matmul, quantize=recipe),
    functools.partial(pallas_gemm.gated_matmul, quantize=recipe),
    dot_general,
  )


@functools.partial(jax.jit, static_argnames="products", donate_argnums=0)
def train_step(state: Any, tokens: jax.Array, rate: jax.Array, *, products):
  """A step of Adam: weights and moments, and the loss before it."""
  params, first, second, step = state
  loss = functools.partial(
    transformer.loss, dtype=jnp.bfloat16, products=products
  )
  value, slopes = jax.value_and_grad(loss)(params, tokens)
  step += 1
  first = jax.tree.map(lambda m, s: 0.9 * m + 0.1 * s, first, slopes)
  second = jax.tree.map(lambda v, s: 0.98 * v + 0.02 * s**2, second, slopes)

  def changed(w, m, v):
    m, v = m / (1 - 0.9**step), v / (1 - 0.98**step)
    return w - rate * m / (jnp.sqrt(v) + 1e-8)

  params = jax.tree.map(changed, params, first, second)
  return (params, first, second, step), value


def losses(name: str, seed: int, args: argparse.Namespace) -> list[float]:
  """Of each step of one run; prints some of them."""
  sizes = {size: getattr(args, size) for size in _SIZES}
  params = transformer.init(jax.random.key(seed), **sizes, vocabulary=256)
  zeros = functools.partial(jax.tree.map, jnp.zeros_like)
  state = params, zeros(params), zeros(params), jnp.float32(0)
  multiply, found = products(RECIPES[name]), []
  pieces = batches(seed, args.batch, args.time)
  for step, tokens in zip(range(args.steps), pieces):
    warm = min(1.0, (step + 1) / 20)
    rate = jnp.float32(args.learning_rate * warm)
    state, value = train_step(state, tokens, rate, products=multiply)
    found.append(float(value))
    if (step + 1) % max(1, args.steps // 5) == 0:
      print(f"{name}, seed {seed}, step {step + 1}: {value:.4f}", flush=True)
  return found


def main(argv: Sequence[str] | None = None) -> int:
  """Trains all; returns the exit status."""
  args = _parser().parse_args(argv)
  means = {
    name: [
      statistics.fmean(losses(name, seed, args)[-_LAST:])
      for seed in range(args.seeds)
    ]
    for name in args.recipes.split(",")
  }
  print(
    f"mean loss of the last {min(_LAST, args.steps)} of {args.steps} steps:"
  )
  for name, found in means.items():
    spread = max(found) - min(found)
    each = ", ".join(f"{x:.4f}" for x in found)
    print(
      f"{name}: {statistics.fmean(found):.4f}, spread {spread:.4f} ({each})"
    )
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m examples.train_eight_bits",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  own = {"steps": 300, "seeds": 3, "batch": 16, "time": 128}
  for name, n in (own | _SIZES).items():
    parser.add_argument(f"--{name}", type=positive, default=n, help=f"({n})")
  parser.add_argument(
    "--learning_rate", type=float, default=3e-3, help="(3e-3)"
  )
  names = ",".join(RECIPES)
  parser.add_argument(
    "--recipes", type=_recipes, default=names, help=f"some of {names} (all)"
  )
  return parser


def _recipes(value: str) -> str:
  if unknown := [x for x in value.split(",") if x not in RECIPES]:
    wanted = f"must be of {','.join(RECIPES)}"
    raise argparse.ArgumentTypeError(f"{wanted}, got {','.join(unknown)}")
  return value


if __name__ == "__main__":
  sys.exit(main())
