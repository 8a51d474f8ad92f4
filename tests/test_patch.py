"""vramx.restore and vramx.report: every change is found, whatever wraps the model, and undone."""

from __future__ import annotations

import functools
import itertools
import types
from typing import Any

import pytest
import torch
from optimize_tools import INT8_NOISE
from patch_tools import (
    OPTIONS,
    OTHERS,
    OURS,
    Plain,
    Wrapper,
    error,
    gradients,
    inputs,
    is_equal,
    model,
    pack,
    recompute,
    shard,
    states,
    train,
    unhook,
)
from torch import nn

import vramx
from vramx.errors import InvalidValueError, VramxWarning
from vramx.nn.levels import LEVELS

pytestmark = pytest.mark.usefixtures("seeded")

PAIRS = [*itertools.permutations(OURS, 2)]


@pytest.mark.parametrize("ways", [*[(way,) for way in OURS], *PAIRS, tuple(OURS)], ids="+".join)
def test_what_was_done_in_any_order_is_undone_to_the_bit(ways: tuple[str, ...]) -> None:
    net = model()
    before, exact = states(net), gradients(net)
    for way in ways:
        OURS[way](net)
    noisy = gradients(net)
    assert not is_equal(exact, noisy)
    assert error(noisy, exact) < INT8_NOISE
    report = str(vramx.restore(net))
    assert all(way in report for way in ways)
    net.zero_grad(set_to_none=True)
    assert states(net) == before
    assert is_equal(gradients(net), exact)
    assert len(vramx.restore(net)) == 0


WRAPPING = ("packed", "recomputed")
STEPS: dict[str, Any] = {**OURS, **OTHERS, "unhooked": unhook, "restored": vramx.restore}
ORDERS = [
    *(f"fused {others} restored" for others in OTHERS),
    *(f"{others} {ours} restored" for others in OTHERS for ours in WRAPPING),
    *(f"{ours} {others} restored {ours} restored" for others in OTHERS for ours in WRAPPING),
    *(f"hooked {ours} unhooked restored" for ours in WRAPPING),
    *(f"{ours} hooked unhooked restored" for ours in WRAPPING),
    "packed hooked restored unhooked restored",
    "prepared packed prepared restored",
]


def forwards_and_calls(net: nn.Module) -> tuple[list[Any], list[int]]:
    forwards = [vars(block).get("forward") for block in net]
    return forwards, [block.hook_calls for block in net if hasattr(block, "hook_calls")]


@pytest.mark.parametrize("order", ORDERS)
def test_ours_come_and_go_while_what_others_did_stays_and_runs(order: str) -> None:
    net, changed, theirs = model(), 0, [None, None]
    before, exact = states(net), gradients(net)
    for step in order.split():
        done = STEPS[step](net)
        forwards, calls = forwards_and_calls(net)
        if step in OURS:
            changed = 1 if step == "fused" else 2
        elif step == "restored":
            assert len(done) == changed
            assert "unhooked" in order or forwards == theirs
            changed = 0
        else:
            theirs = forwards
        assert [row.note for row in vramx.report(net).rows] == [""] * changed
        assert is_equal(gradients(net), exact) == (changed == 0)
        assert forwards_and_calls(net)[1] == [count + 1 for count in calls]
    if "unhooked" in order:
        net.zero_grad(set_to_none=True)
        assert states(net) == before


@pytest.mark.parametrize("others", OTHERS)
def test_block_that_others_changed_is_not_fused_and_is_named(others: str) -> None:
    net = model()
    OTHERS[others](net)
    with pytest.warns(VramxWarning, match="TransformerEncoderLayer of .* is left as it was"):
        vramx.optimize(net, "int8")
    assert len(vramx.report(net)) == 0


def test_forward_that_was_set_before_can_be_deleted_below_ours() -> None:
    block = Plain()
    block.forward = torch.sin  # type: ignore[method-assign]
    vramx.compressed_activations(block, **OPTIONS)
    assert torch.equal(block(inputs()), inputs().sin())
    del block.forward
    train(block)
    assert set(vramx.compression_stats(block).operations) == {"linear", "gelu"}
    vramx.restore(block)
    assert "forward" not in block.__dict__


def test_forward_that_takes_the_place_of_ours_is_told_of() -> None:
    block = vramx.compressed_activations(Plain(), **OPTIONS)
    block.forward = torch.sin
    assert "replaced since" in str(vramx.report(block))
    vramx.compressed_activations(block, **OPTIONS)
    assert "replaced since" not in str(vramx.report(block))
    block(inputs().requires_grad_() * 1)
    assert set(vramx.compression_stats(block).operations) == {"sin"}
    vramx.restore(block)
    assert block.forward is torch.sin


@pytest.mark.parametrize("ours", [*OURS, *(level for level in LEVELS if level != "left")])
def test_change_that_is_undone_between_forward_and_backward_is_no_error(ours: str) -> None:
    net = model()
    exact = gradients(net)
    net.zero_grad()
    OURS.get(ours, functools.partial(vramx.optimize, level=ours))(net)
    loss = net(inputs()).square().mean()
    vramx.restore(net)
    loss.backward()
    # int4 has 17 times fewer codes.
    bound = INT8_NOISE * (17 if ours == "int4" else 1)
    assert error([p.grad for p in net.parameters()], exact) < bound
    assert [type(block) for block in net] == [Plain, nn.TransformerEncoderLayer]


