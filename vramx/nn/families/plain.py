"""Blocks that no family names: attention and a feed-forward part, each behind a norm.

What such a block computes was read from its forward (plain_reading.py), part by part; it is
computed so while its parts and attributes are as they were then, and else as it was. nanoGPT's is
one, and so are vision transformers that multiply queries and keys themselves: theirs goes through
torch's attention, which keeps no matrix of tokens by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.compression.config import Compression
from vramx.nn.families.attention import attention_is_torchs, packed
from vramx.nn.families.norm_modules import layer_normed, normalise
from vramx.nn.families.parts import FeedForward, add, feed_forward, feed_forward_add, nothing
from vramx.nn.families.plain_plan import Heads, Norm, Plan
from vramx.nn.families.plain_reading import is_as_read
from vramx.nn.families.projection import Source, probability_of, project, tensor_of
from vramx.nn.families.questions import all_untouched, part_of
from vramx.nn.families.swap import Fused
from vramx.nn.norm import Sources

_NOTHING = nn.Identity()


class PlainBlock(Fused):
    """A block that was read."""

    ARGUMENTS = ("x",)

    def vramx_understands(self, call: dict[str, Any]) -> bool:
        plan, x = self._plan, call["x"]
        if x.dim() != 3 or not attention_is_torchs() or not all_untouched(()):
            return False
        for name, value in plan.defaults.items():
            if call.get(name, value) is not value:
                return False
        return is_as_read(self, plan)

    def vramx_fused(self, x: Tensor, /, **_others: Any) -> Tensor:
        plan, keep = self._plan, self.vramx_settings.keep
        attended, last = _through(self._attend(x), self._parts(plan.after[0]))
        p = probability_of(last)
        sources = Sources(last(attended), x) if p is None else Sources(attended, x, p)
        del attended
        part = self.vramx_feed_forward()
        into = () if part is None else part.inner
        source, residual = _normalised(self, plan.norms[1], sources, keep, into)
        after = self._parts(plan.after[1])
        if part is not None:
            finish = feed_forward(source, part, self.vramx_settings)
            del source
            if len(after) < 2:
                return feed_forward_add(finish, after[0] if after else _NOTHING, residual)
            y = finish(None)
        else:
            y = tensor_of(source)
            del source
            for module in self._parts((plan.inner, *plan.unit, plan.outer)):
                y = module(y)
        y, last = _through(y, after)
        return add(last, y, residual)

    def vramx_feed_forward(self) -> FeedForward | None:
        plan = self._plan
        inner, activation, *rest, outer = self._parts((plan.inner, *plan.unit, plan.outer))
        return FeedForward((inner,), activation, outer) if all(map(nothing, rest)) else None

    @property
    def _plan(self) -> Plan:
        plan: Plan = self.vramx_settings.read
        return plan

    def _parts(self, named: Sequence[str | nn.Module]) -> list[Any]:
        return [part_of(self, each) if isinstance(each, str) else each for each in named]

    def _attend(self, x: Tensor) -> Tensor:
        plan, keep = self._plan, self.vramx_settings.keep
        linears = self._parts(plan.projections)
        source, _ = _normalised(self, plan.norms[0], Sources(x), keep, linears)
        heads, dropout, is_causal, scale = plan.attention
        q, k, v = _heads_of(project(source, linears, keep), heads)
        del source
        p = dropout if isinstance(dropout, float) else probability_of(part_of(self, dropout))
        how = {"dropout_p": p, "is_causal": is_causal, "scale": scale}
        return packed((q, k, v), None, how, keep)(part_of(self, plan.output))


def _heads_of(projected: Sequence[Tensor], heads: Sequence[Heads]) -> list[Tensor]:
    """Return q, k and v as (rows, heads, tokens, size), views."""
    found = []
    for of, start, number, size in heads:
        flat: Tensor = projected[of].narrow(-1, start, number * size)
        found.append(flat.unflatten(-1, (number, size)).transpose(1, 2))
    return found


def _through(x: Tensor, parts: Sequence[Any]) -> tuple[Tensor, Any]:
    """Return what all but the last of some modules make of a tensor, and the last one."""
    *first, last = parts or (_NOTHING,)
    for part in first:
        x = part(x)
    return x, last


def _normalised(
    block: Any, norm: Norm, sources: Sources, keep: Compression, into: Any
) -> tuple[Source, Tensor]:
    """Return the result of one of a block's norms, and the sum that it is of."""
    if norm.module is not None:
        return normalise(part_of(block, norm.module), sources, keep, into)
    weight, bias = (
        None if path is None else part_of(block, path) for path in (norm.weight, norm.bias)
    )
    normed = layer_normed((weight, bias, norm.eps), sources, keep, into)
    if normed is not None:
        return normed, normed.residual_sum
    total = sources.total()
    y: Tensor = F.layer_norm(total, total.shape[-1:], weight, bias, norm.eps)
    return y, total
