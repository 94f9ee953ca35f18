"""The Hopper kernels, one idea a file; see docs/architecture.md."""
