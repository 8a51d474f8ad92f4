"""Mixed precision: what autocast halves, and what it does not.

python amp.py [--variant NAME] [--small]
"""

from __future__ import annotations

import torch
from common import Figures, Place, adamw, batches, kept_bytes, language_model, main, measure, train
from torch import Tensor

import vramx


def float32(place: Place) -> Figures:
    model = language_model(place)
    optimizer = adamw(model)
    data = batches(place)

    def step(_index: int) -> Tensor:
        batch = next(data)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return measure(place, step) | kept_bytes(model, optimizer)


def bf16_autocast(place: Place) -> Figures:
    model = language_model(place)
    optimizer = adamw(model)
    data = batches(place)
    device = place.device.type

    def step(_index: int) -> Tensor:
        batch = next(data)
        with torch.autocast(device, torch.bfloat16):  # the forward pass and the loss, no more
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return measure(place, step) | kept_bytes(model, optimizer)


def fp16_autocast(place: Place) -> Figures:
    model = language_model(place)
    optimizer = adamw(model)
    data = batches(place)
    device = place.device.type
    scaler = torch.amp.GradScaler(device)

    def step(_index: int) -> Tensor:
        batch = next(data)
        with torch.autocast(device, torch.float16):
            loss = model(input_ids=batch, labels=batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # skips the step where a gradient overflowed
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return measure(place, step) | kept_bytes(model, optimizer)


def bf16_weights(place: Place) -> Figures:
    """All of it in bfloat16: half of everything, and small updates are rounded away."""
    model = language_model(place).to(torch.bfloat16)
    optimizer = adamw(model)
    return train(place, model, optimizer) | kept_bytes(model, optimizer)


def bf16_autocast_int8(place: Place) -> Figures:
    model = vramx.compressed_activations(language_model(place))
    optimizer = adamw(model)
    return train(place, model, optimizer) | kept_bytes(model, optimizer)


VARIANTS = {
    "float32": float32,
    "bf16_autocast": bf16_autocast,
    "fp16_autocast": fp16_autocast,
    "bf16_weights": bf16_weights,
    "bf16_autocast_int8": bf16_autocast_int8,
}

if __name__ == "__main__":
    main(VARIANTS, __doc__)
