"""Reinforcement learning: a program that generates and trains in turn, with one GPU for both.

python reinforcement.py [--variant NAME] [--small]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from common import Figures, Place, adamw, batch_of, generate, install, language_model, main, measure
from torch import Tensor

import vramx


def in_turn(place: Place) -> Figures:
    return alternated(place)


def empty_cache_between(place: Place) -> Figures:
    return alternated(place, empties=True)


def vramx_allocator(place: Place) -> Figures:
    install(place)
    return alternated(place)


def vramx_allocator_states_on_host(place: Place) -> Figures:
    install(place)
    return alternated(place, offloads=True)


def alternated(place: Place, empties: bool = False, offloads: bool = False) -> Figures:
    model = language_model(place)
    optimizer = adamw(model)
    if offloads:
        vramx.offload_optimizer(optimizer)  # on the host while tokens are generated
    rows, new = place.sized((48, 48), (2, 3))

    def step(index: int) -> Tensor:
        # Rollouts of other lengths in each round, as prompts and answers have them.
        length = place.sized(128 + 48 * (index % 4), 8 + 2 * (index % 4))
        prompts = batch_of(place, rows, length, index)
        model.eval()
        rollouts = generate(place, model, prompts, new)
        if empties:
            torch.cuda.empty_cache()
        model.train()
        loss = policy_loss(place, model, rollouts, rewards(rollouts))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if empties:
            torch.cuda.empty_cache()
        return loss.detach()

    return measure(place, step, place.sized(8, 2))


def policy_loss(place: Place, model: Any, rollouts: Tensor, rewards: Tensor) -> Tensor:
    """REINFORCE with the mean reward as the baseline."""
    with place.autocast():
        logits = model(input_ids=rollouts).logits[:, :-1]
    each = F.cross_entropy(logits.float().transpose(1, 2), rollouts[:, 1:], reduction="none")
    return ((rewards - rewards.mean())[:, None] * each).mean()


def rewards(rollouts: Tensor) -> Tensor:
    """A stand-in for whoever judges: answers with more even tokens are better."""
    return (rollouts % 2 == 0).float().mean(dim=1)


VARIANTS = {
    "in_turn": in_turn,
    "empty_cache_between": empty_cache_between,
    "vramx_allocator": vramx_allocator,
    "vramx_allocator_states_on_host": vramx_allocator_states_on_host,
}

if __name__ == "__main__":
    main(VARIANTS, __doc__)
