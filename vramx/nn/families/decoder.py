"""Decoder layers of transformers: Llama, Mistral, Qwen2, Qwen3 and Gemma.

Computed are norm, the projections from its one pack, q's and k's norms, rotary embedding and the
model's attention; the output projection; norm with the residual added; gate and up from its pack;
the gated unit with the down projection, into which the residual goes. A call with a cache is
computed so as well, the cache updated in its place. Kept at 8 bits, in bytes per token and hidden
unit: 2.03 for the norms, 2.03 for a unit of the gated part unless that is computed again, and what
attention keeps: its values and result exactly, as torch does, where keys have a bias (Qwen2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from vramx.compression.config import Compression
from vramx.nn.arguments import own
from vramx.nn.attention_groups import Heads
from vramx.nn.families.attention import (
    attend,
    attend_in_groups,
    attending,
    cannot_centre,
    heads_of,
    is_in,
    is_in_groups,
    takes_cache,
    turn,
    values_again,
)
from vramx.nn.families.norm_modules import RMS_NORMS, normalise
from vramx.nn.families.parts import FeedForward, feed_forward
from vramx.nn.families.projection import projected, projection_of, tensor_of
from vramx.nn.families.questions import all_untouched, cache_of, class_name, untouched
from vramx.nn.families.small import of_transformers
from vramx.nn.families.swap import Fused
from vramx.nn.norm import Sources, rms_norm

_HF = "transformers.models"
_AS_IT_IS = Compression(level="keep")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class DecoderLayer(Fused):
    """The layers that are written as Llama's is."""

    CLASSES: ClassVar[tuple[str, ...]] = (
        f"{_HF}.llama.modeling_llama.LlamaDecoderLayer",
        f"{_HF}.gemma.modeling_gemma.GemmaDecoderLayer",
    )
    PARTS: ClassVar[tuple[str, ...]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "mlp",
        *(f"self_attn.{name}" for name in (*_PROJECTIONS, "config", "head_dim", "scaling")),
        "self_attn.attention_dropout",
    )
    OPTIONAL = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    PARAMETERS: ClassVar[dict[str, str]] = {
        "": "hidden_states attention_mask position_ids past_key_values use_cache "
        "position_embeddings cache_position",
        "self_attn": "hidden_states position_embeddings attention_mask past_key_values "
        "cache_position",
    }

    # Its modules, as the original class has them.
    input_layernorm: Any
    post_attention_layernorm: Any
    self_attn: Any
    mlp: Any

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        missing = super().why_not(module)
        if missing is None and not _is_own(type(module), module.self_attn, "Attention"):
            return f"its attention is a {type(module.self_attn).__name__}"
        return missing

    @classmethod
    def small(cls, module: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
        return of_transformers(module, cached=True, turned=True)

    def vramx_understands(self, call: dict[str, Any]) -> bool:
        return (
            call.get("position_embeddings") is not None
            and not call.get("output_attentions")
            and takes_cache(call)
        )

    def vramx_is_in(self, cache: Any) -> bool:
        return is_in(cache, self.self_attn)

    def vramx_fused(self, x: Tensor, /, **others: Any) -> Tensor:
        return self._feed_forward(*self._attend(x, others))

    def _attend(self, x: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return attention's result, and x where it is to be added to it."""
        attention, keep = own(self, "self_attn"), self.vramx_settings.keep
        source, _ = normalise(own(self, "input_layernorm"), Sources(x), keep)
        of = attending(attention) if all_untouched([attention]) else None
        if of is None:
            result: Tensor = attention(hidden_states=tensor_of(source), **kwargs)[0]
            return result, x
        options = dict(kwargs)
        positions, mask = options.pop("position_embeddings"), options.pop("attention_mask", None)
        cache_name, cache = cache_of(options)
        options = {k: v for k, v in options.items() if k != cache_name and v is not None}
        options |= {
            "dropout": attention.attention_dropout if attention.training else 0.0,
            "scaling": attention.scaling,
            **self._options(attention),
        }
        grouped = cache is None and is_in_groups(source)
        heads = self._heads_in_groups(positions) if grouped else None
        if heads is not None:
            whole = attend_in_groups(attention, source, mask, options, heads)
            if whole is not None and whole.dtype == x.dtype:
                return whole.add_(x), None  # in its memory, which nobody else has
            if whole is not None:
                return whole, x
        found = [projection_of(own(attention, name)) for name in _PROJECTIONS[:3]]
        projections = projected(source, found, keep)
        values = values_again(source, found[-1], attention.head_dim)
        del source  # a norm's result is not needed while attention runs
        q, k, v = heads_of(projections, attention.head_dim)
        q, k = self._normalise_heads(q, k)
        q, k = turn(attention, q, k, positions)
        if cache is not None:
            values = None if is_in(cache, attention) else values
            k, v = cache.update(k, v, attention.layer_idx)
        if cannot_centre(found[1]):
            keep = replace(keep, level="keep")
        finish = attend(of, (q, k, v), mask, options, keep, values)
        return finish(own(attention, "o_proj")), x

    def _normalise_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def _heads_in_groups(self, positions: tuple[Tensor, Tensor]) -> Heads | None:
        """Return what happens to heads between projections and attention; None: it is not known."""
        attention = self.self_attn

        def between(q: Tensor, k: Tensor) -> Sequence[Tensor]:
            return turn(attention, q, k, positions)

        return Heads(attention.head_dim, between)

    def _options(self, _attention: Any) -> dict[str, Any]:
        return {}

    def _feed_forward(self, attended: Tensor, x: Tensor | None) -> Tensor:
        settings = self.vramx_settings
        norm = own(self, "post_attention_layernorm")
        source, residual = normalise(norm, Sources(attended, x), settings.keep)
        del attended, x
        part = self.vramx_feed_forward()
        if part is None:
            result: Tensor = residual + self.mlp(tensor_of(source))
            return result
        finish = feed_forward(source, part, settings)
        del source
        return finish(residual)

    def vramx_feed_forward(self) -> FeedForward | None:
        mlp = own(self, "mlp")
        if not _is_own(self._vramx_original, mlp, "MLP") or not all_untouched([mlp]):
            return None
        gate, up, down = (own(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
        return FeedForward((gate, up), own(mlp, "act_fn"), down)


class MistralLayer(DecoderLayer):
    """Mistral's layer: a window for all of the model."""

    CLASSES = (f"{_HF}.mistral.modeling_mistral.MistralDecoderLayer",)

    def _options(self, attention: Any) -> dict[str, Any]:
        return {"sliding_window": getattr(attention.config, "sliding_window", None)}


class Qwen2Layer(DecoderLayer):
    """Qwen2's layer: a window for some of the layers."""

    CLASSES = (f"{_HF}.qwen2.modeling_qwen2.Qwen2DecoderLayer",)

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        if not hasattr(getattr(module, "self_attn", None), "sliding_window"):
            return "it has no self_attn.sliding_window"
        return super().why_not(module)

    def _options(self, attention: Any) -> dict[str, Any]:
        return {"sliding_window": attention.sliding_window}


class Qwen3Layer(Qwen2Layer):
    """Qwen3's layer: Qwen2's with norms of q's and k's heads."""

    CLASSES = (f"{_HF}.qwen3.modeling_qwen3.Qwen3DecoderLayer",)
    PARTS = (*DecoderLayer.PARTS, "self_attn.q_norm", "self_attn.k_norm")

    def _normalise_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        attention = self.self_attn
        return self._normalise(attention.q_norm, q), self._normalise(attention.k_norm, k)

    def _heads_in_groups(self, positions: tuple[Tensor, Tensor]) -> Heads | None:
        attention = self.self_attn
        norms = attention.q_norm, attention.k_norm
        if not all(class_name(type(each)) in RMS_NORMS and untouched(each) for each in norms):
            return None

        def between(q: Tensor, k: Tensor, *weights: Tensor) -> Sequence[Tensor]:
            q, k = (_by_rms(*of) for of in zip((q, k), weights, norms, strict=True))
            return turn(attention, q, k, positions)

        return Heads(attention.head_dim, between, tuple(norm.weight for norm in norms))

    def _normalise(self, norm: Any, heads: Tensor) -> Tensor:
        # As they lie in memory, (batch, tokens, heads, size): no copy.
        rows = heads.transpose(1, 2)
        return tensor_of(normalise(norm, Sources(rows), self.vramx_settings.keep)[0]).transpose(
            1, 2
        )


def _by_rms(heads: Tensor, weight: Tensor, norm: Any) -> Tensor:
    made = rms_norm(heads.transpose(1, 2), weight, norm.variance_epsilon, None, _AS_IT_IS)
    return made.y.transpose(1, 2)


def _is_own(layer: type, part: Any, suffix: str) -> bool:
    """Tell whether a part is of the class that the layer's own file has for it."""
    expected = class_name(layer).removesuffix("DecoderLayer") + suffix
    return class_name(type(part)) == expected
