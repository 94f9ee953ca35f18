"""The programs of examples/ that run on many devices; a program.

  python -m tests.support.recipes mlp moe transformer linen linen_fused nnx \\
      nnx_fused equinox

Needs eight devices. Checks are made with Explicit and with Auto axes: result,
loss, gradients, and what a step of training makes of the weights, are those of
a program in jax.numpy; they are sharded as the example says; a stand-in for
the kernel is given one device's share. Then the example's own program runs.
Fails with an AssertionError.
"""

from collections.abc import Callable
import contextlib
import functools
import io
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples import layers, meshes, moe, sharded_mlp, sharded_moe, transformer
from tests.support import mesh_checks, stand_in

# Large, so that new weights show what the gradients are.
RATE = 64.0


class Program(NamedTuple):
  """Functions of weights and data."""

  forward: Callable[..., jax.Array]
  loss: Callable[..., jax.Array]


def squares(forward: Callable[..., jax.Array]) -> Program:
  """With the mean of squares of what is off a target, the second array."""

  def of_data(params, x, target):
    del target
    return forward(params, x)

  def loss(params, x, target):
    return jnp.mean((forward(params, x) - target) ** 2)

  return Program(of_data, loss)


class Recipe(NamedTuple):
  """An example and what is expected of it.

  Attributes:
    params: the weights.
    specs: how they are sharded.
    ours: the example's program.
    plain: the same in jax.numpy.
    step: a step of training: the new weights and the loss.
    shapes: of the operands of the products in `forward`, on a device.
    whole: sizes that no operand of any product has on a device.
    main: runs the example's own program with flags.
    data: the arrays that a step of training takes beside the weights.
    rows: how they are sharded.
    result: how the result is.
    on_mesh: `plain` runs on the mesh, too; else on one device.
  """

  params: Any
  specs: Any
  ours: Program
  plain: Program
  step: Callable[..., Any]
  shapes: set[tuple[tuple[int, ...], ...]]
  whole: set[int]
  main: Callable[[list[str]], int]
  data: tuple[jax.Array, ...]
  rows: P = layers.ROWS
  result: P = layers.ROWS
  on_mesh: bool = False


def main(names: list[str]) -> None:
  """Checks the recipes of these names."""
  assert jax.device_count() == 8, jax.devices()
  for name in names:
    for axes in axes_of(name):
      recipe = check(name, axes)
      check_program(recipe, axes)
      print(f"ok {name} {axes}", flush=True)


# Layers of a library are checked with one kind of axes.
_ONE_KIND = {
  **dict.fromkeys(("linen", "nnx_fused", "equinox"), ("explicit",)),
  **dict.fromkeys(("linen_fused", "nnx"), ("auto",)),
}


def axes_of(name: str) -> tuple[str, ...]:
  """Kinds of axes that a recipe is checked with."""
  return _ONE_KIND.get(name, tuple(meshes.AXES))


def check(name: str, axes: str) -> Recipe:
  """Values, shardings and what reaches the kernel."""
  second = "expert" if name == "moe" else "model"
  mesh = meshes.make(axes, ("data", second))
  with (
    stand_in.installed(default=True) as calls,
    mesh_checks.logged_warnings() as warnings,
  ):
    with jax.set_mesh(mesh):
      recipe = RECIPES[name](axes)
      params = jax.device_put(recipe.params, recipe.specs)
      data = jax.device_put(recipe.data, recipe.rows)
      calls.clear()
      out = jax.jit(recipe.ours.forward)(params, *data)
      met = {call.shapes for call in calls}
      assert met == recipe.shapes, met ^ recipe.shapes
      new, value = recipe.step(params, *data, RATE)
      sizes = {n for call in calls for shape in call.shapes for n in shape}
      assert calls and not sizes & recipe.whole, calls
      if axes == "explicit":
        slopes = jax.eval_shape(jax.grad(recipe.ours.loss), params, *data)
        own = jax.eval_shape(lambda params: params, params)
        assert jax.tree.leaves(slopes) == jax.tree.leaves(own), slopes
    assert not warnings, warnings

  on_mesh = jax.set_mesh(mesh) if recipe.on_mesh else contextlib.nullcontext()
  with on_mesh:
    given = params, *data
    given = given if recipe.on_mesh else jax.device_get(given)
    plain = jax.jit(functools.partial(run_plainly, recipe.plain))(*given)
  got = out, value, new
  mesh_checks.same_values(got, plain)
  if axes == "explicit" and recipe.on_mesh:
    mesh_checks.same_shardings(got, plain)
  same_places((out, new), (recipe.result, recipe.specs), mesh)
  return recipe


def run_plainly(program: Program, params: Any, *data: jax.Array) -> Any:
  """Result, loss and new weights."""
  value, slopes = jax.value_and_grad(program.loss)(params, *data)
  new = jax.tree.map(lambda p, s: p - RATE * s, params, slopes)
  return program.forward(params, *data), value, new


def same_places(x: Any, specs: Any, mesh: jax.sharding.Mesh) -> None:
  """Each array lies where its spec says."""

  def same(x, spec):
    want = NamedSharding(mesh, spec)
    assert x.sharding.is_equivalent_to(want, x.ndim), (x.sharding, spec)

  jax.tree.map(same, x, specs)


