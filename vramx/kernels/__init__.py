"""Triton kernels and their launchers, one family a file; imports nothing by itself.

`layout` says where the bytes of a packed buffer lie, in plain integers. `launch` is the only module
that other parts call: it picks a kernel and its configuration, and launches on the tensor's device.
The other modules hold the kernels and need triton. Nothing here knows of autograd, of hooks, or of
how a format is chosen. No state but triton's own cache of compiled kernels: safe from any thread.
"""
