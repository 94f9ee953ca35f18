"""Kernels: Hopper's in `sm90`, Triton's, and their epilogues."""
