"""Modules and functions that keep less for backward, because they choose what.

Modules are here, functions in `functional`. Each takes the place of torch's own: the same
parameters and the same result. How things are kept is a vramx.Compression; what the options say of
operations (but for attention's q and k), small tensors, offloading and determinism does not count.
"""

from __future__ import annotations

from vramx.nn import functional
from vramx.nn.attention import Attended
from vramx.nn.batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from vramx.nn.channel_norm import ChannelNormed
from vramx.nn.convolution import Conv2d, Conv3d
from vramx.nn.group_norm import GroupNorm, InstanceNorm1d, InstanceNorm2d, InstanceNorm3d
from vramx.nn.linear import Linear
from vramx.nn.modules import GELU, Dropout, GeGLU, LinearCrossEntropy, ReLU, SiLU, SwiGLU
from vramx.nn.norm import LayerNorm, Normed, RMSNorm

__all__ = [
    "GELU",
    "Attended",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "ChannelNormed",
    "Conv2d",
    "Conv3d",
    "Dropout",
    "GeGLU",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "Normed",
    "RMSNorm",
    "ReLU",
    "SiLU",
    "SwiGLU",
    "functional",
]
