"""Evaluation: no graph, no logits that nobody reads, and a cache of a known size.

python evaluation.py [--variant NAME] [--small]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from common import (
    Figures,
    Place,
    UnavailableError,
    batch_of,
    generate,
    install,
    language_model,
    main,
    measure,
)
from torch import Tensor

BATCHES = 4


def graph_kept(place: Place) -> Figures:
    """The mistake: each loss that is kept keeps the graph that made it."""
    model = language_model(place, torch.bfloat16).eval()

    def evaluate(_index: int) -> Tensor:
        losses = [model(input_ids=ids, labels=ids).loss for ids in held_out(place)]
        return torch.stack(losses).mean().detach()

    return measure(place, evaluate, place.sized(6, 2))


def no_grad(place: Place) -> Figures:
    model = language_model(place, torch.bfloat16).eval()

    def evaluate(_index: int) -> Tensor:
        with torch.no_grad():
            losses = [model(input_ids=ids, labels=ids).loss for ids in held_out(place)]
        return torch.stack(losses).mean()

    return measure(place, evaluate, place.sized(6, 2))


def inference_mode(place: Place) -> Figures:
    model = language_model(place, torch.bfloat16).eval()

    def evaluate(_index: int) -> Tensor:
        with torch.inference_mode():
            losses = [model(input_ids=ids, labels=ids).loss for ids in held_out(place)]
        return torch.stack(losses).mean()

    return measure(place, evaluate, place.sized(6, 2))


def logits_kept(place: Place) -> Figures:
    """What a metric over the whole set tempts one to: the logits of all batches."""
    model = language_model(place, torch.bfloat16).eval()

    def evaluate(_index: int) -> Tensor:
        with torch.inference_mode():
            logits = [model(input_ids=ids).logits for ids in held_out(place)]
            pairs = zip(logits, held_out(place), strict=True)
            return torch.stack([loss_of(each, ids) for each, ids in pairs]).mean()

    return measure(place, evaluate, place.sized(6, 2))


def loss_in_pieces(place: Place) -> Figures:
    model = language_model(place, torch.bfloat16).eval()

    def evaluate(_index: int) -> Tensor:
        with torch.inference_mode():
            losses = [mean_loss(model, ids) for ids in held_out(place)]
        return torch.stack(losses).mean()

    return measure(place, evaluate, place.sized(6, 2))


def mean_loss(model: Any, ids: Tensor, rows: int = 1) -> Tensor:
    hidden = model.model(input_ids=ids)
    hidden = getattr(hidden, "last_hidden_state", hidden)
    pairs = zip(hidden.split(rows), ids.split(rows), strict=True)
    losses = [loss_of(model.lm_head(part), targets) for part, targets in pairs]
    return torch.stack(losses).mean()  # the logits of `rows` sequences at a time


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def generation(place: Place) -> Figures:
    return generated(place)


def generation_static_cache(place: Place) -> Figures:
    return generated(place, cache_implementation="static", disable_compile=True)


def generation_vramx_allocator(place: Place) -> Figures:
    install(place)
    return generated(place)


def generated(place: Place, **options: Any) -> Figures:
    model = language_model(place, torch.bfloat16).eval()
    if options and not hasattr(model, "generate"):
        raise UnavailableError("a static cache needs transformers")
    rows, new = place.sized((64, 48), (2, 3))

    def step(index: int) -> float:
        # Prompts of other lengths each time, as requests have them.
        prompts = batch_of(place, rows, place.sized(384, 8) + place.sized(64, 2) * (index % 3))
        generate(place, model, prompts, new, **options)
        return 0.0

    return measure(place, step, place.sized(6, 2))


def held_out(place: Place) -> list[Tensor]:
    rows, length = place.sized((8, 1024), (4, 32))
    return [batch_of(place, rows, length, index) for index in range(BATCHES)]


VARIANTS = {
    "graph_kept": graph_kept,
    "no_grad": no_grad,
    "inference_mode": inference_mode,
    "logits_kept": logits_kept,
    "loss_in_pieces": loss_in_pieces,
    "generation": generation,
    "generation_static_cache": generation_static_cache,
    "generation_vramx_allocator": generation_vramx_allocator,
}

if __name__ == "__main__":
    main(VARIANTS, __doc__)
