"""`explain`: what computes each product of a function, and why."""

from collections.abc import Callable
import dataclasses
import itertools
from typing import Any

import jax

from pallas_gemm import compat, report, tracing
from pallas_gemm.report import Ran

# Where a config comes from, in words behind it.
_ORIGINS = {
  "user": ", as given",
  "measured": ", measured by autotune",
  "shipped": ", of the shipped table",
  "model": ", by the cost model",
}


@dataclasses.dataclass(frozen=True)
class Explanation:
  """What `explain` found; printing it tells all.

  Attributes:
    products: a `report.Ran` for each product of the compiled program, in the
      order in which they were lowered; products that are alike are lowered
      once.
    platform: what it was lowered for.
    is_partitioned_later: whether there are products that XLA partitions when
      it compiles the program, which are not listed.
    times: how often each of `products` occurs in the function; 0 of what is
      sharded, which is not known.
  """

  products: tuple[Ran, ...]
  platform: str
  is_partitioned_later: bool = False
  times: tuple[int, ...] = ()

  def __str__(self) -> str:
    if not self.products:
      return f"on {self.platform}: no product of this package{self._more()}"
    lines = [f"on {self.platform}:"]
    for ran, times in itertools.zip_longest(self.products, self.times):
      lines.append(f"{ran.product}" + f", x {times}" * ((times or 0) > 1))
      shapes = " x ".join(str(list(shape)) for shape in ran.shapes)
      lines.append(f"  runs on {ran.implementation!r}, a device reads {shapes}")
      if ran.config is not None:
        config = _short(ran.config)
        lines.append(f"  {config}{_ORIGINS.get(ran.source, '')}")
      if ran.why:
        lines.append(f"  because {ran.why}")
      if ran.around:
        lines.append(f"  shards: {ran.around}")
    return "\n".join(lines) + self._more()

  def _more(self) -> str:
    """What is not listed, in words."""
    if self.is_partitioned_later:
      return (
        "\nproducts that XLA partitions over Auto mesh axes are not known yet"
        " and not listed; without platform= they are"
      )
    if not self.products:
      return (
        "; dot_general passes on to jax.lax what no kernel takes, as float32"
        " below HIGHEST"
      )
    return ""


def _short(config: Any) -> str:
  """A config, with the fields that differ from the default, or in its words."""
  if type(config).__str__ is not object.__str__:
    return str(config)
  fields = [
    f"{field.name}={value!r}"
    for field in dataclasses.fields(config)
    if (value := getattr(config, field.name)) != field.default
  ]
  return f"{type(config).__name__}({', '.join(fields)})"


def explain(
  fn: Callable[..., Any], /, *args: Any, platform: str | None = None, **kwargs
) -> Explanation:
  """What computes each product in fn(*args, **kwargs); prints and returns it.

  The function is compiled, not run. For each of its products: dtypes, sizes and
  layout as one device has them, and how often it occurs ("x 4"); whether the
  kernel or XLA computes it and why; the fields of the kernel's config that
  differ from `tuning.Config()`, and who chose it; the shapes that a device
  reads (of what XLA partitions, whole ones), and the mesh axes and collectives
  around it.

  Args:
    fn: any function that `jax.jit` takes, or one that is jitted.
    *args: its arguments; arrays may be `jax.ShapeDtypeStruct`s with shardings.
    platform: None compiles for the devices that there are. "cuda" or "cpu" only
      lowers for that platform, which needs no such device; what kernels would
      compute over Auto mesh axes is not known then, and not listed.
    **kwargs: its keyword arguments.

  Returns:
    An `Explanation`.

  Raises:
    TypeError: fn is no function, as where a product was passed.
    ValueError: there is no such platform.

  Example:
    >>> import jax.numpy as jnp
    >>> import pallas_gemm
    >>> x, w = jnp.ones((8, 16)), jnp.ones((16, 4))
    >>> found = pallas_gemm.explain(pallas_gemm.matmul, x, w)
    on cpu:
    matmul float32 to float32, batch 1, M 8, N 4, K 16, NN
      runs on 'xla', a device reads [1, 8, 16] x [1, 16, 4]
    >>> found.products[0].implementation
    'xla'
  """
  if platform not in (None, "cpu", "cuda"):
    raise ValueError(
      f"platform must be None, 'cpu' or 'cuda', got {platform!r}"
    )
  call, arrays = tracing.of_arrays(fn, args, kwargs)
  if platform is None:
    heard, later = tracing.compiled(call, arrays), False
  else:
    traced = jax.jit(call).trace(arrays)
    with report.listening() as heard:
      lowered = traced.lower(lowering_platforms=(platform,))
    later = compat.PARTITIONED_BY_XLA in lowered.as_text()
  # Where a GPU is assumed, what is compiled is for this machine all the same.
  here = jax.devices()[0] if compat.assumes_gpu() else compat.target_device()
  where = platform or here.platform
  count, asked = tracing.counts(call, arrays), {}
  for ran in heard:
    asked.setdefault(ran, set()).add(ran.asked)
  times = tuple(sum(count[x] for x in same) for same in asked.values())
  found = Explanation(tuple(asked), where, later, times)
  print(found)
  return found
