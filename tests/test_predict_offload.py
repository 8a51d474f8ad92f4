"""Predicted steps of models whose packed tensors wait on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vramx

LAYERS, ROWS, WIDTH = 8, 4096, 256


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


def peak(change: Any) -> int:
    model, x = nn.Sequential(*(Layer() for _ in range(LAYERS))), torch.randn(ROWS, WIDTH)
    change(model)
    return vramx.predict(lambda: model(x).sum().backward(), policies="live").peak_bytes()


def checkpointed(offload: Any) -> Any:
    return lambda model: vramx.checkpoint_modules(
        model, lambda each: type(each) is Layer, offload=offload
    )


def compressed(offload: Any) -> Any:
    return lambda model: vramx.compressed_activations(model, level="int8", offload=offload)


@pytest.mark.parametrize("how", [checkpointed, compressed])
def test_what_waits_on_the_host_is_not_on_the_gpu(how: Any) -> None:
    stays, half, leaves = (peak(how(share)) for share in (None, 0.5, "cpu"))
    saved = 2 * (LAYERS - 3) * ROWS * WIDTH if how is compressed else (LAYERS - 3) * ROWS * WIDTH
    assert leaves <= stays - saved
    assert leaves < half < stays
    assert half == pytest.approx((leaves + stays) / 2, rel=0.1)
