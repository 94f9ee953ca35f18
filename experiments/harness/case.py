"""What a program measures: a case, its arms, and why one can't run."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import re
from typing import Any, NamedTuple, Protocol

import jax

from pallas_gemm import numerics

Call = Callable[..., Any]
Config = dict[str, Any] | None

OURS = "pallas_gemm"


class Candidate(NamedTuple):
  """A function of a case's operands, and the config that it has."""

  fn: Call
  config: Config = None


# What gives an arm's candidates, of which the fastest is taken. It raises
# NotImplementedError, with the reason, where the arm can't run.
Arm = Callable[[], Sequence[Candidate]]


def only(fn: Call, config: Config = None) -> Arm:
  """An arm of one candidate."""
  return lambda: [Candidate(fn, config)]


# What XLA computes around products.
_AROUND = re.compile(r"(loop|input|wrapped)_")


@dataclasses.dataclass(frozen=True)
class Claim:
  """Names of kernels that prove that an arm ran what it is called after.

  A right result may come from elsewhere: of an option that the compiler drops,
  or of a fallback. Its time is then no time of that arm.

  Attributes:
    own: a pattern that is found in the names of the arm's kernels.
    needs: what it takes to run them, for the reason of one that did not.
    alone: whether all kernels of a call must match, rather than some.
  """

  own: str
  needs: str
  alone: bool = False

  def refuted(self, kernels: Sequence[str], products: int = 1) -> str | None:
    """Why the kernels of a call are not the arm's; None if they are.

    Args:
      kernels: their names.
      products: so many of them must be the arm's, if others may run besides.
    """
    ran = sum(bool(re.search(self.own, name)) for name in kernels)
    if ran >= (len(kernels) if self.alone else products):
      return None
    others = [name for name in kernels if not _AROUND.match(name)] or kernels
    # Without their tiles: one reason for all that differ in these alone.
    names = (re.split(r"_\d+x\d+", name)[0] for name in others)
    seen = ", ".join(dict.fromkeys(names)) or "no kernel"
    return f"it is not what its name says: it ran {seen}; {self.needs}"


# A product of XLA's claims no more than that no kernel from elsewhere ran,
# whichever way XLA computes it.
XLA = Claim(
  r"^(?!.*_mosaic_gpu_kernel|triton_dense|_ragged_)",
  "it needs XLA's kernels and no others",
  alone=True,
)


class Case(Protocol):
  """What a row is of: an expression on a shape, computed by several arms.

  Attributes:
    suite: the list that it is of; those of a suite are compiled together.
    baseline: the arm whose time over that of the first is the row's ratio.
    may_skip: whether arms after the first may be left out. Then the row says
      which, and why others were not.
    claims: of the arms from elsewhere, by name. The ops, the rungs and two
      calls of an op claim nothing: they may choose XLA.
    products: of a call; an arm from elsewhere runs a kernel for each.
  """

  suite: str
  may_skip: bool = False
  claims: Mapping[str, Claim] = {}
  products: int = 1

  @property
  def baseline(self) -> str: ...

  @property
  def program(self) -> Any:
    """What compiled arms depend on; cases of equal ones share them."""
    return self

  def fields(self) -> dict[str, Any]:
    """What a row says of the case."""

  def operands(self) -> dict[str, Any]:
    """Shapes and dtypes of the arguments, by name."""
    return jax.eval_shape(functools.partial(self.draw, 0))

  def draw(self, seed: int) -> dict[str, Any]:
    """The arguments, N(0, 1), on the device."""

  def arms(self, implementation: str | None = None) -> dict[str, Arm]:
    """What is timed side by side; the first is what the row is of."""

  def flops(self, seed: int = 0) -> int:
    """Operations of a call."""

  def least_bytes(self, seed: int = 0) -> int:
    """Bytes if each operand is read once and each result written once."""

  def check(
    self, results: Any, operands: dict[str, Any], seed: int = 0
  ) -> numerics.Check:
    """Compares results with float64; `passed` is None of what isn't judged."""


def first_line(error: BaseException, limit: int = 300) -> str:
  """Kind and first line of an exception, for a log."""
  lines = [line for line in str(error).splitlines() if line.strip()]
  text = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
  return text if len(text) <= limit else text[: limit - 3] + "..."


def reason(error: BaseException) -> str:
  """Why something can't run: what it says itself, or the error's first line."""
  if isinstance(error, NotImplementedError):
    return str(error)
  return first_line(error)
