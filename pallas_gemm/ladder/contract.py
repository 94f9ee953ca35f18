"""What every rung shares: the problem, the argument checks, how it is called.

A rung's file holds only its idea. What is the same in all twelve lives here:
which arguments are legal, what happens when a dimension is zero, how operands
that a kernel can't mask are padded, and how `alpha`, `beta` and `C` enter.
"""

from collections.abc import Callable, Sequence
import dataclasses
import re
import sys
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_gemm import blas, hardware
from pallas_gemm.ladder import blocks
from pallas_gemm.ladder import needs as needs_lib
from pallas_gemm.ladder.configs import SIMT_FIELDS as SIMT_FIELDS
from pallas_gemm.ladder.configs import TENSOR_CORE_FIELDS as TENSOR_CORE_FIELDS
from pallas_gemm.ladder.configs import Config as Config
from pallas_gemm.ladder.configs import SimtConfig as SimtConfig
from pallas_gemm.ladder.configs import TensorCoreConfig as TensorCoreConfig
from pallas_gemm.ladder.configs import check_fields as check_fields

FLOAT32, FLOAT16S = blas.FLOAT32, blas.FLOAT16S


@dataclasses.dataclass(frozen=True)
class Gemm:
  """alpha * A[m, k] @ B[k, n] + beta * C[m, n], all of one dtype.

  Attributes:
    m: rows of A and of the result.
    n: columns of B and of the result.
    k: the contracted dimension.
    dtype: name of the operands' and the result's dtype.
    alpha: factor of the product.
    beta: factor of C; C takes no part when it is zero.
  """

  m: int
  n: int
  k: int
  dtype: str = "float32"
  alpha: float = 1.0
  beta: float = 0.0

  @property
  def itemsize(self) -> int:
    """Bytes of one element."""
    return jnp.dtype(self.dtype).itemsize


