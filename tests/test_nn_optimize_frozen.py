"""vramx.optimize on ResNets whose batch norms are frozen, or in evaluation mode while they train.

Detection and segmentation are trained so. Frozen norms are of torchvision, timm and transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from norm_tools import INT8_STEP, held_bytes
from optimize_tools import ROUNDING, error
from torch import Tensor, nn

import vramx
from vramx.errors import VramxWarning
from vramx.nn.families.resnet import Residual

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")

from timm.layers import freeze_batch_norm_2d  # noqa: E402
from timm.models import resnet as timm_resnet  # noqa: E402
from torchvision.models import resnet  # noqa: E402
from torchvision.ops.misc import FrozenBatchNorm2d  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded")

# As optimize_tools.INT8_NOISE, of at most 4 packs of one block that a gradient passes.
INT8_NOISE = INT8_STEP * 4 / 2 * 4**0.5


def in_evaluation(block: nn.Module, learns: bool) -> nn.Module:
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
    path = {"ResNet": "resnet.modeling_resnet", "RTDetrResNet": "rt_detr.modeling_rt_detr_resnet"}
    prefix = "RTDetrResNet" if name.startswith("RT") else "ResNet"
    module: Any = pytest.importorskip(f"transformers.models.{path[prefix]}")
    made: nn.Module = getattr(module, name)(*arguments)
    return made


CONFIG = SimpleNamespace(hidden_act="relu", downsample_in_bottleneck=False)


def shortcut(norm: Any = nn.BatchNorm2d) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(64, 128, 1, 2, bias=False), norm(128))


def torchvisions() -> nn.Module:
    return resnet.Bottleneck(
        64, 32, 2, shortcut(FrozenBatchNorm2d), norm_layer=FrozenBatchNorm2d
    )  # fmt: skip


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "torchvision": torchvisions,
    "torchvision basic": lambda: resnet.BasicBlock(64, 64, norm_layer=FrozenBatchNorm2d),
    "evaluation": lambda: in_evaluation(resnet.Bottleneck(64, 32, 2, shortcut()), learns=False),
    "evaluation, learning": lambda: in_evaluation(
        resnet.Bottleneck(64, 32, 2, shortcut()), learns=True
    ),
    "timm": lambda: freeze_batch_norm_2d(
        timm_resnet.Bottleneck(64, 32, 2, timm_resnet.downsample_avg(64, 128, 1, 2))
    ),
    "timm silu": lambda: freeze_batch_norm_2d(timm_resnet.Bottleneck(64, 16, act_layer=nn.SiLU)),
    "detr of timm": lambda: detrs(timm_resnet.Bottleneck(64, 16)),
    "detr": lambda: detrs(hugging_face("ResNetBottleNeckLayer", 64, 128, 2)),
    "detr basic": lambda: detrs(hugging_face("ResNetBasicLayer", 64, 64)),
    "rt-detr": lambda: detrs(hugging_face("RTDetrResNetBottleNeckLayer", CONFIG, 64, 128, 2)),
    "rt-detr basic": lambda: hugging_face("RTDetrResNetBasicLayer", CONFIG, 64, 128, 2, True),
    "resnet of transformers": lambda: hugging_face("ResNetBottleNeckLayer", 64, 128, 2),
}
# Whose norms move their statistics.
MOVING = ("rt-detr basic", "resnet of transformers")


def block_of(name: str) -> nn.Module:
    """Return a block that trains, with constants of which none is neutral."""
    torch.manual_seed(0)
    block = BLOCKS[name]()
    block.training = True
    with torch.no_grad():
        for norm in block.modules():
            if hasattr(norm, "running_var"):
                nn.init.uniform_(norm.running_var, 0.5, 1.5)
                for each in (norm.weight, norm.bias, norm.running_mean):
                    nn.init.normal_(each)
    return block


def image(seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(2, 64, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return x.to(memory_format=torch.channels_last).requires_grad_()


def gradient(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = block(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    learn = [each for each in (x, *block.parameters()) if each.requires_grad]
    found = torch.autograd.grad((y * weights).sum(), learn)
    return y, torch.cat([each.flatten() for each in found])


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the calls that are computed the fused way."""
    calls: list[int] = []
    function: Any = Residual._vramx_block

    def count(*args: Any) -> Any:
        calls.append(1)
        return function(*args)

    monkeypatch.setattr(Residual, "_vramx_block", count)
    return calls


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_all"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_compute_what_their_originals_do(name: str, level: str, fused: list[int]) -> None:
    original, x = block_of(name), image()
    block = copy.deepcopy(original)
    assert len(vramx.optimize(block, level, min_bytes=1).swapped) == 1
    before = copy.deepcopy(block.state_dict())
    fused.clear()  # of the trial of its class
    y, found = gradient(block, x)
    assert len(fused) == (2 if level == "recompute_all" else 1)
    expected, exact = gradient(original, x)
    assert error(y, expected) < ROUNDING
    assert y.stride() == expected.stride()
    assert error(found, exact) < ROUNDING + (level == "int8") * INT8_NOISE
    for key, value in block.state_dict().items():
        if name in MOVING:
            assert torch.allclose(value, original.state_dict()[key], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(value, before[key])
    assert len(vramx.restore(block)) == 1
    block.load_state_dict(original.state_dict())
    assert torch.equal(gradient(block, x)[1], gradient(original, x)[1])


# In bytes an element of the input, of bfloat16. The result of the last ReLU is counted with the
# next block, whose input it is. Norms in evaluation mode keep their input, frozen ones nothing:
#   bottleneck  input 2, ReLUs' results a quarter each          3/2 packs, 3/2 bits
PACK, BIT = 1 + 6 / 128, 1 / 8
KEPT = {"torchvision": 3.0, "timm": 3.0, "evaluation": 6.0}


@pytest.mark.parametrize("name", KEPT)
def test_nothing_is_kept_of_a_frozen_norm(name: str) -> None:
    torch.manual_seed(0)
    block: nn.Module = (timm_resnet if name == "timm" else resnet).Bottleneck(64, 16)
    block = (
        in_evaluation(block, learns=False) if name == "evaluation" else freeze_batch_norm_2d(block)
    )
    block, x = block.bfloat16(), image(dtype=torch.bfloat16)

    def kept(level: str) -> float:
        made: list[Tensor] = []
        if level != "plain":
            vramx.optimize(block, level)
        held = held_bytes(lambda: made.append(block(x)), *block.parameters(), *block.buffers())
        is_relu = "Relu" in type(made[0].grad_fn).__name__
        return (held - is_relu * made[0].nbytes) / x.numel()

    # Tables of channels are less than a hundredth.
    assert kept("plain") == pytest.approx(KEPT[name], rel=0.02)
    assert kept("keep") == pytest.approx(3.0, rel=0.02)
    assert kept("int8") == pytest.approx(1.5 * PACK + 1.5 * BIT, rel=0.02)


def test_frozen_convolutions_keep_nothing() -> None:
    block, x = block_of("torchvision").requires_grad_(False), image()
    vramx.optimize(block)
    held = held_bytes(lambda: block(x), *block.parameters(), *block.buffers())
    # Of three results, of which the second is an eighth of the input and the others are a half; of
    # each channel of four norms a factor, and of each norm a probe.
    bits = x.numel() * (1 / 2 + 1 / 8 + 1 / 2)
    assert held == bits / 8 + 4 * (32 + 32 + 128 + 128) + 4 * 4
    assert held_bytes(lambda: block(x.detach())) == 0


@pytest.mark.parametrize("name", ["torchvision", "evaluation", "detr", "timm"])
@pytest.mark.parametrize("level", ["keep", "int8"])
def test_types_under_autocast_are_the_originals(name: str, level: str) -> None:
    """A frozen norm's products are promoted; torch's norm gives the type that it is given."""
    original, x = block_of(name), image()
    block = copy.deepcopy(original)
    vramx.optimize(block, level)
    with torch.autocast("cpu", torch.bfloat16):
        (y, found), (expected, exact) = (gradient(each, x) for each in (block, original))
    assert y.dtype == expected.dtype
    step = torch.finfo(torch.bfloat16).eps
    assert error(y, expected) < 4 * step
    assert error(found, exact) < 8 * step + (level == "int8") * INT8_NOISE


@pytest.mark.parametrize("level", ["keep", "int8", "recompute_all"])
def test_mode_and_constants_are_read_at_each_call(level: str) -> None:
    original = block_of("evaluation, learning")
    block = copy.deepcopy(original)
    vramx.optimize(block, level, min_bytes=1)
    for step, training in enumerate((False, True, False, True)):
        for each in (block, original):
            each.bn2.train(training)
            each.bn3.requires_grad_(training)
            with torch.no_grad():  # loaded
                each.bn1.running_mean.fill_(step)
                each.bn1.running_var.fill_(step + 0.5)
        (y, found), (expected, exact) = (gradient(each, image(step)) for each in (block, original))
        assert error(y, expected) < ROUNDING
        assert error(found, exact) < ROUNDING + (level == "int8") * INT8_NOISE
        for ours, theirs in zip(block.buffers(), original.buffers(), strict=True):
            assert torch.allclose(ours.double(), theirs.double(), rtol=1e-5, atol=1e-6)


class OtherFrozenBatchNorm2d(FrozenBatchNorm2d):
    """Of the name, with another formula."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.001


class EpsilonFrozenBatchNorm2d(FrozenBatchNorm2d):
    """With a number of its own, which a trial with the default does not show."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.epsilon = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.epsilon)


class FixedFrozenBatchNorm2d(FrozenBatchNorm2d):
    """Which does not read its eps."""

    def forward(self, x: Tensor) -> Tensor:
        now, self.eps = self.eps, 1e-5
        y = super().forward(x)
        self.eps = now
        return y


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (OtherFrozenBatchNorm2d, "its result differs"),
        (FixedFrozenBatchNorm2d, "its result differs"),
        (EpsilonFrozenBatchNorm2d, "its bn1 is a EpsilonFrozenBatchNorm2d"),
    ],
)
def test_frozen_norm_that_computes_otherwise_is_left_and_named(norm: Any, reason: str) -> None:
    block = resnet.BasicBlock(64, 64, norm_layer=norm)
    with pytest.warns(VramxWarning, match=reason):
        report = vramx.optimize(block)
    assert report.swapped == ()


def test_frozen_norm_of_a_shortcut_alone_is_called_as_it_is() -> None:
    """A trial has no shortcut, and so does not tell of its norm's class."""
    original = resnet.Bottleneck(64, 32, 2, shortcut(OtherFrozenBatchNorm2d))
    original = in_evaluation(original, learns=False)
    block = copy.deepcopy(original)
    assert len(vramx.optimize(block, "keep", min_bytes=1).swapped) == 1
    (y, found), (expected, exact) = (gradient(each, image()) for each in (block, original))
    assert error(y, expected) < ROUNDING
    assert error(found, exact) < ROUNDING


@pytest.mark.parametrize("level", ["int8", "recompute_all"])
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiled_block_is_its_original(level: str) -> None:
    torch.compiler.reset()
    original, x = block_of("torchvision"), image()
    block = copy.deepcopy(original)
    vramx.optimize(block, level, min_bytes=1)
    y, found = gradient(torch.compile(block, backend="aot_eager", fullgraph=True), x)
    expected, exact = gradient(original, x)
    assert error(y, expected) < ROUNDING
    assert error(found, exact) < ROUNDING + INT8_NOISE
