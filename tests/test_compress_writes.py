"""Data that is written without its version moving is not taken for what was packed before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from compress_tools import input_of, packs_of
from torch import nn

from vramx.compression.hooks import compress
from vramx.compression.policy import writes


def double_array(h: torch.Tensor) -> None:
    h.detach().numpy()[:] *= 2


def all_reduce_twice(h: torch.Tensor) -> None:
    distributed.all_reduce(h.detach(), op=distributed.ReduceOp.MAX)
    h.data.add_(h.data)


class Doubling(torch.autograd.Function):
    """Writes into its argument and does not say so."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(h)
        with torch._C.DisableTorchFunction():  # as C++ does, which no mode sees
            h.detach().numpy()[:] *= 2
        return h.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda h: h.data.mul_(2),
    "array": double_array,
    "collective": all_reduce_twice,
    "function": Doubling.apply,
}


@pytest.fixture(autouse=True)
def _others() -> Iterator[None]:
    with torch.library._scoped_library("vramx_writes", "FRAGMENT") as library:
        library.define("may_write(Tensor x) -> ()")
        library.impl("may_write", lambda x: None, "CPU")
        yield


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def second_gradient(write: Callable[[torch.Tensor], Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a layer that reads what was written, and what it should be."""
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    h = input_of(16, 64)
    with compress(min_bytes=0):
        y = first(h).sum()
        write(h)
        z = second(h).sum()
    z.backward()
    del y
    return second.weight.grad, h.detach().sum(0).expand(64, 64)


def is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("how", ["data", "array", "function"])
def test_what_was_written_is_packed_anew(how: str, monkeypatch: Any) -> None:
    assert is_near(*second_gradient(WRITES[how]))
    if how != "function":
        monkeypatch.setattr(writes, "epoch", lambda _: 0)  # shared it would be far off
        assert not is_near(*second_gradient(WRITES[how]))


@pytest.mark.usefixtures("_group")
def test_what_a_collective_wrote_is_packed_anew() -> None:
    assert is_near(*second_gradient(WRITES["collective"]))


Layer = Callable[[torch.Tensor], torch.Tensor]


def given_to_an_operator(layer: Layer, h: torch.Tensor) -> list[torch.Tensor]:
    results = [layer(h)]
    torch.ops.vramx_writes.may_write(h)
    return [*results, layer(h)]


def as_an_array_that_is_kept(layer: Layer, h: torch.Tensor) -> list[torch.Tensor]:
    array, results = h.detach().numpy(), []
    for _ in range(3):
        results.append(layer(h))
        array *= 2
    return results


def as_an_alias_that_is_kept(layer: Layer, h: torch.Tensor) -> list[torch.Tensor]:
    alias = h.data
    results = [layer(h), layer(h)]
    alias.mul_(2)
    return [*results, layer(h)]


@pytest.mark.parametrize(
    ("read", "count"),
    [
        (given_to_an_operator, 2),
        (as_an_array_that_is_kept, 3),
        (as_an_alias_that_is_kept, 2),
    ],
)
def test_what_others_may_have_written_is_packed_anew(
    read: Callable[[Layer, torch.Tensor], list[torch.Tensor]], count: int, monkeypatch: Any
) -> None:
    layer, h = nn.Linear(64, 64), input_of(16, 64)
    packed, _ = packs_of(lambda: read(layer, h), monkeypatch)
    assert len(packed) == count


def test_what_is_only_read_is_shared(monkeypatch: Any) -> None:
    layer, h = nn.Linear(64, 64), input_of(16, 64)
    packed, _ = packs_of(
        lambda: [layer(h), layer(h.relu()), layer(h.detach().clone().mul_(2) + h), layer(h)],
        monkeypatch,
    )
    assert sum(torch.equal(p, h.detach().flatten()) for p in packed) == 1


def test_data_that_is_packed_and_then_kept_counts_once_for_torch() -> None:
    h = input_of(16, 64)
    with compress(min_bytes=0) as stats:
        y = nn.Linear(64, 64)(h).sum() + h.exp().sum() + (1 / h).sum() + h.clamp(0, 1).sum()
    held_by_torch = 3 * h.numel() * 4  # the data, its exponential, its reciprocal
    assert stats.saved_bytes == held_by_torch
    assert stats.kept_bytes == held_by_torch
    del y
