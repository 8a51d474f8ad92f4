"""Packed sequences without data: torch's own calls read from memory how many rows go on.

Each is done by what needs no data and takes the same memory: packing is a part of the rows. A
recurrent layer is given the known numbers of rows themselves, which it reads as ever.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from vramx.planning.fake_values import keep_value, real, value_of

_functions: Any = torch._C._VariableFunctions


def _packed(x: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    if not isinstance(x, FakeTensor):
        return _functions._pack_padded_sequence(x, lengths, batch_first)
    steps, count = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    with real():
        known = value_of(lengths)
        known = torch.full((count,), steps) if known is None else known
        going_on = (known[None] > torch.arange(int(known.max()))[:, None]).sum(1)
        total = int(known.sum())
    sizes = torch.empty(len(going_on), dtype=torch.int64)
    keep_value(sizes, going_on)
    return x.flatten(0, 1)[:total].clone(), sizes  # as many rows, whichever they are


def _padded(
    data: Tensor, sizes: Tensor, batch_first: bool, padding: float, total_length: int
) -> Any:
    known = value_of(sizes)
    if not isinstance(data, FakeTensor) or known is None:
        return _functions._pad_packed_sequence(data, sizes, batch_first, padding, total_length)
    with real():
        steps, count = len(known), int(known[0])
        found = (known[:, None] > torch.arange(count)[None]).sum(0)
    lengths = torch.empty(count, dtype=torch.int64)
    keep_value(lengths, found)
    rows = _filled(data, max(steps, total_length), count)
    return (rows.transpose(0, 1) if batch_first else rows), lengths


def _filled(data: Tensor, steps: int, count: int) -> Tensor:
    missing = steps * count - data.shape[0]
    filled = functional.pad(data, (0, 0) * (data.dim() - 1) + (0, missing))
    return filled.view(steps, count, *data.shape[1:])


def _recurrent(function: Any) -> Any:
    """Return what runs a recurrent layer, of which packed rows come with their sizes."""

    def run(x: Tensor, *rest: Any) -> Any:
        # Of packed rows there are sizes, then states; of others states, then weights.
        is_packed = isinstance(rest[0], Tensor) and rest[0].dtype == torch.int64
        known = value_of(rest[0]) if is_packed else None
        return function(x, *(rest if known is None else (known, *rest[1:])))

    return run


def _ctc_loss(
    probabilities: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *rest: Any
) -> Any:
    """Have lengths that are tensors, which torch reads on the host, given as numbers."""
    steps = [probabilities.shape[0]] * probabilities.shape[1]
    longest = [targets.shape[-1]] * probabilities.shape[1]
    lengths = _numbers(input_lengths, steps), _numbers(target_lengths, longest)
    return _functions.ctc_loss(probabilities, targets, *lengths, *rest)


def _numbers(lengths: Any, otherwise: list[int]) -> Any:
    if not isinstance(lengths, FakeTensor):
        return lengths
    known = value_of(lengths)
    with real():
        return otherwise if known is None else known.flatten().tolist()


SEQUENCES: dict[Any, Any] = {
    _functions._pack_padded_sequence: _packed,
    _functions._pad_packed_sequence: _padded,
    _functions.ctc_loss: _ctc_loss,
    **{
        layer: _recurrent(layer)
        for layer in (
            *(_functions.lstm, _functions.gru),
            *(_functions.rnn_tanh, _functions.rnn_relu),
        )
    },
}