Problem = Gemm  # as users know it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
  """One rung of the ladder, or a variant of one.

  Attributes:
    number: 1..13; the same number is in the file's name and the table's row.
    variant: "" of the rung itself, a letter of a variant in the same file.
    name: the idea; of a rung, as it stands in the file's name.
    idea: one line for tables.
    dtypes: names of the dtypes that `gemm` takes.
    config_type: SimtConfig or TensorCoreConfig.
    uses: the config's fields that the kernel reads; the others keep their
      defaults.
    needs: what of `hardware.FEATURES` a GPU must have.
    default_config: the config that `gemm` uses for a problem when none is
      given.
    is_legal: (config, problem) -> None, or the reason why it can't run.
    grid: (problem, config) -> (M / bm, N / bn, K / bk), rounded up: blocks of
      rows, blocks of columns, and steps along K.
    specs: (problem, config) -> `blocks.Specs`: for each point of the grid,
      the blocks of A and B that it reads, and of C where beta is not 0; and
      the block of the result that it belongs to.
    launch: (problem, config) -> the grid of thread blocks (of clusters, where
      there are some) that is started. One for each block of the result unless
      the rung's file says otherwise.
    layout: config -> which thread of a warpgroup holds which elements of its
      part of the result; None where wgmma or mma prescribes it.
    warpgroups: config -> warpgroups of a thread block that compute.
    padding: (problem, config) -> what M, N and K are padded to multiples of.
    kernel: (operands, problem, config) -> result; the operands are A and B,
      and C where beta is not 0, all padded, and the problem is theirs.
    module: dotted name of the module, whose docstring is the rung's page.
    variants: the rung's variants.
  """

  number: int
  variant: str
  name: str
  idea: str
  dtypes: tuple[str, ...]
  config_type: type
  uses: tuple[str, ...]
  needs: tuple[str, ...]
  default_config: Callable[[Gemm], Config]
  is_legal: Callable[[Any, Gemm], str | None]
  grid: Callable[[Gemm, Any], tuple[int, int, int]]
  specs: Callable[[Gemm, Any], blocks.Specs]
  launch: Callable[[Gemm, Any], tuple[int, ...]]
  layout: Callable[[Any], Any] | None
  warpgroups: Callable[[Any], int]
  padding: Callable[[Gemm, Any], tuple[int, int, int]]
  kernel: Callable[..., jax.Array]
  module: str
  variants: "tuple[Rung, ...]" = ()

  @property
  def label(self) -> str:
    """The number, with the letter of a variant: "8", "8a"."""
    return f"{self.number}{self.variant}"

  def lacks(self, gpu: hardware.Gpu | None = None) -> str | None:
    """None, or which of `needs` a GPU has not got, and what runs on it.

    Args:
      gpu: None is the one that a trace made now is for.

    Example:
      >>> from pallas_gemm import hardware, ladder
      >>> ladder.find(8).lacks(hardware.lookup("T4"))[:40]
      'rung 8 needs TMA, which compute capabili'
    """
    return needs_lib.lacks(self.label, self.needs, gpu)

  def gemm(
    self,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    config: Config | None = None,
  ) -> jax.Array:
    """alpha * A @ B + beta * C with this rung's kernel.

    Works under `jax.jit` and `jax.vmap`; it has no derivative. On a machine
    without an NVIDIA GPU the same kernel runs in Pallas' GPU interpreter: slow,
    right.

    Args:
      a: [M, K], a dtype of `self.dtypes`, row-major.
      b: [K, N], the dtype of `a`.
      c: [M, N], the dtype of `a`; never read when beta is 0.
      alpha: a Python number, rounded to float32.
      beta: the same; not zero needs `c`.
      config: tile sizes; None takes `default_config`.

    Returns:
      [M, N], the dtype of `a`. Products are accumulated in float32 in
      increasing order of k, on tensor cores 16 at a time in an order of their
      own; the result is rounded once. K = 0 gives beta * C.
      The error of an element is at most `numerics.error_bound`.

    Raises:
      TypeError: an argument is of the wrong kind or dtype.
      ValueError: a rank, a shape, `alpha` or `beta` beyond float32, `beta`
        without `c`, a GPU that the rung can't run on, or a config that is not
        legal.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_gemm.ladder import LADDER
      >>> a, b = jnp.ones((3, 5)), jnp.ones((5, 2))
      >>> LADDER[0].gemm(a, b, alpha=2.0).tolist()
      [[10.0, 10.0], [10.0, 10.0], [10.0, 10.0]]
    """
    problem = check_arguments(
      a, b, c, alpha=alpha, beta=beta, dtypes=self.dtypes, rung=self.name
    )
    if reason := self.lacks():
      raise ValueError(reason)
    if config is None:
      config = self.default_config(problem)
    elif not isinstance(config, self.config_type):
      raise TypeError(
        f"config of {self.name} must be a {self.config_type.__name__}, got"
        f" {type(config).__name__}"
      )
    if (reason := self.is_legal(config, problem)) is not None:
      raise ValueError(f"config of {self.name} is not legal: {reason}")
    if problem.beta == 0:
      c = None
    if 0 in (problem.m, problem.n, problem.k) or problem.alpha == 0:
      return _without_product(c, problem)
    padded = self.padded(problem, config)
    with jax.enable_x64(False):  # indices in kernels are 32 bits wide
      operands = [
        _pad_to(a, padded.m, padded.k),
        _pad_to(b, padded.k, padded.n),
        *([] if c is None else [_pad_to(c, padded.m, padded.n)]),
      ]
      out = self.kernel(operands, padded, config)
    return out if padded == problem else out[: problem.m, : problem.n]

  def padded(self, problem: Gemm, config: Config) -> Gemm:
    """The problem with its sizes rounded up to what the kernel takes.

    XLA pads operands with zeros, and cuts the result: one read and one write
    of each that does not fit, O(MK + KN + MN) bytes for O(MNK) work.
    """
    m, n, k = (
      pl.cdiv(size, multiple) * multiple
      for size, multiple in zip(
        (problem.m, problem.n, problem.k), self.padding(problem, config)
      )
    )
    return dataclasses.replace(problem, m=m, n=n, k=k)


def check_arguments(
  a, b, c, *, alpha, beta, dtypes: tuple[str, ...], rung: str
) -> Gemm:
  """Checks what a user passed, see `blas`; returns the problem it describes."""
  factors = {"alpha": alpha, "beta": beta}
  m, n, k = blas.sizes(a, b, c, **factors, dtypes=dtypes, kernel=rung)
  return Gemm(
    m, n, k, jnp.dtype(a.dtype).name, alpha=float(alpha), beta=float(beta)
  )


def _without_product(c: jax.Array | None, problem: Gemm) -> jax.Array:
  """beta * C, or zeros: no kernel has anything to multiply."""
  if c is None:
    return jnp.zeros((problem.m, problem.n), problem.dtype)
  scaled = jnp.float32(problem.beta) * c.astype(jnp.float32)
  return scaled.astype(problem.dtype)


def _pad_to(x: jax.Array, rows: int, columns: int) -> jax.Array:
  """Zero-pads to (rows, columns); no copy if it is that large."""
  pad = rows - x.shape[0], columns - x.shape[1]
  return jnp.pad(x, [(0, size) for size in pad]) if any(pad) else x


