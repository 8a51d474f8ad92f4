"""The workspaces that torch gives to cuBLAS and cuBLASLt: how large they are.

ATen/cuda/CublasHandlePool.cpp makes one for each handle (of which a thread has one) and stream, at
the first product, and keeps it. cuBLASLt, which serves a product with a bias, shares cuBLAS's where
TORCH_CUBLASLT_UNIFIED_WORKSPACE says so, by default from torch 2.12 on; torch 2.9 to 2.11 keep one
of its own beside it, and releases before make one for each call. cuDNN and cuSPARSE take theirs for
a call and give them back: temporaries of it.
"""

from __future__ import annotations

from vramx import config
from vramx.sizes import KIB, MIB

# Of cuBLAS on GPUs before Hopper, on Hopper, and one or the other on those after it.
_BEFORE, _ON_HOPPER = (4096 * 2 + 16 * 8) * KIB, 4096 * 8 * KIB
_HOPPER = 9
_OF_CUBLASLT = 1024 * KIB
# Tensors have the smaller sizes as well: 512 times 512 floats are 1 MiB.
RARE_BYTES = 8 * MIB


def workspace_sizes() -> tuple[int, ...]:
    """Return the bytes of each kind of workspace on the GPUs of this process."""
    lt = config.cublaslt_workspace_bytes()
    return (*_of_cublas(), _OF_CUBLASLT if lt is None else lt)


def _of_cublas() -> tuple[int, ...]:
    import torch

    asked = config.cublas_workspace_bytes()
    if asked is not None:
        return (asked,)
    devices = range(torch.cuda.device_count())
    generations = {torch.cuda.get_device_capability(device)[0] for device in devices}
    has_before = any(generation != _HOPPER for generation in generations)
    has_hopper = any(generation >= _HOPPER for generation in generations)
    return (_BEFORE,) * has_before + (_ON_HOPPER,) * has_hopper
