"""Everything that follows from a problem and a config, said once.

A `Plan` is arithmetic, in three parts: how the problem is cut up (`tiling`),
how its matrices lie in global memory (`matrices`) and what a block has on its
SM (`memory`). The kernel, the rules on configs (`legal`) and the cost model
read it.
"""

import dataclasses
import functools

from pallas_gemm import hardware
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.loaders import Loader
from pallas_gemm.kernels.sm90.matrices import Matrices
from pallas_gemm.kernels.sm90.memory import Memory
from pallas_gemm.kernels.sm90.tiling import Tiling
from pallas_gemm.problem import Problem


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """A problem and a config, legal or not, and what follows from them.

  Each part reads those before it, and works out what it is asked for.
  """

  tiling: Tiling
  matrices: Matrices
  memory: Memory

  @classmethod
  def of(cls, problem: Problem, config: Config) -> "Plan":
    """The plan on the GPU that a trace made now is for; there is one."""
    return _plan(problem, config, hardware.current())

  @classmethod
  def new(cls, problem: Problem, config: Config, gpu: hardware.Gpu) -> "Plan":
    """A plan, made sooner than looked up where dozens are weighed once."""
    tiling = Tiling(problem, config, gpu)
    matrices = Matrices(tiling)
    return cls(tiling, matrices, Memory(tiling, matrices))

  @property
  def problem(self) -> Problem:
    """What the kernel computes, see `Tiling.problem`."""
    return self.tiling.problem

  @property
  def config(self) -> Config:
    return self.tiling.config

  @property
  def gpu(self) -> hardware.Gpu:
    return self.tiling.gpu

  @property
  def loader(self) -> Loader:
    return self.matrices.loader


_plan = functools.lru_cache(maxsize=1024)(Plan.new)
