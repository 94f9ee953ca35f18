"""A mixture-of-experts layer on pallas_gemm, and a few steps of training.

  python -m examples.moe
  python -m examples.moe --tokens=8192 --features=4096 --hidden=14336 \\
      --experts=8 --steps=5

Each token goes to the `top_k` experts that its router likes best; an expert is
a gated MLP. The rows of one expert are put together by sorting, so that
all experts are two grouped products, and the results are put back in order:

  route -> sort rows by expert -> gated_ragged_dot -> ragged_dot -> unsort, add

No token is dropped and no expert is padded: the sizes of the groups are data.
"""

import argparse
from collections.abc import Callable, Sequence
import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp

from examples.flag_types import positive
import pallas_gemm


class Params(NamedTuple):
  """Weights of a layer of E experts.

  Attributes:
    router: [features, E], float32.
    gate, up: [E, features, hidden].
    down: [E, hidden, features].
  """

  router: jax.Array
  gate: jax.Array
  up: jax.Array
  down: jax.Array


def init(
  key: jax.Array,
  *,
  features: int,
  hidden: int,
  experts: int,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> Params:
  """Random weights that keep the size of what they are applied to."""
  shapes = {
    "router": (features, experts),
    "gate": (experts, features, hidden),
    "up": (experts, features, hidden),
    "down": (experts, hidden, features),
  }
  found = {}
  for name, part in zip(shapes, jax.random.split(key, len(shapes))):
    shape = shapes[name]
    values = jax.random.normal(part, shape) * shape[-2] ** -0.5
    found[name] = values.astype(jnp.float32 if name == "router" else dtype)
  return Params(**found)


def route(
  router: jax.Array, x: jax.Array, top_k: int
) -> tuple[jax.Array, jax.Array]:
  """The experts of each token, and how much each of them counts.

  Args:
    router: [features, E], float32.
    x: [T, features].
    top_k: experts of a token.

  Returns:
    weights [T, top_k], float32, of sum 1; experts [T, top_k], int32.
  """
  logits = jnp.dot(x.astype(jnp.float32), router, precision="highest")
  best, experts = jax.lax.top_k(logits, top_k)
  return jax.nn.softmax(best), experts


def layer(
  params: Params,
  x: jax.Array,
  *,
  top_k: int,
  dot: Callable[..., jax.Array] = pallas_gemm.ragged_dot,
  gated_dot: Callable[..., jax.Array] = pallas_gemm.gated_ragged_dot,
) -> jax.Array:
  """Each token through its experts, the results weighted and added.

  Args:
    params: the weights; the experts' are rounded to the dtype of x.
    x: [T, features]; for the Hopper kernels, bfloat16 or float16.
    top_k: experts of a token.
    dot: `ragged_dot` or what takes its place.
    gated_dot: `gated_ragged_dot` or what takes its place; see `gated`.

  Returns:
    [T, features], the dtype of x.
  """
  gate, up, down = (w.astype(x.dtype) for w in params[1:])
  weights, experts = route(params.router, x, top_k)

  # Row i of `rows` is token order[i] // top_k; an expert's rows are together.
  order = jnp.argsort(experts.reshape(-1), stable=True)
  group_sizes = jnp.bincount(experts.reshape(-1), length=gate.shape[0])
  rows = _permute(jnp.repeat(x, top_k, axis=0), order)

  hidden = gated_dot(rows, gate, up, group_sizes)
  out = dot(hidden, down, group_sizes)

  out = _permute(out, jnp.argsort(order)).reshape(*experts.shape, -1)
  # Elementwise: on a GPU a float32 product may be less exact.
  out = jnp.sum(out.astype(jnp.float32) * weights[..., None], axis=1)
  return out.astype(x.dtype)


def _permute(x: jax.Array, order: jax.Array) -> jax.Array:
  """x[order], an order of all rows: the derivative adds up nothing."""
  return x.at[order].get(unique_indices=True, mode="promise_in_bounds")


def gated(dot: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """`gated_ragged_dot` made of two calls of a `ragged_dot`."""

  def gated_dot(x, gate, up, group_sizes):
    out = jax.nn.silu(dot(x, gate, group_sizes))
    return out * dot(x, up, group_sizes)

  return gated_dot


def reference(params: Params, x: jax.Array, *, top_k: int) -> jax.Array:
  """The layer in float32, every expert applied to every token."""
  weights, experts = route(params.router, x, top_k)
  x = x.astype(jnp.float32)
  dot = functools.partial(jnp.dot, precision="highest")
  out = jnp.zeros_like(x)
  for i, (gate, up, down) in enumerate(zip(*params[1:])):
    hidden = jax.nn.silu(dot(x, gate)) * dot(x, up)
    share = jnp.sum(jnp.where(experts == i, weights, 0), axis=1)
    out += share[:, None] * dot(hidden, down)
  return out


def loss(
  params: Params,
  x: jax.Array,
  target: jax.Array,
  *,
  top_k: int,
  layer: Callable[..., jax.Array] = layer,
) -> jax.Array:
  """Mean squared distance of the layer from a target."""
  out = layer(params, x, top_k=top_k).astype(jnp.float32)
  return jnp.mean(jnp.square(out - target))


@functools.partial(jax.jit, static_argnames=("top_k", "layer"))
def train_step(
  params: Params,
  x: jax.Array,
  target: jax.Array,
  learning_rate: float,
  *,
  top_k: int,
  layer: Callable[..., jax.Array] = layer,
) -> tuple[Params, jax.Array]:
  """A step of gradient descent: the new weights, and the loss before it."""
  of_layer = functools.partial(loss, top_k=top_k, layer=layer)
  value, slopes = jax.value_and_grad(of_layer)(params, x, target)
  params = jax.tree.map(lambda p, s: p - learning_rate * s, params, slopes)
  return params, value


def relative_error(params: Params, x: jax.Array, *, top_k: int) -> float:
  """|layer - reference| / |reference|, Euclidean norms."""
  rounded = jax.tree.map(lambda w: w.astype(x.dtype), params[1:])
  # What the layer computes with, so that only its arithmetic is judged.
  exact = Params(params.router, *(w.astype(jnp.float32) for w in rounded))
  want = jax.jit(reference, static_argnames="top_k")(exact, x, top_k=top_k)
  got = jax.jit(layer, static_argnames="top_k")(params, x, top_k=top_k)
  return float(
    jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)
  )


def main(argv: Sequence[str] | None = None) -> int:
  """Checks a layer, then trains it; returns the exit status."""
  args = parsed(flags("python -m examples.moe", __doc__), argv)
  keys = jax.random.split(jax.random.key(args.seed), 3)
  params = init(
    keys[0],
    features=args.features,
    hidden=args.hidden,
    experts=args.experts,
  )
  x = jax.random.normal(keys[1], (args.tokens, args.features), args.dtype)
  mixer = jax.random.normal(keys[2], (args.features, args.features))
  target = x.astype(jnp.float32) @ mixer * args.features**-0.5

  error = relative_error(params, x, top_k=args.top_k)
  # On its way each value is rounded to dtype some four times.
  limit = 4 * float(jnp.finfo(x.dtype).eps)
  passed = error <= limit  # NaN does not
  print(
    f"{'PASSED' if passed else 'FAILED'}: relative distance from every expert"
    f" on every token, in float32: {error:.1e} (limit {limit:.1e})"
  )
  if not passed:
    return 1
  for step in range(args.steps):
    params, value = train_step(
      params, x, target, args.learning_rate, top_k=args.top_k
    )
    print(f"step {step}: loss {value:.4f}", flush=True)
  return 0


def flags(prog: str, description: str | None) -> argparse.ArgumentParser:
  """The flags of a program that trains a layer."""
  parser = argparse.ArgumentParser(
    prog=prog,
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  for name, default, what in (
    ("tokens", 64, "rows of the input"),
    ("features", 32, "numbers of a token"),
    ("hidden", 64, "numbers between the two products of an expert"),
    ("experts", 4, "experts"),
    ("top_k", 2, "experts of a token"),
    ("steps", 10, "steps of training"),
    ("seed", 0, "seed of weights and inputs"),
  ):
    kind = int if name in ("seed", "steps") else positive
    parser.add_argument(
      f"--{name}", type=kind, default=default, help=f"{what} ({default})"
    )
  parser.add_argument("--learning_rate", type=float, default=2.0, help="(2.0)")
  parser.add_argument(
    "--dtype",
    choices=("bfloat16", "float16"),
    default="bfloat16",
    help="of the tokens and the products (bfloat16)",
  )
  return parser


def parsed(
  parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
  """The flags' values; exits where they are wrong."""
  args = parser.parse_args(argv)
  if not 1 <= args.top_k <= args.experts:
    parser.error(
      f"--top_k must be from 1 to --experts={args.experts}, got {args.top_k}"
    )
  return args


if __name__ == "__main__":
  sys.exit(main())
