"""vramx.restore and vramx.report: every change is found, whatever wraps the model, and undone."""

from __future__ import annotations

import functools
import itertools
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
    hook,
    inputs,
    is_equal,
    model,
    pack,
    prepare,
    recompute,
    shard,
    states,
    train,
    unhook,
)
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import vramx
from vramx.errors import InvalidValueError
from vramx.nn.levels import LEVELS
from vramx.patch import function
from vramx.patch.change import Change
from vramx.patch.module import patch_of, put

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


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("first", ["ours", "others"])
def test_what_others_did_stays_and_runs(ours: str, others: str, first: str) -> None:
    net = model()
    exact = gradients(net)
    steps = [OURS[ours], OTHERS[others]]
    for step in steps if first == "ours" else reversed(steps):
        step(net)
    if ours == "fused" and first == "others":
        pytest.skip("a block whose forward or class is another's is left, and the report says so")
    assert [row.note for row in vramx.report(net).rows] == [""] * (1 if ours == "fused" else 2)
    assert not is_equal(gradients(net), exact)
    theirs = [block.__dict__.get("forward") for block in net] if first == "ours" else None
    assert len(vramx.restore(net)) == (1 if ours == "fused" else 2)
    assert is_equal(gradients(net), exact)
    if theirs is not None:
        assert [block.__dict__.get("forward") for block in net] == theirs
    assert len(vramx.report(net)) == len(vramx.restore(net)) == 0


@pytest.mark.parametrize("ours", ["packed", "recomputed"])
@pytest.mark.parametrize("order", ["hook, ours", "ours, hook"])
def test_hook_that_is_taken_off_leaves_ours(ours: str, order: str) -> None:
    net = model()
    before, exact = states(net), gradients(net)
    for step in [hook, OURS[ours]] if order == "hook, ours" else [OURS[ours], hook]:
        step(net)
    train(net)
    assert [block.hook_calls for block in net] == [1, 1]
    unhook(net)
    assert not is_equal(gradients(net), exact)
    assert [row.note for row in vramx.report(net).rows] == ["", ""]
    vramx.restore(net)
    assert is_equal(gradients(net), exact)
    net.zero_grad(set_to_none=True)
    assert states(net) == before


def test_hook_that_is_taken_off_after_restoring_puts_nothing_of_ours_back() -> None:
    net = model()
    exact = gradients(net)
    pack(net)
    hook(net)
    vramx.restore(net)
    unhook(net)
    assert is_equal(gradients(net), exact)
    vramx.restore(net)
    assert not any("forward" in block.__dict__ for block in net)


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


@pytest.mark.parametrize("ours", ["packed", "recomputed"])
@pytest.mark.parametrize("others", OTHERS)
def test_change_may_be_made_undone_and_made_again_below_others(ours: str, others: str) -> None:
    net = model()
    exact = gradients(net)
    OURS[ours](net)
    OTHERS[others](net)
    for _ in range(2):
        assert len(vramx.restore(net)) == 2
        assert is_equal(gradients(net), exact)
        OURS[ours](net)
        assert [row.note for row in vramx.report(net).rows] == ["", ""]
        assert not is_equal(gradients(net), exact)


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


@pytest.mark.parametrize("wrap", [Wrapper, functools.partial(torch.compile, backend="eager")])
def test_model_is_found_within_modules_around_it(wrap: Any) -> None:
    inner = vramx.compressed_activations(Plain(), **OPTIONS)
    outer = wrap(inner)
    train(outer)
    assert vramx.compression_stats(outer).packed.tensors == 2  # the batch is kept
    vramx.compressed_activations(outer, level="int4", **OPTIONS)
    assert [row.done for row in vramx.report(outer).rows] == ["packed in int4"]
    assert len(vramx.restore(outer)) == 1
    assert type(inner) is Plain


def test_compiled_module_itself_is_packed_and_restored() -> None:
    compiled = torch.compile(Plain(), backend="eager")
    before = states(compiled)
    vramx.compressed_activations(compiled, **OPTIONS)
    train(compiled)
    assert vramx.compression_stats(compiled).packed.tensors == 2  # the batch is kept
    vramx.restore(compiled)
    assert states(compiled)[0] == before[0]
    train(compiled)


def test_compiled_module_may_set_attributes() -> None:
    class Counts(Plain):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    block = Counts()
    recompute(nn.Sequential(block))
    compiled = torch.compile(block, backend="eager")
    for _ in range(2):
        train(compiled)
    assert block.calls >= 2


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


def test_class_of_others_that_was_made_of_ours_does_nothing_after_restoring() -> None:
    net = model()
    exact = gradients(net)
    pack(net)
    shard(net)
    assert "does nothing of its own" in str(vramx.restore(net))
    assert is_equal(gradients(net), exact)
    pack(net)
    train(net)
    assert vramx.compression_stats(net).packed.tensors > 0


