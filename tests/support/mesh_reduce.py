"""Checks of `meshes`: parts of sums that are rounded before they are added.

Each op, forward and with its gradients, beside float64 and the bounds of
`numerics`; and what the programs say of the collectives.
"""

from collections.abc import Iterator
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import check, report
from tests.support import mesh_calls, mesh_checks
from tests.support.mesh_calls import AUTO, EXPLICIT, MANUAL, Mode
from tests.support.mesh_cases import SIZES, Case
from tests.support.mesh_checks import BY_KEY, Arm, register
from tests.support.ops import SUMS

# Over the axis x, or y of 2 devices, which has a smaller bound.
_REDUCED = jnp.dtype("bfloat16"), 4
# Whether parts of the result itself are added up, and not of a gradient alone.
_CASES = {
  "matmul: M": False,
  "matmul: K": True,
  "matmul: K, M of the result over its axis": True,
  "matmul: M, K, N of the result over K's axis": True,
  "matmul: K, alpha, C, bias, silu": True,
  "gated_matmul: K": True,
  "dot_general: K": True,
  "ragged_dot: K": True,
  "ragged_dot: rows": False,
  "ragged_dot: groups, bias, tanh": True,
  "gated_ragged_dot: K": True,
  "ragged_dot_general: groups": True,
  "ragged_dot_general: sums over rows; rows": True,
}


def _values(arm: Arm, key: str, mode: Mode) -> None:
  """They are as good as parts that are rounded, and no better."""
  case = BY_KEY[key]
  call = mesh_calls.TRANSFORMATIONS["vjp"](case)
  op = case.ours(mode.asked(case), reduce_dtype="bfloat16", **arm.how)
  with report.listening() as heard:
    out, gradients = mesh_checks.run(mode, call, op).results
  said = [ran.around for ran in heard if "psum" in ran.around]
  assert said and all(" of bfloat16[" in text for text in said), heard
  x, ct = case.arrays(), np.asarray(call.args[1])
  x = {name: np.asarray(v) for name, v in x.items()}
  found = [
    [
      check.expected(**of, reduced=reduced)[0].check(np.asarray(out)[at])
      for at, of in _products(case, x)
    ]
    for reduced in (_REDUCED, None)
  ]
  assert all(one.passed for one in found[0]), found[0]
  if _CASES[key]:
    assert not all(one.passed for one in found[1]), "nothing was rounded"
  gradients = {name: np.asarray(v) for name, v in gradients.items()}
  for got, a, b in _gradients(case, gradients, x, ct):
    found = check.expected(a, b, reduced=_REDUCED)[0].check(got)
    assert found.passed, found


def _products(case: Case, x: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
  """The dense products in a result, by where they are."""
  options = {k: v for k, v in case.options.items() if "numbers" not in k}
  a, b, *rest = x.values()
  if "gated" in case.op:
    options |= {"activation": jax.nn.silu, "b_up": rest[0]}
  if not case.grouped:
    added = {name: x[name] for name in ("bias", "c") if name in x}
    yield ..., {"a": a, "b": b} | options | added
    return
  for group, rows in enumerate(_spans()):
    if SUMS in case.options.values():
      yield group, {"a": a[rows].T, "b": b[rows]}
      continue
    of = {"a": a[rows], "b": b[group]} | options
    if "b_up" in of:
      of["b_up"] = rest[0][group]
    if "bias" in x:
      of["bias"] = x["bias"][group]
    yield rows, of


def _gradients(case: Case, gradients: dict[str, Any], x, ct) -> Iterator[Any]:
  """Gradients of a case that is linear, and whose product each is."""
  if "activation" in case.options or "gated" in case.op:
    return
  (d_a, d_b), (a, b) = gradients.values(), x.values()
  if not case.grouped:
    yield d_a, ct, b.T
    yield d_b, a.T, ct
    return
  for group, rows in enumerate(_spans()):
    if SUMS in case.options.values():
      yield d_a[rows], b[rows], ct[group].T
      yield d_b[rows], a[rows], ct[group]
    else:
      yield d_a[rows], ct[rows], b[group].T
      yield d_b[group], a[rows].T, ct[rows]


def _spans() -> list[slice]:
  ends = np.cumsum(SIZES)
  return [slice(end - n, end) for n, end in zip(SIZES, ends)]


# By JAX's own product and by the stand-in, with either kind of axes in turn.
for _i, _key in enumerate(_CASES):
  _mode = AUTO if _i % 2 and BY_KEY[_key].auto else EXPLICIT
  register(
    f"{_key}, bfloat16 parts | {_mode.name}",
    (("default", "kernel")[_i // 2 % 2],),
  )(functools.partial(_values, key=_key, mode=_mode))


# Programs.

_SUM = re.compile(
  r'"stablehlo\.(all_reduce|reduce_scatter)".*?\}\) : \(tensor<(\w+)>\)', re.S
)


def _lowered(arm: Arm, key: str, mode: Mode, **options: Any) -> str:
  """The program of a case, forward and backward."""
  case = BY_KEY[key]
  unit = mesh_calls.Unit(case, mode, "vjp")
  call = mesh_calls.TRANSFORMATIONS["vjp"](case)
  op = case.ours(mode.asked(case), **options, **arm.how)
  f = call.wrap(mesh_checks.sharded_op(unit, op))
  args = jax.tree.map(mode.place, call.args, call.specs)
  with mode.context():
    return jax.jit(f).lower(*args).as_text()


@register("reduce_dtype: collectives | explicit", ("kernel",))
def _collectives(arm: Arm) -> None:
  """What is asked for is added up, float32 if nothing is."""
  for key, options, wanted in (
    ("matmul: K", {}, ["16x24xf32"]),
    ("matmul: K", {"reduce_dtype": jnp.float16}, ["16x24xf16"]),
    (
      "matmul: M, K, N of the result over K's axis",
      {"reduce_dtype": jnp.bfloat16},
      # Along N it is computed transposed; the gradient of B is over M.
      ["24x4xbf16", "16x24xbf16"],
    ),
    ("gated_matmul: K", {"reduce_dtype": "bfloat16"}, ["16x24xbf16"] * 2),
  ):
    text = _lowered(arm, key, EXPLICIT, **options)
    found = [shape for _, shape in _SUM.findall(text)]
    assert found == wanted, (key, options, found)


@register("reduce_dtype: unchanged", ("kernel",))
def _unchanged(arm: Arm) -> None:
  """Float32 is the default; it is nothing to what is not added up by the op."""
  for key, mode, dtype in (
    ("matmul: K", EXPLICIT, "float32"),
    ("matmul: N", MANUAL, "bfloat16"),
    ("matmul: K", MANUAL, "bfloat16"),
    ("ragged_dot: K", EXPLICIT, "float32"),
    ("ragged_dot: N", MANUAL, "bfloat16"),
  ):
    plain = _lowered(arm, key, mode)
    assert _lowered(arm, key, mode, reduce_dtype=dtype) == plain, (key, mode)
