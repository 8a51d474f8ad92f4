"""Residual blocks of ResNets: of torchvision, of timm, and of transformers, also of its RT-DETR.

A convolution keeps what the norm before it keeps, and the first one shares the block's packed input
with the shortcut's. So of each convolution's result one pack and a bit an element are left, where
torch keeps it twice: before the norm and behind the ReLU. A block is understood whole or not at
all. Where it is recomputed, running statistics are updated in the forward pass only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vramx.compression.config import Compression
from vramx.nn.arguments import own
from vramx.nn.batch_norm import normed_by
from vramx.nn.channel_norm import ChannelNormed
from vramx.nn.convolution import convolved_by, keep_input
from vramx.nn.families.convolutions import is_frozen, plain_convolution, plain_norm, word_of
from vramx.nn.families.projection import plain_tensor
from vramx.nn.families.questions import all_untouched, class_name, part_of
from vramx.nn.families.small import WIDTH, images
from vramx.nn.families.swap import Fused
from vramx.nn.keeping import Kept
from vramx.patch.module import original_class

Stages = tuple[tuple[str, str, str], ...]
# Of a small block's norms, whose variances it shows beside.
_EPS = 0.005


class Residual(Fused):
    """A residual block: STAGES are the names of its convolutions, norms and activations."""

    ARGUMENTS = ("x",)
    PARAMETERS: ClassVar[dict[str, str]] = {"": "x"}
    STAGES: ClassVar[Stages] = ()
    # What must be there and do nothing, or be None.
    NOTHING: ClassVar[tuple[str, ...]] = ()
    SHORTCUT: ClassVar[str] = "downsample"

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        found = super().why_not(module)
        if found is not None:
            return found
        return _why_not(cls, module)

    @classmethod
    def small(cls, module: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
        block = cls.small_block(original_class(module))
        for _, path, _ in cls.STAGES:
            kind: Any = type(part_of(module, path))
            outer, _, name = path.rpartition(".")
            norm = kind(part_of(block, path).num_features)
            if hasattr(norm, "eps"):
                norm.eps = _EPS  # not what code may have in its place
            setattr(part_of(block, outer), name, norm)
        return block, [{cls.ARGUMENTS[0]: images(2, WIDTH, 6, 6)}]

    @classmethod
    def small_block(cls, block_class: Any) -> nn.Module:
        block: nn.Module = block_class(WIDTH, WIDTH // block_class.expansion)
        return block

    def vramx_understands(self, call: dict[str, Any]) -> bool:
        if _why_not(type(self), self) is not None:  # its parts may be others since
            return False
        for convolution, *_ in self.STAGES:
            if not plain_tensor(own(part_of(self, convolution), "weight")):
                return False
        return bool(call[self.ARGUMENTS[0]].dim() == 4) and all_untouched(
            [part_of(self, path) for path in self.PARTS]
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
        first = own(part_of(self, self.STAGES[0][0]), "weight")
        kept = keep_input(x, keep) if first.requires_grad else None
        shortcut = self._vramx_shortcut(x, kept, updates)
        source: Tensor | ChannelNormed = x
        *stages, last = self.STAGES
        for stage in stages:
            result = convolved_by(part_of(self, stage[0]), source, keep, kept)
            source = self._vramx_norm(stage, result, None, updates)
            kept = None
            del result
        result = convolved_by(part_of(self, last[0]), source, keep, kept)
        del source, x
        result = _promoted(part_of(self, last[1]), result)
        return self._vramx_norm(last, result, shortcut.to(result.dtype), updates).y

    def _vramx_norm(
        self, stage: tuple[str, str, str], x: Tensor, residual: Tensor | None, updates: bool
    ) -> ChannelNormed:
        _, norm, activation = (part_of(self, path) for path in stage)
        word = word_of(activation)
        assert word is not None
        return normed_by(norm, x, residual, word, self.vramx_settings.keep, updates)

    def _vramx_shortcut(self, x: Tensor, kept: Kept | None, updates: bool) -> Tensor:
        shortcut = own(self, self.SHORTCUT)
        if shortcut is None:
            return x
        found = _projection(shortcut)
        if found is None or not self._vramx_is_tried(found[-1]):
            with nullcontext() if updates else _statistics_restored(shortcut):
                y: Tensor = shortcut(x)
            return y
        *before, convolution, norm = found
        for module in before:
            x, kept = module(x), None
        keep: Compression = self.vramx_settings.keep
        projected = convolved_by(convolution, x, keep, kept)
        projected = _promoted(norm, projected)
        return normed_by(norm, projected, None, "none", keep, updates).y

    def _vramx_is_tried(self, norm: Any) -> bool:
        """Tell whether a shortcut's norm is of a class of which the trial, without one, tells."""
        tried = (part_of(self, name) for _, name, _ in self.STAGES)
        return not is_frozen(norm) or any(type(norm) is type(each) for each in tried)