@pytest.mark.parametrize("others", ["prepared", "wrapped", "timed", "sharded"])
def test_new_options_replace_old_ones_below_others(others: str) -> None:
    net = model()
    pack(net)
    OTHERS[others](net)
    for block in net:
        vramx.compressed_activations(block, level="int4", **OPTIONS)
    train(net)
    counts = vramx.compression_stats(net).packed
    # 16 codes of 4 bits, and a scale and a minimum of 32 bits, for at most 64 numbers of 32 bits.
    assert 0 < counts.kept_bytes < counts.seen_bytes / 4
    assert all("int4" in row.done for row in vramx.report(net).rows)


def test_plan_is_undone_alone_or_with_all_else() -> None:
    net = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32) for _ in range(2)), nn.Tanh())
    vramx.compressed_activations(net[2], **OPTIONS)
    plan = vramx.plan(net, torch.randn(4, 2, 16), "smallest", levels=["recompute_all"])
    assert [row.name for row in vramx.report(net).rows] == ["2"]
    plan.apply().undo()
    assert [row.name for row in vramx.report(net).rows] == ["2"]
    plan.apply()
    assert [row.name for row in vramx.report(net).rows] == ["0", "1", "2"]
    assert len(vramx.restore(net)) == 3
    plan.apply()
    assert len(vramx.restore(net)) == 2


def test_class_of_others_that_was_made_of_ours_is_said_to_do_nothing_after_restoring() -> None:
    net = model()
    pack(net)
    shard(net)
    assert "does nothing of its own" in str(vramx.restore(net))


# -- What is told ----------------------------------------------------------------------------------


def test_counts_of_a_model_are_of_all_that_is_packed_in_it() -> None:
    net = model()
    pack(net)
    train(net)
    parts = [vramx.compression_stats(block) for block in net]
    whole = vramx.compression_stats(Wrapper(net))
    assert whole.packed.tensors == sum(part.packed.tensors for part in parts) > 0
    assert whole.saved_bytes == sum(part.saved_bytes for part in parts)
    assert set(whole.operations) == {name for part in parts for name in part.operations}


def test_report_says_what_each_module_does() -> None:
    net = model()
    assert str(vramx.report(net)) == f"{len(list(net.modules()))} modules, none of them changed"
    vramx.optimize(net, "int8")
    vramx.compressed_activations(net[0], **OPTIONS)
    recompute(net)
    vramx.compressed_activations(net, level="int4")
    train(net)
    rows = {row.name: row for row in vramx.report(net).rows}
    assert {name: row.done for name, row in rows.items()} == {
        "": "packed in int4",
        "0": "packed in int8; recomputed, input in int8",
        "1": "fused, int8, as EncoderLayer; recomputed, input in int8",
    }
    assert vramx.report(net).unchanged == len(list(net.modules())) - 3


def test_equal_rows_of_a_report_are_one_line() -> None:
    net = nn.Sequential(*(Plain() for _ in range(3)))
    recompute(net)
    assert "\n3        *     Plain  recomputed, input in int8" in str(vramx.report(net))


def test_class_that_was_decorated_is_named_and_not_undone_for_one_model() -> None:
    @vramx.compressed_activations(**OPTIONS)
    class Decorated(Plain):
        pass

    net = nn.Sequential(Decorated(), Plain())
    (row,) = vramx.report(net).rows
    assert row.done == "packed in int8"
    assert "restore(Decorated)" in row.note
    assert len(vramx.restore(net)) == 0
    assert len(vramx.report(net)) == 1
    assert len(vramx.restore(Decorated)) == 1
    assert len(vramx.report(net)) == 0


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def around(*args: Any) -> Any:
        return function(*args) + 0

    return around


@pytest.mark.parametrize(
    "over",
    [
        decorated,
        functools.partial,
        functools.lru_cache,
        lambda function: types.MethodType(lambda _, x: function(x), 0),
    ],
    ids=["wraps", "partial", "lru_cache", "unknown"],
)
def test_function_is_restored_below_decorators(over: Any, request: Any) -> None:
    @vramx.compressed_activations(**OPTIONS)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    outer, counts = over(function), vramx.compression_stats(function)
    if "unknown" in request.node.name:
        assert len(vramx.restore(outer)) == 0
        assert len(vramx.restore(function)) == 1
    else:
        assert len(vramx.report(outer)) == len(vramx.restore(outer)) == 1
    outer(inputs().requires_grad_())
    assert counts.tensors == 0
    assert len(vramx.report(function)) == 0


@pytest.mark.parametrize("target", [3, "model", int, [nn.Linear(2, 2)]])
@pytest.mark.parametrize("ask", [vramx.restore, vramx.report])
def test_anything_else_is_refused(ask: Any, target: Any) -> None:
    with pytest.raises(InvalidValueError, match="accepted are a Module, a class of Modules"):
        ask(target)
