"""The problem and the config, by one name for both."""

from pallas_gemm.kernels.sm90.config import Config, Split
from pallas_gemm.problem import Problem, Side

__all__ = ["Config", "Problem", "Side", "Split"]
