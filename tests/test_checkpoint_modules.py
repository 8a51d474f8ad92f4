"""vramx.checkpoint_modules: every so many modules of a model are recomputed, from packed inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_tools import (
    SMALL,
    WIDTH,
    Block,
    Packs,
    activation,
    cosine,
    gradients,
    packs,
    quiet,
    seeds,
)
from torch import nn

import vramx
from vramx.errors import InvalidValueError
from vramx.patch.module import find
from vramx.recompute.modules import Recomputing

__all__ = ["packs", "quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds")


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)))


def test_modules_that_match_are_checkpointed(model: nn.Sequential, packs: Packs) -> None:
    before = gradients(model, model)
    report = vramx.checkpoint_modules(model, where=Block, every=2, level=SMALL)
    after = gradients(model, model)
    assert len(report) == 2
    assert packs.sizes == [32 * WIDTH] * 2
    assert cosine(before, after) > 0.999


def test_names_state_and_classes_stay(model: nn.Sequential) -> None:
    before = (list(model.state_dict()), str(model))
    vramx.checkpoint_modules(model, where=(Block, nn.LayerNorm))
    assert (list(model.state_dict()), str(model)) == before
    assert all(isinstance(module, Block) for module in model[1:])


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layers.*", ["layers.0", "layers.1"]),  # and not what is in them
        ("layers.?", ["layers.0", "layers.1"]),
        ("*", ["layers.0", "layers.1", "head"]),  # a ModuleList is not called
        ("layers.1*", ["layers.1"]),
    ],
)
def test_names_that_match_a_pattern_are_checkpointed(pattern: str, names: list[str]) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Block()])
    model.head = nn.Linear(WIDTH, WIDTH)
    report = vramx.checkpoint_modules(model, where=pattern)
    assert [name for name, module in model.named_modules() if find(module, Recomputing)] == names
    assert len(report) == len(names)


def test_keywords_with_names_of_ours_reach_the_module() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor, *, compress: int, debug: bool) -> torch.Tensor:
            return x.sin() * compress * debug

    module = Odd()
    vramx.checkpoint_modules(module, where=Odd, level=SMALL)
    assert module(activation(), compress=2, debug=True).grad_fn is not None


def test_modules_are_not_checkpointed_twice(model: nn.Sequential) -> None:
    vramx.checkpoint_modules(model, where=lambda module: module is model[1])
    with pytest.raises(InvalidValueError, match="is checkpointed already"):
        vramx.checkpoint_modules(model, where=Block)
    assert len(vramx.restore(model)) == 1, "a refused call wrapped some"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"where": nn.Conv2d}, "matches no module; the model has Linear, Block"),
        ({"where": 3}, "accepted are a module class"),
        ({"where": nn.Tanh()}, "accepted are a module class"),
        ({"where": "Block"}, "where 'Block': no module's name matches; closest are '"),
        ({"where": Block, "every": 0}, "every 0"),
        ({"where": Block, "offlaod": "cpu"}, "'offlaod' is not accepted"),
        ({"where": Block, "use_reentrant": True}, "use_reentrant=True"),
    ],
)
def test_mistakes_are_named(model: nn.Sequential, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        vramx.checkpoint_modules(model, **options)


def test_a_module_that_is_not_training_is_recomputed_from_exact_inputs() -> None:
    def gradient(*, training: bool, checkpointed: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).train(training)
        if checkpointed:
            options = vramx.Compression(min_bytes=0)
            vramx.checkpoint_modules(model[1], where=nn.Linear, level=options)
        model(torch.randn(8, 64)).square().sum().backward()
        return model[1].weight.grad

    exact = gradient(training=True, checkpointed=False)

    assert not torch.equal(gradient(training=True, checkpointed=True), exact)
    assert torch.equal(gradient(training=False, checkpointed=True), exact)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("level", ["keep", SMALL], ids=["exact", "int8"])
def test_a_trace_is_of_what_a_checkpoint_runs(level: Any) -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()), torch.randn(4, 8)
    expected = net(x)
    vramx.checkpoint_modules(net, lambda module: module is net, level=level)
    traced = torch.jit.trace(net, x)
    assert torch.equal(traced(x), expected)
    assert str(traced.inlined_graph).count("aten::") == 3


class Scores(nn.Module):
    """What reads its input needs it exactly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1) * 2


@pytest.mark.usefixtures("quiet")
def test_a_report_says_what_is_kept_of_inputs_and_why_they_are_not_packed() -> None:
    rough = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), rough, Scores())
    vramx.checkpoint_modules(model, where=lambda m: m in (model[1], rough, model[3]), level=SMALL)
    gradients(model, model)
    smooth, relu, scores = (row.effect for row in vramx.report(model).rows)
    assert "kept" not in smooth
    assert "-> " in smooth
    assert "(1.00x)" not in smooth
    assert "(1.00x); kept: aten::relu 8.00 KiB" in relu
    assert "(1.00x); kept: needed exactly 8.00 KiB" in scores
