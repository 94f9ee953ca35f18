"""The ways to compute a product on one device, and the choice between them.

Each takes folded operands, the spec and the target, and returns the results,
or raises NotImplementedError with the reason why it does not.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_gemm import hardware, report, tuning
from pallas_gemm.ops import folding
from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.spec import Operands, Spec

NOT_INVARIANT = (
  "XLA chooses the order of additions for M too, so it is not batch invariant"
)
_PRESETS = lax.DotAlgorithmPreset


@dataclasses.dataclass(frozen=True)
class Target:
  """What a product is lowered for.

  Attributes:
    cuda: a CUDA GPU; else any other platform.
  """

  cuda: bool

  @property
  def default(self) -> tuple[str, ...]:
    """The names that implementation=None stands for."""
    return ("sm90", "xla") if self.cuda else ("xla",)


class Implementation(NamedTuple):
  """One way to compute a product.

  Attributes:
    run: run(x, spec, target) gives the results.
    refuses: refuses(spec, x) is None, or why dtypes and precision alone keep it
      from ever taking the product, whatever the sizes.
    choose: choose(x, spec) is the config to run with.
  """

  run: Callable[[Operands, Spec, Target], Sequence[jax.Array]]
  refuses: Callable[[Spec, Operands], str | None]
  choose: Callable[[Operands, Spec], Any] = lambda x, spec: spec.config


def names(spec: Spec, target: Target) -> tuple[str, ...]:
  """What is tried, in order."""
  return spec.implementation or target.default


def may_run_kernel(spec: Spec, x: Operands, target: Target) -> bool:
  """Whether anything but XLA's own product could be taken."""
  return any(
    name != "xla" and not IMPLEMENTATIONS[name].refuses(spec, x)
    for name in names(spec, target)
  )


def run(*operands: jax.Array, spec: Spec, target: Target) -> list[jax.Array]:
  """The results on one device, of the first implementation that takes it.

  Args:
    *operands: as `spec` names them.
    spec: what is computed.
    target: what is lowered for.

  Raises:
    NotImplementedError: none takes it; the reason of each.
  """

  def first_of(x: Operands, spec: Spec) -> Sequence[jax.Array]:
    if spec_lib.is_empty(spec.sizes(x)[: 5 if spec.ragged else 4]):
      return _without_product(x, spec)
    return _first_of(x, spec, target)

  return folded(*operands, spec=spec, run=first_of)


def folded(
  *operands: jax.Array, spec: Spec, run: folding.Run
) -> list[jax.Array]:
  """The results, of folded products by `run`."""
  x = spec.named(operands)
  if not folding.is_fused(spec):
    return _apart(x, spec, run)
  if spec.ragged:
    grouped = functools.partial(folding.grouped, run)
    return folding.over_batch(grouped, x, spec)
  return folding.dense(run, x, spec)


def _apart(x: Operands, spec: Spec, run: folding.Run) -> list[jax.Array]:
  """The epilogue in XLA, after each product by itself."""
  wide = x.wide(spec.out_dtype)
  w, sums = spec.words, []
  for b, word in ((x.b, w.b), (x.b_up, w.b_up)):
    if b is None:
      continue
    there = w.a + word + (w.offsets or "") + "g" * bool(spec.ragged)
    out = "".join(c for c in spec.out if c in there)
    words = Operands(w.a, word, offsets=w.offsets)
    alone = spec.product_alone(words=words, out=out, out_dtype=wide)
    operands = Operands(x.a, b, offsets=x.offsets).present()
    (z,) = folded(*operands, spec=alone, run=run)
    sums.append(spec_lib.lifted(z, out, spec.out))
  shape = spec.shape(x)
  return [
    jnp.broadcast_to(out, shape) for out in spec_lib.epilogue(sums, x, spec)
  ]


def _first_of(x: Operands, spec: Spec, target: Target) -> Sequence[jax.Array]:
  product = in_words(x, spec)
  refusals: dict[str, str] = {}
  for name in names(spec, target):
    implementation = IMPLEMENTATIONS[name]
    try:
      if reason := implementation.refuses(spec, x):
        raise NotImplementedError(reason)
      config = implementation.choose(x, spec)
      chosen = dataclasses.replace(spec, config=config)
      outs = implementation.run(x, chosen, target)
    except NotImplementedError as error:
      refusals[name] = str(error)
      if refusals[name] == SYMBOLIC:  # all else would have let the kernel run
        report.warn_once(f"XLA's product runs instead of a kernel: {SYMBOLIC}")
      continue
    platform = "CUDA" if target.cuda else "other platforms than CUDA"
    why = _listed(refusals)
    skipped = f" (not {why})" if refusals else ""
    report.log_once(f"{product} runs on {name!r} on {platform}{skipped}")
    shapes = tuple(v.shape for v in x.present())
    report.ran(report.Ran(product, name, config, why, shapes, spec.around))
    return outs
  raise NotImplementedError(
    f"no implementation computes {product}: {_listed(refusals)}"
  )