def combine(
  acc: jax.Array, c: jax.Array | None = None, *, problem: Gemm
) -> jax.Array:
  """alpha * acc + beta * C in float32; used inside kernels.

  Factors of one cost no instruction.
  """
  if problem.alpha != 1:
    acc = acc * jnp.float32(problem.alpha)
  if c is None:
    return acc
  c = c.astype(jnp.float32)
  if problem.beta != 1:
    c = c * jnp.float32(problem.beta)
  return acc + c


def _number_and_name(
  module: str, number: int | None, name: str | None
) -> tuple[int, str]:
  """Those that are given, or in the file's name."""
  stem = re.fullmatch(r"k(\d+)_(\w+)", module.rsplit(".", 1)[-1])
  if stem is None and (number is None or name is None):
    raise ValueError(
      "number and name must be given where the file is not called kNN_name.py,"
      f" got number={number!r}, name={name!r} in {module!r}"
    )
  return (
    int(stem[1]) if number is None else number,
    stem[2] if name is None else name,
  )


def make_rung(
  module: str,
  *,
  idea: str,
  dtypes: tuple[str, ...],
  uses: Sequence[str] | None = None,
  needs: Sequence[str] = (),
  variant: str = "",
  number: int | None = None,
  name: str | None = None,
  **other: Any,
) -> Rung:
  """The rung of a kernel file, or of a notebook.

  What a `Rung` consists of is what the file defines under the same names:
  `grid`, `specs`, `is_legal`, `kernel` and `DEFAULT` (or `default_config`),
  and where they differ from what most rungs do `launch` (a thread block for
  each block of the result), `layout` (none), `warpgroups` (one, or the
  config's consumers) and `padding` (to whole blocks).

  Args:
    module: the file's `__name__`.
    idea, variant: see `Rung`.
    dtypes: see `Rung`; they say which kind of config it takes.
    uses: see `Rung`; None for all. `check_fields` holds a config to it before
      `is_legal` is asked.
    needs: see `Rung`; a GPU without it is refused before that, too.
    number, name: those in the file's name, `kNN_name.py`, if not given; a
      variant needs a name of its own.
    **other: fields of `Rung` that are not what the file defines under their
      names; of a variant at least its `kernel`.

  Raises:
    ValueError: number or name is missing, or what a rung must have.
  """
  config_type = SimtConfig if dtypes == FLOAT32 else TensorCoreConfig
  fields = tuple(field.name for field in dataclasses.fields(config_type))
  uses = fields if uses is None else tuple(uses)
  file = sys.modules.get(module)
  own = name, other.get("kernel")
  number, name = _number_and_name(module, number, name)
  if variant and (own[0] is None or own[1] is None):
    raise ValueError(
      f"variant {number}{variant} needs name= and kernel= of its own, got"
      f" name={own[0]!r}, kernel={own[1]!r}"
    )

  def take(field, default=None):
    return other.pop(field, getattr(file, field, default))

  parts = {x: take(x) for x in ("grid", "specs", "is_legal", "kernel")}
  config = take("DEFAULT")
  same = config and (lambda problem: config)
  parts["default_config"] = take("default_config", same)
  if missing := [x for x, part in parts.items() if part is None]:
    raise ValueError(
      f"{module!r} must define {', '.join(missing)}, or hand them to make_rung"
    )
  grid, specs = parts["grid"], parts["specs"]
  label = f"{number}{variant}"

  def legal(config, problem):
    if not isinstance(config, config_type):
      want, got = config_type.__name__, type(config).__name__
      return f"config must be a {want}, got {got}"
    reason = (
      needs_lib.lacks(label, needs, None)
      or check_fields(config, uses)
      or parts["is_legal"](config, problem)
    )
    if reason:
      return reason
    # JAX's planar_snake counts the blocks of a full strip in 32 bits.
    most = config.raster * max(grid(problem, config)[:2])
    if most >= 2**31:
      return f"raster must keep strips below 2**31 blocks, got {most}"
    return None

  def whole_blocks(problem, config):
    in_specs, out_specs = specs(problem, config)
    return (*out_specs.block_shape, in_specs[0].block_shape[1] or 1)

  return Rung(
    number=number,
    variant=variant,
    name=name,
    idea=idea,
    dtypes=dtypes,
    config_type=config_type,
    uses=uses,
    needs=tuple(needs),
    launch=take("launch", lambda problem, config: grid(problem, config)[:2]),
    layout=take("layout"),
    warpgroups=take("warpgroups", lambda c: getattr(c, "consumers", 1)),
    padding=take("padding", whole_blocks),
    module=module,
    **(parts | {"is_legal": legal}),
    **other,
  )
