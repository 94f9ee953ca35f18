"""Operands in planes that the user keeps: see `splitting`.

The largest plane of B is the operand itself, the others are operands beside it,
with the same letters. Of A there are none.
"""

import jax.numpy as jnp

from pallas_gemm import report
from pallas_gemm.ops import arguments, constants, scales
from pallas_gemm.ops.spec import PLANES, Operands
from pallas_gemm.splitting import Split


def apart(names: Operands, x: Operands, planes: int | None) -> Operands:
  """The operands, with the planes of B apart if so many are multiplied.

  Args:
    names: of the arguments.
    x: the operands; A and B may be a `Split`.
    planes: of `arguments.planes`.

  Raises:
    TypeError: of two B one alone is a `Split`, or its planes are no bfloat16.
  """
  of_b = [isinstance(v, Split) for v in (x.b, x.b_up) if v is not None]
  if len(set(of_b)) > 1:
    raise TypeError(f"{names.b} and {names.b_up} must both be a Split or none")
  if of_b == [True, True]:
    have, want = len(x.b_up.planes), len(x.b.planes)
    wanted = f"{names.b_up} must have {want} planes like {names.b}"
    arguments.check(have == want, wanted, have)
  found, beside = {}, x.a.dtype in (jnp.float32, jnp.bfloat16)
  for field, rest in PLANES.items():
    v, name = getattr(x, field), getattr(names, field)
    if isinstance(v, Split):
      _check(name, v)
      if beside and not isinstance(x.a, Split) and planes == len(v.planes):
        found |= dict(zip((field, *rest), v.planes))
  return x._replace(**found)


def joined(names: Operands, x: Operands) -> Operands:
  """The operands, each `Split` that is left added up; and said so."""
  found = {}
  for (field, v), name in zip(scales.multiplied(x).items(), names):
    if isinstance(v, Split):
      _check(name, v)
      report.warn_once(
        f"the planes of {name} are added up at each call: a Split is taken for"
        " weights, at the precision that multiplies as many planes; pass the"
        " array"
      )
      found[field] = constants.constant(v, constants.OF_SPLIT).joined()
  return x._replace(**found)


def _check(name: str, v: Split) -> None:
  kinds = {(plane.shape, jnp.dtype(plane.dtype)) for plane in v.planes}
  dtypes = {dtype.name for _, dtype in kinds}
  if dtypes != {"bfloat16"} or len(kinds) > 1 or len(v.planes) not in (2, 3):
    got = ", ".join(f"{p.dtype}{list(p.shape)}" for p in v.planes)
    raise TypeError(
      f"{name}.planes must be two or three of bfloat16 and one shape, got {got}"
    )
