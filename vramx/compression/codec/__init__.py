"""Tensors in fewer bits and back, and what stands for a tensor where its elements lose too much."""
