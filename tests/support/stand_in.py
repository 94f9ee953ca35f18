"""A stand-in for the Hopper kernel: opaque to XLA, and quick on CPU.

It computes XLA's product, but where XLA would have to split it over devices it
is not lowered, as the kernel can't be. What it is lowered for is recorded.
"""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax.extend import core
from jax.interpreters import mlir

from pallas_gemm import compat
from pallas_gemm.ops import implementations, sm90


class Call(NamedTuple):
  """The shapes of the operands that one product has, in their order."""

  shapes: tuple[tuple[int, ...], ...]


@contextlib.contextmanager
def installed(*, default: bool = False) -> Iterator[list[Call]]:
  """Context: "sm90" is the stand-in; yields what it was lowered for so far.

  Args:
    default: it is also what `implementation=None` tries first.
  """
  calls: list[Call] = []
  table = implementations.IMPLEMENTATIONS
  entry = implementations.Implementation(
    run=taking_all(table["xla"].run, calls), refuses=lambda *_: None
  )
  with contextlib.ExitStack() as stack:
    stack.enter_context(mock.patch.dict(table, sm90=entry))
    # Nothing of it is interpreted.
    no = mock.patch.object(sm90, "is_asked_for", return_value=False)
    stack.enter_context(no)
    if default:
      names = dict.fromkeys((False, True), ("sm90", "xla"))
      stack.enter_context(mock.patch.dict(implementations.DEFAULT, names))
    jax.clear_caches()  # of what was lowered without it
    try:
      yield calls
    finally:
      jax.clear_caches()


def taking_all(
  xla: Callable[..., Any], calls: list[Call]
) -> Callable[..., Any]:
  """The stand-in: takes every product.

  Args:
    xla: computes it, as an implementation does.
    calls: to which it adds what it was lowered for.
  """

  def run(x, spec):
    there = [v is not None for v in x]

    def compute(*operands):
      rest = iter(operands)
      named = type(x)(*[next(rest) if here else None for here in there])
      return list(xla(named, spec))

    operands = compat.join_varying(*x.present())
    return _opaque_p.bind(*operands, compute=compute, calls=_Recorder(calls))

  return run


class _Recorder:
  """A list that a primitive's parameter can be: equal to itself alone."""

  def __init__(self, calls: list[Call]):
    self.append = calls.append


_opaque_p = core.Primitive("stand_in_for_kernel")
_opaque_p.multiple_results = True


@_opaque_p.def_abstract_eval
def _abstract_eval(*avals, compute, calls):
  del calls
  plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
  with compat.one_device():
    outs = jax.eval_shape(compute, *plain)
  return [compat.shaped_like(avals, x.shape, x.dtype) for x in outs]


def _lowering(ctx, *operands, compute, calls):
  if compat.is_partitioned(ctx.module_context.axis_context):
    raise AssertionError("XLA was to partition a kernel")
  calls.append(Call(tuple(x.shape for x in ctx.avals_in)))
  plain = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
  with compat.one_device():
    rule = mlir.lower_fun(compute, multiple_results=True)
    return rule(ctx.replace(avals_in=plain), *operands)


mlir.register_lowering(_opaque_p, _lowering)
