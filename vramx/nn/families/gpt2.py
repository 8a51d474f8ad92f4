"""GPT-2's block in transformers: layer norms, Conv1D (weights are transposed), GELU and dropout.

A block that is given an encoder's states is the original's. The output projection of attention is
called as it is: what it keeps is what attention keeps already.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from vramx.nn.arguments import own
from vramx.nn.families.attention import (
    attend,
    attending,
    heads_of,
    implementation,
    is_in,
    takes_cache,
)
from vramx.nn.families.norm_modules import normalise
from vramx.nn.families.parts import FeedForward, add_normalise, feed_forward, feed_forward_add
from vramx.nn.families.projection import project, tensor_of
from vramx.nn.families.questions import all_untouched, cache_of, class_name
from vramx.nn.families.small import of_transformers
from vramx.nn.families.swap import Fused
from vramx.nn.norm import Sources

_FILE = "transformers.models.gpt2.modeling_gpt2"


class Gpt2Block(Fused):
    """GPT2Block."""

    CLASSES = (f"{_FILE}.GPT2Block",)
    PARTS = (
        *("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "attn.attn_dropout", "attn.resid_dropout"),
        *("attn.config", "attn.head_dim", "attn.scaling", "mlp.c_fc", "mlp.c_proj", "mlp.act"),
        *("mlp.dropout",),
    )
    ARGUMENTS = ("hidden_states", "past_key_values", "attention_mask", "encoder_hidden_states")
    PARAMETERS: ClassVar[dict[str, str]] = {
        "": "hidden_states past_key_values attention_mask encoder_hidden_states "
        "encoder_attention_mask use_cache cache_position",
        "attn": "hidden_states past_key_values attention_mask encoder_hidden_states "
        "encoder_attention_mask output_attentions cache_position",
    }
    TYPES: ClassVar[dict[str, str]] = {"attn": f"{_FILE}.GPT2Attention"}

    ln_1: Any
    ln_2: Any
    attn: Any
    mlp: Any

    @classmethod
    def small(cls, module: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
        return of_transformers(module, cached=True)

    def vramx_understands(self, call: dict[str, Any]) -> bool:
        return (
            call.get("encoder_hidden_states") is None
            and not call.get("output_attentions")
            and takes_cache(call)
        )

    def vramx_is_in(self, cache: Any) -> bool:
        return is_in(cache, self.attn)

    def vramx_fused(self, x: Tensor, /, **others: Any) -> Tensor:
        options = {k: v for k, v in others.items() if not k.startswith("encoder_")}
        attended, dropout = self._attend(x, options)
        return self._feed_forward(dropout, (attended, x))

    def _attend(self, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, Any]:
        """Return the projected result, and the dropout that is still to be applied to it."""
        attention, keep = own(self, "attn"), self.vramx_settings.keep
        source, _ = normalise(own(self, "ln_1"), Sources(x), keep)
        upcast = attention.reorder_and_upcast_attn and implementation(attention) == "eager"
        dropout = own(attention, "attn_dropout")
        of = attending(attention) if all_untouched([attention, dropout]) else None
        if of is None or upcast:
            return attention(tensor_of(source), **options)[0], _NO_DROPOUT
        mask, (cache_name, cache) = options.pop("attention_mask", None), cache_of(options)
        options = {k: v for k, v in options.items() if k != cache_name and v is not None}
        (projected,) = project(source, [own(attention, "c_attn")], keep)
        del source
        q, k, v = heads_of(projected.chunk(3, -1), attention.head_dim)
        if cache is not None:
            k, v = cache.update(k, v, attention.layer_idx)
        options.pop("output_attentions", None)
        options |= {
            "dropout": dropout.p if attention.training else 0.0,
            "scaling": attention.scaling,
        }
        finish = attend(of, (q, k, v), mask, options, keep)
        return finish(own(attention, "c_proj")), own(attention, "resid_dropout")

    def _feed_forward(self, dropout: Any, parts: tuple[Tensor, Tensor]) -> Tensor:
        norm, keep = own(self, "ln_2"), self.vramx_settings.keep
        source, residual = add_normalise(dropout, norm, parts, keep)
        part = self.vramx_feed_forward()
        if part is None:
            return residual + self.mlp(tensor_of(source))  # type: ignore[no-any-return]
        finish = feed_forward(source, part, self.vramx_settings)
        del source
        return feed_forward_add(finish, own(own(self, "mlp"), "dropout"), residual)

    def vramx_feed_forward(self) -> FeedForward | None:
        mlp = own(self, "mlp")
        if class_name(type(mlp)) != f"{_FILE}.GPT2MLP" or not all_untouched([mlp]):
            return None
        return FeedForward((own(mlp, "c_fc"),), own(mlp, "act"), own(mlp, "c_proj"))


_NO_DROPOUT = nn.Identity()
