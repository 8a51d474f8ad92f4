"""vramx.record tells what each byte is for.

Recorded are trainings on the CPU, through a history that logs its storages. What a moment must hold
is counted apart: by autograd's own hooks, and from the parameters, gradients and states there are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_history import CpuHistory
from record_tools import (
    PROGRAMS,
    Kept,
    by_category,
    features,
    loss_of,
    recorder,
    residuals,
    storage_bytes,
    train,
)
from torch import nn

import vramx
from vramx.memory import categories as names
from vramx.memory.holders import category_tree
from vramx.memory.snapshot import Snapshot


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.pickle"


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_moment_before_backward_holds_what_is_counted_there(
    program: str, amp: bool, path: Path
) -> None:
    make, batch = PROGRAMS[program]
    model, source = make(), CpuHistory()
    optimizer = torch.optim.AdamW(model.parameters())
    with recorder(path, source, model, optimizer):
        train(model, optimizer, batch)
        args, kwargs = batch()
        kept = Kept(model)
        with kept.watching(), torch.autocast("cpu", enabled=amp):
            out = model(*args, **kwargs)
            loss = loss_of(out)
        moment = len(source.entries) - 1
        live = sum(source.live.values())
        kept_bytes = kept.bytes(out, loss, *args, *kwargs.values())
        kept.storages.clear()
        loss.backward()
        del loss, out
    snapshot = Snapshot.load(path)
    found = by_category(snapshot, moment)
    states = [t for state in optimizer.state.values() for t in state.values()]
    input_bytes = storage_bytes([*args, *kwargs.values()])
    assert sum(found.values()) == live
    assert found[names.PARAMETERS] == storage_bytes(model.state_dict().values())
    assert found[names.OPTIMIZER] == storage_bytes(states)
    assert found[names.INPUTS] == input_bytes
    assert found[names.ACTIVATIONS] == kept_bytes - input_bytes
    assert names.GRADIENTS not in found
    assert names.UNKNOWN not in found


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_live_byte_has_one_category_at_any_event(program: str, path: Path) -> None:
    make, batch = PROGRAMS[program]
    model, source = make(), CpuHistory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with recorder(path, source, model, optimizer):
        train(model, optimizer, batch)
    snapshot = Snapshot.load(path)
    assert not (snapshot.allocations.category == 0).any()
    for event in range(0, snapshot.event_count, 7):
        found = by_category(snapshot, event)
        assert sum(found.values()) == snapshot.live_bytes_at(event)
        assert set(found) <= set(names.CATEGORIES)


def test_gradients_are_those_of_the_parameters(path: Path) -> None:
    model, source = residuals(), CpuHistory()
    with recorder(path, source, model):
        loss_of(model(*features()[0])).backward()
        moment = len(source.entries) - 1
    found = by_category(Snapshot.load(path), moment)
    assert found[names.GRADIENTS] == storage_bytes(p.grad for p in model.parameters())


def test_gradients_of_a_hand_made_step_are_gradients(path: Path) -> None:
    model, source = residuals(), CpuHistory()
    with recorder(path, source, model):
        loss_of(model(*features()[0])).backward()
        moment = len(source.entries) - 1
        expected = storage_bytes(p.grad for p in model.parameters())
        for parameter in model.parameters():
            parameter.grad = None
    assert by_category(Snapshot.load(path), moment)[names.GRADIENTS] == expected


def test_packs_are_what_the_compression_keeps(path: Path) -> None:
    model, source = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), CpuHistory()
    x = torch.randn(512, 256)
    with recorder(path, source, model):
        with vramx.compress(min_bytes=0) as stats:
            out = model(x)
        moment = len(source.entries) - 1
        out.sum().backward()
    found = by_category(Snapshot.load(path), moment)
    assert stats.packed.kept_bytes > 0
    assert found[names.PACKED] == stats.packed.kept_bytes


def test_what_backward_makes_and_frees_is_temporary(path: Path) -> None:
    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            torch.empty(100_003, dtype=torch.uint8)
            return grad

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Doubling.apply(x)

    source = CpuHistory()
    with recorder(path, source, Model()):
        Model()(torch.randn(8, requires_grad=True)).sum().backward()
    snapshot = Snapshot.load(path)
    (number,) = (snapshot.allocations.size == 100_003).nonzero()[0]
    assert snapshot.categories[snapshot.allocations.category[number]] == names.TEMPORARIES
    assert snapshot.labels[snapshot.allocations.label[number]] == "(backward)"


def test_activations_are_told_apart_by_module(path: Path) -> None:
    model, source = residuals(), CpuHistory()
    with recorder(path, source, model):
        loss = loss_of(model(*features()[0]))
        moment = len(source.entries) - 1
        loss.backward()
    tree = category_tree(Snapshot.load(path), moment)
    by_name = {frame.name: node for frame, node in tree.children.items()}
    blocks = {frame.name: node for frame, node in by_name[names.ACTIVATIONS].children.items()}
    assert {"0", "1", "2"} <= set(blocks)
    assert blocks["0"].bytes == blocks["1"].bytes
    assert {frame.name for frame in blocks["0"].children} == {"norm", "mlp"}


def test_inference_has_no_activations(path: Path) -> None:
    model, source = residuals(), CpuHistory()
    with recorder(path, source, model), torch.no_grad():
        model(*features()[0])
    snapshot = Snapshot.load(path)
    assert names.TEMPORARIES in snapshot.categories
    assert names.ACTIVATIONS not in snapshot.categories


def test_without_a_model_parameters_are_the_optimizers(path: Path) -> None:
    model, source = residuals(), CpuHistory()
    optimizer = torch.optim.AdamW(model.parameters())
    with recorder(path, source, None, [optimizer]):
        train(model, optimizer, features)
    snapshot = Snapshot.load(path)
    found = by_category(snapshot, snapshot.end_event)
    assert found[names.PARAMETERS] == storage_bytes(model.parameters())


def test_an_optimizer_that_was_not_named_is_found(path: Path) -> None:
    model, source = residuals(), CpuHistory()
    optimizer = torch.optim.AdamW(model.parameters())
    with recorder(path, source, model):
        train(model, optimizer, features)
    snapshot = Snapshot.load(path)
    states = [t for state in optimizer.state.values() for t in state.values()]
    assert by_category(snapshot, snapshot.end_event)[names.OPTIMIZER] == storage_bytes(states)


@pytest.mark.parametrize("speed", [0.9, 1.0, 1.1])
def test_another_clock_changes_nothing(speed: float, path: Path) -> None:
    model, source = residuals(), CpuHistory(speed)
    optimizer = torch.optim.AdamW(model.parameters())
    with recorder(path, source, model, optimizer):
        train(model, optimizer, features)
    snapshot = Snapshot.load(path)
    found = by_category(snapshot, snapshot.end_event)
    states = [t for state in optimizer.state.values() for t in state.values()]
    assert found[names.OPTIMIZER] == storage_bytes(states)
    assert found[names.PARAMETERS] == storage_bytes(model.parameters())


def test_a_history_that_lost_its_beginning_is_still_told_apart(path: Path) -> None:
    model, source = residuals(), CpuHistory(last=300)
    optimizer = torch.optim.AdamW(model.parameters())
    with recorder(path, source, model, optimizer):
        train(model, optimizer, features)
    assert len(source.entries) > 300
    snapshot = Snapshot.load(path)
    found = by_category(snapshot, snapshot.end_event)
    states = [t for state in optimizer.state.values() for t in state.values()]
    assert found[names.OPTIMIZER] == storage_bytes(states)
    assert found[names.PARAMETERS] == storage_bytes(model.parameters())
