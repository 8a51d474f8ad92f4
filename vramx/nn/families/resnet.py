"""Residual blocks of ResNets: BasicBlock and Bottleneck of torchvision and of timm.

A convolution keeps what the norm before it keeps, and the first one shares the block's packed input
with the shortcut's. So of each convolution's result one pack and a bit an element are left, where
torch keeps it twice: before the norm and behind the ReLU. A block is understood whole or not at
all. Where it is recomputed, running statistics are updated in the forward pass only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vramx.compression.config import Compression
from vramx.nn.arguments import own
from vramx.nn.batch_norm import normed_by
from vramx.nn.channel_norm import ChannelNormed
from vramx.nn.convolution import convolved_by, keep_input
from vramx.nn.families.convolutions import plain_convolution, word_of
from vramx.nn.families.projection import plain_tensor
from vramx.nn.families.questions import all_untouched
from vramx.nn.families.small import WIDTH, images
from vramx.nn.families.swap import Fused
from vramx.nn.keeping import Kept
from vramx.patch.module import original_class

Activation = str | tuple[str, float]


class Residual(Fused):
    """A residual block: STAGES are the names of its convolutions, norms and activations."""

    ARGUMENTS = ("x",)
    PARAMETERS: ClassVar[dict[str, str]] = {"": "x"}
    STAGES: ClassVar[tuple[tuple[str, str, str], ...]] = ()
    # What must be there and do nothing, or be None.
    NOTHING: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        found = super().why_not(module)
        if found is not None:
            return found
        return _why_not(cls, module)

    @classmethod
    def small(cls, module: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
        block_class: Any = original_class(module)
        block: nn.Module = block_class(WIDTH, WIDTH // block_class.expansion)
        return block, [{"x": images(2, WIDTH, 6, 6)}]

    def vramx_understands(self, call: dict[str, Any]) -> bool:
        if _why_not(type(self), self) is not None:  # its parts may be others since
            return False
        for convolution, *_ in self.STAGES:
            if not plain_tensor(own(own(self, convolution), "weight")):
                return False
        return bool(call["x"].dim() == 4) and all_untouched(
            [own(self, name) for name in self.PARTS]
        )

    def vramx_fused(self, x: Tensor, /, **_others: Any) -> Tensor:
        return self._vramx_block(_Calls(), x)

    def vramx_recomputed(self) -> Any:
        """Return vramx_fused(), which updates statistics in its first call only."""
        if torch.compiler.is_compiling():
            return self.vramx_fused  # a graph that recomputes does not change buffers again
        return partial(self._vramx_block, _Calls())

    def _vramx_block(self, calls: _Calls, x: Tensor) -> Tensor:
        keep, updates = self.vramx_settings.keep, calls.next() == 0
        # Shared by the first convolution and the shortcut's.
        kept = keep_input(x, keep)
        shortcut = self._vramx_shortcut(x, kept, updates)
        source: Tensor | ChannelNormed = x
        *stages, last = self.STAGES
        for stage in stages:
            result = convolved_by(own(self, stage[0]), source, keep, kept)
            source = self._vramx_norm(stage, result, None, updates)
            kept = None
            del result
        result = convolved_by(own(self, last[0]), source, keep, kept)
        del source, x
        return self._vramx_norm(last, result, shortcut.to(result.dtype), updates).y

    def _vramx_norm(
        self, stage: tuple[str, str, str], x: Tensor, residual: Tensor | None, updates: bool
    ) -> ChannelNormed:
        word = word_of(own(self, stage[2]))
        assert word is not None
        return normed_by(own(self, stage[1]), x, residual, word, self.vramx_settings.keep, updates)

    def _vramx_shortcut(self, x: Tensor, kept: Kept | None, updates: bool) -> Tensor:
        downsample = own(self, "downsample")
        if downsample is None:
            return x
        found = _projection(downsample)
        if found is None:
            with nullcontext() if updates else _statistics_restored(downsample):
                y: Tensor = downsample(x)
            return y
        *before, convolution, norm = found
        for module in before:
            x, kept = module(x), None
        keep: Compression = self.vramx_settings.keep
        projected = convolved_by(convolution, x, keep, kept)
        return normed_by(norm, projected, None, "none", keep, updates).y


def _why_not(family: type[Residual], module: Any) -> str | None:
    """Return which part is not what a family knows; None: all are."""
    for name in family.NOTHING:
        part = own(module, name)
        if part is not None and type(part) is not nn.Identity:
            return f"its {name} is a {type(part).__name__}"
    for convolution, norm, activation in family.STAGES:
        for name, kind in ((convolution, nn.Conv2d), (norm, nn.BatchNorm2d)):
            part = own(module, name)
            if type(part) is not kind:
                return f"its {name} is a {type(part).__name__}"
        part = own(module, activation)
        if word_of(part) is None:
            return f"its {activation} is a {type(part).__name__}"
    return None


class _Calls:
    """Counts the calls of one function."""

    def __init__(self) -> None:
        self._made = 0

    def next(self) -> int:
        """Return how many there have been."""
        self._made += 1
        return self._made - 1


@contextmanager
def _statistics_restored(module: nn.Module) -> Iterator[None]:
    """Undo what a module does to its buffers, unseen by autograd, which has saved some."""
    before = [buffer.clone() for buffer in module.buffers()]
    yield
    for buffer, value in zip(module.buffers(), before, strict=True):
        buffer.data.copy_(value)


def _projection(downsample: Any) -> list[Any] | None:
    """Return what a shortcut is: a convolution, a norm, before them modules without a state.

    None: it is something else.
    """
    if type(downsample) is not nn.Sequential or len(downsample) < 2:
        return None
    *before, convolution, norm = found = list(downsample)
    known = plain_convolution(convolution) and type(norm) is nn.BatchNorm2d
    known = known and not any(list(module.buffers()) for module in before)
    return found if known and all_untouched([downsample, *found]) else None


_TORCHVISION = "torchvision.models.resnet"
_TIMM = "timm.models.resnet"
_THREE = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"))


class BasicBlock(Residual):
    """BasicBlock of torchvision."""

    CLASSES = (f"{_TORCHVISION}.BasicBlock",)
    STAGES = tuple((*names, "relu") for names in _THREE[:2])
    PARTS = tuple(dict.fromkeys(name for stage in STAGES for name in stage))


class Bottleneck(Residual):
    """Bottleneck of torchvision."""

    CLASSES = (f"{_TORCHVISION}.Bottleneck",)
    STAGES = tuple((*names, "relu") for names in _THREE)
    PARTS = tuple(dict.fromkeys(name for stage in STAGES for name in stage))


class TimmBasicBlock(Residual):
    """BasicBlock of timm."""

    CLASSES = (f"{_TIMM}.BasicBlock",)
    STAGES = tuple((*names, f"act{i}") for i, names in enumerate(_THREE[:2], 1))
    PARTS = tuple(name for stage in STAGES for name in stage)
    NOTHING = ("drop_block", "aa", "se", "drop_path")


class TimmBottleneck(Residual):
    """Bottleneck of timm."""

    CLASSES = (f"{_TIMM}.Bottleneck",)
    STAGES = tuple((*names, f"act{i}") for i, names in enumerate(_THREE, 1))
    PARTS = tuple(name for stage in STAGES for name in stage)
    NOTHING = TimmBasicBlock.NOTHING
