"""What tests share: shapes, the GPU interpreter, compiling without a GPU."""
