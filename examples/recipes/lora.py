"""LoRA and QLoRA: frozen weights, small adapters, and what still fills the memory.

python lora.py [--variant NAME] [--small]
"""

from __future__ import annotations

from typing import Any

import torch
from common import Figures, Place, adamw, kept_bytes, language_model, main, train
from torch import nn

import vramx


def full(place: Place) -> Figures:
    model = language_model(place)
    optimizer = adamw(model)
    return train(place, model, optimizer) | kept_bytes(model, optimizer)


def lora(place: Place) -> Figures:
    return adapted(place, language_model(place, torch.bfloat16))


def lora_checkpointed(place: Place) -> Figures:
    model = language_model(place, torch.bfloat16)
    vramx.checkpoint_modules(model, where=type(model.model.layers[0]), level="keep")
    return adapted(place, model)


def lora_hooks(place: Place) -> Figures:
    model = language_model(place, torch.bfloat16)
    vramx.compressed_activations(model)
    return adapted(place, model)


def lora_optimized(place: Place) -> Figures:
    model = language_model(place, torch.bfloat16)
    vramx.optimize(model, level="int8")  # knows the blocks of transformers
    return adapted(place, model)


def qlora(place: Place) -> Figures:
    place.needs_gpu("a base in 4 bits")
    import bitsandbytes as bnb

    model = language_model(place, torch.bfloat16)
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and name != "lm_head":
            small = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=False,
                compute_dtype=torch.bfloat16, quant_type="nf4",
            )  # fmt: skip
            small.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False)
            model.set_submodule(name, small.to(place.device))
    return adapted(place, model)


def adapted(place: Place, model: Any) -> Figures:
    from peft import LoraConfig, inject_adapter_in_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model.requires_grad_(False)
    model = inject_adapter_in_model(LoraConfig(r=16, target_modules=targets), model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return train(place, model, optimizer) | kept_bytes(model, optimizer)


VARIANTS = {
    "full": full,
    "lora": lora,
    "lora_checkpointed": lora_checkpointed,
    "lora_hooks": lora_hooks,
    "lora_optimized": lora_optimized,
    "qlora": qlora,
}

if __name__ == "__main__":
    main(VARIANTS, __doc__)
