"""Checkpointing: what is not kept is computed again in backward.

python checkpointing.py [--variant NAME] [--small]
"""

from __future__ import annotations

from functools import partial

from common import Figures, Place, adamw, language_model, main, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import vramx


def nothing(place: Place) -> Figures:
    model = language_model(place)
    return train(place, model, adamw(model))


def each_block(place: Place) -> Figures:
    model = language_model(place)
    for block in model.model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return train(place, model, adamw(model))


def every_second(place: Place) -> Figures:
    model = language_model(place)
    for block in model.model.layers[::2]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return train(place, model, adamw(model))


def feed_forward(place: Place) -> Figures:
    model = language_model(place)
    for block in model.model.layers:
        block.mlp.forward = partial(checkpoint, block.mlp.forward, use_reentrant=False)
    return train(place, model, adamw(model))


def int8_inputs(place: Place) -> Figures:
    model = language_model(place)
    vramx.checkpoint_modules(model, where=block_class(model))  # inputs in int8
    return train(place, model, adamw(model))


def int8_inputs_on_host(place: Place) -> Figures:
    model = language_model(place)
    vramx.checkpoint_modules(model, where=block_class(model), offload="cpu")
    return train(place, model, adamw(model))


def int8_activations(place: Place) -> Figures:
    """No checkpoint at all: what backward needs is kept in int8."""
    model = vramx.compressed_activations(language_model(place))
    return train(place, model, adamw(model))


def block_class(model: nn.Module) -> type[nn.Module]:
    return type(model.model.layers[0])


VARIANTS = {
    "nothing": nothing,
    "each_block": each_block,
    "every_second": every_second,
    "feed_forward": feed_forward,
    "int8_inputs": int8_inputs,
    "int8_inputs_on_host": int8_inputs_on_host,
    "int8_activations": int8_activations,
}

if __name__ == "__main__":
    main(VARIANTS, __doc__)
