"""Kernels in Triton for training on a GPU."""
