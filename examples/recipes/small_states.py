"""Optimizers with small states: 8 bits, factors, or none of it on the GPU.

python small_states.py [--variant NAME] [--small]
"""

from __future__ import annotations

import torch
from common import Figures, Place, adamw, kept_bytes, language_model, main, train

import vramx


def adamw_fused(place: Place) -> Figures:
    model = language_model(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return train(place, model, optimizer) | kept_bytes(model, optimizer)


def adamw_foreach(place: Place) -> Figures:
    model = language_model(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    return train(place, model, optimizer) | kept_bytes(model, optimizer)


def adafactor(place: Place) -> Figures:
    """A row and a column of second moments for each matrix, and no first moments."""
    model = language_model(place)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    return train(place, model, optimizer) | kept_bytes(model, optimizer)


def flashoptim(place: Place) -> Figures:
    place.needs_gpu("FlashOptim")
    from flashoptim import FlashAdamW

    model = language_model(place).to(torch.bfloat16)
    # Keeps 8 more bits of each weight.
    optimizer = FlashAdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    return train(place, model, optimizer)


def torchao_8bit(place: Place) -> Figures:
    from torchao.optim import AdamW8bit

    model = language_model(place)
    optimizer = AdamW8bit(model.parameters(), lr=1e-4)
    return train(place, model, optimizer)


def bitsandbytes_8bit(place: Place) -> Figures:
    from bitsandbytes.optim import AdamW8bit

    model = language_model(place)
    optimizer = AdamW8bit(model.parameters(), lr=1e-4)
    return train(place, model, optimizer)


def on_the_host(place: Place) -> Figures:
    model = language_model(place)
    optimizer = vramx.offload_optimizer(adamw(model))
    return train(place, model, optimizer)


VARIANTS = {
    "adamw_fused": adamw_fused,
    "adamw_foreach": adamw_foreach,
    "adafactor": adafactor,
    "flashoptim": flashoptim,
    "torchao_8bit": torchao_8bit,
    "bitsandbytes_8bit": bitsandbytes_8bit,
    "on_the_host": on_the_host,
}

if __name__ == "__main__":
    main(VARIANTS, __doc__)
