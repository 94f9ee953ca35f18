"""pallas_gemm in the layers of Flax Linen, Flax NNX and Equinox.

  python -m examples.layers --library=linen
  python -m examples.layers --library=nnx_fused --axes=auto
  python -m examples.layers --library=equinox

Flax's layers take a `dot_general`, which computes the product alone. A layer of
one's own is ten lines and has bias and activation in the kernel, too: the
libraries "_fused", and Equinox, whose `Linear` takes no `dot_general`. Each is
an MLP here, on a mesh whose axis "data" has the
rows and "model" the hidden features; on one device the same lines run, and
neither specs nor `out_sharding` need be there. Weights are float32: `dtype` has
the products run in the 16 bits that the Hopper kernel takes.

See examples/meshes.py for devices without GPUs.
"""

import argparse
from collections.abc import Callable, Sequence
import functools
import sys
from typing import Any, NamedTuple

from flax import linen, nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from examples import meshes
from examples.flag_types import positive
import pallas_gemm

ROWS = P("data", None)


class Model(NamedTuple):
  """What a library makes: params, a pytree, and apply(params, x)."""

  params: Any
  apply: Callable[[Any, jax.Array], jax.Array]


class LinenMlp(linen.Module):
  """Flax Linen: what is fixed of a product is fixed by `functools.partial`."""

  features: int
  hidden: int
  dtype: Any

  @linen.compact
  def __call__(self, x):
    up = linen.Dense(
      self.hidden,
      dtype=self.dtype,
      dot_general=pallas_gemm.dot_general,
      name="up",
    )
    down = linen.Dense(
      self.features,
      dtype=self.dtype,
      dot_general=functools.partial(
        pallas_gemm.dot_general, out_sharding=meshes.explicit("data", None)
      ),
      name="down",
    )
    return down(linen.gelu(up(x)))


class LinenDense(linen.Module):
  """Linen's `Dense` with bias and activation in the kernel."""

  features: int
  activation: Callable[[jax.Array], jax.Array] | None = None
  out_sharding: P | None = None
  dtype: Any = jnp.bfloat16

  @linen.compact
  def __call__(self, x):
    init = linen.initializers.lecun_normal()
    kernel = self.param("kernel", init, (x.shape[-1], self.features))
    bias = self.param("bias", linen.initializers.zeros, (self.features,))
    return pallas_gemm.matmul(
      x.astype(self.dtype),
      kernel.astype(self.dtype),
      bias=bias,
      activation=self.activation,
      out_sharding=self.out_sharding,
    )


class LinenFusedMlp(linen.Module):
  """`LinenMlp` with bias and activation in the kernels."""

  features: int
  hidden: int
  dtype: Any

  @linen.compact
  def __call__(self, x):
    dense = functools.partial(LinenDense, dtype=self.dtype)
    hidden = dense(self.hidden, activation=jax.nn.gelu, name="up")(x)
    to = meshes.explicit("data", None)
    return dense(self.features, out_sharding=to, name="down")(hidden)


def of_linen(
  key, features: int, hidden: int, dtype: Any, mlp: Any = LinenMlp
) -> Model:
  """Linen's own partitioned parameters are for Auto axes; this is for both."""
  module = mlp(features, hidden, dtype)
  params = jax.jit(module.init)(
    key, jnp.zeros((jax.device_count(), features), dtype)
  )
  up = {"kernel": P(None, "model"), "bias": P("model")}
  down = {"kernel": P("model", None), "bias": P(None)}
  specs = {"params": {"up": up, "down": down}}
  return Model(jax.device_put(params, specs), module.apply)


class NnxMlp(nnx.Module):
  """Flax NNX: layers have a sharding for parameters, and one for results."""

  linear = nnx.Linear

  def __init__(self, key, features: int, hidden: int, dtype: Any):
    how = {
      "dtype": dtype,
      "dot_general": pallas_gemm.dot_general,
      "rngs": nnx.Rngs(key),
    }
    kernel, bias = nnx.initializers.lecun_normal(), nnx.initializers.zeros
    self.up = self.linear(
      features,
      hidden,
      kernel_init=nnx.with_partitioning(kernel, (None, "model")),
      bias_init=nnx.with_partitioning(bias, ("model",)),
      **how,
    )
    self.down = self.linear(
      hidden,
      features,
      kernel_init=nnx.with_partitioning(kernel, ("model", None)),
      **how,
    )

  def __call__(self, x):
    to = meshes.explicit("data", None)
    return self.down(nnx.gelu(self.up(x)), out_sharding=to)


