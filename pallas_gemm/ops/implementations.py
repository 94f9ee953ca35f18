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
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_gemm import compat, hardware, report, tuning
from pallas_gemm.ops import folding
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.spec import Operands, Spec

NOT_INVARIANT = (
  "XLA chooses the order of additions for M too, so it is not batch invariant"
)
SYMBOLIC = (
  "sizes must be known numbers, got symbolic ones; export with"
  " pallas_gemm.export_buckets to keep the kernel"
)
# What implementation=None stands for, on a CUDA GPU and elsewhere.
DEFAULT = {True: ("sm90", "xla"), False: ("xla",)}


class Implementation(NamedTuple):
  """One way to compute a product.

  Attributes:
    run: run(x, spec) gives the results.
    refuses: refuses(spec, x) is None, or why dtypes and precision alone keep it
      from ever taking the product, whatever the sizes.
    choose: choose(x, spec) is the config to run with.
  """

  run: Callable[[Operands, Spec], Sequence[jax.Array]]
  refuses: Callable[[Spec, Operands], str | None]
  choose: Callable[[Operands, Spec], Any] = lambda x, spec: spec.config


def names(spec: Spec, cuda: bool) -> tuple[str, ...]:
  """What is tried, in order, where it is lowered for a CUDA GPU or not."""
  return spec.implementation or DEFAULT[cuda]


def may_run_kernel(spec: Spec, x: Operands, cuda: bool) -> bool:
  """Whether anything but XLA's own product could be taken."""
  return any(
    name != "xla" and not IMPLEMENTATIONS[name].refuses(spec, x)
    for name in names(spec, cuda)
  )


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
  refusals: list[str] = []
  for name in names(spec, cuda):
    implementation = IMPLEMENTATIONS[name]
    try:
      if reason := implementation.refuses(spec, x):
        raise NotImplementedError(reason)
      config = implementation.choose(x, spec)
      chosen = dataclasses.replace(spec, config=config)
      outs = implementation.run(x, chosen)
    except NotImplementedError as error:
      refusals.append(f"{name}: {error}")
      if str(error) == SYMBOLIC:  # all else would have let the kernel run
        report.warn_once(f"XLA's product runs instead of a kernel: {SYMBOLIC}")
      continue
    platform = "CUDA" if cuda else "other platforms than CUDA"
    why = "; ".join(refusals)
    skipped = f" (not {why})" if refusals else ""
    report.log_once(f"{product} runs on {name!r} on {platform}{skipped}")
    shapes = tuple(v.shape for v in x.present())
    report.ran(report.Ran(product, name, config, why, shapes, spec.around))
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
  }
  extra = "".join(f" + {part}" for part, there in parts.items() if there)
  op, of = "matmul", f"batch {batch}"
  if spec.ragged:
    op, of = "ragged_dot", f"groups {groups} along {spec.ragged.upper()}"
  return (
    f"{'gated_' if spec.gated else ''}{op} {x.a.dtype.name} to"
    f" {jnp.dtype(spec.out_dtype).name}, {of}, M {m}, N {n}, K {k},"
    f" {'NT'[spec.transpose_a]}{'NT'[spec.transpose_b]}{extra}"
  )


# The Hopper kernel.


def _sm90_refuses(spec: Spec, x: Operands) -> str | None:
  from pallas_gemm.kernels.sm90 import legal

  dtypes = x.a.dtype.name, x.b.dtype.name, jnp.dtype(spec.out_dtype).name
  return legal.refuses(*dtypes, spec.precision)


def sm90_config(x: Operands, spec: Spec) -> tuning.Config:
  """What the Hopper kernel computes a folded product with.

  Raises:
    NotImplementedError: it can't, or XLA is expected to be faster.
    ValueError: the user's config is not legal.
  """
  from pallas_gemm.kernels.sm90 import legal
  from pallas_gemm.kernels.sm90.plan import Plan
  from pallas_gemm.tuning import left_to_xla

  problem = problem_of(x, spec)
  if reason := legal.wrong_gpu():
    raise NotImplementedError(reason)
  if isinstance(spec.config, tuning.Config):
    if reason := legal.reason(Plan.of(problem, spec.config)):
      raise ValueError(f"config can't compute this product: {reason}")
    return spec.config
  config = tuning.resolve(problem, batch_invariant=spec.batch_invariant)
  free = spec.implementation is None and not spec.batch_invariant
  if free and not spec.ragged:
    if reason := left_to_xla.why(config, problem):
      raise NotImplementedError(reason)
  return config


