"""Which products XLA's own kernels are expected to compute faster, and why."""

import dataclasses
import math
from typing import NamedTuple

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90 import layout
from pallas_gemm.kernels.sm90.layout import cdiv
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.tuning import constants, model

# What the fastest config is predicted to take at least of the time of device
# memory or of the tensor cores.
_FLOOR = 0.94


class Faster(NamedTuple):
  """XLA's product where it is expected to be faster than the Hopper kernel.

  Attributes:
    why: the reason, in words; "it" is the kernel.
    seconds: about how long it takes; None if only the difference is known.
  """

  why: str
  seconds: float | None = None


def faster(problem: Problem, time: float) -> Faster | None:
  """XLA's product, if it is expected to be faster than the Hopper kernel.

  Args:
    problem: what is computed.
    time: what the kernel is predicted to take, in seconds.
  """
  p, gpu = problem, hardware.current()
  if p.planes > 1:
    theirs = of_float32(p, constants.of(gpu).xla, gpu)
    is_slower = time > constants.of(gpu).xla.least_float32_gain * theirs
    return _as_slow_as("it", time, "kernel", theirs) if is_slower else None
  if p.m == 1:  # a row in memory, however it is stored
    p = dataclasses.replace(p, a=dataclasses.replace(p.a, k_last=True))
  fit = constants.of(gpu).xla
  if (theirs := of_vector(p, fit, gpu)) and time > theirs:
    return _as_slow_as(
      "a vector times a matrix stored along K", time, "reduction", theirs
    )
  if (theirs := of_short_rows(p, fit, gpu)) and time > fit.least_gain * theirs:
    words = "with rows shorter than 128 bytes it"
    return _as_slow_as(words, time, "kernel", theirs)
  if p.k <= 64 and _is_one_kernel(p):
    # 64 x 80 x 64, twice: 1.4 us, this kernel 1.8; 312 x 10664 x 32: 4.6 and
    # 5.2.
    starts = "XLA's kernel starts sooner, and"
    if p.results <= fit.few_results:
      return Faster(f"{starts} there is one slab to multiply")
    along_k = p.k < 64 and (p.a.k_last or p.b.k_last)
    if (along_k or p.n < 64) and p.results <= fit.few_short_results:
      return Faster(f"{starts} rows are shorter than 128 bytes")
  if theirs := of_odd_rows(p, fit, gpu):
    words = "with rows that do not start at multiples of 16 bytes it"
    is_slower = time > fit.least_gain * theirs
    return _as_slow_as(words, time, "kernel", theirs) if is_slower else None
  return _of_rows_of_no_whole_atoms(p, time, fit, gpu)


def _as_slow_as(what: str, time: float, how: str, theirs: float) -> Faster:
  near = ", too near to tell" if time < theirs else ""
  return Faster(
    f"{what} would take {time * 1e6:.1f} us, XLA's {how} about"
    f" {theirs * 1e6:.1f}{near}",
    theirs,
  )


def _of_rows_of_no_whole_atoms(
  problem: Problem, time: float, fit: constants.Xla, gpu: hardware.Gpu
) -> Faster | None:
  """XLA's product, if whole atoms would save this kernel more than XLA loses.

  XLA's library reads rows that start at multiples of 16 bytes about as fast as
  others. TMA does not, and if they are no whole swizzle atoms, some matrices
  are padded and others need tiles that suit them ill: 792 x 3512 x 7016 88 us,
  XLA 56 (H100).
  """
  p = problem
  if (whole := with_whole_rows(p)) is None:
    return None
  others = fit.most_added_s + epilogue(p, fit, gpu) + padding(p, fit, gpu)
  # Most are near what nothing undercuts, and kept without asking the model.
  if time <= fit.most * _floor(whole, gpu) + others:
    return None
  least = model.predict(Plan.of(whole, model.choose(whole)))
  if time <= fit.most * least + others:
    return None
  return Faster(
    f"with rows that are no multiples of 128 bytes it would take"
    f" {time * 1e6:.1f} us instead of {least * 1e6:.1f}; XLA's kernel reads"
    " them as they are"
  )


def _floor(problem: Problem, gpu: hardware.Gpu) -> float:
  """Seconds that no config is predicted to undercut."""
  p, fit = problem, constants.of(gpu).model
  multiply = 2 * p.results * p.k * p.products / gpu.tensor_flops(p.a.bits)
  moved = p.operand_bytes + layout.bytes_of(p.results, p.out_dtype)
  memory = moved / gpu.dram_bytes_per_s / fit.dram
  return fit.launch * 1e-6 + _FLOOR * max(multiply, memory)


def of_vector(
  problem: Problem, fit: constants.Xla, gpu: hardware.Gpu
) -> float | None:
  """Seconds of its reduction: a vector times a matrix stored along K.

  Small ones are done when a tile has not yet left: 1 x 1024 x 1024 2.1 us, this
  kernel 3.6.
  """
  p = problem
  if p.m > 1 or not p.b.k_last or p.epilogue.gated:
    return None
  rate = fit.vector_rate * gpu.dram_bytes_per_s
  read = p.matrices(p.b) * p.n * p.k * 2
  return fit.vector_launch + read / rate + epilogue(p, fit, gpu)


def of_float32(
  problem: Problem, fit: constants.Xla, gpu: hardware.Gpu
) -> float:
  """Seconds of its product of float32, at HIGHEST by CUDA cores."""
  p = problem
  flops = 2.0 * p.results * p.k * p.products
  rate = fit.float32_flops * gpu.fp32_flops
  rate *= fit.float32_x3 if p.planes == 2 else 1
  seconds = fit.float32_launch + flops / rate + epilogue(p, fit, gpu)
  seconds += fit.float32_per_k * min(p.k, fit.float32_most_k)
  return seconds + 4 * _elements(p) / fit.float32_rate / gpu.dram_bytes_per_s


