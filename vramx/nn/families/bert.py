"""BERT's layer in transformers: the norms come after the residual additions.

A layer's input is the last norm's result: its projections keep a pack of it for themselves, for the
norm's own belongs to another layer. Decoders with an encoder's states and layers that compute their
feed-forward part in chunks are the original's.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from vramx.nn.arguments import own
from vramx.nn.families.attention import (
    Attending,
    Finish,
    attend,
    attending,
    heads_of,
    of_result,
)
from vramx.nn.families.parts import FeedForward, add_normalise, feed_forward
from vramx.nn.families.projection import Source, project, tensor_of
from vramx.nn.families.questions import all_untouched, cache_of
from vramx.nn.families.small import of_transformers
from vramx.nn.families.swap import Fused

_FILE = "transformers.models.bert.modeling_bert"


class BertLayer(Fused):
    """BertLayer."""

    CLASSES = (f"{_FILE}.BertLayer",)
    ARGUMENTS = ("hidden_states", "attention_mask", "encoder_hidden_states")
    PARTS = (
        *("attention.self.query", "attention.self.key", "attention.self.value"),
        *("attention.self.dropout", "attention.self.config", "attention.self.scaling"),
        *("attention.self.attention_head_size", "intermediate.dense", "output.dense"),
        *("attention.output.LayerNorm", "attention.output.dropout", "attention.output.dense"),
        *("output.LayerNorm", "output.dropout", "intermediate.intermediate_act_fn"),
    )  # fmt: skip
    PARAMETERS: ClassVar[dict[str, str]] = {
        "": "hidden_states attention_mask encoder_hidden_states encoder_attention_mask "
        "past_key_values cache_position",
        "attention.self": "hidden_states attention_mask past_key_values cache_position",
    }
    TYPES: ClassVar[dict[str, str]] = {
        "attention": f"{_FILE}.BertAttention",
        "attention.self": f"{_FILE}.BertSelfAttention",
        "attention.output": f"{_FILE}.BertSelfOutput",
        "intermediate": f"{_FILE}.BertIntermediate",
        "output": f"{_FILE}.BertOutput",
    }

    attention: Any
    intermediate: Any
    output: Any

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        if getattr(module, "chunk_size_feed_forward", 1):
            return "its feed-forward part is computed in chunks"
        return super().why_not(module)

    @classmethod
    def small(cls, module: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
        return of_transformers(module)

    def vramx_understands(self, call: dict[str, Any]) -> bool:
        return (
            call.get("encoder_hidden_states") is None
            and cache_of(call)[1] is None
            and not call.get("output_attentions")
        )

    def vramx_fused(self, x: Tensor, /, **others: Any) -> Tensor:
        options = {k: v for k, v in others.items() if not k.startswith("encoder_")}
        source = self._attend(x, options)
        return tensor_of(self._feed_forward(source))

    def _attend(self, x: Tensor, options: dict[str, Any]) -> Source:
        whole = own(self, "attention")
        if not all_untouched([whole]):
            y: Tensor = whole(x, **options)[0]
            return y
        attention, output = own(whole, "self"), own(whole, "output")
        watched = not all_untouched([attention, own(attention, "dropout")])
        of = None if watched else attending(attention)
        if of is None:
            finish = of_result(attention(x, **options)[0])
        else:
            finish = self._heads(of, x, dict(options))
        if not all_untouched([output]):
            return output(finish(None), x)  # type: ignore[no-any-return]
        return self._add_normalise(output, finish(own(output, "dense")), x)

    def _heads(self, of: Attending, x: Tensor, options: dict[str, Any]) -> Finish:
        attention, keep = of.module, self.vramx_settings.keep
        mask = options.pop("attention_mask", None)
        options = {k: v for k, v in options.items() if v is not None}
        linears = [own(attention, name) for name in ("query", "key", "value")]
        heads = heads_of(project(x, linears, keep), attention.attention_head_size)
        options |= {
            "dropout": own(attention, "dropout").p if attention.training else 0.0,
            "scaling": attention.scaling,
        }
        return attend(of, heads, mask, options, keep)

    def _feed_forward(self, source: Source) -> Source:
        output, y, part = own(self, "output"), tensor_of(source), self.vramx_feed_forward()
        if part is None:
            result: Tensor = output(self.intermediate(y), y)
            return result
        narrow = feed_forward(source, part, self.vramx_settings)(None)
        return self._add_normalise(output, narrow, y)

    def _add_normalise(self, output: Any, x: Tensor, residual: Tensor) -> Source:
        dropout, norm = own(output, "dropout"), own(output, "LayerNorm")
        return add_normalise(dropout, norm, (x, residual), self.vramx_settings.keep)[0]

    def vramx_feed_forward(self) -> FeedForward | None:
        inner, output = own(self, "intermediate"), own(self, "output")
        if not all_untouched([inner, output]):
            return None
        activation = own(inner, "intermediate_act_fn")
        return FeedForward((own(inner, "dense"),), activation, own(output, "dense"))