def _why_not(family: type[Residual], module: Any) -> str | None:
    """Return which part is not what a family knows; None: all are."""
    for name in family.NOTHING:
        part = part_of(module, name)
        if part is not None and type(part) is not nn.Identity:
            return f"its {name} is a {type(part).__name__}"
    for convolution, norm, activation in family.STAGES:
        for name, known in ((convolution, _is_conv), (norm, plain_norm), (activation, word_of)):
            part = part_of(module, name)
            if not known(part):
                return f"its {name} is a {type(part).__name__}"
    return None


def _is_conv(module: Any) -> bool:
    return type(module) is nn.Conv2d


def _promoted(norm: Any, x: Tensor) -> Tensor:
    """Return a norm's input in the type of its result: a frozen one's is promoted, by products.

    A convolution that follows would cast that again, so that the input's type serves there.
    """
    return x.to(torch.promote_types(x.dtype, own(norm, "weight").dtype)) if is_frozen(norm) else x


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


def _projection(shortcut: Any) -> list[Any] | None:
    """Return what a shortcut is: a convolution, a norm, before them modules without a state.

    None: it is something else.
    """
    found, outer = [shortcut], []
    while type(found[-1]) is nn.Sequential or class_name(type(found[-1])) in _SHORTCUTS:
        outer.append(found.pop())
        found += outer[-1].children()
        if not found:
            return None
    if len(found) < 2:
        return None
    *before, convolution, norm = found
    known = plain_convolution(convolution) and plain_norm(norm)
    known = known and not any(list(module.buffers()) for module in before)
    return found if known and all_untouched([*outer, *found]) else None


_TORCHVISION = "torchvision.models.resnet"
_TIMM = "timm.models.resnet"
_HF = "transformers.models.resnet.modeling_resnet.ResNet"
_RT_DETR = "transformers.models.rt_detr.modeling_rt_detr_resnet.RTDetrResNet"
# A convolution and a norm, in this order.
_SHORTCUTS = (f"{_HF}ShortCut", f"{_RT_DETR}ShortCut")
_THREE = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"))


def _of_layers(
    count: int, prefix: str
) -> tuple[Stages, tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """Return STAGES, NOTHING, PARTS and TYPES of a block of transformers that has `count` layers.

    The last one's activation is the block's, behind the sum.
    """
    layers = tuple(f"layer.{i}" for i in range(count))
    activations = (*(f"{layer}.activation" for layer in layers[:-1]), "activation")
    stages = tuple(
        (f"{layer}.convolution", f"{layer}.normalization", activation)
        for layer, activation in zip(layers, activations, strict=True)
    )
    nothing = f"{layers[-1]}.activation"
    parts = ("layer", *layers, *(path for stage in stages for path in stage), nothing)
    types = {"layer": class_name(nn.Sequential), **dict.fromkeys(layers, f"{prefix}ConvLayer")}
    return stages, (nothing,), parts, types


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


class HuggingFaceBasicLayer(Residual):
    """ResNetBasicLayer of transformers."""

    CLASSES: ClassVar[tuple[str, ...]] = (f"{_HF}BasicLayer",)
    ARGUMENTS = ("hidden_state",)
    PARAMETERS: ClassVar[dict[str, str]] = {"": "hidden_state"}
    STAGES, NOTHING, PARTS, TYPES = _of_layers(2, _HF)
    SHORTCUT = "shortcut"

    @classmethod
    def small_block(cls, block_class: Any) -> nn.Module:
        block: nn.Module = block_class(WIDTH, WIDTH)
        return block


class HuggingFaceBottleNeckLayer(HuggingFaceBasicLayer):
    """ResNetBottleNeckLayer of transformers."""

    CLASSES = (f"{_HF}BottleNeckLayer",)
    STAGES, NOTHING, PARTS, TYPES = _of_layers(3, _HF)


class RTDetrBasicLayer(HuggingFaceBasicLayer):
    """RTDetrResNetBasicLayer of transformers."""

    CLASSES = (f"{_RT_DETR}BasicLayer",)
    STAGES, NOTHING, PARTS, TYPES = _of_layers(2, _RT_DETR)

    @classmethod
    def small_block(cls, block_class: Any) -> nn.Module:
        config = SimpleNamespace(hidden_act="relu", downsample_in_bottleneck=False)
        block: nn.Module = block_class(config, WIDTH, WIDTH)
        return block


class RTDetrBottleNeckLayer(RTDetrBasicLayer):
    """RTDetrResNetBottleNeckLayer of transformers."""

    CLASSES = (f"{_RT_DETR}BottleNeckLayer",)
    STAGES, NOTHING, PARTS, TYPES = _of_layers(3, _RT_DETR)