def with_whole_rows(problem: Problem) -> Problem | None:
  """The problem with multiples of 64; None where rows are whole atoms."""
  p = problem
  if not any(width % 64 for width in _row_lengths(p)):
    return None
  m, n, k = (cdiv(size, 64) * 64 for size in (p.m, p.n, p.k))
  return dataclasses.replace(p, m=m, n=n, k=k)


def epilogue(problem: Problem, fit: constants.Xla, gpu: hardware.Gpu) -> float:
  """Seconds that XLA takes for the epilogue, in a kernel of its own."""
  p = problem
  if p.epilogue == Epilogue():
    return 0.0
  rate = fit.epilogue_rate * gpu.dram_bytes_per_s
  return fit.epilogue_launch + 8 * p.results / rate


def _is_one_kernel(problem: Problem) -> bool:
  """Whether XLA computes one slab, and what follows, in one kernel: relu.

  1832 x 32 x 32 with relu takes it 1.7 us, this kernel 3.6 (H100).
  """
  epilogue = problem.epilogue
  if epilogue.activation == "relu":
    epilogue = dataclasses.replace(epilogue, activation=None)
  return epilogue == Epilogue()


def padding(problem: Problem, fit: constants.Xla, gpu: hardware.Gpu) -> float:
  """Seconds that XLA takes to pad K of both operands, where it does.

  To cut a sum in parts, of which each is whole slabs, where results are too few
  to keep all SMs busy: 1856 x 632 x 7544 takes it 58 us, 792 x 3512 x 7016 57
  (H100).
  """
  p = problem
  tiles = cdiv(p.m, 128) * cdiv(p.n, 128)
  if p.k % 64 == 0 or p.k < fit.split_k or p.batch > 1:
    return 0.0
  if tiles > fit.split_tiles * gpu.sm_count:
    return 0.0
  copied = 2 * sum(
    layout.bytes_of(math.prod(shape), operand.dtype)
    for shape, operand in zip(layout.operand_shapes(p), (p.a, p.b))
  )
  rate = fit.short_rate * gpu.dram_bytes_per_s
  return fit.short_padded + p.products * copied / rate


def _row_lengths(problem: Problem) -> tuple[int, int, int]:
  """Columns of A and B in memory, and of the results."""
  a, b = layout.operand_shapes(problem)
  return a[1], b[1], problem.n


def of_odd_rows(
  problem: Problem, fit: constants.Xla, gpu: hardware.Gpu
) -> float | None:
  """Seconds of its product if rows start at no multiples of 16 bytes.

  Few rows of A that are stored as columns it reads as fast as others, if they
  start at multiples of 4 bytes: 100 x 320 x 1536 TN 5.4 us, this kernel 7.3
  with the copy of A, 300 x 12288 x 6144 137 and 68 (H100). So it does one slab:
  389 x 1966 x 60 TN with relu 3.0 us, this kernel 4.3.
  """
  p = problem
  widths = _row_lengths(p)
  if not any(width % 8 for width in widths):
    return None
  flops = 2.0 * p.batch * p.m * p.n * p.k * p.products
  is_alone = p.k <= 64 and _is_one_kernel(p)
  others = 0.0 if is_alone else epilogue(p, fit, gpu)
  rate = fit.short_rate * gpu.dram_bytes_per_s
  if p.k <= 64:
    return fit.short_launch + 2 * _elements(p) / rate + others
  a, b, n = widths
  if p.m <= fit.few_rows and not (p.a.k_last or a % 2 or b % 8 or n % 8):
    longer = max(2 * _elements(p) / rate, flops / fit.few_flops)
    theirs = fit.short_launch + _steps_of_short_rows(p, fit) + longer
    return fit.few_odd_rows * theirs + others
  theirs = fit.launch + fit.per_k * p.k + flops / fit.flops
  words = 1.0 if any(width % 2 for width in widths) else fit.words
  return words * theirs + others


def of_short_rows(
  problem: Problem, fit: constants.Xla, gpu: hardware.Gpu
) -> float | None:
  """Seconds that XLA's kernel takes if rows are short, else None.

  TMA loads rows slowly that are shorter than 128 bytes, of a matrix stored
  along M or N or of K below 32: 4096 x 16 x 4096 11.4 us, this kernel 17.1, and
  10.7 where B is stored [N, K] (H100).
  """
  p = problem
  along = [p.m] * (not p.a.k_last) + [p.n] * (not p.b.k_last)
  launch = fit.short_launch
  if min(along, default=64) >= 64:
    # XLA has a kernel for the epilogue of a sum that is not cut in parts.
    if p.k >= 32 or p.epilogue != Epilogue():
      return None
    launch = fit.one_step_launch
  if p.k % 64 and p.k >= fit.padded_k and p.batch == 1:
    launch += fit.short_padded
  rate = fit.short_rate * gpu.dram_bytes_per_s
  launch += _steps_of_short_rows(p, fit)
  theirs = p.products * (launch + 2 * _elements(p) / rate)
  return theirs + epilogue(p, fit, gpu)


def _steps_of_short_rows(problem: Problem, fit: constants.Xla) -> float:
  """Seconds that steps of K take; of a longer sum there are more parts."""
  return fit.short_per_k * min(problem.k, fit.short_most_k)


def _elements(problem: Problem) -> int:
  """Of A, one B and the results."""
  p = problem
  a, b = p.m * p.matrices(p.a), p.n * p.matrices(p.b)
  return (a + b) * p.k + p.results
