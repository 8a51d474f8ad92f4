"""Blocks of ResNets and ConvNeXts for the tests of vramx.optimize, and what they compute and keep.

Frozen norms are those of torchvision, timm and transformers, and norms in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from norm_tools import INT8_STEP, held_bytes
from torch import Tensor, nn

from vramx.nn.families.convnext import ConvNext
from vramx.nn.families.resnet import Residual

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")

from timm.layers import freeze_batch_norm_2d  # noqa: E402
from timm.models import convnext as timm_convnext  # noqa: E402
from timm.models import resnet as timm_resnet  # noqa: E402
from torchvision.models import convnext, resnet  # noqa: E402
from torchvision.ops.misc import FrozenBatchNorm2d  # noqa: E402

CHANNELS = 64
# As optimize_tools.INT8_NOISE, of at most 4 packs of one block that a gradient passes.
INT8_NOISE = INT8_STEP * 4 / 2 * 4**0.5
# Of an element in bytes: a pack with outliers in groups of 128, and the sign that a ReLU keeps.
PACK, BIT = 1 + 6 / 128, 1 / 8
Blocks = dict[str, Callable[[], nn.Module]]


def shortcut(norm: Any = nn.BatchNorm2d) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(64, 128, 1, 2, bias=False), norm(128))


class Wrapped(nn.Module):
    """A shortcut that is not understood."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = shortcut()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def in_evaluation(block: nn.Module, learns: bool = False) -> nn.Module:
    for module in block.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(learns)
    return block


def detrs(block: nn.Module) -> nn.Module:
    detr: Any = pytest.importorskip("transformers.models.detr.modeling_detr")
    if not hasattr(detr, "replace_batch_norm"):
        pytest.skip("this release of transformers freezes norms by another function")
    with torch.no_grad():
        detr.replace_batch_norm(block)
    return block


def hugging_face(name: str, *arguments: Any) -> nn.Module:
    path = "rt_detr.modeling_rt_detr_resnet" if name.startswith("RT") else "resnet.modeling_resnet"
    module: Any = pytest.importorskip(f"transformers.models.{path}")
    made: nn.Module = getattr(module, name)(*arguments)
    return made


def averaged() -> nn.Module:
    return timm_resnet.Bottleneck(64, 32, 2, timm_resnet.downsample_avg(64, 128, 1, 2))


CONFIG = SimpleNamespace(hidden_act="relu", downsample_in_bottleneck=False)
FROZEN: Blocks = {
    "frozen": lambda: resnet.Bottleneck(
        64, 32, 2, shortcut(FrozenBatchNorm2d), norm_layer=FrozenBatchNorm2d
    ),
    "frozen basic": lambda: resnet.BasicBlock(64, 64, norm_layer=FrozenBatchNorm2d),
    "evaluation": lambda: in_evaluation(resnet.Bottleneck(64, 32, 2, shortcut())),
    "evaluation, learning": lambda: in_evaluation(
        resnet.Bottleneck(64, 32, 2, shortcut()), learns=True
    ),
    "frozen timm": lambda: freeze_batch_norm_2d(averaged()),
    "frozen timm silu": lambda: freeze_batch_norm_2d(
        timm_resnet.Bottleneck(64, 16, act_layer=nn.SiLU)
    ),
    "detr of timm": lambda: detrs(timm_resnet.Bottleneck(64, 16)),
    "detr": lambda: detrs(hugging_face("ResNetBottleNeckLayer", 64, 128, 2)),
    "detr basic": lambda: detrs(hugging_face("ResNetBasicLayer", 64, 64)),
    "rt-detr": lambda: detrs(hugging_face("RTDetrResNetBottleNeckLayer", CONFIG, 64, 128, 2)),
}
TRAINED: Blocks = {
    "torchvision basic": lambda: resnet.BasicBlock(64, 64),
    "torchvision basic down": lambda: resnet.BasicBlock(64, 128, 2, shortcut()),
    "torchvision bottleneck": lambda: resnet.Bottleneck(64, 16),
    "torchvision bottleneck down": lambda: resnet.Bottleneck(64, 32, 2, shortcut(), groups=2),
    "timm basic": lambda: timm_resnet.BasicBlock(64, 64),
    "timm bottleneck": lambda: timm_resnet.Bottleneck(64, 16),
    "timm bottleneck silu": lambda: timm_resnet.Bottleneck(64, 16, act_layer=nn.SiLU),
    "timm bottleneck average": averaged,
    "timm bottleneck wrapped": lambda: timm_resnet.Bottleneck(64, 32, 2, Wrapped()),
    "rt-detr basic": lambda: hugging_face("RTDetrResNetBasicLayer", CONFIG, 64, 128, 2, True),
    "resnet of transformers": lambda: hugging_face("ResNetBottleNeckLayer", 64, 128, 2),
}
CONVNEXTS: Blocks = {
    "torchvision convnext": lambda: convnext.CNBlock(64, 1.0, 0.0),
    "timm convnext": lambda: timm_convnext.ConvNeXtBlock(64),
    "timm convnext down": lambda: timm_convnext.ConvNeXtBlock(64, 128, stride=2),
    "timm convnext grn": lambda: timm_convnext.ConvNeXtBlock(64, use_grn=True),
}
BLOCKS = TRAINED | CONVNEXTS | FROZEN


def block_of(name: str) -> nn.Module:
    """Return a block that trains."""
    torch.manual_seed(0)
    block = without_neutral_constants(BLOCKS[name]())
    block.training = True
    return block


def without_neutral_constants(block: nn.Module) -> nn.Module:
    """A new ConvNeXt's branch, say, is a millionth of its input: no error of it would be seen."""
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name in ("gamma", "layer_scale"):
                parameter.normal_()
        for norm in block.modules():
            if hasattr(norm, "running_var"):
                nn.init.uniform_(norm.running_var, 0.5, 1.5)
                for each in (norm.weight, norm.bias, norm.running_mean):
                    nn.init.normal_(each)
    return block


def image(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*(shape or (2, CHANNELS, 8, 8)), generator=generator).to(dtype)
    return x.to(memory_format=torch.channels_last).requires_grad_()


def gradient(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result, and the gradient of a fixed weighting of it for all that learns."""
    y = block(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    learn = [each for each in (x, *block.parameters()) if each.requires_grad]
    return y, torch.cat(
        [each.flatten() for each in torch.autograd.grad((y * weights).sum(), learn)]
    )


def kept(block: nn.Module, x: Tensor) -> float:
    """Return the bytes an element of x that are kept, but for the last ReLU's result.

    That one is counted with the next block, whose input it is.
    """
    made: list[Tensor] = []
    held = held_bytes(lambda: made.append(block(x)), *block.parameters(), *block.buffers())
    is_relu = "Relu" in type(made[0].grad_fn).__name__
    return (held - is_relu * made[0].nbytes) / x.numel()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the methods that compute blocks the fused way; a file names it in `__all__`."""
    calls: list[str] = []
    for family, name in ((Residual, "_vramx_block"), (ConvNext, "vramx_branch")):
        function: Any = getattr(family, name)

        def count(*args: Any, function: Any = function, name: str = name) -> Any:
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(family, name, count)
    return calls
