"""vramx.optimize on blocks of ResNets and ConvNeXts, of torchvision and timm."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_tools import INT8_STEP, held_bytes
from optimize_tools import optimised_copy
from torch import Tensor, nn

import vramx
from vramx.nn.families.convnext import ConvNext
from vramx.nn.families.resnet import Residual

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")

from timm.models import convnext as timm_convnext  # noqa: E402
from timm.models import resnet as timm_resnet  # noqa: E402
from torchvision.models import convnext, resnet  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded")

CHANNELS = 64
# float32: some twenty roundings by half a step in a row, and sums of a thousand terms.
ROUNDING = 64 * torch.finfo(torch.float32).eps
# As optimize_tools.INT8_NOISE, of at most 4 packs of one block that a gradient passes.
INT8_NOISE = INT8_STEP * 4 / 2 * 4**0.5


def shortcut(stride: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(64, 128, 1, stride, bias=False), nn.BatchNorm2d(128))


def scaled(block: nn.Module) -> nn.Module:
    """A new ConvNeXt's branch is a millionth of its input: no error of it would be seen."""
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name in ("gamma", "layer_scale"):
                parameter.normal_()
    return block


class Wrapped(nn.Module):
    """A shortcut that is not understood."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "torchvision basic": lambda: resnet.BasicBlock(64, 64),
    "torchvision basic down": lambda: resnet.BasicBlock(64, 128, 2, shortcut()),
    "torchvision bottleneck": lambda: resnet.Bottleneck(64, 16),
    "torchvision bottleneck down": lambda: resnet.Bottleneck(64, 32, 2, shortcut(), groups=2),
    "timm basic": lambda: timm_resnet.BasicBlock(64, 64),
    "timm bottleneck": lambda: timm_resnet.Bottleneck(64, 16),
    "timm bottleneck silu": lambda: timm_resnet.Bottleneck(64, 16, act_layer=nn.SiLU),
    "timm bottleneck average": lambda: timm_resnet.Bottleneck(
        64, 32, 2, timm_resnet.downsample_avg(64, 128, 1, 2)
    ),
    "timm bottleneck wrapped": lambda: timm_resnet.Bottleneck(64, 32, 2, Wrapped(shortcut())),
    "torchvision convnext": lambda: convnext.CNBlock(64, 1.0, 0.0),
    "timm convnext": lambda: timm_convnext.ConvNeXtBlock(64),
    "timm convnext down": lambda: timm_convnext.ConvNeXtBlock(64, 128, stride=2),
    "timm convnext grn": lambda: timm_convnext.ConvNeXtBlock(64, use_grn=True),
}


def block_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    block = scaled(BLOCKS[name]()).train()
    for norm in block.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return block


def image(*shape: int) -> Tensor:
    x = torch.randn(*(shape or (2, CHANNELS, 8, 8)), generator=torch.Generator().manual_seed(1))
    return x.to(memory_format=torch.channels_last).requires_grad_()


def gradient(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = block(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((y * weights).sum(), [x, *block.parameters()])
    return y, torch.cat([each.flatten() for each in found])


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of the methods that compute blocks the fused way."""
    calls: list[str] = []
    for family, name in ((Residual, "_vramx_block"), (ConvNext, "vramx_branch")):
        function: Any = getattr(family, name)

        def count(*args: Any, function: Any = function, name: str = name) -> Any:
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(family, name, count)
    return calls


RECOMPUTED = ("torchvision basic down", "timm bottleneck average", "timm bottleneck wrapped")
LEVELS = [
    *((name, level) for name in BLOCKS for level in ("keep", "int8")),
    *((name, "recompute_all") for name in (*RECOMPUTED, "timm convnext")),
    *((name, "recompute_mlp") for name in ("torchvision convnext", "timm convnext down")),
]


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_blocks_compute_what_their_originals_do(name: str, level: str, fused: list[str]) -> None:
    original, x = block_of(name), image()
    block = copy.deepcopy(original)
    assert len(vramx.optimize(block, level, min_bytes=1).swapped) == 1
    fused.clear()  # of the trial of its class
    y, found = gradient(block, x)
    assert len(fused) == (2 if level == "recompute_all" else 1)
    expected, exact = gradient(original, x)
    assert error(y, expected) < ROUNDING
    assert y.stride() == expected.stride()
    assert error(found, exact) < ROUNDING + (level != "keep") * INT8_NOISE
    # Once each, and not again where a block is recomputed.
    for buffer, right in zip(block.buffers(), original.buffers(), strict=True):
        assert torch.allclose(buffer.double(), right.double(), rtol=1e-5, atol=1e-6)
    assert len(vramx.restore(block)) == 1
    assert torch.equal(gradient(block, x)[1], gradient(original, x)[1])


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputed_block_with_a_relu_has_exact_gradients(name: str, monkeypatch: Any) -> None:
    def distance() -> float:
        blocks = [block_of(name), block_of(name)]
        vramx.optimize(blocks[0], "recompute_all", min_bytes=1)
        # A leaf would be kept as it is: its owner holds it anyway.
        found, exact = (
            gradient(nn.Sequential(nn.AvgPool2d(1), block), image()) for block in blocks
        )
        return error(found[1], exact[1])

    assert distance() < ROUNDING
    module = sys.modules["vramx.nn.optimize"]  # a function of the package has its name
    monkeypatch.setattr(module, "compares", lambda _module: False)
    assert distance() > 10 * ROUNDING


@pytest.mark.parametrize("name", ["torchvision basic down", "timm bottleneck", "timm convnext"])
def test_block_in_eval_mode_is_the_original(name: str, fused: list[str]) -> None:
    original, x = block_of(name).eval(), image()
    block = optimised_copy(original)
    fused.clear()  # of the trial of its class
    assert torch.equal(block(x), original(x))
    assert fused == []