def sm90(x: Operands, spec: Spec) -> Sequence[jax.Array]:
  """The Hopper kernel; interpreted where the target is no GPU."""
  from pallas_gemm.kernels.sm90 import launch

  how = {
    "problem": problem_of(x, spec),
    "config": spec.config,
    "activation": spec.activation and spec.activation.function,
  }
  # Indices in kernels are 32 bits wide, whatever the user's are.
  with jax.enable_x64(False):
    if spec.ragged:
      how |= {"b_up": x.b_up, "bias": x.bias}
      return launch.grouped(x.a, x.b, x.offsets, **how)
    batch, m, n, _, _ = spec.sizes(x)
    if _is_column(x, spec):
      x = _as_row(x, spec)
    for name, factor in (("alpha", x.alpha), ("beta", x.beta)):
      how[name] = 1.0 if factor is None else factor
    how |= {"b_up": x.b_up, "bias": x.bias, "c": x.c}
    outs = launch.dense(x.a, x.b, **how)
  return [out.reshape(batch, m, n) for out in outs]


def problem_of(x: Operands, spec: Spec) -> tuning.Problem:
  """What the kernel computes: of a matrix times a column, the transposed."""
  sizes = spec.sizes(x)
  if not all(isinstance(size, int) for size in sizes):
    raise NotImplementedError(SYMBOLIC)
  problem = tuning.Problem(
    **sizes._asdict(),
    dtype=x.a.dtype.name,
    out_dtype=jnp.dtype(spec.out_dtype).name,
    batched_a=not spec.ragged and x.a.shape[0] > 1,
    batched_b=not spec.ragged and x.b.shape[0] > 1,
    transpose_a=spec.transpose_a,
    transpose_b=spec.transpose_b,
    bias=spec.bias,
    c_dtype=None if x.c is None else x.c.dtype.name,
    activation=spec.activation and spec.activation.name,
    gated=spec.gated,
    ragged=spec.ragged,
    save_preactivation=spec.save,
    device=hardware.current().name,
  )
  if not _is_column(x, spec):
    return problem
  rows = dataclasses.replace(problem.transposed(), transpose_a=False)
  if problem.batched_b and not problem.batched_a:
    return dataclasses.replace(rows, m=sizes.batch, batch=1, batched_a=False)
  return rows


def _is_column(x: Operands, spec: Spec) -> bool:
  """Whether the product is a matrix times a column, computed as a row.

  TMA can't address columns: they would be copied into padded ones. 4096 x 1 x
  4096 takes 37.9 us so on an H200, 1 x 4096 x 4096 (NT) 10.0.
  """
  if spec.ragged or spec.gated or spec.batch_invariant:
    return False
  _, m, n, _, _ = spec.sizes(x)
  return n == 1 and m > 1


def _as_row(x: Operands, spec: Spec) -> Operands:
  """The operands of the transposed product; a column is a row in memory.

  Columns that share a matrix (vmap of a matrix times a vector) are the rows of
  one product.
  """
  batch, m, _, k, _ = spec.sizes(x)
  rows = batch if x.a.shape[0] == 1 else 1
  a = x.b.reshape(-1, rows, k)
  bias = jnp.broadcast_to(x.bias, (rows,)) if spec.bias == "n" else x.bias
  c = None if x.c is None else x.c.reshape(-1, rows, m)
  return x._replace(a=a, b=x.a, bias=bias, c=c)


# The Triton kernel.


def _triton_refuses(spec: Spec, x: Operands) -> str | None:
  if spec.ragged:
    return "takes no groups"
  if spec.batch_invariant:
    return "its config depends on M"
  from pallas_gemm.kernels import triton_dense

  dtypes = {v.dtype for v in (x.a, x.b, x.c) if v is not None}
  reason = _exceeded(
    {
      "no activation or gate": spec.activation is None,
      "no bias": spec.words.bias is None,
      "one dtype": dtypes == {jnp.dtype(spec.out_dtype)},
    }
  )
  if reason is None and x.a.dtype.name not in triton_dense.DTYPES:
    return f"takes {', '.join(triton_dense.DTYPES)}, got {x.a.dtype.name}"
  return reason


def _exceeded(limits: dict[str, bool]) -> str | None:
  """None, or the limits that are not kept, in words."""
  words = ", ".join(limit for limit, kept in limits.items() if not kept)
  return f"takes {words}" if words else None


def triton(x: Operands, spec: Spec) -> list[jax.Array]:
  """The Triton kernel: row-major matrices of one dtype."""
  from pallas_gemm.kernels import triton_dense

  limits = {
    "no batch": x.a.shape[0] == x.b.shape[0] == 1,
    "no transposed operand": not (spec.transpose_a or spec.transpose_b),
  }
  if reason := _exceeded(limits):
    raise NotImplementedError(reason)
  # Its factors are compiled in: XLA applies those that are arrays.
  is_plain = x.alpha is None and x.beta is None
  added, config = is_plain and x.c is not None, spec.config
  out = triton_dense.matmul(
    x.a[0],
    x.b[0],
    x.c[0] if added else None,
    beta=float(added),
    config=config if isinstance(config, triton_dense.Config) else None,
    precision=triton_dense.precision_of(spec.precision, x.a.dtype),
  )[None]
  if is_plain:
    return [out]
  return spec_lib.epilogue([out.astype(x.wide(spec.out_dtype))], x, spec)


