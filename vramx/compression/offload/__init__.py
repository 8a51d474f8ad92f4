"""Packed tensors on the host: buffers, copies, and how many bytes may leave the device."""