class NnxLinear(nnx.Linear):
  """NNX's `Linear` with bias, and activation, in the kernel."""

  def __call__(self, x, **how):
    return pallas_gemm.matmul(
      x.astype(self.dtype),
      self.kernel[...].astype(self.dtype),
      bias=self.bias[...],
      **how,
    )


class NnxFusedMlp(NnxMlp):
  """`NnxMlp` with bias and activation in the kernels."""

  linear = NnxLinear

  def __call__(self, x):
    hidden = self.up(x, activation=jax.nn.gelu)
    return self.down(hidden, out_sharding=meshes.explicit("data", None))


def of_nnx(
  key, features: int, hidden: int, dtype: Any, mlp: Any = NnxMlp
) -> Model:
  """The state of a module; `nnx.jit` and `nnx.grad` of the module do, too."""
  definition, state = nnx.split(mlp(key, features, hidden, dtype))
  return Model(state, lambda state, x: nnx.merge(definition, state)(x))


def of_equinox(key, features: int, hidden: int, dtype: Any) -> Model:
  """Layers of one's own; they take a whole batch, without `jax.vmap`."""
  import equinox  # here, so that the others run without it

  class Linear(equinox.Module):
    weight: jax.Array
    bias: jax.Array

    def __init__(self, key, n_in: int, n_out: int, spec: P):
      weight = jax.random.normal(key, (n_in, n_out)) * n_in**-0.5
      self.weight = jax.device_put(weight, spec)
      self.bias = jax.device_put(jnp.zeros(n_out), P(spec[1]))

    def __call__(self, x, **how):
      weight, bias = self.weight.astype(dtype), self.bias.astype(dtype)
      return pallas_gemm.matmul(x, weight, bias=bias, **how)

  class Mlp(equinox.Module):
    up: Linear
    down: Linear

    def __call__(self, x):
      hidden = self.up(x, activation=jax.nn.gelu)
      return self.down(hidden, out_sharding=meshes.explicit("data", None))

  keys = jax.random.split(key)
  up = Linear(keys[0], features, hidden, P(None, "model"))
  down = Linear(keys[1], hidden, features, P("model", None))
  return Model(Mlp(up, down), lambda model, x: model(x))


LIBRARIES = {
  "linen": of_linen,
  "linen_fused": functools.partial(of_linen, mlp=LinenFusedMlp),
  "nnx": of_nnx,
  "nnx_fused": functools.partial(of_nnx, mlp=NnxFusedMlp),
  "equinox": of_equinox,
}


def loss(params, x: jax.Array, target: jax.Array, *, apply) -> jax.Array:
  """Mean squared distance of a model from a target."""
  return jnp.mean(jnp.square(apply(params, x).astype(jnp.float32) - target))


@functools.partial(jax.jit, static_argnames="apply")
def train_step(params, x, target, learning_rate: float, *, apply):
  """A step of gradient descent: the new weights, and the loss before it."""
  value, slopes = jax.value_and_grad(loss)(params, x, target, apply=apply)
  return jax.tree.map(lambda p, s: p - learning_rate * s, params, slopes), value


def main(argv: Sequence[str] | None = None) -> int:
  """Trains on all devices; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m examples.layers",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--library", choices=LIBRARIES, default="linen", help="(linen)"
  )
  meshes.add_flag(parser)
  sizes = {"batch": 256, "features": 32, "hidden": 64, "steps": 5}
  for name, n in sizes.items():
    parser.add_argument(f"--{name}", type=positive, default=n, help=f"({n})")
  parser.add_argument("--learning_rate", type=float, default=2.0, help="(2.0)")
  args = parser.parse_args(argv)
  keys = jax.random.split(jax.random.key(0))
  with jax.set_mesh(meshes.make(args.axes, ("data", "model"))):
    of_library = LIBRARIES[args.library]
    model = of_library(keys[0], args.features, args.hidden, jnp.bfloat16)
    shape = args.batch, args.features
    x = jax.random.normal(keys[1], shape, jnp.bfloat16)
    target = jnp.roll(x.astype(jnp.float32), 1, axis=1)
    params, (x, target) = model.params, jax.device_put((x, target), ROWS)
    for step in range(args.steps):
      params, value = train_step(
        params, x, target, args.learning_rate, apply=model.apply
      )
      print(f"step {step}: loss {value:.4f}", flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
