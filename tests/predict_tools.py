"""What tests of vramx.predict share: steps, and what is predicted and measured of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import vramx
from vramx.planning.meters import HostMeter
from vramx.planning.prediction import Prediction


def training(model: nn.Module, x: Tensor, optimizer: Any = None) -> Callable[[], None]:
    """Return a step, which has no optimizer's where none is given."""

    def step() -> None:
        model(x).sum().backward()
        if optimizer is not None:
            optimizer.step()
        (optimizer or model).zero_grad()

    return step


def peak(step: Any, *arguments: Any, **options: Any) -> int:
    return vramx.predict(step, *arguments, policies="live", **options).peak_bytes()


def assumes(prediction: Prediction, word: str) -> bool:
    return any(word in each for each in prediction.assumptions)


def measured_bytes(step: Any, model: nn.Module, *others: Tensor, steps: int = 2) -> int:
    """Return the peak of real steps on the host."""
    meter = HostMeter(model, others)
    with meter.watching():
        for _ in range(steps):
            step()
    return meter.peak_bytes()
