"""Advice that is often given for "CUDA out of memory", measured.

python folklore.py [--variant NAME] [--small]
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from common import Figures, Place, install, main, measure, train_varying
from torch import Tensor, nn

TEXTS = 30


def plain(place: Place) -> Figures:
    return train_varying(place, TEXTS)


def max_split_size_mb(place: Place) -> Figures:
    settings(place, "max_split_size_mb:128")
    return train_varying(place, TEXTS)


def expandable_segments(place: Place) -> Figures:
    settings(place, "expandable_segments:True")
    return train_varying(place, TEXTS)


def empty_cache_each_step(place: Place) -> Figures:
    return train_varying(place, TEXTS, torch.cuda.empty_cache)


def vramx_allocator(place: Place) -> Figures:
    install(place)
    return train_varying(place, TEXTS)


def copies_pageable(place: Place) -> Figures:
    return copied(place, lambda batch: batch.to(place.device))


def copies_pinned_each_time(place: Place) -> Figures:
    place.needs_gpu("pinned memory")
    return copied(place, lambda batch: batch.pin_memory().to(place.device, non_blocking=True))


def copies_pinned_once(place: Place) -> Figures:
    place.needs_gpu("pinned memory")
    held = host_batch(place).pin_memory()
    return copied(place, lambda _batch: held.to(place.device, non_blocking=True))


def quantize_dynamic(_place: Place) -> Figures:
    """What is left to train of a model that torch.ao.quantization has made small."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    before = sum(p.numel() for p in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the module is deprecated
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    after = sum(p.numel() for p in model.parameters())
    return {"trainable_before": before, "trainable_after": after}


def settings(place: Place, text: str) -> None:
    """Set what PYTORCH_ALLOC_CONF sets, in a process that runs already."""
    place.needs_gpu("an allocator's setting")
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or torch.cuda.memory._set_allocator_settings)(text)


def copied(place: Place, copy: Callable[[Tensor], Tensor]) -> Figures:
    """Copy a batch of images to the device, again and again."""
    batch = host_batch(place)
    return measure(place, lambda _index: copy(batch).flatten()[0])


def host_batch(place: Place) -> Tensor:
    return torch.ones(place.sized(64, 1), 3, place.sized(512, 16), place.sized(512, 16))


VARIANTS = {
    "plain": plain,
    "max_split_size_mb": max_split_size_mb,
    "expandable_segments": expandable_segments,
    "empty_cache_each_step": empty_cache_each_step,
    "vramx_allocator": vramx_allocator,
    "copies_pageable": copies_pageable,
    "copies_pinned_each_time": copies_pinned_each_time,
    "copies_pinned_once": copies_pinned_once,
    "quantize_dynamic": quantize_dynamic,
}

if __name__ == "__main__":
    main(VARIANTS, __doc__)