# XLA.


def check_invariance(batch_invariant: bool, cuda: bool, why: str = "") -> None:
  """XLA promises none: refused on a Hopper GPU, said elsewhere."""
  if not batch_invariant:
    return
  if cuda and hardware.current().compute_capability == (9, 0):
    raise NotImplementedError(NOT_INVARIANT + why)
  report.warn_once(
    f"batch_invariant() has no effect here: {NOT_INVARIANT}; on a Hopper GPU"
    " the kernel keeps the promise"
  )


def _xla_config(x: Operands, spec: Spec) -> None:
  """It has none, and keeps no order."""
  del x
  check_invariance(spec.batch_invariant, compat.targets_gpu())


def xla(
  x: Operands, spec: Spec, out_sharding: NamedSharding | None = None
) -> list[jax.Array]:
  """What `jnp.dot` runs, and XLA's fusions for the epilogue.

  A dense product may have any letters. In a grouped one XLA multiplies every
  row with every B, and with zeros where the row is not in the group: a NaN or
  an infinity in B of one group reaches the rows of others.
  """
  narrow = jnp.dtype(spec.out_dtype)
  # Whether `lax.dot_general` takes the results' dtype itself.
  alone = not spec.has_epilogue and (
    narrow == x.b.dtype or narrow.itemsize > x.b.dtype.itemsize
  )
  dtype, sums = narrow if alone else x.wide(narrow), []
  for one, product in spec.products(x, out=spec.out, out_dtype=dtype):
    sums.append(
      _grouped_dot(one, product)
      if spec.ragged
      else _dot(one, product, out_sharding)
    )
  if spec.ragged == "k":
    return [z.astype(narrow) for z in sums]
  if alone and not spec.ragged:
    return sums
  return spec_lib.epilogue(sums, x, spec)


def _dot(x: Operands, spec: Spec, out_sharding: Any) -> jax.Array:
  """A @ B as one `lax.dot_general`, whatever the letters."""
  word_a, word_b, out = spec.words.a, spec.words.b, spec.out
  a, word_a = _without_shared_batch(x.a, word_a)
  b, word_b = _without_shared_batch(x.b, word_b)
  have = [c for c in out if c in word_a and c in word_b]
  have += [c for c in word_a if c in out and c not in word_b]
  have += [c for c in word_b if c in out and c not in word_a]
  both = [c for c in word_a if c in word_b]
  sides = [c for c in both if c not in out], [c for c in out if c in both]
  numbers = tuple(
    tuple(tuple(map(word.index, letters)) for word in (word_a, word_b))
    for letters in sides
  )
  if out_sharding is not None:
    parts = dict(zip(out, out_sharding.spec))
    spec_of = PartitionSpec(*[parts.get(c) for c in have])
    out_sharding = NamedSharding(out_sharding.mesh, spec_of)
  z = lax.dot_general(
    a,
    b,
    numbers,
    precision=spec.precision,
    preferred_element_type=spec.out_dtype,
    out_sharding=out_sharding,
  )
  return spec_lib.lifted(z, "".join(have), out)


def _without_shared_batch(v: jax.Array, word: str) -> tuple[jax.Array, str]:
  """A folded operand that all of the batch shares has no such dimension."""
  shared = word.startswith("b") and v.shape[0] == 1
  return (jnp.squeeze(v, 0), word[1:]) if shared else (v, word)


# By the letters of B.
_DIMENSIONS = {
  word: lax.RaggedDotDimensionNumbers(
    (contracted, ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=groups,
  )
  for word, contracted, groups in (
    ("gkn", ((1,), (1,)), (0,)),
    ("gnk", ((1,), (2,)), (0,)),
    ("kn", ((0,), (0,)), ()),
  )
}


def _grouped_dot(x: Operands, spec: Spec) -> jax.Array:
  """[M, N], of anything outside of the groups, or [G, M, N]."""
  a, b, first = x.a, x.b, x.offsets[0]
  both = max((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize)
  # XLA starts with the first row: rows are turned in a circle.
  turned = spec.leading_rows
  if turned:
    a = jnp.roll(a, -first, axis=0)
    b = jnp.roll(b, -first, axis=0) if spec.ragged == "k" else b
  out = lax.ragged_dot_general(
    a.astype(both),
    b.astype(both),
    jnp.diff(x.offsets),
    _DIMENSIONS[spec.words.b],
    precision=spec.precision,
    preferred_element_type=spec.out_dtype,
  )
  turned = turned and spec.ragged == "m"
  return jnp.roll(out, first, axis=0) if turned else out


IMPLEMENTATIONS: dict[str, Implementation] = {
  "sm90": Implementation(sm90, _sm90_refuses, sm90_config),
  "triton": Implementation(triton, _triton_refuses),
  "xla": Implementation(xla, lambda spec, x: None, _xla_config),
}
