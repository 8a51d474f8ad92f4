"""What the families of convolution nets share: which of their parts are understood.

No state; any thread.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vramx.compression.config import Compression
from vramx.nn.convolution import convolved_by
from vramx.nn.families.projection import plain_tensor
from vramx.nn.families.questions import untouched
from vramx.recompute.kinds import OF_EVERY_MODULE

_CONSTANTS = {"weight", "bias", "running_mean", "running_var"}
# What else a frozen norm may have of its own, by what made it or by transformers: a trial of its
# class may not tell of anything more.
_COUNT = "num_batches_tracked"
_KNOWN = {*OF_EVERY_MODULE, "training", "eps", "num_features", "affine", "_is_hf_initialized"}
_WORDS = {nn.Identity: "none", nn.ReLU: "relu", nn.SiLU: "silu"}


def plain_convolution(module: Any) -> bool:
    """Tell whether a module is a Conv2d whose weight is a tensor of no subclass."""
    return type(module) is nn.Conv2d and untouched(module) and plain_tensor(module.weight)


def plain_norm(module: Any) -> bool:
    """Tell whether a module is a BatchNorm2d, or one that is frozen: of constants, in any mode.

    Libraries have a class each of the second kind, with a name and buffers in common; what it
    computes a trial tells.

    Example:
        >>> plain_norm(nn.BatchNorm2d(3)), plain_norm(nn.SyncBatchNorm(3))
        (True, False)
    """
    return type(module) is nn.BatchNorm2d or is_frozen(module)


def is_frozen(module: Any) -> bool:
    """Tell whether a module is a batch norm of four buffers and an eps, and nothing else."""
    if not type(module).__name__.endswith("FrozenBatchNorm2d"):
        return False
    has_parts = bool(module._parameters or module._modules)
    has_others = has_parts or not vars(module).keys() <= _KNOWN
    return not has_others and module._buffers.keys() - {_COUNT} == _CONSTANTS


def convolve(module: Any, x: Tensor, keep: Compression) -> Tensor:
    """Return a convolution of a tensor; one that is not understood is called as it is."""
    if plain_convolution(module):
        return convolved_by(module, x, keep)
    y: Tensor = module(x)
    return y


def word_of(activation: Any) -> str | tuple[str, float] | None:
    """Return batch_norm()'s word for a module; None: there is none.

    Example:
        >>> word_of(nn.LeakyReLU(0.2))
        ('leaky_relu', 0.2)
    """
    if type(activation) is nn.LeakyReLU:
        return "leaky_relu", activation.negative_slope
    if type(activation) is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    return _WORDS.get(type(activation))
