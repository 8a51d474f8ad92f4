"""Vision transformers' blocks: ViTLayer of transformers and Block of timm.

Both are norm, attention, norm, two Linears with an activation between. timm's has what may be
nothing: norms of heads, scales and stochastic depth of the branches, which are called as they are.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from vramx.nn.families.attention import (
    attend,
    attending,
    attention_is_torchs,
    heads_of,
    of_result,
    packed,
)
from vramx.nn.families.norm_modules import normalise
from vramx.nn.families.parts import (
    FeedForward,
    add,
    add_normalise,
    feed_forward,
    feed_forward_add,
    nothing,
)
from vramx.nn.families.projection import project, tensor_of
from vramx.nn.families.questions import all_untouched, class_name
from vramx.nn.families.small import HEADS, TOKENS, WIDTH, images, of_transformers
from vramx.nn.families.swap import Fused
from vramx.nn.norm import Sources
from vramx.patch.module import original_class

_VIT = "transformers.models.vit.modeling_vit"


class VitLayer(Fused):
    """ViTLayer of transformers, as it is since attention and the MLP are modules of their own."""

    CLASSES = (f"{_VIT}.ViTLayer",)
    ARGUMENTS = ("hidden_states", "attention_mask")
    PARTS = (
        *("layernorm_before", "layernorm_after", "dropout", "mlp.fc1", "mlp.fc2"),
        *("mlp.activation_fn", "attention.head_dim", "attention.scaling", "attention.config"),
        *(f"attention.{name}_proj" for name in "qkvo"),
        "attention.attention_dropout",
    )
    PARAMETERS: ClassVar[dict[str, str]] = dict.fromkeys(
        ("", "attention"), "hidden_states attention_mask"
    )
    TYPES: ClassVar[dict[str, str]] = {"attention": f"{_VIT}.ViTAttention", "mlp": f"{_VIT}.ViTMLP"}

    layernorm_before: Any
    layernorm_after: Any
    attention: Any
    mlp: Any
    dropout: Any

    @classmethod
    def small(cls, module: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
        return of_transformers(module)

    def vramx_understands(self, call: dict[str, Any]) -> bool:
        return not call.get("output_attentions")

    def vramx_fused(self, x: Tensor, /, **others: Any) -> Tensor:
        return self._feed_forward(self._attend(x, dict(others)), x)

    def _attend(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        attention, keep = self.attention, self.vramx_settings.keep
        source, _ = normalise(self.layernorm_before, Sources(x), keep)
        mask = options.pop("attention_mask", None)
        of = attending(attention) if all_untouched([attention]) else None
        if of is None:
            result: Tensor = attention(tensor_of(source), mask, **options)[0]
            return result
        linears = [attention.q_proj, attention.k_proj, attention.v_proj]
        heads = heads_of(project(source, linears, keep), attention.head_dim)
        del source
        options |= {
            "dropout": attention.attention_dropout if attention.training else 0.0,
            "scaling": attention.scaling,
        }
        return attend(of, heads, mask, options, keep)(attention.o_proj)

    def _feed_forward(self, attended: Tensor, residual: Tensor) -> Tensor:
        parts, keep = (attended, residual), self.vramx_settings.keep
        source, residual = add_normalise(self.dropout, self.layernorm_after, parts, keep)
        part = self.vramx_feed_forward()
        if part is None:
            return add(self.dropout, self.mlp(tensor_of(source)), residual)
        finish = feed_forward(source, part, self.vramx_settings)
        del source
        return feed_forward_add(finish, self.dropout, residual)

    def vramx_feed_forward(self) -> FeedForward | None:
        mlp = self.mlp
        if not all_untouched([mlp]):
            return None
        return FeedForward((mlp.fc1,), mlp.activation_fn, mlp.fc2)


class TimmBlock(Fused):
    """Block of timm's vision_transformer."""

    CLASSES = ("timm.models.vision_transformer.Block",)
    ARGUMENTS = ("x",)
    PARTS = (
        *("norm1", "attn.qkv", "attn.proj", "attn.q_norm", "attn.k_norm", "attn.attn_drop"),
        *("attn.proj_drop", "attn.norm", "attn.num_heads", "attn.head_dim", "norm2", "mlp.fc1"),
        *("ls1", "drop_path1", "ls2", "drop_path2"),
    )
    OPTIONAL = ("mlp.fc2",)
    PARAMETERS: ClassVar[dict[str, str]] = dict.fromkeys(("", "attn"), "x attn_mask is_causal")
    TYPES: ClassVar[dict[str, str]] = {"attn": "timm.layers.attention.Attention"}

    norm1: Any
    norm2: Any
    attn: Any
    mlp: Any
    ls1: Any
    ls2: Any
    drop_path1: Any
    drop_path2: Any

    @classmethod
    def small(cls, module: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
        block: nn.Module = original_class(module)(WIDTH, HEADS, qkv_bias=True)
        return block, [{"x": images(2, TOKENS, WIDTH)}]

    def vramx_understands(self, call: dict[str, Any]) -> bool:
        return bool(call["x"].dim() == 3)

    def vramx_fused(self, x: Tensor, /, **others: Any) -> Tensor:
        attended = self.drop_path1(self.ls1(self._attend(x, others)))
        part = self.vramx_feed_forward()
        into = () if part is None else part.inner
        source, residual = normalise(
            self.norm2, Sources(attended, x), self.vramx_settings.keep, into
        )
        if part is None:
            return self._add(self.mlp(tensor_of(source)), residual)
        finish = feed_forward(source, part, self.vramx_settings)
        del source
        if all(map(nothing, (self.mlp.drop2, self.ls2, self.drop_path2))):
            return finish(residual)
        return self._add(self.mlp.drop2(finish(None)), residual)

    def _add(self, branch: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = residual + self.drop_path2(self.ls2(branch))
        return y

    def _attend(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        attention = self.attn
        fused = attention.fused_attn and getattr(attention, "gate", None) is None
        fused = fused and all_untouched([attention, attention.attn_drop]) and attention_is_torchs()
        into = [attention.qkv] if fused else []
        source, _ = normalise(self.norm1, Sources(x), self.vramx_settings.keep, into)
        if not fused:
            result: Tensor = attention(tensor_of(source), **options)
            return result
        (projected,) = project(source, [attention.qkv], self.vramx_settings.keep)
        del source
        q, k, v = projected.unflatten(-1, (3, attention.num_heads, attention.head_dim)).permute(
            2, 0, 3, 1, 4
        )
        heads = (attention.q_norm(q), attention.k_norm(k), v)
        how = {
            "dropout_p": attention.attn_drop.p if attention.training else 0.0,
            "is_causal": options.get("is_causal", False),
        }
        finish = packed(heads, options.get("attn_mask"), how, self.vramx_settings.keep)
        if type(attention.norm) is not nn.Identity:
            finish = of_result(attention.norm(finish(None)))
        return attention.proj_drop(finish(attention.proj))  # type: ignore[no-any-return]

    def vramx_feed_forward(self) -> FeedForward | None:
        mlp = self.mlp
        known = class_name(type(mlp)) == "timm.layers.mlp.Mlp" and all_untouched([mlp])
        if not known or not nothing(mlp.drop1) or not nothing(mlp.norm):
            return None
        return FeedForward((mlp.fc1,), mlp.act, mlp.fc2)
