"""Sharded products compiled for eight GPUs, without one; a program.

  python -m tests.support.mesh_compile [--lower] NAME..

Prints the compiled program of each name, after a line with it; a name is that
of one of `EXAMPLES` and "auto" or "explicit". With --lower it prints what is
lowered instead, by eight devices that need not be GPUs. "sums" are products
whose K is sharded: for each of `SUMS` jnp's program, ours, and ours with parts
in bfloat16.
"""

from collections.abc import Callable
import functools
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import pallas_gemm

# The mesh is 4 x 2. M, N and K, and what is left of them on a device, are all
# different.
M, N, K, GROUPS = 8192, 6144, 1024, 8
START = "=== "


def dense(a, b):
  """Rows over x, columns over y."""
  return pallas_gemm.matmul(a, b, activation=jnp.tanh)


def by_xla(a, b):
  """Rows over x, columns over y, by XLA."""
  return pallas_gemm.matmul(a, b, implementation="xla")


def gated(x, gate, up):
  """The same with two weights."""
  return pallas_gemm.gated_matmul(x, gate, up)


def grouped(x, w, sizes):
  """Rows over x, columns of every group over y."""
  return pallas_gemm.ragged_dot(x, w, sizes)


def _gradients(f, count: int):
  """A function of the cotangent and the arguments: results and gradients."""

  def run(ct, *args):
    out, pullback = jax.vjp(lambda *xs: f(*xs, *args[count:]), *args[:count])
    return out, pullback(ct)

  return run


_A, _B = ((M, K), P("x", None)), ((K, N), P(None, "y"))
_OUT = (M, N), P("x", "y")
_W, _SIZES = ((GROUPS, K, N), P(None, None, "y")), ((GROUPS,), P(None))
EXAMPLES: dict[str, tuple[Callable, list]] = {
  "dense gradients": (_gradients(dense, 2), [_OUT, _A, _B]),
  "one row by XLA": (by_xla, [((1, K), P(None, None)), _B]),
  "a row each by XLA": (by_xla, [((4, K), P("x", None)), _B]),
  "gated gradients": (_gradients(gated, 3), [_OUT, _A, _B, _B]),
  "grouped gradients": (_gradients(grouped, 2), [_OUT, _A, _W, _SIZES]),
}


def main(*names: str) -> None:
  """Prints programs."""
  lowers = names[0] == "--lower"
  devices = np.array(jax.devices()) if lowers else _gpus()
  for name in names[lowers:]:
    print(START + name)
    if name == "sums":
      _print_sums(devices)
      continue
    example, _, mode = name.rpartition(" ")
    kind = AxisType.Auto if mode == "auto" else AxisType.Explicit
    mesh = Mesh(devices.reshape(4, 2), ("x", "y"), axis_types=(kind,) * 2)
    function, arguments = EXAMPLES[example]
    traced = jax.jit(function).trace(*_shapes(mesh, arguments))
    lowered = traced.lower(lowering_platforms=("cuda",))
    print((lowered if lowers else lowered.compile()).as_text())


# What sums are scattered along: rows, columns, nothing.
SUMS = (
  (AxisType.Auto, P("x", None)),
  (AxisType.Explicit, P(None, "x")),
  (AxisType.Auto, P(None, None)),
)


def _print_sums(devices: np.ndarray) -> None:
  low = functools.partial(pallas_gemm.matmul, reduce_dtype=jnp.bfloat16)
  for kind, out in SUMS:
    mesh = Mesh(devices, ("x",), axis_types=(kind,))
    args = _shapes(mesh, [((2048, 8 * N), P(None, "x")), ((8 * N, K), P("x"))])
    to = NamedSharding(mesh, out)
    for product in jnp.matmul, pallas_gemm.matmul, low:
      function = jax.jit(product, out_shardings=to)
      if kind == AxisType.Explicit:
        function = jax.jit(functools.partial(product, out_sharding=to))
      lowered = function.trace(*args).lower(lowering_platforms=("cuda",))
      print(lowered.compile().as_text())


def _shapes(mesh: Mesh, arguments: list) -> list[jax.ShapeDtypeStruct]:
  return [
    jax.ShapeDtypeStruct(
      shape,
      jnp.int32 if len(shape) == 1 else jnp.bfloat16,
      sharding=NamedSharding(mesh, spec),
    )
    for shape, spec in arguments
  ]


def _gpus() -> np.ndarray:
  from jax.experimental import topologies

  from experiments.harness import compile_process, compiled

  target = compile_process.target_config(compiled.GPU)
  topology = topologies.get_topology_desc(
    platform="cuda", target_config=target, topology="1x1x8"
  )
  return np.array(topology.devices)


if __name__ == "__main__":
  main(*sys.argv[1:])
