"""Encoders with low-rank adapters, by a stand-in that is shaped as peft's are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from optimize_tools import encoder, encoder_inputs
from torch import nn

from benchmarks.programs._adapters import Adapters, adapt_without_peft

INPUTS = encoder_inputs()
TARGETS = ("linear1", "linear2")
CALLS: Counter[nn.Module] = Counter()  # not in a module, where a second run would be taken back


def adapted(
    dropout: float = 0.0, dtype: torch.dtype = torch.float32, targets: tuple[str, ...] = TARGETS
) -> Any:
    return adapt_without_peft(encoder(norm_first=True), Adapters(targets, 4, 8.0, dropout), dtype)


def linears_of(model: Any) -> list[Any]:
    """Return the Linears that have adapters."""
    found = [getattr(layer, name) for layer in model.layers for name in TARGETS]
    return [linear for linear in found if hasattr(linear, "base_layer")]


class Quantised(nn.Module):
    """Stands for a Linear whose weight is made when it is called."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self.scale = float(linear.weight.abs().max()) / 127
        self.weight = nn.Parameter((linear.weight / self.scale).round().char(), False)

    @property
    def calls(self) -> int:
        return CALLS[self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS[self] += 1
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Linear4bit(Quantised):
    """Stands for bitsandbytes' class."""


Linear4bit.__module__ = "bitsandbytes.nn.modules"


def quantised(model: nn.Module, cls: type[Quantised] = Linear4bit) -> Any:
    """Return a model with adapters whose bases are quantised."""
    for module in list(model.modules()):
        if hasattr(module, "base_layer"):
            module.base_layer = cls(module.base_layer)
    return model
