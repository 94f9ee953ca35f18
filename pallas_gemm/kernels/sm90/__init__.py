"""The Hopper kernels; `launch.dense` and `launch.grouped` run them."""
