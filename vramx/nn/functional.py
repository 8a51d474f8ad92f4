"""Fused functions that choose what they keep for backward; see the modules that define them."""

from __future__ import annotations

from vramx.nn.linear import linear, linears
from vramx.nn.norm import layer_norm, rms_norm

__all__ = ["layer_norm", "linear", "linears", "rms_norm"]
