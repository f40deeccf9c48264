"""The hot loops for a GPU, as Triton kernels."""
