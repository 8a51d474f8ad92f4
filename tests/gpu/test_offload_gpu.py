"""Offloading on a GPU: the same gradients with less memory, and a link that is measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import vramx
from gpu import tools
from gpu.tools import LONG_SLEEP, MIB, settle
from vramx.compression.offload import offload

pytestmark = pytest.mark.gpu

WIDTH, ROWS, LAYERS = 2048, 8192, 12
# What a layer keeps at 8 bits: its input and the input of its activation.
LAYER_BYTES = 2 * ROWS * WIDTH


@pytest.fixture(autouse=True)
def fresh_stashes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(offload, "_stashes", {})
    yield
    settle()


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


def step(
    net: Any, x: torch.Tensor, offload: Any, seed: int | None = None
) -> tuple[torch.Tensor, int]:
    """Return the gradient of a step, and the bytes that were allocated after its forward pass."""
    if seed is not None:
        vramx.manual_seed(seed)
    net.zero_grad()
    with vramx.compress(offload=offload):
        y = net(x)
    held = torch.cuda.memory_allocated()
    y.float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()]), held


def sample() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)


def window_of(net: Any) -> int:
    return next(iter(offload._stashes.values())).budget.window_bytes()


@pytest.mark.parametrize("offload", [1.0, 0.5, "cpu"])
def test_gradients_are_those_without_offload(offload: Any) -> None:
    net, x = model(), sample()
    for _ in range(4):
        kept, _ = step(net, x, None, seed=5)
        moved, _ = step(net, x, offload, seed=5)
        assert torch.equal(kept, moved)
    (report,) = vramx.offload_report()
    assert report.returned_bytes > 0


def test_buffers_that_lie_in_parts_come_back_as_they_were() -> None:
    stash = offload.stash_of(torch.device("cuda"), 1.0)
    assert stash is not None
    sizes = [600 * MIB + 12_345, 300 * MIB, 1100 * MIB]
    for _ in range(2):
        values = [torch.randint(256, (n,), dtype=torch.uint8, device="cuda") for n in sizes]
        tickets = [stash.put(value.clone()) for value in values]
        while tickets:
            ticket, value = tickets.pop(), values.pop()
            assert len(ticket._parcel.slots) > 1
            assert torch.equal(ticket.get(), value)
    stash.collect()
    stash.check()


def test_memory_after_forward_is_the_window() -> None:
    net, x = model(), sample()
    step(net, x, None)
    _, kept = step(net, x, None)
    for _ in range(3):
        _, moved = step(net, x, 1.0)
    saved = kept - moved
    # All but the window, and two buffers of which it may hold a part.
    assert saved >= LAYERS * LAYER_BYTES - window_of(net) - 2 * LAYER_BYTES - 8 * MIB


def test_a_slow_device_reads_what_was_written() -> None:
    """The host is far ahead: every copy must wait for the device, not for the host."""
    net, x = model(), sample()
    step(net, x, 1.0)
    kept, _ = step(net, x, None, seed=5)
    for _ in range(3):
        torch.cuda._sleep(LONG_SLEEP)
        moved, _ = step(net, x, 1.0, seed=5)
        assert torch.equal(kept, moved)


def test_graphs_that_are_dropped_leave_nothing() -> None:
    net, x = model(), sample()
    step(net, x, 1.0)
    settle()
    (before,) = vramx.offload_report()
    allocated = torch.cuda.memory_allocated()
    for _ in range(5):
        with vramx.compress(offload=1.0):
            net(x)
    (after,) = vramx.offload_report()
    settle()
    assert torch.cuda.memory_allocated() <= allocated + MIB
    assert after.pinned_bytes == before.pinned_bytes


def test_the_report_knows_the_link() -> None:
    net, x = model(), sample()
    for _ in range(4):
        step(net, x, "cpu")
        settle()  # what the device has not come to is not measured yet
    (report,) = vramx.offload_report()
    # A link that copies less than 1 GB in a second, or more than 2 TB, was measured wrongly.
    assert 1e9 < report.to_host_bytes_per_s < 2e12
    assert 1e9 < report.to_device_bytes_per_s < 2e12
    assert 0 <= report.hidden_measured <= 1
    assert 0 < report.hidden_predicted <= 1


def test_nothing_is_offloaded_under_capture() -> None:
    net, x = model(), sample()
    graph, (captured, _) = tools.captured(lambda: step(net, x, 1.0), warm_ups=2)
    (report,) = vramx.offload_report()
    assert report.kept_under_capture > 0
    exact, _ = step(net, x, None)
    graph.replay()
    error = (captured - exact).float().norm() / exact.float().norm()
    # Both are rounded by chance: twice the error of 8 bits, some 1 % a layer's input.
    assert 0 < float(error) < 0.1


def test_a_second_backward_fetches_again() -> None:
    net, x = model(), sample()
    with vramx.compress(offload=1.0):
        loss = net(x).float().square().mean()
    parameters = list(net.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
