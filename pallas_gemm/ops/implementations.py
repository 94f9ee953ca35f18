"""The ways to compute a product on one device, and the choice between them.

Each takes folded operands and the spec, and returns the results, or raises
NotImplementedError with the reason why it does not. What a trace is for, a GPU
or not, `compat.targets_gpu` says.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_gemm import compat, hardware, report
from pallas_gemm.ops import folding, scales, sm90, triton, xla, xla_groups
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.sm90 import HOPPER
from pallas_gemm.ops.spec import Operands, Spec

# What implementation=None stands for, on a CUDA GPU and elsewhere.
DEFAULT = {True: (HOPPER, "xla"), False: ("xla",)}


class Implementation(NamedTuple):
  """One way to compute a product.

  Attributes:
    run: run(x, spec) gives the results.
    refuses: refuses(spec, x) is None, or why dtypes and precision alone keep it
      from ever taking the product, whatever the sizes.
    choose: choose(x, spec) is the config to run with, and where it comes
      from: "user", "measured", "shipped", "model", or "" where there is none.
  """

  run: Callable[[Operands, Spec], Sequence[jax.Array]]
  refuses: Callable[[Spec, Operands], str | None]
  choose: Callable[[Operands, Spec], tuple[Any, str]] = lambda x, spec: (
    spec.config,
    "user" if spec.config else "",
  )


def names(spec: Spec, cuda: bool) -> tuple[str, ...]:
  """What is tried, in order, where it is lowered for a CUDA GPU or not."""
  return spec.implementation or DEFAULT[cuda]


def may_run_kernel(spec: Spec, x: Operands, cuda: bool) -> bool:
  """Whether anything but XLA's own product could be taken."""
  return any(
    name != "xla" and not IMPLEMENTATIONS[name].refuses(spec, x)
    for name in names(spec, cuda)
  )


def why_none(spec: Spec, v: Operands, cuda: bool) -> str:
  """Why dtypes and precision keep each implementation from ever taking it."""
  found = {x: IMPLEMENTATIONS[x] for x in names(spec, cuda)}
  return "; ".join(f"{x}: {one.refuses(spec, v)}" for x, one in found.items())


def run(*operands: jax.Array, spec: Spec) -> list[jax.Array]:
  """The results on one device, of the first implementation that takes it.

  Raises:
    NotImplementedError: none takes it; the reason of each.
  """
  return folded(*operands, spec=spec, run=_first_of)


def folded(
  *operands: jax.Array, spec: Spec, run: folding.Run
) -> list[jax.Array]:
  """The results, of folded products by `run`."""
  x = spec.named(operands)
  if reason := scales.why_not_fused(spec):
    if "xla" not in names(spec, compat.targets_gpu()):
      raise NotImplementedError(f"no kernel has {reason}")
    x, spec = scales.in_operands(x, spec)
    spec = dataclasses.replace(spec, before=f"8 bits: no kernel has {reason}")
  if not folding.is_fused(spec):  # the epilogue in XLA, after each product
    wide, sums = x.wide(spec.out_dtype), []
    for one, alone in spec.products(x, out_dtype=wide):
      (z,) = folded(*one.present(), spec=alone, run=run)
      sums.append(spec_lib.lifted(z, alone.out, spec.out))
    outs, shape = spec_lib.epilogue(sums, x, spec), spec.shape(x)
    return [jnp.broadcast_to(out, shape) for out in outs]
  if spec.ragged:
    grouped = functools.partial(folding.grouped, run)
    return folding.over_batch(grouped, x, spec)
  return folding.dense(run, x, spec)


def _first_of(x: Operands, spec: Spec) -> Sequence[jax.Array]:
  if spec.is_empty(x):
    return spec_lib.without_product(x, spec)
  product, cuda = _in_words(x, spec), compat.targets_gpu()
  refusals = [spec.before] if spec.before else []
  reason = hardware.why_not("the kernel", ())
  if reason and not spec.implementation:  # a GPU that nothing is known of
    report.warn_once(f"products are XLA's: {reason}")
    if not cuda:
      refusals.append(f"{HOPPER}: {reason}")
  for name in names(spec, cuda):
    implementation = IMPLEMENTATIONS[name]
    try:
      if reason := implementation.refuses(spec, x):
        raise NotImplementedError(reason)
      config, source = implementation.choose(x, spec)
      chosen = dataclasses.replace(spec, config=config)
      outs = implementation.run(x, chosen)
    except NotImplementedError as error:
      refusals.append(f"{name}: {error}")
      if str(error) == sm90.SYMBOLIC:  # all else would have let the kernel run
        report.warn_once(
          f"XLA's product runs instead of a kernel: {sm90.SYMBOLIC}"
        )
      continue
    platform = "CUDA" if cuda else "other platforms than CUDA"
    why = "; ".join(refusals)
    skipped = f" (not {why})" if refusals else ""
    how = f" in {config}" if isinstance(config, xla_groups.Tiles) else ""
    report.log_once(f"{product} runs on {name!r}{how} on {platform}{skipped}")
    kind = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), x)
    report.ran(
      report.Ran(
        product,
        name,
        config,
        why,
        tuple(v.shape for v in x.present()),
        spec.around,
        source,
        asked=(spec, kind),
      )
    )
    return outs
  raise NotImplementedError(
    f"no implementation computes {product}: {'; '.join(refusals)}"
  )


def _in_words(x: Operands, spec: Spec) -> str:
  """A folded product, as far as the choice depends on it."""
  batch, m, n, k, groups = spec.sizes(x)
  parts = {
    "bias": spec.words.bias is not None,
    "activation": spec.activation is not None,
    "C": spec.words.c is not None,
    "saved pre-activation": spec.save,
    "batch invariance": spec.batch_invariant,
    "scales": spec.words.has_scales,
    "planes that are kept": x.has_planes,
  }
  extra = "".join(f" + {part}" for part, there in parts.items() if there)
  op, of = "matmul", f"batch {batch}"
  of_b = "float32" if x.has_planes else x.b.dtype.name
  of_both = " x ".join(dict.fromkeys((x.a.dtype.name, of_b)))
  if spec.ragged:
    op, of = "ragged_dot", f"groups {groups} along {spec.ragged.upper()}"
  layout = "NT"[spec.transpose_a] + "NT"[spec.transpose_b]
  return (
    f"{'gated_' if spec.gated else ''}{op} {of_both} to"
    f" {jnp.dtype(spec.out_dtype).name}, {of}, M {m}, N {n}, K {k},"
    f" {layout}{_precision(x, spec)}{extra}"
  )


def _precision(x: Operands, spec: Spec) -> str:
  """In words; of float32 alone, which it changes the arithmetic of."""
  is_float32 = "float32" in (x.a.dtype, x.b.dtype) or x.has_planes
  if spec.precision is None or not is_float32:
    return ""
  one = spec.precision
  pair = dict.fromkeys(one if type(one) is tuple else (one,))
  return f", precision {', '.join(getattr(x, 'name', str(x)) for x in pair)}"


IMPLEMENTATIONS: dict[str, Implementation] = {
  HOPPER: Implementation(sm90.run, sm90.refuses, sm90.chosen),
  "triton": Implementation(triton.run, triton.refuses),
  "xla": Implementation(xla.run, lambda spec, x: None, xla.chosen),
}
