"""Kernels: Hopper's in `sm90`, Triton's, and what both do with a product."""
