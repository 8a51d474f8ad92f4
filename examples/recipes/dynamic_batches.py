"""Batches by tokens: as many sequences as fit, not always as many.

python dynamic_batches.py [--variant NAME] [--small]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from common import Figures, Place, adamw, batch_of, install, language_model, lengths, main, measure
from torch import Tensor


def by_count(place: Place) -> Figures:
    documents = lengths(place, count=256)
    return trained(place, [documents[at : at + 8] for at in range(0, len(documents), 8)])


def by_tokens(place: Place) -> Figures:
    documents = lengths(place, count=256)
    return trained(place, list(batches_by_tokens(documents, place.sized(8192, 256))))


def by_tokens_vramx_allocator(place: Place) -> Figures:
    install(place)
    return by_tokens(place)


def batches_by_tokens(lengths: Sequence[int], limit: int, pool: int = 64) -> Iterator[list[int]]:
    """Yield lengths of alike documents, whose padded tokens are at most `limit`."""
    for at in range(0, len(lengths), pool):  # sorted within a pool: the order stays random
        batch: list[int] = []
        for length in sorted(lengths[at : at + pool]):
            if batch and length * (len(batch) + 1) > limit:
                yield batch
                batch = []
            batch.append(length)
        yield batch


def trained(place: Place, groups: Sequence[Sequence[int]]) -> Figures:
    model = language_model(place)
    optimizer = adamw(model)
    used = spread(groups, place.steps)

    def step(index: int) -> Tensor:
        ids, labels = padded(place, used[index])
        with place.autocast():
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    figures = measure(place, step)
    seconds = sum(figures["step_ms"]) / 1000
    tokens = sum(map(sum, used[place.warm_up : place.steps]))
    figures["tokens_per_s"] = tokens / seconds
    figures["padding"] = 1 - sum(map(sum, groups)) / sum(max(g) * len(g) for g in groups)
    return figures


def spread(groups: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    """Return groups from all over, the largest among them: it decides whether the run fits."""
    largest = max(groups, key=lambda group: max(group) * len(group))
    others = [groups[at * len(groups) // (count - 1)] for at in range(count - 1)]
    return [*others[: count // 2], largest, *others[count // 2 :]]


def padded(place: Place, group: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of a group; where there is padding, the label is -100."""
    ids = batch_of(place, len(group), max(group)).clone()
    ends = torch.tensor(group, device=place.device)[:, None]
    is_padding = torch.arange(max(group), device=place.device) >= ends
    return ids.masked_fill(is_padding, 0), ids.masked_fill(is_padding, -100)


VARIANTS = {
    "by_count": by_count,
    "by_tokens": by_tokens,
    "by_tokens_vramx_allocator": by_tokens_vramx_allocator,
}

if __name__ == "__main__":
    main(VARIANTS, __doc__)
