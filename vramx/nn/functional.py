"""Fused functions that choose what they keep for backward; see the modules that define them."""

from __future__ import annotations

from vramx.errors import FirstDerivativeOnlyError
from vramx.nn.activation import gelu, silu
from vramx.nn.attention import Attended, scaled_dot_product_attention
from vramx.nn.batch_norm import batch_norm
from vramx.nn.channel_norm import ChannelNormed
from vramx.nn.convolution import conv2d
from vramx.nn.dropout import dropout, dropout_add
from vramx.nn.glu import geglu, swiglu
from vramx.nn.group_norm import group_norm, instance_norm
from vramx.nn.linear import linear, linears
from vramx.nn.loss import linear_cross_entropy
from vramx.nn.mlp import mlp
from vramx.nn.norm import Normed, layer_norm, rms_norm
from vramx.nn.relu import relu
from vramx.nn.rotary import rotary
from vramx.nn.unit_linear import gelu_linear, glu_linear, silu_linear

__all__ = [
    "Attended", "ChannelNormed", "FirstDerivativeOnlyError", "Normed", "batch_norm", "conv2d",
    "dropout", "dropout_add", "geglu", "gelu", "gelu_linear", "glu_linear", "group_norm",
    "instance_norm", "layer_norm", "linear", "linear_cross_entropy", "linears", "mlp", "relu",
    "rms_norm", "rotary", "scaled_dot_product_attention", "silu", "silu_linear", "swiglu",
]  # fmt: skip
