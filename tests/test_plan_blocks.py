"""What vramx.plan takes for a model's blocks, how odd ones are called, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from plan_tools import EXACT, LEVELS, PACKED_ROWS, WIDTH, Block, Layer, Stack, counted_time, rows
from torch import Tensor, nn

import vramx
from vramx.errors import InvalidValueError
from vramx.planning.blocks import find_blocks
from vramx.planning.words import chosen_words, words_for

__all__ = ["counted_time"]
pytestmark = pytest.mark.usefixtures("seeded", "counted_time")

CLOCK = itertools.count()


@dataclasses.dataclass
class Passed:
    hidden: Tensor


class PassesObjects(Block):
    """A block whose argument and result are objects that torch's trees do not open."""

    noise = 0.0

    def forward(self, given: Any, past_key_values: object = None) -> Any:
        return Passed(super().forward(given.hidden) + self.noise * next(CLOCK))


class PassesNoise(PassesObjects):
    noise = 1.0


class OfObjects(Stack):
    def forward(self, x: Tensor) -> Tensor:
        given = Passed(self.embed(x))
        for block in self.blocks:
            given = block(given)
        return self.head(given.hidden)


def test_what_blocks_hand_on_in_dataclasses_is_seen() -> None:
    sample = rows(PACKED_ROWS)
    widest = vramx.plan(OfObjects(3, PassesObjects), sample, levels=LEVELS)
    smallest = widest.with_budget(sample, "smallest")
    assert smallest.measured_bytes < 0.8 * widest.measured_bytes
    for plan in (widest, smallest):
        assert plan.predicted_bytes == pytest.approx(plan.measured_bytes, rel=EXACT)
    by_the_clock = vramx.plan(OfObjects(3, PassesNoise), sample, "smallest", levels=LEVELS)
    assert set(by_the_clock.words.values()) == {"left"}
    assert any("when it is called again" in note for note in by_the_clock.notes)


class Streaming(Layer):
    """Adds the end of its last piece, which it keeps, as causal convolutions of video models do."""

    def __init__(self, as_buffer: bool) -> None:
        super().__init__()
        if as_buffer:
            self.register_buffer("last", None, persistent=False)
        else:
            self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.last is not None:
            y = y + self.last
        self.last = y[-1:]
        return y


