"""The grouped Hopper kernel in tests: operands, runs and checks."""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.kernels.sm90 import launch, layout
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem
from tests.support import dense

Arrays = dict[str, jax.Array]
Activation = Callable[[jax.Array], jax.Array] | None


def shapes(problem: Problem) -> dict[str, jax.ShapeDtypeStruct]:
  """The arrays that `launch.grouped` takes, by name, offsets left out."""
  p = problem
  if p.along == "k":
    a, b = layout.operand_shapes(p)
    found = {"a": (a, p.a.value_dtype), "b": (b, p.b.value_dtype)}
  else:
    matrix = (p.n, p.k) if p.b.k_last else (p.k, p.n)
    found = {
      "a": ((p.m, p.k), p.a.value_dtype),
      "b": ((p.groups.count, *matrix), p.b.value_dtype),
    }
  if p.epilogue.gated:
    found["b_up"] = found["b"]
  # Of a slab along K there is one, of rows and columns one of each group.
  of_a, of_b = 1, p.groups.count
  if p.along == "k":
    of_a = of_b = 1 if p.has_blocks else of_b
  if p.a.scale:
    found["scale_a"] = (of_a, *dense.scale_shape(p, "a", p.m)), "float32"
  for name in ("scale_b", "scale_b_up")[: p.products if p.b.scale else 0]:
    found[name] = (of_b, *dense.scale_shape(p, "b", p.n)), "float32"
  if p.epilogue.bias is not None:
    found["bias"] = ((p.groups.count, p.n), "float32")
  return {
    name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    for name, (shape, dtype) in found.items()
  }


def operands(problem: Problem, seed: int = 0) -> Arrays:
  """N(0, 1) for each of `shapes`; of int8 in steps of 1 / 40."""
  return {
    name: dense.normal(x, seed + i)
    for i, (name, x) in enumerate(shapes(problem).items())
  }


def run(
  problem: Problem,
  config: Config,
  x: Arrays,
  offsets: Sequence[int],
  activation: Activation = None,
) -> tuple[jax.Array, ...]:
  """What the kernel gives, compiled as one program with all around it."""

  @jax.jit
  def product(x, offsets):
    x, scales = dense.named_scales(x)
    return launch.grouped(
      offsets=offsets,
      problem=problem,
      config=config,
      activation=activation,
      scales=scales,
      **x,
    )

  return product(x, jnp.asarray(offsets, jnp.int32))


def assert_right(
  outs: tuple[jax.Array, ...],
  problem: Problem,
  x: Arrays,
  offsets: Sequence[int],
  activation: Activation = None,
) -> None:
  """Every result is within its bound of float64, and zero beside groups."""
  p = problem
  epilogue = dense.Epilogue(activation=activation)
  # On the host no slice is compiled.
  outs, x = jax.tree.map(np.asarray, (outs, x))
  for group, (start, end) in enumerate(itertools.pairwise(offsets)):
    rows = slice(start, end)
    if p.along == "k":
      p = dataclasses.replace(p, k=min(end, problem.k) - start)
      own = {name: _along_k(p, name, x[name], rows, group) for name in x}
      of_group = [out[None, group] for out in outs]
    else:
      of_a = ("a", "scale_a")
      own = {y: x[y][None, group] for y in x if y not in of_a}
      own["a"] = x["a"][None, rows]
      if p.a.scale:
        is_one = p.a.scale == "tensor"
        own["scale_a"] = x["scale_a"] if is_one else x["scale_a"][..., rows]
      if p.epilogue.bias:
        own["bias"] = x["bias"][group]
      of_group = [out[None, rows] for out in outs]
    if start < end:
      dense.assert_right(tuple(of_group), p, own, epilogue)
    elif p.along == "k":
      assert not of_group[0].any()
  if p.along == "m":
    for out in outs:
      assert not out[: offsets[0]].any()
      assert not out[offsets[-1] :].any()


def _along_k(p: Problem, name: str, x: np.ndarray, rows: slice, group: int):
  """What of an operand, or of scales, a group along K has."""
  if not name.startswith("scale"):
    return x[None, :, rows] if p.has_whole_slabs else x[None, rows]
  if p.has_blocks:
    return x[:, rows.start // 128 : rows.stop // 128]
  return x[[min(group, len(x) - 1)]]


def example(
  problem: Problem, config: Config
) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
  """The kernel as a function, and its arguments.

  The problem's activation is a name of `jax.nn`, or None.
  """
  arguments = shapes(problem)
  offsets = jax.ShapeDtypeStruct((problem.groups.count + 1,), jnp.int32)
  named = problem.epilogue.activation
  activation = getattr(jax.nn, named) if named else None

  def kernel(offsets, *args):
    return run(problem, config, dict(zip(arguments, args)), offsets, activation)

  return kernel, [offsets, *arguments.values()]


def named_example(problem: dict, config: dict, activation: str | None):
  """`example` of fields that JSON holds; see `compiled.compile_example`."""
  return example(
    Problem.flat(**problem, activation=activation), Config(**config)
  )
