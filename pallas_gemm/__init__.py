"""GEMM kernels for JAX on NVIDIA GPUs."""

__version__ = "0.1.0"