# What eager torch keeps of a block, of bfloat16, in bytes an element of its input, and what is
# kept now. The result of the last ReLU is counted with the next block, whose input it is.
#   basic       input, two of conv's results, a ReLU's: 8        3 packs, 2 times a bit
#   bottleneck  input 2; a quarter: 2 + 2 + 2 + 2 quarters; 2    3/2 packs + 1 pack, 3/2 bits
#   convnext    input, norm's input and output, 4 + 4 inside, branch: 24      6 packs
PACK, BIT = 1 + 6 / 128, 1 / 8
# A factor of fp32 a row of the norm.
APART = 4 / CHANNELS
KEPT = {
    "torchvision basic": (8.0, 3 * PACK + 2 * BIT),
    "timm basic": (8.0, 3 * PACK + 2 * BIT),
    "torchvision bottleneck": (6.0, 2.5 * PACK + 1.5 * BIT),
    "timm bottleneck": (6.0, 2.5 * PACK + 1.5 * BIT),
    "torchvision convnext": (24.0, 6 * PACK + APART),
    "timm convnext": (24.0, 6 * PACK + APART),
}


@pytest.mark.parametrize("name", KEPT)
def test_blocks_keep_half_or_less(name: str) -> None:
    block, x = block_of(name).bfloat16(), image(2, 64, 16, 16).detach().bfloat16()
    x.requires_grad_()

    def kept() -> float:
        made: list[Tensor] = []
        held = held_bytes(lambda: made.append(block(x)), *block.parameters(), *block.buffers())
        is_relu = "Relu" in type(made[0].grad_fn).__name__
        return (held - is_relu * made[0].nbytes) / x.numel()

    eager, ours = KEPT[name]
    # Tables of channels and factors of rows are less than a hundredth.
    assert kept() == pytest.approx(eager, rel=0.02)
    vramx.optimize(block)
    assert kept() == pytest.approx(ours, rel=0.02)
    assert eager / ours > 1.8


LEFT = {
    "its bn1 is a SyncBatchNorm": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(
        resnet.BasicBlock(64, 64)
    ),
    "its se is a SEModule": lambda: timm_resnet.BasicBlock(
        64, 64, attn_layer=timm.layers.SqueezeExcite
    ),
    "its drop_path is a DropPath": lambda: timm_resnet.BasicBlock(
        64, 64, drop_path=timm.layers.DropPath(0.1)
    ),
    "its aa is a BlurPool2d": lambda: timm_resnet.Bottleneck(
        64, 16, 2, shortcut(), aa_layer=timm.layers.BlurPool2d
    ),
    "its act1 is a Hardswish": lambda: timm_resnet.BasicBlock(64, 64, act_layer=nn.Hardswish),
    "its MLP is of convolutions": lambda: timm_convnext.ConvNeXtBlock(64, conv_mlp=True),
}


@pytest.mark.parametrize("reason", LEFT)
def test_blocks_that_are_not_understood_are_left_and_say_why(reason: str) -> None:
    report = vramx.optimize(LEFT[reason]())
    assert report.swapped == ()
    assert reason in str(report)


@pytest.mark.parametrize("name", ["torchvision basic", "timm bottleneck"])
def test_block_with_a_hook_is_computed_as_it_was(name: str, fused: list[str]) -> None:
    block, x = block_of(name), image()
    vramx.optimize(block)
    seen: list[int] = []
    block.bn1.register_forward_hook(lambda *_: seen.append(1))
    block(x)
    assert (seen, fused) == ([1], [])


def test_stochastic_depth_is_the_originals() -> None:
    torch.manual_seed(0)
    originals = [
        scaled(timm_convnext.ConvNeXtBlock(64, drop_path=0.5)).train(),
        scaled(convnext.CNBlock(64, 1.0, 0.5)).train(),
    ]
    for original in originals:
        block, x = copy.deepcopy(original), image(16, 64, 4, 4)
        vramx.optimize(block)
        results = []
        for each in (block, original):
            torch.manual_seed(3)
            results.append(each(x))
        assert error(*results) < ROUNDING


def test_models_are_swapped_block_by_block() -> None:
    stages = [convnext.CNBlockConfig(16, 32, 2), convnext.CNBlockConfig(32, None, 1)]
    for model, blocks in ((torchvision.models.resnet18(), 8), (convnext.ConvNeXt(stages), 3)):
        assert len(vramx.optimize(model).swapped) == blocks


@pytest.mark.parametrize("name", ["torchvision basic down", "timm convnext"])
def test_verification_accepts_blocks(name: str, recwarn: pytest.WarningsRecorder) -> None:
    block = block_of(name)
    vramx.optimize(block, verify=True)
    block(image())
    assert len(vramx.restore(block)) == 1
    assert not [each for each in recwarn if "is left as it was" in str(each.message)]


@pytest.mark.parametrize("level", ["int8", "recompute_all"])
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiled_block_updates_statistics_once(level: str) -> None:
    torch.compiler.reset()
    block, x = block_of("torchvision basic"), image()
    vramx.optimize(block, level, min_bytes=1)
    other = copy.deepcopy(block)
    y, _ = gradient(torch.compile(block, backend="aot_eager", fullgraph=True), x)
    assert error(y, gradient(other, x)[0]) < ROUNDING
    for found, expected in zip(block.buffers(), other.buffers(), strict=True):
        assert torch.allclose(found.double(), expected.double(), rtol=1e-5, atol=1e-6)
