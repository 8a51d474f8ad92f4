"""Modules and functions that keep less for backward, because they choose what.

Modules are here, functions in `functional`. Each takes the place of torch's own: the same
parameters and the same result. How things are kept is a vramx.Compression; what the options say of
operations, small tensors, offloading and determinism does not count here.
"""

from __future__ import annotations

from vramx.nn import functional
from vramx.nn.linear import Linear
from vramx.nn.norm import LayerNorm, Normed, RMSNorm

__all__ = ["LayerNorm", "Linear", "Normed", "RMSNorm", "functional"]