def _without_product(x: Operands, spec: Spec) -> list[jax.Array]:
  """As in BLAS: what K = 0 leaves is activation(beta * C + bias)."""
  batch, m, n, _, groups = spec.sizes(x)
  sizes = (m, n, groups) if spec.ragged else (batch, m, n)
  if spec.ragged == "k" or spec_lib.is_empty(sizes):
    return [jnp.zeros(spec.shape(x), spec.out_dtype)] * spec.outputs
  dtype = x.wide(spec.out_dtype)
  nothing = jnp.zeros(spec.shape(x), dtype)
  return spec_lib.epilogue([nothing] * (2 if spec.gated else 1), x, spec)


# The Hopper kernel.


def _sm90_refuses(spec: Spec, x: Operands) -> str | None:
  dtype = x.a.dtype
  if dtype != x.b.dtype:
    return f"operands must have one dtype, got {dtype} and {x.b.dtype}"
  if dtype not in (jnp.bfloat16, jnp.float16):
    return f"operands must be bfloat16 or float16, got {dtype}"
  if jnp.dtype(spec.out_dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
    return f"out_dtype must be 16-bit float or float32, got {spec.out_dtype}"
  same = {
    "bfloat16": _PRESETS.BF16_BF16_F32,
    "float16": _PRESETS.F16_F16_F32,
  }[dtype.name]
  # All of `lax.Precision` is the same arithmetic on 16-bit operands.
  if isinstance(spec.precision, _PRESETS | lax.DotAlgorithm) and (
    spec.precision not in (same, _PRESETS.DEFAULT)
  ):
    return (
      f"multiplies {dtype} and adds in float32, got precision {spec.precision}"
    )
  return None


def sm90_config(x: Operands, spec: Spec) -> tuning.Config:
  """What the Hopper kernel computes a folded product with.

  Raises:
    NotImplementedError: it can't, or XLA is expected to be faster.
    ValueError: the user's config is not legal.
  """
  from pallas_gemm.kernels import sm90_legal
  from pallas_gemm.tuning import left_to_xla

  problem = problem_of(x, spec)
  gpu = hardware.current()
  if gpu.compute_capability != (9, 0):
    raise NotImplementedError(
      f"needs a GPU of compute capability 9.0, the {gpu.name} has"
      f" {'.'.join(map(str, gpu.compute_capability))}"
    )
  if isinstance(spec.config, tuning.Config):
    if reason := sm90_legal.is_legal(spec.config, problem):
      raise ValueError(f"config can't compute this product: {reason}")
    return spec.config
  config = tuning.resolve(problem, batch_invariant=spec.batch_invariant)
  free = spec.implementation is None and not spec.batch_invariant
  if free and not spec.ragged:
    if reason := left_to_xla.why(config, problem):
      raise NotImplementedError(reason)
  return config


def sm90(x: Operands, spec: Spec, target: Target) -> Sequence[jax.Array]:
  """The Hopper kernel; interpreted where the target is no GPU."""
  del target
  from pallas_gemm.kernels import sm90_dense, sm90_ragged

  how = {
    "problem": problem_of(x, spec),
    "config": spec.config,
    "activation": spec.activation and spec.activation.function,
  }
  # Indices in kernels are 32 bits wide, whatever the user's are.
  with jax.enable_x64(False):
    if spec.ragged:
      how |= {"b_up": x.b_up, "bias": x.bias}
      return sm90_ragged.matmul(x.a, x.b, x.offsets, **how)
    batch, m, n, _, _ = spec.sizes(x)
    if _is_column(x, spec):
      x = _as_row(x, spec)
    for name, factor in (("alpha", x.alpha), ("beta", x.beta)):
      how[name] = 1.0 if factor is None else factor
    how |= {"b_up": x.b_up, "bias": x.bias, "c": x.c}
    outs = sm90_dense.matmul(x.a, x.b, **how)
  return [out.reshape(batch, m, n) for out in outs]


def problem_of(x: Operands, spec: Spec) -> tuning.Problem:
  """What the kernel computes: of a matrix times a column, the transposed."""
  batch, m, n, k, groups = spec.sizes(x)
  if not all(isinstance(size, int) for size in (batch, m, n, k, groups)):
    raise NotImplementedError(SYMBOLIC)
  problem = tuning.Problem(
    m=m,
    n=n,
    k=k,
    dtype=x.a.dtype.name,
    out_dtype=jnp.dtype(spec.out_dtype).name,
    batch=batch,
    batched_a=not spec.ragged and x.a.shape[0] > 1,
    batched_b=not spec.ragged and x.b.shape[0] > 1,
    transpose_a=spec.transpose_a,
    transpose_b=spec.transpose_b,
    bias=spec.bias,
    c_dtype=None if x.c is None else x.c.dtype.name,
    activation=spec.activation and spec.activation.name,
    gated=spec.gated,
    ragged=spec.ragged,
    groups=groups,
    save_preactivation=spec.save,
    device=hardware.current().name,
  )
  if not _is_column(x, spec):
    return problem
  rows = dataclasses.replace(problem.transposed(), transpose_a=False)
  if problem.batched_b and not problem.batched_a:
    return dataclasses.replace(rows, m=batch, batch=1, batched_a=False)
  return rows


SYMBOLIC = (
  "sizes must be known numbers, got symbolic ones; export with"
  " pallas_gemm.export_buckets to keep the kernel"
)


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
  bias = x.bias
  if spec.bias == "n":
    bias = jnp.broadcast_to(bias, (rows,))
  return x._replace(
    a=x.b.reshape(-1, rows, k),
    b=x.a,
    bias=bias,
    c=None if x.c is None else x.c.reshape(-1, rows, m),
  )


# The Triton kernel.


def _triton_refuses(spec: Spec, x: Operands) -> str | None:
  if spec.ragged:
    return "takes no groups"
  if spec.batch_invariant:
    return "its config depends on M"
  from pallas_gemm.kernels import triton_dense

  dtypes = {x.a.dtype, x.b.dtype, jnp.dtype(spec.out_dtype)}
  if x.c is not None:
    dtypes.add(x.c.dtype)
  limits = {
    "no activation or gate": spec.activation is None,
    "no bias": spec.words.bias is None,
    "one dtype": len(dtypes) == 1,
  }
  if exceeded := [limit for limit, kept in limits.items() if not kept]:
    return f"takes {', '.join(exceeded)}"
  if x.a.dtype.name not in triton_dense.DTYPES:
    return f"takes {', '.join(triton_dense.DTYPES)}, got {x.a.dtype.name}"
  return None


def triton(x: Operands, spec: Spec, target: Target) -> list[jax.Array]:
  """The Triton kernel: row-major matrices of one dtype."""
  del target
  from pallas_gemm.kernels import triton_dense

  limits = {
    "no batch": x.a.shape[0] == x.b.shape[0] == 1,
    "no transposed operand": not (spec.transpose_a or spec.transpose_b),
  }
  if exceeded := [limit for limit, kept in limits.items() if not kept]:
    raise NotImplementedError(f"takes {', '.join(exceeded)}")
  # Its factors are compiled in: XLA applies those that are arrays.
  wide = x.wide(spec.out_dtype)
  is_plain = x.alpha is None and x.beta is None
  config = spec.config
  out = triton_dense.matmul(
    x.a[0],
    x.b[0],
    x.c[0] if is_plain and x.c is not None else None,
    beta=1.0 if is_plain and x.c is not None else 0.0,
    config=config if isinstance(config, triton_dense.Config) else None,
    precision=_triton_precision(spec.precision, x.a.dtype),
  )[None]
  return [out] if is_plain else spec_lib.epilogue([out.astype(wide)], x, spec)


def _triton_precision(precision: Any, dtype: Any) -> str:
  """Of float32: TF32 where XLA takes it too, exact where more is asked for."""
  if dtype != jnp.float32:
    return "ieee"
  tf32 = (None, lax.Precision.DEFAULT, _PRESETS.TF32_TF32_F32)
  exact = (lax.Precision.HIGH, lax.Precision.HIGHEST, _PRESETS.F32_F32_F32)
  if precision in tf32:
    return "tf32"
  if precision in exact:
    return "ieee"
  raise NotImplementedError(f"has no precision {precision} of float32")


# XLA.


def check_invariance(spec: Spec, target: Target) -> None:
  """XLA promises none: refused on a Hopper GPU, said elsewhere."""
  if not spec.batch_invariant:
    return
  if target.cuda and hardware.current().compute_capability == (9, 0):
    raise NotImplementedError(NOT_INVARIANT)
  report.warn_once(
    f"batch_invariant() has no effect here: {NOT_INVARIANT}; on a Hopper GPU"
    " the kernel keeps the promise"
  )


def xla(
  x: Operands, spec: Spec, target: Target, out_sharding: Any = None
) -> list[jax.Array]:
  """What `jnp.dot` runs, and XLA's fusions for the epilogue.

  A dense product may have any letters. In a grouped one XLA multiplies every
  row with every B, and with zeros where the row is not in the group: a NaN or
  an infinity in B of one group reaches the rows of others.
  """
  check_invariance(spec, target)
  w, wide = spec.words, x.wide(spec.out_dtype)
  alone = not spec.has_epilogue and is_wider(spec.out_dtype, x.b.dtype)
  dtype, sums = spec.out_dtype if alone else wide, []
  for b, word in ((x.b, w.b), (x.b_up, w.b_up)):
    if b is not None and spec.ragged:
      sums.append(_grouped_dot(x, b, spec, dtype))
    elif b is not None:
      of_b = dataclasses.replace(spec, words=w._replace(b=word))
      sums.append(dot(x, b, of_b, dtype, out_sharding))
  if spec.ragged == "k":
    return [z.astype(spec.out_dtype) for z in sums]
  if alone and not spec.ragged:
    return sums
  return spec_lib.epilogue(sums, x, spec)


def is_wider(dtype: Any, than: Any) -> bool:
  """Whether `lax.dot_general` takes `dtype` for the result of `than`."""
  return dtype == than or jnp.dtype(dtype).itemsize > than.itemsize


def dot(
  x: Operands, b: jax.Array, spec: Spec, dtype: Any, out_sharding: Any = None
) -> jax.Array:
  """A @ B as one `lax.dot_general`, whatever the letters.

  Args:
    x: the operands.
    b: B, or B_up.
    spec: what is computed.
    dtype: of the sums.
    out_sharding: of the result, a NamedSharding or None.
  """
  word_a, word_b, out = spec.words.a, spec.words.b, spec.out
  a, word_a = _without_shared_batch(x.a, word_a, word_b, b)
  b, word_b = _without_shared_batch(b, word_b, word_a, a)
  have = [c for c in out if c in word_a and c in word_b]
  have += [c for c in word_a if c in out and c not in word_b]
  have += [c for c in word_b if c in out and c not in word_a]
  sides = [c for c in word_a if c in word_b and c not in out], have
  numbers = tuple(
    tuple(
      tuple(word.index(c) for c in letters if c in word_a and c in word_b)
      for word in (word_a, word_b)
    )
    for letters in sides
  )
  if out_sharding is not None:
    parts = dict(zip(out, out_sharding.spec))
    spec_of = jax.sharding.PartitionSpec(*[parts.get(c) for c in have])
    out_sharding = jax.sharding.NamedSharding(out_sharding.mesh, spec_of)
  z = lax.dot_general(
    a,
    b,
    numbers,
    precision=spec.precision,
    preferred_element_type=dtype,
    out_sharding=out_sharding,
  )
  return spec_lib.lifted(z, "".join(have), out)


def _without_shared_batch(v, word: str, other_word: str, other):
  """A folded operand that all of the batch shares has no such dimension."""
  if word.startswith("b") and v.shape[0] == 1:
    return jnp.squeeze(v, 0), word[1:]
  return v, word


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


def _grouped_dot(x: Operands, b: jax.Array, spec: Spec, dtype: Any):
  """[M, N], of anything outside of the groups, or [G, M, N]."""
  a, first = x.a, x.offsets[0]
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
    preferred_element_type=dtype,
  )
  turned = turned and spec.ragged == "m"
  return jnp.roll(out, first, axis=0) if turned else out


IMPLEMENTATIONS: dict[str, Implementation] = {
  "sm90": Implementation(sm90, _sm90_refuses, sm90_config),
  "triton": Implementation(triton, _triton_refuses),
  "xla": Implementation(xla, lambda spec, x: None, lambda x, spec: None),
}


# In words.


def in_words(x: Operands, spec: Spec) -> str:
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
  op = "ragged_dot" if spec.ragged else "matmul"
  of = f"batch {batch}"
  if spec.ragged:
    of = f"groups {groups} along {spec.ragged.upper()}"
  return (
    f"{'gated_' if spec.gated else ''}{op} {x.a.dtype.name} to"
    f" {jnp.dtype(spec.out_dtype).name}, {of}, M {m}, N {n}, K {k},"
    f" {'NT'[spec.transpose_a]}{'NT'[spec.transpose_b]}{extra}"
  )


def _listed(refusals: dict[str, str]) -> str:
  return "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
