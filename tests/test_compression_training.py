"""What compression does to training: language models of four seeds learn what they did without.

In float32, so that the codec's error is the only one; with a defect under which each must fail.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from compress_tools import worst_cosine
from compression_training_tools import EVERYTHING, fewer_bits, gradient, one_thread, same_noise
from torch import Tensor

import vramx
from benchmarks.language_model import Equivalence, compare
from benchmarks.models_gpt import (
    Block,
    Gpts,
    Shape,
    draw_starts,
    standard_library_text,
    windows,
)
from benchmarks.programs._language_model import share_of_rate
from vramx.compression.codec import reference
from vramx.compression.config import Compression
from vramx.kernels.layout import Layout

__all__ = ["fewer_bits", "one_thread", "same_noise"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "same_noise")]


@pytest.fixture
def misplaced_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that is off by one group."""
    dequantize = reference.dequantize

    def wrong(buffer: Tensor, layout: Layout, dtype: Any) -> Tensor:
        return dequantize(buffer, layout, dtype).roll(layout.group_size)

    monkeypatch.setattr(reference, "dequantize", wrong)


# Four language models of different seeds at once, each of 0.15 M parameters.
SEEDS = (1, 2, 3, 4)
SHAPE = Shape(width=64, layers=2, heads=2, length=32, rows=4)
STEPS, WARMUP, RATE = 70, 10, 1e-3

Text = tuple[Tensor, Tensor]
# Makes the forward pass out of the models.
Prepare = Callable[[Gpts], Callable[[Tensor], Tensor]]


@pytest.fixture(scope="module")
def text() -> Text:
    return standard_library_text(1 << 22)


def train(text: Text, prepare: Prepare = lambda models: models) -> list[float]:
    """Train from the seeds' weights on the seeds' batches; return their validation losses."""
    learnt, checked = text
    models = Gpts(SEEDS, SHAPE)
    forward = prepare(models)
    optimizer = torch.optim.AdamW(models.parameters(), lr=RATE)
    for step, starts in enumerate(draw_starts(learnt, SEEDS, STEPS, SHAPE), 1):
        optimizer.param_groups[0]["lr"] = RATE * share_of_rate(step, STEPS, WARMUP)
        tokens, targets = windows(learnt, starts, SHAPE.length)
        models.losses(forward(tokens), targets).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    same = [9] * len(SEEDS)  # one set of windows for all
    with torch.no_grad():
        losses = [
            models.losses(models(tokens), targets)
            for tokens, targets in (
                windows(checked, starts, SHAPE.length)
                for starts in draw_starts(checked, same, 8, SHAPE)
            )
        ]
    return list(torch.stack(losses).mean(0).tolist())


@pytest.fixture(scope="module")
def exact_losses(text: Text) -> list[float]:
    return train(text)


def compressed(**options: Any) -> Prepare:
    context = vramx.compress(**EVERYTHING, **options)

    def prepare(models: Gpts) -> Callable[[Tensor], Tensor]:
        def forward(tokens: Tensor) -> Tensor:
            with context:
                result: Tensor = models(tokens)
            return result

        return forward

    return prepare


def gaps(ours: Sequence[float], exact: Sequence[float], margin: float) -> Equivalence:
    return compare([a - b for a, b in zip(ours, exact, strict=True)], margin)


def int8_margin(exact: Sequence[float]) -> float:
    """A quarter of what the seed alone changes: what no reader of a loss curve could tell."""
    return 0.25 * statistics.stdev(exact)


INT4_MARGIN_NAT = 0.02


def test_a_language_model_learns(exact_losses: list[float]) -> None:
    """Else equal losses would say nothing. The text differs from one Python to another."""
    assert max(exact_losses) < 2 / 3 * math.log(256)  # what a model has that knows nothing


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_a_language_model_learns_the_same_at_8_bits(
    text: Text, exact_losses: list[float], rounding: str
) -> None:
    ours = train(text, compressed(rounding=rounding))
    assert ours != exact_losses  # it was compressed
    assert gaps(ours, exact_losses, int8_margin(exact_losses)).is_shown


def test_a_language_model_learns_nearly_the_same_at_4_bits(text: Text, exact_losses: Any) -> None:
    ours = train(text, compressed(level="int4"))
    assert gaps(ours, exact_losses, INT4_MARGIN_NAT).is_shown


def test_a_language_model_with_misplaced_groups_is_found_different(
    text: Text, exact_losses: list[float], misplaced_groups: None
) -> None:
    ours = train(text, compressed())
    assert not gaps(ours, exact_losses, INT4_MARGIN_NAT).is_shown


def recomputed(level: str | Compression) -> Prepare:
    def prepare(models: Gpts) -> Callable[[Tensor], Tensor]:
        vramx.checkpoint_modules(models, where=Block, level=level)
        return models

    return prepare


def test_a_language_model_learns_the_same_from_recomputation_with_packed_inputs(
    text: Text, exact_losses: list[float]
) -> None:
    ours = train(text, recomputed(Compression(min_bytes=1)))
    assert ours != exact_losses  # it was compressed
    assert gaps(ours, exact_losses, int8_margin(exact_losses)).is_shown


def test_exact_recomputation_changes_no_bit(text: Text, exact_losses: list[float]) -> None:
    assert train(text, recomputed("keep")) == exact_losses


def recomputed_cosine(text: Text) -> float:
    """Return the cosine of the gradients with and without packed inputs of recomputed blocks."""
    tokens, targets = windows(
        text[0], draw_starts(text[0], SEEDS, 1, SHAPE)[0], length=SHAPE.length
    )

    def found(level: str | Compression) -> Tensor:
        models = Gpts(SEEDS, SHAPE)
        forward = recomputed(level)(models)
        loss = gradient(models, lambda: models.losses(forward(tokens), targets).sum())
        return loss.double()

    packed = found(Compression(min_bytes=1))
    return worst_cosine([packed], [found("keep")])


COSINE_LIMIT = 0.999  # an error of 4.5 % of the gradient; expected is 1 %


def test_recomputation_from_packed_inputs_keeps_the_gradient(text: Text, fewer_bits: Any) -> None:
    assert COSINE_LIMIT < recomputed_cosine(text) < 1.0
    fewer_bits(2)  # a defect that is found out
    assert recomputed_cosine(text) < COSINE_LIMIT
