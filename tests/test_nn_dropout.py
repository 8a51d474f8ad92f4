"""Dropout without a mask: which elements go, that backward drops the same, and what is kept."""

from __future__ import annotations

import math

import pytest
import torch
from nn_elementwise_tools import leaves, sample, saved_by
from torch import Tensor

from vramx.nn.dropout import dropout, dropout_add


@pytest.mark.parametrize("p", [2.0**-16, 0.1, 0.5, 0.9])
def test_share_that_is_dropped_is_p(p: float) -> None:
    """Within 5 standard deviations of a binomial, passed with probability 1 - 6e-7."""
    torch.manual_seed(1)
    n = 1 << 18
    dropped = int((dropout(torch.ones(n), p) == 0).sum())
    spread = 5 * math.sqrt(n * p * (1 - p)) + 1

    def fits(count: float) -> bool:
        return abs(count - n * p) <= spread

    assert fits(dropped)
    assert not fits(n * (p + 0.01))  # what a share that is off by a hundredth gives


def test_neighbours_are_dropped_independently() -> None:
    """The correlation at lag 1 to 8, within 5 / sqrt(n); repeating every 8th element fails."""
    torch.manual_seed(2)
    n = 1 << 18
    flags = (dropout(torch.ones(n), 0.5) > 0).double() * 2 - 1

    def independent(flags: Tensor) -> bool:
        lags = range(1, 9)
        return all(abs(float((flags[lag:] * flags[:-lag]).mean())) < 5 / n**0.5 for lag in lags)

    assert independent(flags)
    assert not independent(flags[:8].repeat(n // 8))


@pytest.mark.parametrize("adds", [False, True])
def test_gradient_passes_where_the_element_did(adds: bool) -> None:
    x, residual = leaves(torch.ones(5, 77), torch.zeros(5, 77))
    y = dropout_add(x, residual, 0.5) if adds else dropout(x, 0.5)
    y.backward(incoming := sample(5, 77))
    assert torch.equal(x.grad, y.detach() * incoming)
    if adds:
        assert torch.equal(residual.grad, incoming)


def test_torchs_seed_decides_and_calls_differ() -> None:
    x = torch.ones(1000)
    torch.manual_seed(5)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(5)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


def test_p_of_zero_and_evaluation_draw_nothing() -> None:
    x = sample(10)
    before = torch.get_rng_state()
    assert dropout(x, 0.0) is x
    assert dropout(x, 0.5, training=False) is x
    assert torch.equal(dropout_add(x, x, 0.5, training=False), x + x)
    assert torch.equal(torch.get_rng_state(), before)


def test_p_of_one_drops_everything() -> None:
    (x,) = leaves(torch.tensor([1.0, torch.inf]))
    y = dropout(x, 1.0)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2))
    assert torch.equal(x.grad, torch.zeros(2))


def test_only_a_key_is_kept() -> None:
    x, residual = leaves(sample(64, 128), sample(64, 128))
    for saved in (
        saved_by(lambda x: dropout(x, 0.1), [x]),
        saved_by(lambda x, r: dropout_add(x, r, 0.1), [x, residual]),
    ):
        assert sum(tensor.numel() * tensor.element_size() for tensor in saved) == 16


def test_compiled_calls_of_one_graph_differ() -> None:
    compiled = torch.compile(
        lambda x: (dropout(x, 0.5), dropout(x, 0.5)), fullgraph=True, backend="aot_eager"
    )
    (x,) = leaves(torch.ones(1000))
    first, second = compiled(x)
    assert not torch.equal(first, second)
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())
