"""RMS norms of transformers that stand outside of known blocks, as a model's last one does.

Theirs is a composition that keeps its input in float32 and again normalised: six bytes an element
in bfloat16, where this keeps one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vramx.nn.families.norm_modules import GEMMA_NORM, RMS_NORMS, normed_by
from vramx.nn.families.projection import plain_tensor
from vramx.nn.families.small import TOKENS, WIDTH, images
from vramx.nn.families.swap import Fused
from vramx.nn.norm import Sources
from vramx.patch.module import original_class


class RmsNorm(Fused):
    """RMSNorm of Llama, Mistral, Qwen2 and Qwen3."""

    CLASSES = tuple(sorted(RMS_NORMS))
    PARTS = ("weight", "variance_epsilon")
    RECOMPUTES = False

    weight: Any

    @classmethod
    def small(cls, module: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
        """Return a small module of a module's class, and calls of it."""
        norm: nn.Module = original_class(module)(WIDTH)
        return norm, [{cls.ARGUMENTS[0]: images(2, TOKENS, WIDTH)}]

    def vramx_understands(self, call: dict[str, Any]) -> bool:
        """Tell whether the weight is a plain tensor, and the result has the input's type."""
        same: bool = self.weight.dtype == call[self.ARGUMENTS[0]].dtype
        return same and plain_tensor(self.weight)

    def vramx_fused(self, x: Tensor, /, **_others: Any) -> Tensor:
        """Return the norm's result."""
        normed = normed_by(self, Sources(x), self.vramx_settings.keep)
        assert normed is not None
        return normed.y


class GemmaNorm(RmsNorm):
    """RMSNorm of Gemma: its weight is an addition to 1, in float32."""

    CLASSES = (GEMMA_NORM,)
    ARGUMENTS = ("x",)
    PARTS = ("weight", "eps")

    def vramx_understands(self, call: dict[str, Any]) -> bool:  # noqa: ARG002
        """Tell whether the weight is a plain tensor."""
        return plain_tensor(self.weight)
