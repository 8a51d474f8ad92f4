"""vramx.record tells what each byte is for.

Recorded are trainings on the CPU, through a history that logs its storages. What a moment must hold
is counted apart: by autograd's own hooks, and from the parameters, gradients and states there are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from record_tools import (
    PROGRAMS,
    Kept,
    by_category,
    features,
    loss_of,
    path,
    recording,
    residuals,
    states_of,
    storage_bytes,
    train,
)
from torch import nn

import vramx
from vramx.memory import categories as names

__all__ = ["path"]


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_moment_before_backward_holds_what_is_counted_there(
    program: str, amp: bool, path: Path
) -> None:
    make, batch = PROGRAMS[program]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    with recording(path, model, optimizer) as seen:
        train(model, optimizer, batch)
        args, kwargs = batch()
        kept = Kept(model)
        with kept.watching(), torch.autocast("cpu", enabled=amp):
            out = model(*args, **kwargs)
            loss = loss_of(out)
        seen.now()
        live = sum(seen.source.live.values())
        kept_bytes = kept.bytes(out, loss, *args, *kwargs.values())
        kept.storages.clear()
        loss.backward()
        del loss, out
    found = seen.found()
    input_bytes = storage_bytes([*args, *kwargs.values()])
    assert sum(found.values()) == live
    assert found[names.PARAMETERS] == storage_bytes(model.state_dict().values())
    assert found[names.OPTIMIZER] == storage_bytes(states_of(optimizer))
    assert found[names.INPUTS] == input_bytes
    assert found[names.ACTIVATIONS] == kept_bytes - input_bytes
    assert names.GRADIENTS not in found
    assert names.UNKNOWN not in found


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_live_byte_has_one_category_at_any_event(program: str, path: Path) -> None:
    make, batch = PROGRAMS[program]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with recording(path, model, optimizer) as seen:
        train(model, optimizer, batch)
    snapshot = seen.snapshot()
    assert not (snapshot.allocations.category == 0).any()
    for event in range(0, snapshot.event_count, 7):
        found = by_category(snapshot, event)
        assert sum(found.values()) == snapshot.live_bytes_at(event)
        assert set(found) <= set(names.CATEGORIES)


@pytest.mark.parametrize("are_dropped", [False, True], ids=["kept", "of a hand-made step"])
def test_gradients_are_those_of_the_parameters(are_dropped: bool, path: Path) -> None:
    model = residuals()
    with recording(path, model) as seen:
        loss_of(model(*features()[0])).backward()
        seen.now()
        expected = storage_bytes(p.grad for p in model.parameters())
        if are_dropped:
            for parameter in model.parameters():
                parameter.grad = None
    assert seen.found()[names.GRADIENTS] == expected


def test_packs_are_what_the_compression_keeps(path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    x = torch.randn(512, 256)
    with recording(path, model) as seen:
        with vramx.compress(min_bytes=0) as stats:
            out = model(x)
        seen.now()
        out.sum().backward()
    found = seen.found()
    assert stats.packed.kept_bytes > 0
    assert found[names.PACKED] == stats.packed.kept_bytes


def test_activations_are_told_apart_by_module(path: Path) -> None:
    model = residuals()
    with recording(path, model) as seen:
        loss = loss_of(model(*features()[0]))
        seen.now()
        loss.backward()
    tree = seen.tree()
    by_name = {frame.name: node for frame, node in tree.children.items()}
    blocks = {frame.name: node for frame, node in by_name[names.ACTIVATIONS].children.items()}
    assert {"0", "1", "2"} <= set(blocks)
    assert blocks["0"].bytes == blocks["1"].bytes
    assert {frame.name for frame in blocks["0"].children} == {"norm", "mlp"}


@pytest.mark.parametrize(
    ("is_named", "history"),
    [
        ((True, False), {}),  # an optimizer that steps is found
        ((False, False), {}),  # with its parameters
        ((False, True), {}),  # and has the parameters, where no model is named
        *(((True, True), {"speed": speed}) for speed in (0.9, 1.0, 1.1)),  # another clock
        ((True, True), {"last": 300}),  # the history has lost its beginning
    ],
)
def test_parameters_and_states_are_told_apart(
    is_named: tuple[bool, bool], history: dict[str, Any], path: Path
) -> None:
    model = residuals()
    optimizer = torch.optim.AdamW(model.parameters())
    named = model if is_named[0] else None, [optimizer] if is_named[1] else None
    with recording(path, *named, **history) as seen:
        train(model, optimizer, features)
    assert len(seen.source.entries) > 300
    found = seen.found()
    assert found[names.OPTIMIZER] == storage_bytes(states_of(optimizer))
    assert found[names.PARAMETERS] == storage_bytes(model.parameters())
