"""torch.nn.TransformerEncoderLayer: its norms and its feed-forward part.

Attention is the layer's own: torch.nn.MultiheadAttention projects inside of one function, whose
input is kept as torch keeps it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from vramx.nn.families.norm_modules import normalise
from vramx.nn.families.parts import (
    FeedForward,
    Finish,
    add_normalise,
    feed_forward,
    feed_forward_add,
)
from vramx.nn.families.projection import Source, probability_of, project, tensor_of
from vramx.nn.families.small import HEADS, INNER, TOKENS, WIDTH, images
from vramx.nn.families.swap import Fused
from vramx.nn.norm import Sources


class EncoderLayer(Fused):
    """TransformerEncoderLayer."""

    CLASSES = ("torch.nn.modules.transformer.TransformerEncoderLayer",)
    ARGUMENTS = ("src", "src_mask", "src_key_padding_mask", "is_causal")
    PARTS = (
        *("self_attn", "linear1", "dropout", "linear2", "norm1", "norm2", "dropout1", "dropout2"),
        *("activation", "_sa_block", "_ff_block"),
    )
    PARAMETERS: ClassVar[dict[str, str]] = {"": " ".join(ARGUMENTS)}

    self_attn: Any
    linear1: Any
    linear2: Any
    norm1: Any
    norm2: Any
    dropout: Any
    dropout2: Any
    activation: Any
    norm_first: bool
    _sa_block: Any

    @classmethod
    def small(cls, module: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
        options = {"activation": module.activation, "norm_first": module.norm_first}
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, batch_first=True, **options)
        return layer, [{"src": images(2, TOKENS, WIDTH)}]

    def vramx_understands(self, call: dict[str, Any]) -> bool:  # noqa: ARG002
        return "_sa_block" not in self.__dict__ and "_ff_block" not in self.__dict__

    def vramx_fused(self, x: Tensor, /, **others: Any) -> Tensor:
        masks = _canonical(x, others)
        causal = others.get("is_causal", False)
        keep, none = self.vramx_settings.keep, _NO_DROPOUT
        if self.norm_first:
            source, residual = normalise(self.norm1, Sources(x), keep)
            attended = self._sa_block(tensor_of(source), *masks, is_causal=causal)
            source, residual = add_normalise(none, self.norm2, (attended, residual), keep)
            finish = self._feed_forward(source)
            del source
            return feed_forward_add(finish, self.dropout2, residual)
        attended = self._sa_block(x, *masks, is_causal=causal)
        source, _ = add_normalise(none, self.norm1, (attended, x), keep)
        parts = (self._feed_forward(source)(None), tensor_of(source))
        return tensor_of(add_normalise(self.dropout2, self.norm2, parts, keep)[0])

    def _feed_forward(self, source: Source) -> Finish:
        part, keep = self.vramx_feed_forward(), self.vramx_settings.keep
        if part is not None:
            return feed_forward(source, part, self.vramx_settings)
        (wide,) = project(source, [self.linear1], keep)
        (narrow,) = project(self.dropout(self.activation(wide)), [self.linear2], keep)
        return lambda residual: narrow if residual is None else narrow + residual

    def vramx_feed_forward(self) -> FeedForward | None:
        """Return the Linears, if the dropout between them does nothing."""
        inner = self.dropout
        if probability_of(inner) != 0:
            return None
        return FeedForward((self.linear1,), self.activation, self.linear2)


def _canonical(x: Tensor, others: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """Return the masks as the layer hands them on: floating ones of x's type."""
    mask, padding = others.get("src_mask"), others.get("src_key_padding_mask")
    converted = (_floating(tensor, x) for tensor in (mask, padding))
    return next(converted), next(converted)


def _floating(mask: Tensor | None, x: Tensor) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return x.new_zeros(mask.shape).masked_fill_(mask, float("-inf"))


_NO_DROPOUT = nn.Identity()
