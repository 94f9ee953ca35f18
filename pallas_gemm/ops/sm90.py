"""A folded product on the Hopper kernel."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gemm import compat, tuning
from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.ops import scales, slabs
from pallas_gemm.ops.spec import Operands, Spec

# Its name.
HOPPER = "sm90"
SYMBOLIC = (
  "sizes must be known numbers, got symbolic ones; export with"
  " pallas_gemm.export_buckets to keep the kernel"
)


def refuses(spec: Spec, x: Operands) -> str | None:
  """Why it never takes the product, whatever the sizes."""
  pair, precision = (x.a.dtype.name, x.b.dtype.name), spec.precision
  if "float32" in pair or x.has_planes:
    if not spec.in_planes:
      ours = "lax.Precision" if spec.ragged else "precision HIGHEST"
      return (
        f"float32 is XLA's except at {ours}, BF16_BF16_F32_X3, _X6 or _X9, got"
        f" precision {precision}"
      )
    pair = ("bfloat16" if dtype == "float32" else dtype for dtype in pair)
    precision = None
  out_dtype = jnp.dtype(spec.out_dtype).name
  if reason := legal.refuses(*pair, out_dtype, precision):
    return reason
  # Many factors, which have dimensions, follow the kernel: `folding.is_fused`.
  if out_dtype == "int32" and (spec.words.alpha == "" or spec.activation):
    return "results in int32 are sums of products: no alpha, no activation"
  return None


def is_asked_for(spec: Spec, x: Operands) -> bool:
  """Whether it is named, for a product that it may take."""
  return HOPPER in (spec.implementation or ()) and not refuses(spec, x)


def chosen(x: Operands, spec: Spec) -> tuple[tuning.Config, str]:
  """The config to compute a folded product with, and where it comes from.

  Raises:
    NotImplementedError: it can't be, or XLA's product comes first.
    ValueError: the user's config is not legal.
  """
  problem, platform = problem_of(x, spec), compat.target_device().platform
  if platform not in (*compat.CUDA_PLATFORMS, "cpu"):
    raise NotImplementedError(
      f"the kernel runs on CUDA, and interpreted on CPUs, not on {platform}"
    )
  if reason := legal.wrong_gpu():
    raise NotImplementedError(reason)
  first = next(
    tuning.ranked(
      problem,
      config=spec.config if isinstance(spec.config, tuning.Config) else None,
      batch_invariant=spec.batch_invariant,
      # XLA rounds what scales along K multiply, and see `xla` about int8.
      # It would add planes up first.
      xla_too=spec.implementation is None
      and not (spec.words.has_scales or spec.words.has_planes),
    )
  )
  if first.how == "xla":
    raise NotImplementedError(first.why)
  # The config of planes that are made gives the same bits if they are kept.
  is_there = first.how.moves and x.has_planes
  config = (
    dataclasses.replace(first.how, moves=False) if is_there else first.how
  )
  return config, first.source


def run(x: Operands, spec: Spec) -> Sequence[jax.Array]:
  """The results; the kernel is interpreted where the target is no GPU."""
  # Which imports Mosaic GPU.
  from pallas_gemm.kernels.sm90 import launch
  from pallas_gemm.kernels.sm90.scales import Scales

  how = {
    "problem": problem_of(x, spec),
    "config": spec.config,
    "activation": spec.activation and spec.activation.function,
  }
  # Indices in kernels are 32 bits wide, whatever the user's are.
  with jax.enable_x64(False):
    numbers, shape = scales.of_kernel(x, spec), spec.shape(x)
    if _has_slabs(x, spec):
      x = _in_slabs(x, spec)
    if _is_column(x, spec):
      x = _as_row(x, spec)
      numbers[:2] = numbers[1::-1]
    b = x.planes("b")
    how["b_up"] = None if x.b_up is None else x.planes("b_up")
    how |= {"bias": x.bias, "scales": Scales(*numbers)}
    if spec.ragged:
      return launch.grouped(x.a, b, x.offsets, **how)
    for name, factor in (("alpha", x.alpha), ("beta", x.beta)):
      how[name] = 1.0 if factor is None else factor
    outs = launch.dense(x.a, b, c=x.c, **how)
  return [out.reshape(shape) for out in outs]


def problem_of(x: Operands, spec: Spec) -> tuning.Problem:
  """What the kernel computes: of a matrix times a column, the transposed."""
  sizes = spec.sizes(x)
  if not all(isinstance(size, int) for size in sizes):
    raise NotImplementedError(SYMBOLIC)
  scale_a, scale_b = scales.kinds(spec.words)
  (dtype_a, planes_a), (dtype_b, planes_b) = (
    _in_planes(v.dtype.name, spec) for v in (x.a, x.b)
  )
  planes_b = max(planes_b, len(x.planes("b")))
  problem = tuning.Problem.flat(
    **sizes._asdict(),
    dtype=dtype_a,
    dtype_b=dtype_b,
    planes_a=planes_a,
    planes_b=planes_b,
    all_pairs=legal.multiplies_all_pairs(spec.precision),
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
    fast_accumulation=legal.accumulates_fast(spec.precision),
    scale_a=scale_a,
    scale_b=scale_b,
  )
  if _has_slabs(x, spec):
    k = sizes.k
    if not spec.whole_slabs:
      k = slabs.length(k, sizes.groups)
    return problem.changed(k=k, transpose_a=False, transpose_b=True)
  if not _is_column(x, spec):
    return problem
  rows = problem.transposed().changed(transpose_a=False)
  if problem.b.batched and not problem.a.batched:
    return rows.changed(m=sizes.batch, batch=1, batched_a=False)
  return rows


def _in_planes(dtype: str, spec: Spec) -> tuple[str, int]:
  """The dtype that an operand is multiplied in, and in how many planes."""
  if dtype != "float32":
    return dtype, 1
  return "bfloat16", legal.planes_of(spec.precision, spec.ragged is not None)


def spec_of(problem: tuning.Problem, activation: Any) -> Spec:
  """The folded product that has this problem, without factors.

  Args:
    problem: what is computed.
    activation: the function that the problem names.
  """
  p, epilogue = problem, problem.epilogue
  b = "nk" if p.b.k_last else "kn"
  if p.along == "k":
    words, out = Operands("km", "kn", offsets="o"), "gmn"
  elif p.groups:
    b, out = f"g{b}", "mn"
    words = Operands(
      "mk", b, epilogue.gated and b, epilogue.bias and "gn", offsets="o"
    )
  else:
    a, b, out = "bmk" if p.a.k_last else "bkm", f"b{b}", "bmn"
    words = Operands(
      a, b, epilogue.gated and b, epilogue.bias, epilogue.c_dtype and "bmn"
    )
  return Spec(
    words=Operands(*[None if word is False else word for word in words]),
    out=out,
    out_dtype=jnp.dtype(p.out_dtype),
    ragged=p.along,
    activation=activation,
    save=epilogue.save,
    precision=legal.precision_of(p),
    in_planes=p.planes > 1,
    leading_rows=False,
  )


def _has_slabs(x: Operands, spec: Spec) -> bool:
  """Whether groups share out slabs of 8 bits, which are stored along K."""
  return spec.ragged == "k" and x.a.dtype.itemsize == 1


def _in_slabs(x: Operands, spec: Spec) -> Operands:
  """A [M, K], B [N, K], of groups of whole slabs."""
  if not spec.whole_slabs:
    to = slabs.places(x.offsets, x.a.shape[0])
    # Else XLA gathers into columns, byte by byte. In one fusion with the
    # transpose it reads and writes tiles of both: 2206 -> 1160 us (H100, eight
    # groups of 1,024 rows).
    a, b = (compat.in_rows(slabs.moved(v, to)) for v in (x.a, x.b))
    x = x._replace(a=a, b=b, offsets=to.offsets)
  return x._replace(a=x.a.T, b=x.b.T)


def _is_column(x: Operands, spec: Spec) -> bool:
  """Whether the product is a matrix times a column, computed as a row.

  TMA can't address columns: they would be copied into padded ones. 4096 x 1 x
  4096 takes 37.9 us so on an H200, 1 x 4096 x 4096 (NT) 10.0.
  """
  if spec.ragged or spec.gated or spec.batch_invariant:
    return False
  # Which A and B have of their own kinds.
  if x.has_planes or scales.has_blocks(spec.words):
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