def test_forward_of_ours_that_others_kept_is_the_modules_own_after_restoring() -> None:
    net = model()
    exact = gradients(net)
    prepare(net)
    pack(net)
    prepare(net)
    assert len(vramx.restore(net)) == 2
    assert is_equal(gradients(net), exact)
    assert [patch_of(block).changes for block in net] == [(), ()]  # type: ignore[union-attr]


def test_module_whose_class_cannot_be_followed_is_named_and_unchanged() -> None:
    script = torch.jit.script(nn.Linear(2, 2))
    before = states(script)
    with pytest.raises(InvalidValueError, match="RecursiveScriptModule cannot be changed"):
        put(script, Change())
    assert states(script) == before


def test_model_is_changed_in_all_matching_modules_or_in_none() -> None:
    net = nn.Sequential(Plain(), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(InvalidValueError, match="cannot be changed"):
        vramx.checkpoint_modules(net, where=lambda module: module in net.children())
    assert len(vramx.report(net)) == 0


class Scaled(Plain):
    """Asks of its own class what is below it, as programs of Python 2 did."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super(type(self), self).forward(x) * 2  # type: ignore[misc]

    def train(self, mode: bool = True) -> Scaled:
        super(self.__class__, self).train(mode)
        self.up.eval()
        return self


def test_class_that_asks_for_its_own_class_finds_the_one_below() -> None:
    net = nn.Sequential(Scaled(), Scaled())
    expected = net(inputs())
    vramx.compressed_activations(net[0], min_bytes=0)
    assert torch.equal(net(inputs()), expected)
    assert not net.train()[0].up.training
    assert net[0].training


class Noting(Change):
    """Notes of which module it has run a call."""

    def __init__(self, ran: list[Any]) -> None:
        self._ran = ran

    def run(self, module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._ran.append(module)
        return forward(*args, **kwargs)

    def __str__(self) -> str:
        return "noted"


@pytest.mark.parametrize("part", [nn.LazyLinear(8), nn.LazyBatchNorm1d()], ids=str)
def test_a_lazy_module_keeps_its_changes_when_it_is_made(part: nn.Module) -> None:
    ran = list[Any]()
    put(part, Noting(ran))
    for _ in range(2):
        part(torch.randn(4, 8))
    assert ran == [part, part]
    vramx.restore(part)
    assert type(part) in (nn.Linear, nn.BatchNorm1d)


@pytest.mark.parametrize(
    "order",
    [
        "parametrize put take restore",
        "parametrize put restore take",
        "put parametrize take restore",
        "put parametrize restore take",
        "parametrize put more restore less take",
    ],
)
def test_parametrizations_come_and_go_around_a_change(order: str) -> None:
    layer, x, ran = nn.Linear(8, 8), torch.randn(4, 8), list[Any]()
    expected = layer(x)
    steps: dict[str, Any] = {
        "parametrize": lambda: parametrizations.weight_norm(layer),
        "more": lambda: parametrize.register_parametrization(layer, "bias", nn.Identity()),
        "put": lambda: put(layer, Noting(ran)),
        "less": lambda: parametrize.remove_parametrizations(layer, "bias"),
        "take": lambda: parametrize.remove_parametrizations(layer, "weight"),
        "restore": lambda: vramx.restore(layer),
    }
    is_changed = False
    for step in order.split():
        steps[step]()
        is_changed = step == "put" or (is_changed and step != "restore")
        ran.clear()
        torch.testing.assert_close(layer(x), expected)
        assert bool(ran) == is_changed, step
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("wraps", [True, False])
def test_a_forward_that_a_program_gives_the_class_is_that_of_the_class(wraps: bool) -> None:
    class Own(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    net, other, x, ran = Own(), Own(), inputs(), list[Any]()
    expected, others = net(x) * 2, other(x) * 2
    put(net, Noting(ran))
    below: Any = type(net).forward if wraps else Plain.forward
    type(net).forward = lambda self, x: below(self, x) * 2  # type: ignore[method-assign]
    assert torch.equal(net(x), expected)
    assert ran == [net]
    assert torch.equal(other(x), others)
    put(other, Noting(ran))
    assert torch.equal(other(x), others)
    assert ran == [net, other]
    vramx.restore(net)
    assert torch.equal(net(x), expected)
    del type(other).forward
    assert torch.equal(net(x), expected / 2)


def test_compiled_code_of_what_stands_in_calls_finds_torch() -> None:
    """Where a result is an output of transformers, torch 2.6 has it look among globals."""
    model = nn.Sequential(nn.Linear(2, 2))
    vramx.checkpoint_modules(model, where=nn.Linear)
    wrapped = function.wrap(len, Change())
    kinds, runs = [Change], []
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        ours = kind is not Change and kind.__module__.startswith("vramx.")
        runs += [kind.run] if ours and "run" in vars(kind) else []
    assert len(runs) > 1
    for called in (type(model[0]).forward, wrapped, *runs):
        assert called.__globals__.get("torch") is torch, called
