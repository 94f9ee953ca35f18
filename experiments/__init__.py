"""Programs that measure pallas_gemm against what JAX has already."""
