"""Models that use pallas_gemm, to copy from."""
