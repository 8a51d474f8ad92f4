"""The classes of modules that vramx.optimize knows, a family a file.

A family is known by the names of its original classes, so that no library is imported for it. Pure;
any thread.
"""

from __future__ import annotations

from torch import nn

from vramx.nn.families.bert import BertLayer
from vramx.nn.families.convnext import TimmConvNext, TorchvisionConvNext
from vramx.nn.families.decoder import DecoderLayer, MistralLayer, Qwen2Layer, Qwen3Layer
from vramx.nn.families.encoder import EncoderLayer
from vramx.nn.families.gpt2 import Gpt2Block
from vramx.nn.families.norms import GemmaNorm, RmsNorm
from vramx.nn.families.questions import class_name
from vramx.nn.families.resnet import (
    BasicBlock,
    Bottleneck,
    HuggingFaceBasicLayer,
    HuggingFaceBottleNeckLayer,
    RTDetrBasicLayer,
    RTDetrBottleNeckLayer,
    TimmBasicBlock,
    TimmBottleneck,
)
from vramx.nn.families.swap import Fused
from vramx.nn.families.vit import TimmBlock, VitLayer

FAMILIES: tuple[type[Fused], ...] = (
    *(DecoderLayer, MistralLayer, Qwen2Layer, Qwen3Layer),
    *(Gpt2Block, BertLayer, VitLayer, TimmBlock, EncoderLayer),
    *(TimmConvNext, TorchvisionConvNext),
    *(BasicBlock, Bottleneck, TimmBasicBlock, TimmBottleneck),
    *(HuggingFaceBasicLayer, HuggingFaceBottleNeckLayer, RTDetrBasicLayer, RTDetrBottleNeckLayer),
    *(RmsNorm, GemmaNorm),
)
_BY_CLASS = {name: family for family in FAMILIES for name in family.CLASSES}


def family_of(module: nn.Module) -> type[Fused] | None:
    """Return the family of a module's very class; None: it is of none.

    Example:
        >>> family_of(nn.TransformerEncoderLayer(8, 2)).__name__
        'EncoderLayer'
    """
    return _BY_CLASS.get(class_name(type(module)))


def known_base(module: nn.Module) -> type | None:
    """Return the class of a family that a module's class is derived from; None: there is none."""
    bases = type(module).__mro__[1:]
    return next((base for base in bases if class_name(base) in _BY_CLASS), None)
