"""vramx.predict of recurrent layers: torch's own kernels, and rows that are packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from predict_tools import measured_bytes, peak
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import vramx

STEPS, ROWS, WIDTH = 5, 4, 32
STATE_BYTES = ROWS * WIDTH * 4
# What autograd keeps of one step, in states: the gates of input and state, what a kernel saves of
# the gates, and the states that come out. torch's own kernel of an RNN keeps its state alone.
KEPT = {nn.LSTM: 4 + 4 + 4 + 2, nn.GRU: 3 + 3 + 5 + 1, nn.RNN: 1}


def flattened(layer: nn.RNNBase) -> nn.RNNBase:
    """Have all weights lie in one storage, as flatten_parameters() does on a GPU."""
    weights = list(layer.parameters())
    parts = torch.zeros(sum(w.numel() for w in weights)).split([w.numel() for w in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.data = part.view(weight.shape)
    return layer


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("kind", KEPT)
def test_a_layer_keeps_what_torchs_own_kernels_do(kind: Any, nonlinearity: str) -> None:
    options = {"nonlinearity": nonlinearity} if kind is nn.RNN else {}
    layer = flattened(kind(WIDTH, WIDTH, **options))
    x = torch.zeros(STEPS, ROWS, WIDTH)
    there = x.nbytes + sum(weight.nbytes for weight in layer.parameters())
    row = vramx.predict(lambda: layer(x), policies="live", steps=1).row()
    assert row.before_bytes == there
    # Beside each step: the stacked output, and the states before the first and after the last.
    states = (KEPT[kind] + 1) * STEPS + 2 * (2 if kind is nn.LSTM else 1)
    assert row.peak_bytes["live"] == there + states * STATE_BYTES


DEEP = {"num_layers": 2, "bidirectional": True}


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in KEPT), (nn.LSTM, DEEP)], ids=str
)
def test_weights_in_one_storage_count_once(kind: Any, options: Any) -> None:
    layer, x = kind(WIDTH, WIDTH, batch_first=True, **options), torch.zeros(ROWS, STEPS, WIDTH)
    optimizer = torch.optim.AdamW(layer.parameters())

    def step() -> None:
        layer(x)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    apart = peak(step)
    flattened(layer)
    assert peak(step) == apart


@pytest.mark.parametrize(
    ("kind", "options", "lengths"),
    [
        *((kind, options, [1, 5, 5]) for kind in KEPT for options in ({}, DEEP)),
        (nn.LSTM, {}, [5, 3, 1]),  # in order
    ],
    ids=str,
)
def test_packed_rows_take_what_real_steps_do(kind: Any, options: Any, lengths: list[int]) -> None:
    layer, of_each = kind(16, WIDTH, batch_first=True, **options), torch.tensor(lengths)
    x = torch.randn(len(lengths), max(lengths), 16)

    def step() -> None:
        out = layer(pack_padded_sequence(x, of_each, True, enforce_sorted=False))[0]
        padded, found = pad_packed_sequence(out, batch_first=True)
        assert padded.shape[:2] == x.shape[:2]
        assert found.tolist() == lengths
        padded.sum().backward()
        layer.zero_grad()

    assert peak(step, device="cpu") == measured_bytes(step, layer, x, of_each)
