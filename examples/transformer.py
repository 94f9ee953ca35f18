"""A small decoder-only transformer, trained on many devices.

  python -m examples.transformer --axes=explicit
  python -m examples.transformer --axes=auto

Sequences are spread over the mesh axis "data"; heads, hidden features and the
vocabulary over "model" (tensor parallelism). Every product is one of
pallas_gemm, those of attention by way of `jnp.einsum`. The one thing to say of
shardings in the program itself: with Explicit axes, those of sums over "model"
and of the embedding. See examples/meshes.py for devices without GPUs.
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

# Of a layer, and of all that is around the layers.
LAYER = {
  "qkv": P(None, None, "model", None),  # [features, 3, heads, head]
  "out": P("model", None, None),  # [heads, head, features]
  "gate": P(None, "model"),  # [features, hidden]
  "up": P(None, "model"),
  "down": P("model", None),  # [hidden, features]
}
EMBEDDING = P("model", None)  # [vocabulary, features]
TOKENS = P("data", None)  # [batch, time]


class Products(NamedTuple):
  """What multiplies: `OURS`, or `PLAIN` in its place."""

  matmul: Callable[..., jax.Array]
  gated_matmul: Callable[..., jax.Array]
  dot_general: Callable[..., jax.Array]


def _plain_matmul(a, b, *, c=0, transpose_b=False, out_sharding=None):
  b = b.T if transpose_b else b
  return jnp.matmul(a, b, out_sharding=out_sharding) + c


def _plain_gated_matmul(x, gate, up):
  return jax.nn.silu(x @ gate) * (x @ up)


OURS = Products(
  pallas_gemm.matmul, pallas_gemm.gated_matmul, pallas_gemm.dot_general
)
PLAIN = Products(_plain_matmul, _plain_gated_matmul, jax.lax.dot_general)


def init(
  key: jax.Array,
  *,
  layers: int,
  features: int,
  heads: int,
  hidden: int,
  vocabulary: int,
) -> dict[str, Any]:
  """Random weights, float32."""

  def normal(key, *shape, terms):
    return jax.random.normal(key, shape) * terms**-0.5

  head = features // heads
  keys = iter(jax.random.split(key, 5 * layers + 1))
  return {
    "embedding": normal(next(keys), vocabulary, features, terms=features),
    "layers": [
      {
        "qkv": normal(next(keys), features, 3, heads, head, terms=features),
        "out": normal(next(keys), heads, head, features, terms=features),
        "gate": normal(next(keys), features, hidden, terms=features),
        "up": normal(next(keys), features, hidden, terms=features),
        "down": normal(next(keys), hidden, features, terms=hidden),
      }
      for _ in range(layers)
    ],
  }


def shardings(params: dict[str, Any]) -> dict[str, Any]:
  """Of the weights."""
  return {"embedding": EMBEDDING, "layers": [LAYER for _ in params["layers"]]}


def forward(
  params: dict[str, Any], tokens: jax.Array, dtype: Any, products: Products
) -> jax.Array:
  """The logits of the token that follows.

  Args:
    params: weights; they are rounded to dtype.
    tokens: [batch, time], integers.
    dtype: of all products; for the Hopper kernel, bfloat16 or float16.
    products: what multiplies.

  Returns:
    [batch, time, vocabulary], float32.
  """
  params = jax.tree.map(lambda w: w.astype(dtype), params)
  x = params["embedding"].at[tokens]
  x = x.get(out_sharding=meshes.explicit("data", None, None))
  for layer in params["layers"]:
    x = x + attention(layer, normalized(x), products)
    x = mlp(layer, x, products)
  logits = products.matmul(normalized(x), params["embedding"], transpose_b=True)
  return logits.astype(jnp.float32)


def attention(layer, x: jax.Array, products: Products) -> jax.Array:
  """Causal attention of x [b, t, features]."""
  einsum = functools.partial(jnp.einsum, _dot_general=products.dot_general)
  q, k, v = jnp.moveaxis(einsum("btf,fnhd->btnhd", x, layer["qkv"]), 2, 0)
  scores = einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
  seen = jnp.tri(x.shape[1], dtype=bool)
  scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, -jnp.inf)
  shares = jax.nn.softmax(scores).astype(x.dtype)
  heads = einsum("bhts,bshd->bthd", shares, v)
  # Heads are spread over "model", and this adds them up.
  to = meshes.explicit("data", None, None)
  return einsum("bthd,hdf->btf", heads, layer["out"], out_sharding=to)


def mlp(layer, x: jax.Array, products: Products) -> jax.Array:
  """x + a gated MLP of x: two kernels."""
  hidden = products.gated_matmul(normalized(x), layer["gate"], layer["up"])
  to = meshes.explicit("data", None, None)
  return products.matmul(hidden, layer["down"], c=x, out_sharding=to)


def normalized(x: jax.Array) -> jax.Array:
  """x over the root of its mean square."""
  wide = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
  return (wide * scale).astype(x.dtype)


def loss(params, tokens, *, dtype, products: Products = OURS):
  """Mean cross entropy of each token, given those before it."""
  logits = forward(params, tokens[:, :-1], dtype, products)
  # Each device has a part of the vocabulary: no index, but a comparison.
  is_next = tokens[:, 1:, None] == jnp.arange(logits.shape[-1])
  log_shares = jax.nn.log_softmax(logits)
  return -jnp.mean(jnp.sum(jnp.where(is_next, log_shares, 0), axis=-1))


@functools.partial(jax.jit, static_argnames=("dtype", "products"))
def train_step(
  params, tokens, learning_rate, *, dtype, products: Products = OURS
):
  """A step of gradient descent: the new weights, and the loss before it."""
  of_params = functools.partial(loss, dtype=dtype, products=products)
  value, slopes = jax.value_and_grad(of_params)(params, tokens)
  return jax.tree.map(lambda p, s: p - learning_rate * s, params, slopes), value


def main(argv: Sequence[str] | None = None) -> int:
  """Trains on all devices; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m examples.transformer",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  meshes.add_flag(parser)
  sizes = {"layers": 2, "features": 64, "heads": 4, "hidden": 128}
  sizes["vocabulary"] = 64
  for name, n in (sizes | {"batch": 16, "time": 33, "steps": 5}).items():
    parser.add_argument(f"--{name}", type=positive, default=n, help=f"({n})")
  parser.add_argument("--learning_rate", type=float, default=0.5, help="(0.5)")
  args = parser.parse_args(argv)
  keys = jax.random.split(jax.random.key(0))
  with jax.set_mesh(meshes.make(args.axes, ("data", "model"))):
    params = init(keys[0], **{name: getattr(args, name) for name in sizes})
    params = jax.device_put(params, shardings(params))
    shape = args.batch, args.time
    tokens = jax.random.randint(keys[1], shape, 0, args.vocabulary)
    tokens = jax.device_put(tokens, TOKENS)
    for step in range(args.steps):
      params, value = train_step(
        params, tokens, args.learning_rate, dtype=jnp.bfloat16
      )
      print(f"step {step}: loss {value:.4f}", flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