class InPieces(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            block.last = None
            x = torch.cat([block(piece) for piece in (x[:16], x[16:])])
        return x


@pytest.mark.parametrize("as_buffer", [False, True])
def test_blocks_that_hand_on_from_call_to_call_can_be_planned(as_buffer: bool) -> None:
    """Each kind of call is measured by itself, with what the block had then and no graph to it."""
    model = InPieces(*(Streaming(as_buffer) for _ in "12"))
    plan = vramx.plan(model, torch.randn(48, WIDTH), "smallest", levels=LEVELS)
    assert len(plan.words) == len(model)
    assert all(block.last is None for block in model)


class OfItself(Block):
    def forward(self, x: Tensor, memory: object = None) -> Tensor:
        assert x is memory
        return super().forward(x)


class Attending(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, memory=x)
        return self.head(x)


def test_a_block_that_is_given_one_tensor_twice_is_measured_so() -> None:
    plan = vramx.plan(Attending(2, OfItself), rows(64), "smallest", levels=LEVELS)
    assert len(plan.words) == 2


class Turning(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(torch.tanh(self.linear(x.real)), x.imag)


class OfComplexNumbers(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = torch.complex(x, x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.real)


def test_blocks_of_complex_numbers_are_planned() -> None:
    plan = vramx.plan(OfComplexNumbers(2, Turning), rows(64), "smallest", levels=LEVELS)
    assert plan.words["blocks.0"] == "recompute_all"


class Counting(Block):
    """Says how often it was called, as the vector fields of ODE solvers do."""

    calls = 0

    def forward(self, x: Tensor, past_key_values: object = None) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def extra_repr(self) -> str:
        return f"calls={self.calls}"


def test_blocks_that_count_their_calls_in_what_they_say_of_themselves_are_planned() -> None:
    plans = [vramx.plan(Stack(2, kind), rows(64), "smallest", levels=LEVELS) for kind in BLOCKS]
    assert plans[0].words == plans[1].words


BLOCKS = (Counting, Block)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), Layer(), Layer())


def names(model: nn.Module) -> list[str]:
    return [block.name for block in find_blocks(model)]


def test_blocks_are_the_repeated_modules_and_not_their_stages_or_parts() -> None:
    of_stages = ["0.blocks.1", "0.blocks.2", "1.blocks.1", "1.blocks.2"]
    assert names(nn.Sequential(Stage(), Stage())) == of_stages
    pair = nn.Module()
    pair.first, pair.second = Layer(), Layer()
    assert names(pair) == ["first", "second"]
    with pytest.raises(InvalidValueError, match="level 'int9' is not accepted"):
        vramx.plan(pair, torch.ones(1, 2), levels="int9")


def test_a_model_in_which_nothing_repeats_has_its_parts_for_blocks() -> None:
    layers = nn.ModuleList([nn.LSTM(4, 4), nn.LSTM(4, 4)])
    parts = nn.ModuleDict({"embed": nn.Embedding(4, 4), "layers": layers, "act": nn.ReLU()})
    assert names(parts) == ["embed", "layers.0", "layers.1"]
    network = nn.Sequential(nn.Sequential(nn.Linear(8, 64), nn.GELU()), nn.Linear(64, 1))
    wrapper = nn.Sequential(network)
    assert names(wrapper) == ["0.0", "0.1"]
    plan = vramx.plan(wrapper, torch.ones(512, 8), "smallest", levels=LEVELS)
    assert plan.words["0.0"] == "recompute_all"
    with pytest.raises(InvalidValueError, match="Linear has no blocks"):
        find_blocks(nn.Linear(2, 2))


def test_a_word_that_is_another_ones_is_not_measured_twice() -> None:
    def words(activation: Any, *levels: str) -> list[str]:
        layers = (nn.TransformerEncoderLayer(16, 2, 32, 0.0, activation) for _ in "12")
        block = find_blocks(nn.Sequential(*layers))[0]
        return words_for(block, torch.device("cpu"), chosen_words(levels or None))

    assert words("gelu") == ["left", "keep", "int8", "recompute_mlp", "recompute_all"]
    assert words(torch.tanh) == ["left", "keep", "int8", "recompute_all"]
    assert words(torch.tanh, "recompute_mlp", "recompute_all") == ["recompute_mlp", "recompute_all"]


class WithCache(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.embed(x), past_key_values=object())


class Dropping(Stack):
    """Leaves another block out of each step, as models with layer drop do."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if number != self.count % 5:
                x = block(x)
        return self.head(x)


def checkpoint(model: Any) -> None:
    model.blocks[0].gradient_checkpointing = True


def become(kind: type[nn.Module]) -> Any:
    return lambda model: setattr(model, "__class__", kind)


def without_parameters(model: nn.Module) -> None:
    for module in model.modules():
        module._parameters.clear()


def as_it_is(model: nn.Module) -> None: ...


def ending() -> Any:
    batches = iter([rows(4)])
    return lambda model: model(next(batches)).sum()


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        (as_it_is, {"levels": ("int9",)}, "'int9' is not accepted"),
        (as_it_is, {"levels": ("keep",)}, "none of levels"),
        (as_it_is, {"budget": "24Gi"}, "24Gi"),
        (as_it_is, {"budget": 0.5}, "on cpu"),
        (as_it_is, {"sample": 3}, "sample 3"),
        (as_it_is, {"sample": lambda model: torch.ones(())}, "requires_grad=False"),
        (as_it_is, {"sample": ending()}, "have come to an end"),
        (lambda model: model.requires_grad_(False), {}, "no parameter"),
        (lambda model: model.to("meta"), {}, "embed.weight is on the meta device.*vramx.predict"),
        (without_parameters, {}, "Stack has no parameters: it does not learn"),
        (become(WithCache), {}, "use_cache"),
        (become(Dropping), {}, "calls other blocks in one step than in the next"),
        (checkpoint, {}, "gradient_checkpointing_disable"),
        (lambda model: model.head.weight.register_post_accumulate_grad_hook(print), {}, "hook"),
    ],
)
def test_what_cannot_be_planned_is_said(change: Any, options: Any, text: str) -> None:
    model = Stack(4)
    change(model)
    with pytest.raises(InvalidValueError, match=text):
        vramx.plan(model, **{"sample": rows(4), "levels": ("left",), **options})
