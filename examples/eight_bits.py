"""An MLP and a layer of experts in 8 bits, forward and backward.

  python -m examples.eight_bits
  python -m examples.eight_bits --scaling=row --gradient=float8_e5m2

Weights and activations are arrays of 16 or 32 bits. `quantize=Recipe()` has
each product quantise them, and the cotangents of its derivative. There is no
state: scales are taken from the values at hand.

For each layer and its derivatives the program prints how far 8 bits and 16 bits
are off float32, as norms of differences over norms. It fails if 8 bits are
further off than their own rounding explains.
"""

import argparse
from collections.abc import Callable, Sequence
import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples import moe
from examples.flag_types import positive
import pallas_gemm
from pallas_gemm import Recipe

# An operand of e4m3 is 2.7 % off, of e5m2 twice that. A derivative passes
# through some four products, one after the other, of two operands each.
_MOST_OFF = {"float8_e4m3fn": 0.15, "float8_e5m2": 0.25, "int8": 0.15}


class Mlp(NamedTuple):
  """Weights, float32: [features, hidden] twice, [hidden, features]."""

  gate: jax.Array
  up: jax.Array
  down: jax.Array


def init_mlp(key: jax.Array, *, features: int, hidden: int) -> Mlp:
  """Random weights that keep the size of what they are applied to."""
  shapes = Mlp((features, hidden), (features, hidden), (hidden, features))
  return Mlp(
    *[
      jax.random.normal(part, shape) * shape[0] ** -0.5
      for part, shape in zip(jax.random.split(key, 3), shapes)
    ]
  )


def mlp(params: Mlp, x: jax.Array, recipe: Recipe | None = None) -> jax.Array:
  """x + (silu(x @ gate) * (x @ up)) @ down, in two kernels.

  Args:
    params: the weights; they are rounded to the dtype of x.
    x: [..., features]; for the Hopper kernel, bfloat16 or float16.
    recipe: of both products; None multiplies in the dtype of x.
  """
  gate, up, down = (w.astype(x.dtype) for w in params)
  hidden = pallas_gemm.gated_matmul(x, gate, up, quantize=recipe)
  return pallas_gemm.matmul(hidden, down, c=x, quantize=recipe)


def experts(
  params: moe.Params, x: jax.Array, recipe: Recipe | None = None
) -> jax.Array:
  """Each token through two of the experts; the router is no product of 8 bits.

  Args:
    params: the weights; the experts' are rounded to the dtype of x.
    x: [T, features]; for the Hopper kernels, bfloat16 or float16.
    recipe: of both products of the experts.
  """
  return moe.layer(
    params,
    x,
    top_k=2,
    dot=functools.partial(pallas_gemm.ragged_dot, quantize=recipe),
    gated_dot=functools.partial(pallas_gemm.gated_ragged_dot, quantize=recipe),
  )


@functools.partial(jax.jit, static_argnums=(0, 3))
def derivatives(layer: Callable[..., Any], params: Any, x: Any, recipe: Any):
  """The result, and the derivatives of a loss by all weights and x."""

  def loss(params, x):
    out = layer(params, x, recipe)
    return jnp.mean(jnp.square(out.astype(jnp.float32) - 1)), out

  grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
  slopes, out = grad(params, x)
  return out, slopes


def distance(got: jax.Array, want: jax.Array) -> float:
  """How far one array is off another, in norms."""
  got, want = got.astype(jnp.float32), want.astype(jnp.float32)
  return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def main(argv: Sequence[str] | None = None) -> int:
  """Compares; returns the exit status."""
  parser = _parser()
  args = parser.parse_args(argv)
  gradient = None if args.gradient == "none" else args.gradient
  try:
    recipe = Recipe(args.forward, gradient, args.scaling)
  except ValueError as error:
    parser.error(str(error))
  keys = jax.random.split(jax.random.key(0), 3)
  sizes = {"features": args.features, "hidden": args.hidden}
  x = jax.random.normal(keys[0], (args.tokens, args.features), jnp.bfloat16)
  layers = {
    "mlp": (mlp, init_mlp(keys[1], **sizes)),
    "experts": (experts, moe.init(keys[2], **sizes, experts=4)),
  }
  kinds = args.forward, args.gradient
  most = max(_MOST_OFF.get(kind, 0.0) for kind in kinds)
  failed = False
  for name, (layer, params) in layers.items():
    with jax.default_matmul_precision("highest"):
      want = derivatives(layer, params, x.astype(jnp.float32), None)
    for what, how in (("8 bits", recipe), ("bfloat16", None)):
      got = derivatives(layer, params, x, how)
      off = jax.tree.map(distance, got, want)
      worst = max(jax.tree.leaves(off))
      failed |= not worst <= most
      print(
        f"{name} by {what}: result {off[0]:.2%} off, derivatives at most"
        f" {max(jax.tree.leaves(off[1])):.2%}",
        flush=True,
      )
  print("FAILED" if failed else "PASSED", f"at most {most:.0%}")
  return int(failed)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m examples.eight_bits",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  dtypes = list(_MOST_OFF)
  for name, choices, default in (
    ("forward", dtypes, "float8_e4m3fn"),
    ("gradient", [*dtypes, "none"], "float8_e4m3fn"),
    ("scaling", ["block", "row", "tensor"], "block"),
  ):
    parser.add_argument(
      f"--{name}", choices=choices, default=default, help=f"({default})"
    )
  for name, n in (("tokens", 192), ("features", 256), ("hidden", 384)):
    parser.add_argument(f"--{name}", type=positive, default=n, help=f"({n})")
  return parser


if __name__ == "__main__":
  sys.exit(main())
