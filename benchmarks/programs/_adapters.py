"""Low-rank adapters for a model's linear layers: peft's where it is installed, else a stand-in.

The stand-in has the structure, the name and the forward of peft's LoRA for a Linear, which is what
vramx.optimize knows it by; both keep the same for backward. All but the adapters is frozen, and the
second weights are no zeros, so that every gradient shows. Single-threaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PEFT = "peft.tuners.lora.layer"


class Adapters(NamedTuple):
    """Which linear layers, by the ends of their names; the rank, the scale, and the dropout.

    `size` is that of the second weights, as a part of torch's usual one. Adapters as large as what
    they are added to make a model in which the rounding of bfloat16 grows from layer to layer.
    """

    targets: tuple[str, ...] = TARGETS
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.05
    size: float = 1.0


def adapt(model: nn.Module, adapters: Adapters, dtype: torch.dtype) -> nn.Module:
    """Return a model with frozen weights and adapters of a type: peft's, or stand-ins."""
    try:
        importlib.import_module("peft")
    except ImportError:
        return adapt_without_peft(model, adapters, dtype)
    return adapt_with_peft(model, adapters, dtype)


def adapt_with_peft(model: nn.Module, adapters: Adapters, dtype: torch.dtype) -> nn.Module:
    """Return the model itself, with peft's adapters in it."""
    peft: Any = importlib.import_module("peft")
    config = peft.LoraConfig(
        r=adapters.rank, lora_alpha=adapters.alpha, lora_dropout=adapters.dropout,
        target_modules=list(adapters.targets), init_lora_weights=False,
    )  # fmt: skip
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
        if "lora_B" in name:
            parameter.data.mul_(adapters.size)
    return model


def adapt_without_peft(model: nn.Module, adapters: Adapters, dtype: torch.dtype) -> nn.Module:
    """Return the model itself, with a stand-in around each of the linear layers."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in adapters.targets:
            parent, _, child = name.rpartition(".")
            standing = StandIn(module, adapters).to(device=_weight_of(module).device)
            for part in (standing.lora_A, standing.lora_B):
                part.to(dtype)
            for parameter in standing.lora_B.parameters():
                parameter.data.mul_(adapters.size)
            setattr(model.get_submodule(parent), child, standing)
    return model


def quantise(model: nn.Module, targets: Sequence[str] = TARGETS) -> nn.Module:
    """Return the model itself, with these linear layers in bitsandbytes' 4 bits (NF4).

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    bitsandbytes: Any = importlib.import_module("bitsandbytes.nn")
    for name, module in list(model.named_modules()):
        parent, _, child = name.rpartition(".")
        if child in targets and isinstance(module, nn.Linear):
            weight = module.weight
            narrow = bitsandbytes.Linear4bit(
                module.in_features, module.out_features, bias=module.bias is not None,
                compute_dtype=weight.dtype, quant_type="nf4", device=weight.device,
            )  # fmt: skip
            if not weight.is_meta:
                narrow.load_state_dict(module.state_dict())
                narrow.to(weight.device)  # which quantises
            setattr(model.get_submodule(parent), child, narrow)
    return model


def _weight_of(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight


class StandIn(nn.Module):
    """A linear layer with low-rank adapters by name, of which the active ones are added."""

    def __init__(self, base: nn.Module, adapters: Adapters, name: str = "default") -> None:
        super().__init__()
        self.base_layer = base
        self.out_features, self.in_features = _shape_of(base)
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.lora_dropout = nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.active_adapters: list[str] = []
        self.merged_adapters: list[str] = []
        self.disable_adapters = False
        self.lora_variant: dict[str, Any] = {}
        self.add(adapters, name)

    def add(self, adapters: Adapters, name: str, *, bias: bool = False) -> None:
        """Add an adapter, which is active then, as those before it."""
        outputs, inputs = _shape_of(self.base_layer)
        self.lora_A[name] = nn.Linear(inputs, adapters.rank, bias=False)
        self.lora_B[name] = nn.Linear(adapters.rank, outputs, bias=bias)
        drops = adapters.dropout > 0
        self.lora_dropout[name] = nn.Dropout(adapters.dropout) if drops else nn.Identity()
        self.scaling[name] = adapters.alpha / adapters.rank
        self.active_adapters.append(name)

    @property
    def weight(self) -> Tensor:
        """The base's weight."""
        return _weight_of(self.base_layer)

    @property
    def bias(self) -> Tensor | None:
        """The base's bias."""
        bias: Tensor | None = getattr(self.base_layer, "bias", None)
        return bias

    @property
    def merged(self) -> bool:
        """Whether an adapter is in the base's weight."""
        return bool(self.merged_adapters)

    def merge(self) -> None:
        """Add the active adapters to the base's weight."""
        for name in self.active_adapters:
            self.weight.data += self._product(name).to(self.weight.dtype)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Take them out again."""
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            self.weight.data -= self._product(name).to(self.weight.dtype)

    def _product(self, name: str) -> Tensor:
        second, first = _weight_of(self.lora_B[name]), _weight_of(self.lora_A[name])
        product = second @ first * self.scaling[name]
        return product if product.shape == self.weight.shape else product.t()

    def forward(self, x: Tensor) -> Tensor:
        """Return what the base and the active adapters give."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        result: Tensor = self.base_layer(x)
        dtype = result.dtype
        names: Sequence[str] = self.active_adapters
        if self.disable_adapters or self.merged:
            names = ()
        for name in names:
            first, second = self.lora_A[name], self.lora_B[name]
            x = x.to(_weight_of(first).dtype)
            result = result + second(first(self.lora_dropout[name](x))) * self.scaling[name]
        return result.to(dtype)


def _shape_of(base: nn.Module) -> tuple[int, int]:
    if isinstance(base, nn.Linear):  # whose weight may be packed
        return base.out_features, base.in_features
    inputs, outputs = _weight_of(base).shape
    return outputs, inputs


# What vramx.optimize knows a class by.
StandIn.__module__ = StandIn.forward.__module__ = _PEFT
StandIn.__qualname__ = StandIn.__name__ = "Linear"
