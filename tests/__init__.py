"""Tests of pallas_gemm and of the experiments."""
