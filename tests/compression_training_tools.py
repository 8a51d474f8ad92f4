"""What the tests of compressed gradients and of compressed training share.

Fixtures, of which a file names those that it uses in `__all__`, and has all of its tests use
`one_thread` and `same_noise`; and the gradient of a model as one vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import vramx
from vramx.compression.config import MASK_FORMAT, Compression, Format
from vramx.compression.policy import plans

EVERYTHING = {"min_bytes": 1}  # these tensors are small


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small take twice the processor's time, and no less of ours, on two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def same_noise() -> Iterator[None]:
    torch.manual_seed(7)
    vramx.manual_seed(7)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small are faster so
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fewer_bits(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Store everything in a number of bits that users cannot ask for."""

    def use(bits: int) -> None:
        def format_of(self: Compression, asked: int | None = None) -> Format:
            if asked == 1:
                return MASK_FORMAT
            return Format(bits, group_size=64, symmetric=False, rounding=self.rounding)

        monkeypatch.setattr(Compression, "format", format_of)
        plans.plans_of.cache_clear()

    return use


def gradient(model: nn.Module, loss: Callable[[], Tensor]) -> Tensor:
    model.zero_grad()
    loss().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
