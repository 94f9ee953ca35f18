"""A mixture-of-experts layer on many devices: expert parallelism.

  python -m examples.sharded_moe --axes=explicit
  python -m examples.sharded_moe --axes=auto

The layer of examples/moe.py: tokens are spread over the mesh axis "data",
experts over "expert". Which token goes where is decided for all tokens at once,
from numbers that every device has: a few integers a token. The rows, sorted by
expert, are spread over "data" again; each device multiplies those of its rows
that belong to its experts, and the results are added up over "expert".

With Explicit axes, sorting and indexing have to be told where their results
lie; with Auto axes a hint does. See examples/meshes.py for devices without
GPUs.
"""

from collections.abc import Callable, Sequence
import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from examples import meshes, moe
import pallas_gemm

SHARDED = moe.Params(
  router=P(), gate=P("expert"), up=P("expert"), down=P("expert")
)
ROWS = P("data", None)


def layer(
  params: moe.Params,
  x: jax.Array,
  *,
  top_k: int,
  dot: Callable[..., jax.Array] = pallas_gemm.ragged_dot,
  gated_dot: Callable[..., jax.Array] = pallas_gemm.gated_ragged_dot,
) -> jax.Array:
  """Each token through its experts, the results weighted and added.

  Args:
    params: the weights, sharded as `SHARDED`; the experts' are rounded to the
      dtype of x.
    x: [T, features], sharded as `ROWS`.
    top_k: experts of a token.
    dot: `ragged_dot` or what takes its place.
    gated_dot: `gated_ragged_dot` or what takes its place.

  Returns:
    [T, features], sharded as x.
  """
  gate, up, down = (w.astype(x.dtype) for w in params[1:])
  weights, experts = moe.route(params.router, x, top_k)
  shares, experts = weights.reshape(-1), on_all(experts.reshape(-1))

  order = jnp.argsort(experts, stable=True)
  group_sizes = jnp.bincount(experts, length=gate.shape[0])
  rows = take(x, order // top_k)

  to = meshes.explicit("data", None)
  hidden = gated_dot(rows, gate, up, group_sizes, out_sharding=to)
  out = dot(hidden, down, group_sizes, out_sharding=to)

  out = take(out, jnp.argsort(order)).astype(jnp.float32)
  out = (out * shares[:, None]).reshape(x.shape[0], top_k, x.shape[1])
  return out.sum(axis=1).astype(x.dtype)


def on_all(x: jax.Array) -> jax.Array:
  """The whole array on every device."""
  if meshes.explicit() is not None:
    return jax.sharding.reshard(x, P())
  return jax.lax.with_sharding_constraint(x, P())


def take(x: jax.Array, index: jax.Array) -> jax.Array:
  """x[index], spread over "data"."""
  if meshes.explicit() is not None:
    return x.at[index].get(out_sharding=ROWS)
  return jax.lax.with_sharding_constraint(x[index], ROWS)


def main(argv: Sequence[str] | None = None) -> int:
  """Trains on all devices; returns the exit status."""
  parser = moe.flags("python -m examples.sharded_moe", __doc__)
  meshes.add_flag(parser)
  args = moe.parsed(parser, argv)
  keys = jax.random.split(jax.random.key(args.seed), 2)
  mesh = meshes.make(args.axes, ("data", "expert"))
  with jax.set_mesh(mesh):
    params = moe.init(
      keys[0],
      features=args.features,
      hidden=args.hidden,
      experts=args.experts,
    )
    params = jax.device_put(params, SHARDED)
    x = jax.random.normal(keys[1], (args.tokens, args.features), args.dtype)
    target = jnp.roll(x.astype(jnp.float32), 1, axis=1)
    x, target = jax.device_put((x, target), ROWS)
    for step in range(args.steps):
      params, value = moe.train_step(
        params, x, target, args.learning_rate, top_k=args.top_k, layer=layer
      )
      print(f"step {step}: loss {value:.4f}", flush=True)
    for name, w in params._asdict().items():
      print(f"{name}: {w.shape}, {w.sharding.spec}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
