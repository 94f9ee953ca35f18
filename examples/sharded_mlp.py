"""Training of an MLP on many devices: FSDP and tensor parallelism.

  python -m examples.sharded_mlp --axes=explicit
  python -m examples.sharded_mlp --axes=auto

The mesh has two axes. Rows of the batch are spread over "data", hidden features
over "model" (tensor parallelism), and each weight over both: what a device
lacks of it along "data" is gathered when it is needed (FSDP).

         batch        features     hidden
  x      data
  up                  data         model
  down                data         model

Each device runs a kernel on its part. The sum over the hidden features is one
over "model": with Explicit axes one has to say how its result is sharded, with
Auto axes one may. See examples/meshes.py for devices without GPUs.
"""

import argparse
from collections.abc import Callable, Sequence
import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from examples import meshes
from examples.flag_types import positive
import pallas_gemm


class Params(NamedTuple):
  """Weights, float32: up [features, hidden], down [hidden, features]."""

  up: Any
  down: Any


SHARDED = Params(up=P("data", "model"), down=P("model", "data"))
ROWS = P("data", None)


def init(key: jax.Array, *, features: int, hidden: int) -> Params:
  """Random weights that keep the size of what they are applied to."""
  keys = jax.random.split(key)
  up = jax.random.normal(keys[0], (features, hidden)) * features**-0.5
  down = jax.random.normal(keys[1], (hidden, features)) * hidden**-0.5
  return Params(up, down)


def mlp_explicit(
  params: Params,
  x: jax.Array,
  matmul: Callable[..., jax.Array] = pallas_gemm.matmul,
) -> jax.Array:
  """gelu(x @ up) @ down, of Explicit axes.

  Args:
    params: the weights; they are rounded to the dtype of x.
    x: [batch, features]; for the Hopper kernel, bfloat16 or float16.
    matmul: `pallas_gemm.matmul` or what takes its place; see `plain_matmul`.

  Returns:
    [batch, features], sharded as x.
  """
  up, down = (w.astype(x.dtype) for w in params)
  hidden = matmul(x, up, activation=jax.nn.gelu)  # P("data", "model")
  return matmul(hidden, down, out_sharding=ROWS)


def mlp_auto(
  params: Params,
  x: jax.Array,
  matmul: Callable[..., jax.Array] = pallas_gemm.matmul,
) -> jax.Array:
  """The same, of Auto axes; the constraints are hints."""
  up, down = (w.astype(x.dtype) for w in params)
  hidden = matmul(x, up, activation=jax.nn.gelu)
  hidden = jax.lax.with_sharding_constraint(hidden, P("data", "model"))
  return jax.lax.with_sharding_constraint(matmul(hidden, down), ROWS)


MLPS = {"explicit": mlp_explicit, "auto": mlp_auto}


def plain_matmul(a, b, *, activation=lambda x: x, out_sharding=None):
  """What takes the place of `pallas_gemm.matmul`, in `jax.numpy`."""
  return activation(jnp.matmul(a, b, out_sharding=out_sharding))


def loss(params, x, target, *, mlp=mlp_explicit) -> jax.Array:
  """Mean squared distance of the MLP from a target."""
  return jnp.mean(jnp.square(mlp(params, x).astype(jnp.float32) - target))


@functools.partial(jax.jit, static_argnames="mlp")
def train_step(
  params: Params, x: jax.Array, target: jax.Array, learning_rate: float, *, mlp
) -> tuple[Params, jax.Array]:
  """A step of gradient descent: the new weights, and the loss before it."""
  value, slopes = jax.value_and_grad(loss)(params, x, target, mlp=mlp)
  return jax.tree.map(lambda p, s: p - learning_rate * s, params, slopes), value


def main(argv: Sequence[str] | None = None) -> int:
  """Trains on all devices; returns the exit status."""
  args = _parser().parse_args(argv)
  keys = jax.random.split(jax.random.key(args.seed), 3)
  mesh = meshes.make(args.axes, ("data", "model"))
  with jax.set_mesh(mesh):
    params = init(keys[0], features=args.features, hidden=args.hidden)
    params = jax.device_put(params, SHARDED)
    shape = args.batch, args.features
    x = jax.random.normal(keys[1], shape, args.dtype)
    target = jnp.roll(x.astype(jnp.float32), 1, axis=1)
    x, target = jax.device_put((x, target), ROWS)
    for step in range(args.steps):
      params, value = train_step(
        params, x, target, args.learning_rate, mlp=MLPS[args.axes]
      )
      print(f"step {step}: loss {value:.4f}", flush=True)
    for name, w in params._asdict().items():
      print(f"{name}: {w.shape}, {w.sharding.spec}")
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m examples.sharded_mlp",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  meshes.add_flag(parser)
  for name, default, what in (
    ("batch", 256, "rows of the input"),
    ("features", 32, "numbers of a row"),
    ("hidden", 64, "numbers between the two products"),
    ("steps", 5, "steps of training"),
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
    help="of the input and the products (bfloat16)",
  )
  return parser


if __name__ == "__main__":
  sys.exit(main())