def check_program(recipe: Recipe, axes: str) -> None:
  """The program trains: each step of it lowers the loss."""
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    assert recipe.main([f"--axes={axes}", "--steps=3"]) == 0
  first, *lines = out.getvalue().splitlines()
  assert f"{axes} axes" in first and ": 4" in first and ": 2" in first
  losses = [float(x.rpartition(" ")[2]) for x in lines if x.startswith("step")]
  assert len(losses) == 3 and losses == sorted(losses, reverse=True), losses


# The examples. A device has 64 of 256 rows, half of all else.


UP, DOWN = ((1, 64, 16), (1, 16, 24)), ((1, 64, 24), (1, 24, 16))


def draw(*shape: int, seed: int) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), shape)


def rows(count: int) -> tuple[jax.Array, jax.Array]:
  """x and the target."""
  return draw(count, 16, seed=1), draw(count, 16, seed=2)


def mlp(axes: str) -> Recipe:
  ours = sharded_mlp.MLPS[axes]
  return Recipe(
    params=sharded_mlp.init(jax.random.key(0), features=16, hidden=48),
    specs=sharded_mlp.SHARDED,
    data=rows(256),
    rows=sharded_mlp.ROWS,
    result=sharded_mlp.ROWS,
    ours=squares(ours)._replace(
      loss=functools.partial(sharded_mlp.loss, mlp=ours)
    ),
    plain=squares(functools.partial(ours, matmul=sharded_mlp.plain_matmul)),
    on_mesh=True,
    step=functools.partial(sharded_mlp.train_step, mlp=ours),
    shapes={UP, DOWN},
    whole={256, 48},
    main=sharded_mlp.main,
  )


def experts(axes: str) -> Recipe:
  del axes
  return Recipe(
    params=moe.init(jax.random.key(0), features=16, hidden=24, experts=6),
    specs=sharded_moe.SHARDED,
    data=rows(128),
    rows=sharded_moe.ROWS,
    result=sharded_moe.ROWS,
    ours=squares(functools.partial(sharded_moe.layer, top_k=2)),
    plain=squares(functools.partial(moe.reference, top_k=2)),
    step=functools.partial(moe.train_step, top_k=2, layer=sharded_moe.layer),
    # Rows, three experts, and where the rows of each begin.
    shapes={((64, 16), (3, 16, 24), (4,)), ((64, 24), (3, 24, 16), (4,))},
    whole={256, 128, 6, 7},
    main=sharded_moe.main,
  )


def decoder(axes: str) -> Recipe:
  del axes
  params = transformer.init(
    jax.random.key(0),
    layers=1,
    features=24,
    heads=4,
    hidden=56,
    vocabulary=44,
  )

  def program(products):
    return Program(
      lambda params, tokens: transformer.forward(
        params, tokens[:, :-1], jnp.float32, products
      ),
      functools.partial(transformer.loss, dtype=jnp.float32, products=products),
    )

  return Recipe(
    params=params,
    specs=transformer.shardings(params),
    data=(jax.random.randint(jax.random.key(1), (8, 11), 0, 44),),
    rows=transformer.TOKENS,
    result=P("data", None, "model"),
    ours=program(transformer.OURS),
    plain=program(transformer.PLAIN),
    on_mesh=True,
    step=functools.partial(transformer.train_step, dtype=jnp.float32),
    # Of 8 sequences of 10 tokens and 4 heads of 6 numbers: 2 and 2.
    shapes={
      ((1, 20, 24), (1, 24, 3 * 12)),
      ((4, 10, 6), (4, 10, 6)),
      ((4, 6, 10), (4, 10, 10)),
      ((1, 20, 12), (1, 12, 24)),
      ((1, 20, 24), (1, 24, 28), (1, 24, 28)),
      ((1, 20, 28), (1, 28, 24)),
      ((1, 20, 24), (1, 22, 24)),
    },
    whole={80, 32, 3 * 24, 56, 44},
    main=lambda flags: transformer.main(["--layers=1", "--time=9", *flags]),
  )


def of_library(name: str, axes: str) -> Recipe:
  del axes
  model = layers.LIBRARIES[name](jax.random.key(0), 16, 48, jnp.float32)

  def plain(params, x):
    by_shape = {v.shape: v for v in jax.tree.leaves(params)}
    hidden = jax.nn.gelu(x @ by_shape[16, 48] + by_shape[48,])
    return hidden @ by_shape[48, 16] + by_shape[16,]

  by_shape = {
    (16, 48): P(None, "model"),
    (48,): P("model"),
    (48, 16): P("model", None),
    (16,): P(),
  }
  return Recipe(
    params=model.params,
    specs=jax.tree.map(lambda v: by_shape[v.shape], model.params),
    data=rows(256),
    ours=squares(model.apply)._replace(
      loss=functools.partial(layers.loss, apply=model.apply)
    ),
    plain=squares(plain),
    step=functools.partial(layers.train_step, apply=model.apply),
    # A fused bias is an operand; that of `down` follows a sum over devices.
    shapes={UP if name in ("linen", "nnx") else (*UP, (24,)), DOWN},
    whole={256, 48},
    main=lambda flags: layers.main([f"--library={name}", *flags]),
  )


RECIPES = {"mlp": mlp, "moe": experts, "transformer": decoder} | {
  name: functools.partial(of_library, name) for name in layers.LIBRARIES
}


if __name__ == "__main__":
  main(sys.argv[1:])
