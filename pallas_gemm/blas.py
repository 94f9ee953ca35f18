"""alpha * A @ B + beta * C as users call it: what is checked of the arguments.

The ladder's rungs and the Triton kernel take the same ones.
"""

import math

import jax.numpy as jnp

FLOAT32 = ("float32",)
FLOAT16S = ("bfloat16", "float16")
_LARGEST = float(jnp.finfo(jnp.float32).max)


def sizes(
  a, b, c, *, alpha, beta, dtypes: tuple[str, ...], kernel: str
) -> tuple[int, int, int]:
  """M, N and K of the arguments.

  Args:
    a, b, c: [M, K], [K, N] and [M, N] or None, all of one dtype.
    alpha, beta: Python numbers, rounded to float32; not zero, `beta` needs
      `c`.
    dtypes: names of those that the kernel takes.
    kernel: its name, for messages.

  Raises:
    TypeError: not an array, a dtype the kernel does not take, dtypes that
      differ, or alpha or beta that is no Python number.
    ValueError: a rank that is not 2, shapes that do not fit, alpha or beta
      beyond float32, or beta without c.
  """
  operands = {"a": a, "b": b} | ({} if c is None else {"c": c})
  for name, x in operands.items():
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
      raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if len(x.shape) != 2:
      raise ValueError(f"{name} must have rank 2, got shape {tuple(x.shape)}")
    if jnp.dtype(x.dtype).name not in dtypes:
      raise TypeError(
        f"{name} has dtype {jnp.dtype(x.dtype).name}; {kernel} takes"
        f" {' or '.join(dtypes)}"
      )
    if not jnp.dtype(x.dtype).isnative:
      raise TypeError(f"{name} must have native byte order, got {x.dtype}")
    if x.dtype != a.dtype:
      raise TypeError(
        f"{name} must have the dtype of a, {jnp.dtype(a.dtype).name}, got"
        f" {jnp.dtype(x.dtype).name}"
      )
  for name, x in {"alpha": alpha, "beta": beta}.items():
    if isinstance(x, bool) or not isinstance(x, int | float):
      raise TypeError(
        f"{name} must be a Python int or float, got {type(x).__name__}"
      )
    if abs(x) > _LARGEST and x not in (math.inf, -math.inf):
      raise ValueError(f"{name} must fit into float32: {_LARGEST:.3g} at most")
  (m, k), (k_b, n) = a.shape, b.shape
  if k != k_b:
    raise ValueError(
      f"b must have K = {k} rows, as a {tuple(a.shape)} has columns, got"
      f" shape {tuple(b.shape)}"
    )
  if c is not None and tuple(c.shape) != (m, n):
    raise ValueError(f"c must have shape {(m, n)}, got {tuple(c.shape)}")
  if beta != 0 and c is None:
    raise ValueError(f"beta is {beta} but c is None; pass c or beta=0")
  return m, n, k
