"""What vramx does to a model goes with the model, and with the classes that a program makes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from patch_tools import OURS, model, train
from torch import nn
from torch.nn.utils import parametrizations

import vramx
from vramx.compression.config import Compression

pytestmark = pytest.mark.usefixtures("seeded")

SMALL = Compression(min_bytes=0)


@pytest.mark.parametrize("ours", OURS)
def test_model_dies_without_the_collector(ours: str) -> None:
    gc.collect()
    gc.disable()
    try:
        net = model()
        OURS[ours](net)
        train(net)
        vramx.report(net)
        alive = [weakref.ref(part) for part in net.modules()]
        del net
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


def recomputed_once(net: nn.Module, _optimizer: Any) -> None:
    x = torch.ones(4, 32, 8, requires_grad=True) * 1
    vramx.checkpoint(net, x, level=SMALL).sum().backward()


def packed_once(net: nn.Module, _optimizer: Any) -> None:
    with vramx.compress(SMALL):
        out = net(torch.ones(4, 32, 8))
    out.sum().backward()


@pytest.mark.parametrize(
    "use",
    [
        lambda net, _: vramx.compressed_activations(net, SMALL),
        lambda net, _: vramx.checkpoint_modules(net, nn.TransformerEncoderLayer, level=SMALL),
        lambda _, optimizer: vramx.offload_optimizer(optimizer),
        recomputed_once,
        packed_once,
    ],
    ids=["packed", "blocks", "offloaded", "recomputed once", "packed once"],
)
@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
def test_classes_that_a_program_makes_go_with_its_models(use: Any) -> None:
    """Their methods close over what is as large as a table."""

    def trial() -> list[Any]:
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * 2

        class Block(nn.TransformerEncoderLayer):
            def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                return Twice.apply(super().forward(x))

        class Stepping(torch.optim.SGD):
            pass

        last = parametrizations.weight_norm(nn.Linear(8, 8))
        net = nn.Sequential(Block(8, 2, 16), last)
        optimizer = Stepping(net.parameters(), 0.1)
        use(net, optimizer)
        net(torch.ones(4, 32, 8)).sum().backward()
        optimizer.step()
        return [weakref.ref(cls) for cls in (Twice, Block, Stepping, type(last))]

    classes = trial()
    gc.collect()
    assert [cls() for cls in classes] == [None] * len(classes)
