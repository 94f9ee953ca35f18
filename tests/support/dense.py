"""The dense Hopper kernel in tests: a problem's operands, runs and checks."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.kernels.sm90 import launch
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.layout import cdiv
from pallas_gemm.problem import Problem
from tests.support import products

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epilogue:
  """What is applied to the product, beside what `Problem` says of it."""

  alpha: float | jax.Array = 1.0
  beta: float | jax.Array = 1.0
  activation: Callable[[jax.Array], jax.Array] | None = None


PLAIN = Epilogue()


def shapes(problem: Problem) -> dict[str, jax.ShapeDtypeStruct]:
  """The arguments of `launch.dense`, by name, as they are stored."""
  p = problem
  b = (p.matrices(p.b), *((p.n, p.k) if p.b.k_last else (p.k, p.n)))
  found = {
    "a": (
      (p.matrices(p.a), *((p.m, p.k) if p.a.k_last else (p.k, p.m))),
      p.a.value_dtype,
    ),
    "b": (b, p.b.value_dtype),
  }
  if p.epilogue.gated:
    found["b_up"] = found["b"]
  if p.epilogue.bias is not None:
    wide = p.out_dtype == "float32"
    found["bias"] = (
      (p.n if p.epilogue.bias == "n" else p.m,),
      "float32" if wide or p.a.bits == 8 else p.a.value_dtype,
    )
  for name, operand, size in (("a", p.a, p.m), ("b", p.b, p.n)):
    if operand.scale:
      shape = scale_shape(p, name, size)
      found[f"scale_{name}"] = (p.matrices(operand), *shape), "float32"
  if p.epilogue.gated and p.b.scale:
    found["scale_b_up"] = found["scale_b"]
  if p.epilogue.c_dtype is not None:
    found["c"] = ((p.batch, p.m, p.n), p.epilogue.c_dtype)
  return {
    name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    for name, (shape, dtype) in found.items()
  }


def scale_shape(problem: Problem, name: str, size: int) -> tuple[int, ...]:
  """Of the scales of one A, or of one B, with so many rows, or columns."""
  kind = getattr(problem, name).scale
  if kind not in ("block", "line"):
    return (size if kind == "vector" else 1,)
  is_square = (name, kind) == ("b", "block")
  return cdiv(problem.k, 128), cdiv(size, 128) if is_square else size


def spread(scale: np.ndarray, k: int, size: int) -> np.ndarray:
  """Scales of A [.., M], or of B, as those of all [.., K, M]."""
  if scale.ndim == 2:
    return scale[:, None]
  columns = 128 if scale.shape[2] < size else 1
  return scale.repeat(128, 1)[:, :k].repeat(columns, 2)[:, :, :size]


def operands(problem: Problem, seed: int = 0) -> Arrays:
  """N(0, 1) for each of `shapes`; of int8 in steps of 1 / 40."""
  return {
    name: normal(x, seed + i)
    for i, (name, x) in enumerate(shapes(problem).items())
  }


def normal(x: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
  """An array of that shape and dtype."""
  if x.dtype != jnp.int8:
    return products.normal(*x.shape, dtype=x.dtype, seed=seed)
  steps = jnp.round(40 * products.normal(*x.shape, seed=seed))
  return jnp.clip(steps, -128, 127).astype(x.dtype)


def named_scales(x: Arrays) -> tuple[Arrays, launch.Scales]:
  """The other arguments of a kernel, and the scales."""
  of = {"scale_a": "a", "scale_b": "b", "scale_b_up": "b_up"}
  scales = {of[name]: array for name, array in x.items() if name in of}
  others = {name: array for name, array in x.items() if name not in of}
  return others, launch.Scales(**scales)


def run(
  problem: Problem, config: Config, x: Arrays, epilogue: Epilogue = PLAIN
) -> tuple[jax.Array, ...]:
  """What the kernel gives, compiled as one program with all around it."""

  @jax.jit
  def product(x):
    x, scales = named_scales(x)
    how = {"problem": problem, "config": config, "scales": scales}
    return launch.dense(**x, **how, **vars(epilogue))

  return product(x)


def assert_right(
  outs: tuple[jax.Array, ...],
  problem: Problem,
  x: Arrays,
  epilogue: Epilogue = PLAIN,
) -> None:
  """Every result is within its bound of float64.

  With operands of 8 bits that of sums in float32, as the interpreter computes
  them: their values are taken times their scales, which is exact.
  """
  p = problem
  assert all(out.dtype == p.out_dtype for out in outs)
  # On the host nothing of this is compiled.
  outs, x = jax.tree.map(np.asarray, (outs, x))
  a = x["a"] if p.a.k_last else np.swapaxes(x["a"], 1, 2)
  b, *b_up = (
    np.swapaxes(x[name], 1, 2) if p.b.k_last else x[name]
    for name in ("b", "b_up")
    if name in x
  )
  if p.a.bits == 8 and p.out_dtype != "int32":
    one = np.ones((1, 1))
    of_a = spread(x.get("scale_a", one), p.k, a.shape[1])
    a = products.float64(a) * np.swapaxes(of_a, 1, 2)
    b, *b_up = (
      products.float64(y) * spread(x.get(name, one), p.k, p.n)
      for y, name in zip((b, *b_up), ("scale_b", "scale_b_up"))
    )
  planes = {"planes": p.planes if p.planes > 1 else None}
  if p.epilogue.gated:
    out, *saved = outs
    products.assert_gated(out, a, b, *b_up, epilogue.activation, **planes)
    for product, factor in zip(saved, (b, *b_up)):
      products.assert_product(product, a, factor, **planes)
    return
  added: dict[str, Any] = {"alpha": epilogue.alpha, "beta": epilogue.beta}
  added |= planes
  if p.epilogue.bias is not None:
    added["bias"] = x["bias"] if p.epilogue.bias == "n" else x["bias"][:, None]
  added["c"] = x.get("c")
  out, *saved = outs
  products.assert_product(out, a, b, activation=epilogue.activation, **added)
  for preactivation in saved:
    products.assert_product(preactivation, a, b, **added)


def example(
  problem: Problem, config: Config, factors: Sequence[str] = ()
) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
  """The kernel as a function, and its arguments.

  The problem's activation is a name of `jax.nn`, or None. `factors` names those
  of alpha and beta that are the first arguments; the others are 1.
  """
  arguments = shapes(problem)
  named = problem.epilogue.activation
  epilogue = Epilogue(activation=getattr(jax.nn, named) if named else None)

  def kernel(*args):
    values, args = args[: len(factors)], args[len(factors) :]
    found = dataclasses.replace(epilogue, **dict(zip(factors, values)))
    return run(problem, config, dict(zip(arguments, args)), found)

  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  return kernel, [scalar] * len(factors) + list(arguments.values())


def named_example(
  problem: dict, config: dict, activation: str | None, factors=()
):
  """`example` of fields that JSON holds; see `compiled.compile_example`."""
  problem = Problem.flat(**problem, activation=activation)
  return example(problem, Config(**config), factors)
