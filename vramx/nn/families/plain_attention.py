"""What a record says of attention: how scores are made, scaled, masked and dropped, and of what.

Attention is torch's function, or its product, softmax and product. A mask is a table of what is
later, compared by its content; heads are compared element by element, whatever views made them.
All else raises NotPlainError, which names it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from vramx.nn.families.plain_plan import Attention, Heads, NotPlainError
from vramx.nn.families.plain_stages import Scores, Stage, Value

_NEVER = -1e9  # or less, in scores, is a chance of nothing


class AttentionReader:
    """Reads attention of activations of (rows, tokens, ...), and keeps the stages that are read."""

    def __init__(self, lead: tuple[int, int]) -> None:
        self._lead = lead
        self._projections: list[str] = []
        self._stages: list[Stage] = []

    def fresh(self, stage: Stage, width: int) -> Value:
        """Return all elements of a stage, in order."""
        rows, tokens = self._lead
        stage.size = rows * tokens * width
        self._stages.append(stage)
        return Value(stage, torch.arange(stage.size).view(rows, tokens, width))

    def whole(self, value: Any) -> Stage:
        """Return the stage that a value is, element by element."""
        if not isinstance(value, Value) or value.factor != 1:
            raise NotPlainError("an operation in it is not known there")
        expected = torch.arange(value.index.numel())
        if value.stage.kind == "attended":
            expected = expected.view(value.stage.what[0]).transpose(1, 2).flatten(2)
        else:
            expected = expected.view(*self._lead, -1)
        if value.index.numel() != value.stage.size or not torch.equal(value.index, expected):
            raise NotPlainError("elements are in another order than is known there")
        return value.stage

    def _softmax(self, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        soft = isinstance(input, Scores) and not input.is_soft
        if not soft or dim not in (-1, 3) or dtype is not None:
            raise NotPlainError("it has a softmax that is not known")
        if input.is_causal and not input.fill <= _NEVER:
            raise NotPlainError("its attention has a mask that is not known")
        return replace(input, is_soft=True)

    def _masked(self, input: Any, mask: Any, value: Any) -> Scores:
        """Take scores of what comes later away, if that is what the mask has."""
        tokens = self._lead[1]
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        fits = isinstance(mask, Tensor) and mask.numel() == tokens**2
        fits = fits and mask.shape[-2:] == later.shape and torch.equal(mask.view_as(later), later)
        known = fits and isinstance(value, (int, float))
        if not known or not isinstance(input, Scores) or input.is_soft:
            raise NotPlainError("its attention has a mask that is not known")
        return replace(input, is_causal=True, fill=float(value))

    def _masked_in_place(self, input: Any, mask: Any, value: Any) -> Scores:
        masked = self._masked(input, mask, value)
        input.is_causal, input.fill = True, masked.fill  # for everyone who has it
        return cast(Scores, input)

    def _matmul(self, a: Any, b: Any) -> Any:
        if isinstance(a, Scores) and isinstance(b, Value) and a.is_soft and b.factor == 1:
            return self._attends(a.q, a.k, b, (a.dropout or 0.0, a.is_causal, a.factor))
        four = isinstance(a, Value) and isinstance(b, Value) and a.index.dim() == 4
        if not four or b.index.dim() != 4:
            raise NotPlainError("it multiplies matrices")
        return Scores(a, b.moved(b.index.mT), a.factor * b.factor)

    def _attention(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Value:  # fmt: skip
        values = (query, key, value)
        if attn_mask is not None:
            raise NotPlainError("its attention has a mask")
        if not all(isinstance(each, Value) and each.factor == 1 for each in values):
            raise NotPlainError("its attention is of something else than projections")
        if not enable_gqa and len({each.index.shape[1] for each in values}) > 1:
            raise NotPlainError("its attention repeats heads")
        how = (float(dropout_p), bool(is_causal), None if scale is None else float(scale))
        return self._attends(*values, how)

    def _attends(self, q: Value, k: Value, v: Value, how: tuple[Any, bool, Any]) -> Value:
        heads = (self._heads(q), self._heads(k), self._heads(v))
        if how[2] is not None and not how[2] > 0:  # kernels share its root between q and k
            raise NotPlainError("its attention has a scale that is not positive")
        sources = [each.stage.inputs[0] for each in (q, k, v)]
        if any(each is not sources[0] for each in sources):
            raise NotPlainError("its attention is of two tensors")
        if heads[0].size != heads[1].size or heads[1][2:] != heads[2][2:]:
            raise NotPlainError("its attention is of another shape")
        rows, tokens = self._lead
        shape = (rows, heads[0].number, tokens, heads[0].size)
        made_of = (sources[0], *dict.fromkeys((q.stage, k.stage, v.stage)))
        stage = Stage("attended", (shape, Attention(heads, *how)), made_of)
        stage.size = torch.Size(shape).numel()
        self._stages.append(stage)
        return Value(stage, torch.arange(stage.size).view(shape))

    def _heads(self, value: Value) -> Heads:
        """Return which elements of a projection these are, as (rows, heads, tokens, size)."""
        stage, index = value.stage, value.index
        if stage.kind != "linear" or index.dim() != 4 or not index.numel():
            raise NotPlainError("its attention is of something else than projections")
        _, count, _, size = index.shape
        start = int(index[0, 0, 0, 0])
        all_of_it = torch.arange(stage.size).view(*self._lead, -1)
        expected = all_of_it[..., start : start + count * size]
        fits = expected.shape[-1] == count * size
        fits = fits and torch.equal(index, expected.unflatten(-1, (count, size)).transpose(1, 2))
        if not fits:
            raise NotPlainError("its heads are in another order")
        if stage.what not in self._projections:
            self._projections.append(stage.what)
        return Heads(self._projections.index(stage.what), start, count, size)


def scaled(value: Any, factor: Any) -> Any:
    if not isinstance(factor, (int, float)):
        raise NotPlainError("it multiplies tensors")
    if isinstance(value, Scores) and value.is_soft:
        raise NotPlainError("it scales chances")
    if isinstance(value, Scores):
        value = replace(value, fill=value.fill * float(factor))
    return replace(value, factor=value.factor * float(factor))


def dropped(scores: Scores, dropout: str | float) -> Scores:
    if not scores.is_soft or scores.dropout is not None:
        raise NotPlainError("it drops scores")
    return replace(scores, dropout=dropout)
