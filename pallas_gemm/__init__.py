"""GEMM kernels for JAX on NVIDIA GPUs.

- `matmul`, `gated_matmul`: a product with its epilogue in one kernel.
- `ragged_dot`, `gated_ragged_dot`: one for each group of rows (MoE).
- `dot_general`, `ragged_dot_general`: drop-ins for those of `jax.lax`.
- `quantize`, `Quantized`, `Recipe`: operands of 8 bits, with their scales.
- `split`, `Split`: float32 weights in the parts that tensor cores multiply.
- `batch_invariant`: a row's bits do not depend on the other rows.
- `explain`: which kernel or XLA computes each product of a function, and why.
- `autotune`: measures what is fastest; `tuning` has configs and their cache.
- `export_buckets`, `Buckets`: serving an exported function, rows padded.
- `ladder`: twelve kernels, from a naive one to one for tensor cores.
"""

import importlib
import sys
import types

from pallas_gemm import autotuning, tuning
from pallas_gemm.autotuning import autotune
from pallas_gemm.explanation import explain
from pallas_gemm.ops.general import dot_general, ragged_dot_general
from pallas_gemm.ops.grouped import gated_ragged_dot, ragged_dot
from pallas_gemm.ops.invariance import batch_invariant
from pallas_gemm.ops.matmul import gated_matmul, matmul
from pallas_gemm.quantization import Quantized, Recipe, quantize
from pallas_gemm.serving import Buckets, export_buckets
from pallas_gemm.splitting import Split, split
from pallas_gemm.version import __version__ as __version__

__all__ = [
  "Buckets",
  "Quantized",
  "Recipe",
  "Split",
  "autotune",
  "batch_invariant",
  "dot_general",
  "explain",
  "export_buckets",
  "gated_matmul",
  "gated_ragged_dot",
  "matmul",
  "quantize",
  "ragged_dot",
  "ragged_dot_general",
  "split",
]

# Where users import `Tuned` and `Result` from.
tuning.autotune = sys.modules["pallas_gemm.tuning.autotune"] = autotuning


def __getattr__(name: str) -> types.ModuleType:
  # No op needs the ladder: it is imported when it is first asked for.
  if name == "ladder":
    return importlib.import_module("pallas_gemm.ladder")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
