"""Blocks of ConvNeXts: ConvNeXtBlock of timm and CNBlock of torchvision.

A depthwise convolution, and then a norm and two Linears over the channels, as in a vision
transformer. The scale of the branch is multiplied into the last Linear's weight and bias, so that
its result is kept by nobody.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from vramx.nn.families.convolutions import convolve
from vramx.nn.families.norm_modules import normalise
from vramx.nn.families.parts import (
    FeedForward,
    feed_forward,
    nothing,
    terms_of_all,
    whole_feed_forward,
)
from vramx.nn.families.projection import tensor_of
from vramx.nn.families.questions import all_untouched, class_name
from vramx.nn.families.small import WIDTH, images
from vramx.nn.families.swap import Fused
from vramx.nn.feed_forward import TwoLinears
from vramx.nn.norm import Sources
from vramx.patch.module import original_class


class ConvNext(Fused):
    """What the blocks have in common."""

    def vramx_understands(self, call: dict[str, Any]) -> bool:
        return bool(call[self.ARGUMENTS[0]].dim() == 4)

    def _vramx_parts(self) -> tuple[Any, Any, Tensor | None]:
        """Return the convolution, the norm, and the scale, [channels] or None."""
        raise NotImplementedError

    def _vramx_mlp(self, x: Tensor) -> Tensor:
        """Call the original's MLP for what follows the norm."""
        raise NotImplementedError

    def vramx_branch(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the scaled branch plus a residual."""
        settings, (convolution, norm, scale) = self.vramx_settings, self._vramx_parts()
        part = self.vramx_feed_forward()
        terms = None if part is None else terms_of_all(part)
        y = convolve(convolution, x, settings.keep).permute(0, 2, 3, 1)
        into = () if part is None or terms is None else part.inner
        source, _ = normalise(norm, Sources(y), settings.keep, into)
        del y
        if part is None or terms is None:
            if part is None:
                result = self._vramx_mlp(tensor_of(source))
            else:  # of Linears that have adapters, say
                result = feed_forward(source, part, settings)(None)
            result = result.permute(0, 3, 1, 2)
            result = result if scale is None else result.mul(scale.view(1, -1, 1, 1))
            return result if residual is None else result + residual
        added = None if residual is None else residual.permute(0, 2, 3, 1)
        done = whole_feed_forward(source, TwoLinears(*terms, scale), settings, added)
        return done.permute(0, 3, 1, 2)


class TimmConvNext(ConvNext):
    """ConvNeXtBlock of timm, with Linears."""

    CLASSES = ("timm.models.convnext.ConvNeXtBlock",)
    ARGUMENTS = ("x",)
    PARAMETERS: ClassVar[dict[str, str]] = {"": "x"}
    PARTS = ("conv_dw", "norm", "mlp", "shortcut", "drop_path", "use_conv_mlp")
    OPTIONAL = ("mlp.fc1", "mlp.fc2")

    conv_dw: Any
    norm: Any
    mlp: Any
    gamma: Any
    shortcut: Any
    drop_path: Any

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        found = super().why_not(module)
        if found is None and module.use_conv_mlp:
            found = "its MLP is of convolutions"
        return found

    @classmethod
    def small(cls, module: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
        block: nn.Module = original_class(module)(WIDTH, ls_init_value=0.5)
        return block, [{"x": images(2, WIDTH, 6, 6)}]

    def vramx_fused(self, x: Tensor, /, **_others: Any) -> Tensor:
        if nothing(self.drop_path):
            return self.vramx_branch(x, self.shortcut(x))
        y: Tensor = self.drop_path(self.vramx_branch(x, None)) + self.shortcut(x)
        return y

    def vramx_feed_forward(self) -> FeedForward | None:
        part = self.mlp
        known = class_name(type(part)) == "timm.layers.mlp.Mlp" and all_untouched([part])
        if not known or not all(map(nothing, (part.drop1, part.norm, part.drop2))):
            return None
        return FeedForward((part.fc1,), part.act, part.fc2)

    def _vramx_parts(self) -> tuple[Any, Any, Tensor | None]:
        return self.conv_dw, self.norm, self.gamma

    def _vramx_mlp(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x)
        return y


class TorchvisionConvNext(ConvNext):
    """CNBlock of torchvision."""

    CLASSES = ("torchvision.models.convnext.CNBlock",)
    ARGUMENTS = ("input",)
    PARAMETERS: ClassVar[dict[str, str]] = {"": "input"}
    PARTS = ("block", "layer_scale", "stochastic_depth")

    block: Any
    layer_scale: Any
    stochastic_depth: Any

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        found = super().why_not(module)
        names = [type(part).__name__ for part in module.block] if found is None else []
        if found is None and names != _NAMES:
            found = f"its block is {', '.join(names)}"
        return found

    @classmethod
    def small(cls, module: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
        block: nn.Module = original_class(module)(WIDTH, 0.5, 0.0)
        return block, [{"input": images(2, WIDTH, 6, 6)}]

    def vramx_understands(self, call: dict[str, Any]) -> bool:
        return super().vramx_understands(call) and all_untouched([self.block])

    def vramx_fused(self, x: Tensor, /, **_others: Any) -> Tensor:
        depth = self.stochastic_depth
        if depth.p == 0 and all_untouched([depth]):
            return self.vramx_branch(x, x)
        y: Tensor = depth(self.vramx_branch(x, None))
        return y + x

    def vramx_feed_forward(self) -> FeedForward | None:
        _, _, _, first, activation, last, _ = self.block
        return FeedForward((first,), activation, last)

    def _vramx_parts(self) -> tuple[Any, Any, Tensor | None]:
        return self.block[0], self.block[2], self.layer_scale.view(-1)

    def _vramx_mlp(self, x: Tensor) -> Tensor:
        y: Tensor = self.block[3:6](x)
        return y


_NAMES = ["Conv2d", "Permute", "LayerNorm", "Linear", "GELU", "Linear", "Permute"]
