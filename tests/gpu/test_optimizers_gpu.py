"""offload_optimizer on a GPU: its streams, and what it takes of the device."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import vramx
from vramx.errors import OffloadError
from vramx.sizes import MIB

pytestmark = pytest.mark.gpu

SIDE, LAYERS = 2048, 12  # 8 MiB of bfloat16 a layer
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS))
    return nn.Sequential(*layers)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, SIDE, device="cuda", generator=generator).bfloat16()
        optimizer.zero_grad()
        network(x).float().square().mean().backward()
        optimizer.step()


def offloaded(network: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = MAKERS["fused"](network.parameters())
    return vramx.offload_optimizer(optimizer, bucket="16MiB", **options)


def expect_alike(a: nn.Module, b: nn.Module) -> None:
    for left, right in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("keep", [0, "100MiB"])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_streamed_states_are_the_unstreamed_ones(
    name: str, in_backward: bool, keep: int | str
) -> None:
    plain, streamed = model(), model()
    optimizer, ours = (MAKERS[name](each.parameters()) for each in (plain, streamed))
    vramx.offload_optimizer(ours, in_backward=in_backward, bucket="16MiB", keep=keep)
    train(plain, optimizer, 8)
    train(streamed, ours, 8)
    expect_alike(plain, streamed)
    expected, found = optimizer.state_dict()["state"], ours.state_dict()["state"]
    for number, states in expected.items():
        for key, value in states.items():
            assert torch.equal(value.cpu(), found[number][key].cpu()), (number, key)


def test_gradients_that_were_stepped_are_clipped_by_an_error() -> None:
    network = model()
    optimizer = offloaded(network, in_backward=True)
    train(network, optimizer, 1)
    network(torch.ones(4, SIDE, device="cuda").bfloat16()).float().sum().backward()
    with pytest.raises(OffloadError, match="stepped in backward already"):
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    assert nn.utils.clip_grad_norm_(network.parameters(), float("inf")) == 0
    optimizer.step()
    assert all(p.grad is None for p in network.parameters())


def test_what_stays_can_be_changed_between_steps() -> None:
    plain, streamed = model(), model()
    optimizer, ours = MAKERS["fused"](plain.parameters()), offloaded(streamed, in_backward=True)
    for keep in (64, 1024, 0, 32):
        vramx.offload_optimizer(ours, keep=keep * MIB)
        train(plain, optimizer, 2)
        train(streamed, ours, 2)
        (stream,) = vars(ours)["_vramx_rounds"]._streams.values()
        assert stream.kept_bytes == min(keep, 16 * LAYERS) * MIB  # a layer's are 16 MiB
    expect_alike(plain, streamed)


def test_the_device_holds_three_slots_at_most() -> None:
    gc.collect()
    others = torch.cuda.memory_allocated()
    network = model()
    optimizer = offloaded(network)
    train(network, optimizer, 2)
    torch.cuda.synchronize()
    gradients = sum(p.numel() * 2 for p in network.parameters())
    before = torch.cuda.memory_allocated()
    # Parameters, gradients, and a workspace of 32 MiB for each of two threads: no states.
    assert before - others <= 2 * gradients + 2 * 32 * MIB + 2 * MIB
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 3 * 32 * MIB + MIB  # Adam has two states a parameter


def test_loading_never_has_all_states_on_the_device() -> None:
    network = model()
    optimizer = offloaded(network)
    train(network, optimizer, 2)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, map_location="cpu")
    other = model()
    other.load_state_dict(network.state_dict())
    resumed = offloaded(other)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    resumed.load_state_dict(saved)
    assert torch.cuda.max_memory_allocated() - before < MIB
    train(network, optimizer, 2)
    train(other, resumed, 2)
    expect_alike(network, other)
