"""`sm90.legal` for callers with a config and a problem."""

from collections.abc import Iterable

from pallas_gemm.kernels.sm90 import legal
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.legal import may_not_swap, refuses, wrong_gpu
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem

__all__ = ["first_legal", "is_legal", "may_not_swap", "refuses", "wrong_gpu"]


def is_legal(config: Config, problem: Problem) -> str | None:
  """None, or the reason why the config can't run the problem."""
  return legal.reason(Plan.of(problem, config))


def first_legal(configs: Iterable[Config], problem: Problem) -> Config:
  """The first of some configs that can run the problem."""
  return legal.first_legal(problem, configs)
