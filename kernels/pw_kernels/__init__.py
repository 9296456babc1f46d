"""Tensors in, tensors out: bit-plane layout and the kernels that read it."""
