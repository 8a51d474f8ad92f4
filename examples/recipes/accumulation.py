"""Gradient accumulation: a large batch in parts, with the same gradient.

python accumulation.py [--variant NAME] [--small]
"""

from __future__ import annotations

import torch
from common import Figures, Place, adamw, batches, language_model, main, measure
from torch import Tensor

import vramx


def one_batch(place: Place) -> Figures:
    return accumulated(place, parts=1)


def two_parts(place: Place) -> Figures:
    return accumulated(place, parts=2)


def four_parts(place: Place) -> Figures:
    return accumulated(place, parts=4)


def one_batch_int8(place: Place) -> Figures:
    """The whole batch at once, with activations in int8."""
    return accumulated(place, parts=1, pack=True)


def accumulated(place: Place, parts: int, pack: bool = False) -> Figures:
    model = language_model(place)
    if pack:
        vramx.compressed_activations(model)
    optimizer = adamw(model)
    data = batches(place, rows=16)

    def step(_index: int) -> Tensor:
        batch = next(data)
        total = torch.zeros((), device=place.device)
        tokens = batch.numel()
        for part in batch.chunk(parts):
            with place.autocast():
                mean = model(input_ids=part, labels=part).loss
            loss = mean * (part.numel() / tokens)  # by tokens, for parts may differ in length
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return measure(place, step)


VARIANTS = {
    "one_batch": one_batch,
    "two_parts": two_parts,
    "four_parts": four_parts,
    "one_batch_int8": one_batch_int8,
}

if __name__ == "__main__":
    main(VARIANTS, __doc__)
