"""Models to plan on a host, and a clock that counts operations instead of time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode

from vramx.compression.config import Compression
from vramx.planning import meters, storages
from vramx.planning.steps import Step

WIDTH = 64
PACKED_ROWS = 1024  # of a hidden state of PACKED_BYTES: less is not packed
PACKED_BYTES = 4 * PACKED_ROWS * WIDTH
# Predictions for a host are exact but for scalars of a few bytes; the goal on a GPU is 5 %.
EXACT = 1e-3
LEVELS = ("left", "recompute_all")
PRODUCTS = ("mm", "addmm", "bmm", "convolution", "convolution_backward")


def rows(count: int) -> Tensor:
    """Return a batch for a Stack."""
    return torch.randn(count, 8)


class Block(nn.Module):
    """A residual block of a perceptron, as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, past_key_values: object = None) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


class Layer(nn.Module):
    """Has the weights of a block that does something odd with them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Stack(nn.Module):
    """Blocks between an embedding and a head, with a batch norm and a dropout outside of them."""

    def __init__(self, depth: int = 4, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(self.norm(x)))


class Convolutions(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.ReLU(),
        )


class Skipping(nn.Module):
    """A small U-Net: blocks keep their own output, and what skips is kept by others, too."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolutions(1, 8), Convolutions(8, 8), Convolutions(8, 8)])
        self.pool = nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2)
        self.merge = nn.ModuleList([Convolutions(16, 8), Convolutions(16, 8)])

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for block in self.down[:2]:
            skipped.append(block(x))
            x = self.pool(skipped[-1])
        x = self.down[2](x)
        for block in self.merge:
            x = block(torch.cat([skipped.pop(), self.up(x)], 1))
        return x


def peak_bytes(model: nn.Module, sample: Any) -> int:
    """Return the peak of a second step, after zero_grad(), as a caller would have it."""
    step = Step(model, sample, model.zero_grad)
    step()
    meter = meters.HostMeter(model)
    with meter.watching():
        step()
    return meter.peak_bytes()


def peak_of_loop(
    model: nn.Module,
    step: Callable[[], Any],
    optimizer: torch.optim.Optimizer | None = None,
    gradients: str = "fresh",
) -> int:
    """Return the peak of a loop, the first step among them: `step` is forward and backward.

    What it returns is kept while the optimizer steps.
    """
    meter = meters.HostMeter(model)
    with meter.watching():
        for _ in range(3):
            result = step()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=gradients == "fresh")
            del result
    return meter.peak_bytes()


def gradient(model: nn.Module, loss: Callable[[], Tensor]) -> Tensor:
    """Return the gradients of a step, as one tensor."""
    model.zero_grad()
    loss().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


class Counter(TorchDispatchMode):
    """Counts operations, a product as a thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1000 if func.__name__.split(".")[0] in PRODUCTS else 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counted_time(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Have a call take a millisecond for an operation, and a second for a product.

    Less than by default is packed, so that what is planned may be small.
    """

    def busy(self: Any, function: Any, calls: int, samples: int = 3) -> meters.Busy:
        with Counter() as counter:
            function()
        return meters.Busy(float(counter.count), 0.0)

    monkeypatch.setattr(meters.HostMeter, "busy", busy)
    monkeypatch.setitem(Compression.__init__.__kwdefaults__, "min_bytes", PACKED_BYTES)


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round to nearest: on a host most operations of packing compute noise."""
    monkeypatch.setitem(Compression.__init__.__kwdefaults__, "rounding", "nearest")


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that caps what the host meter lets be allocated."""
    return partial(cap_device, monkeypatch)


def cap_device(
    patch: pytest.MonkeyPatch, limit_bytes: int, error: type[Exception] = torch.OutOfMemoryError
) -> None:
    add = storages.Storages.add

    def capped(self: Any, tensor: Tensor, *, counts: bool) -> None:
        add(self, tensor, counts=counts)
        if self.live_bytes > limit_bytes:
            raise error(f"CUBLAS_STATUS_ALLOC_FAILED: {self.live_bytes} bytes")

    patch.setattr(storages.Storages, "add", capped)
