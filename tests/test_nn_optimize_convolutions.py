"""vramx.optimize on blocks of ResNets and ConvNeXts, of torchvision, timm and transformers."""

from __future__ import annotations

import copy
import sys
from typing import Any

import convolution_tools as tools
import pytest
import torch
from convolution_tools import block_of, fused, gradient, image, kept
from norm_tools import held_bytes
from optimize_tools import ROUNDING, error, optimised_copy
from test_nn_operators import Watch
from torch import Tensor, nn

import vramx

__all__ = ["fused"]  # a fixture
pytestmark = pytest.mark.usefixtures("seeded")

RECOMPUTED = ("torchvision basic down", "timm bottleneck average", "timm bottleneck wrapped")
MOVING = ("rt-detr basic", "resnet of transformers")
LEVELS = [
    *((name, level) for name in tools.BLOCKS for level in ("keep", "int8")),
    *((name, "recompute_all") for name in (*tools.FROZEN, *MOVING, *RECOMPUTED, "timm convnext")),
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
    # A block with a ReLU is computed again from its input as it was, without noise.
    is_noisy = level == "int8" or (name in tools.CONVNEXTS and level != "keep")
    assert error(found, exact) < ROUNDING + is_noisy * tools.INT8_NOISE
    # Statistics move once, and not again where a block is recomputed; those of frozen norms stay.
    of = torch.equal if name in tools.FROZEN else close
    assert all(map(of, block.buffers(), original.buffers()))
    assert len(vramx.restore(block)) == 1
    block.load_state_dict(original.state_dict())
    assert torch.equal(gradient(block, x)[1], gradient(original, x)[1])


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputed_block_with_a_relu_has_exact_gradients(name: str, monkeypatch: Any) -> None:
    def distance() -> float:
        original = block_of(name)
        block = optimised_copy(original, "recompute_all", min_bytes=1)
        # A leaf would be kept as it is: its owner holds it anyway.
        pool = nn.AvgPool2d(1)
        return error(*(gradient(nn.Sequential(pool, b), image())[1] for b in (block, original)))

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
# kept now. Tables of channels and factors of rows are less than a hundredth.
#   basic       input, two of conv's results, a ReLU's: 8        3 packs, 2 times a bit
#   bottleneck  input 2; a quarter: 2 + 2 + 2 + 2 quarters; 2    3/2 packs + 1 pack, 3/2 bits
#   convnext    input, norm's input and output, 4 + 4 inside, branch: 24      6 packs, and a float
#                                                                a row of the norm
OF_CONVNEXT = 6 * tools.PACK + 4 / tools.CHANNELS
KEPT = {
    "torchvision basic": (8.0, 3 * tools.PACK + 2 * tools.BIT),
    "timm basic": (8.0, 3 * tools.PACK + 2 * tools.BIT),
    "torchvision bottleneck": (6.0, 2.5 * tools.PACK + 1.5 * tools.BIT),
    "timm bottleneck": (6.0, 2.5 * tools.PACK + 1.5 * tools.BIT),
    "torchvision convnext": (24.0, OF_CONVNEXT),
    "timm convnext": (24.0, OF_CONVNEXT),
}


@pytest.mark.parametrize("name", KEPT)
def test_blocks_keep_half_or_less(name: str) -> None:
    block, x = block_of(name).bfloat16(), image(2, 64, 16, 16, dtype=torch.bfloat16)
    eager, ours = KEPT[name]
    assert kept(block, x) == pytest.approx(eager, rel=0.02)
    vramx.optimize(block)
    assert kept(block, x) == pytest.approx(ours, rel=0.02)
    assert eager / ours > 1.8


LEFT = {
    "its bn1 is a SyncBatchNorm": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(
        tools.resnet.BasicBlock(64, 64)
    ),
    "its se is a SEModule": lambda: tools.timm_resnet.BasicBlock(
        64, 64, attn_layer=tools.timm.layers.SqueezeExcite
    ),
    "its drop_path is a DropPath": lambda: tools.timm_resnet.BasicBlock(
        64, 64, drop_path=tools.timm.layers.DropPath(0.1)
    ),
    "its aa is a BlurPool2d": lambda: tools.timm_resnet.Bottleneck(
        64, 16, 2, tools.shortcut(), aa_layer=tools.timm.layers.BlurPool2d
    ),
    "its act1 is a Hardswish": lambda: tools.timm_resnet.BasicBlock(64, 64, act_layer=nn.Hardswish),
    "its MLP is of convolutions": lambda: tools.timm_convnext.ConvNeXtBlock(64, conv_mlp=True),
}


@pytest.mark.parametrize("reason", LEFT)
def test_blocks_that_are_not_understood_are_left_and_say_why(reason: str) -> None:
    report = vramx.optimize(LEFT[reason]())
    assert report.swapped == ()
    assert reason in str(report)


@pytest.mark.parametrize("name", ["torchvision basic", "timm bottleneck"])
def test_block_with_a_hook_is_computed_as_it_was(name: str, fused: list[str]) -> None:
    block, seen = block_of(name), list[int]()
    vramx.optimize(block)
    block.bn1.register_forward_hook(lambda *_: seen.append(1))
    block(image())
    assert (seen, fused) == ([1], [])


@pytest.mark.parametrize(
    "make",
    [
        lambda: tools.timm_convnext.ConvNeXtBlock(64, drop_path=0.5),
        lambda: tools.convnext.CNBlock(64, 1.0, 0.5),
    ],
    ids=["timm", "torchvision"],
)
def test_stochastic_depth_is_the_originals(make: Any) -> None:
    original, x = tools.without_neutral_constants(make()), image(16, 64, 4, 4)
    results = []
    for each in (optimised_copy(original), original):
        torch.manual_seed(3)
        results.append(each(x))
    assert error(*results) < ROUNDING


def test_models_are_swapped_block_by_block() -> None:
    stages = [tools.convnext.CNBlockConfig(16, 32, 2), tools.convnext.CNBlockConfig(32, None, 1)]
    for model, blocks in ((tools.resnet.resnet18(), 8), (tools.convnext.ConvNeXt(stages), 3)):
        assert len(vramx.optimize(model).swapped) == blocks


@pytest.mark.parametrize("name", ["torchvision basic down", "timm convnext"])
def test_verification_accepts_blocks(name: str, recwarn: pytest.WarningsRecorder) -> None:
    block = block_of(name)
    vramx.optimize(block, verify=True)
    block(image())
    assert len(vramx.restore(block)) == 1
    assert not [each for each in recwarn if "is left as it was" in str(each.message)]


@pytest.mark.parametrize("level", ["int8", "recompute_all"])
@pytest.mark.parametrize("name", ["torchvision basic", "frozen"])
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiled_block_is_its_original_and_updates_statistics_once(name: str, level: str) -> None:
    torch.compiler.reset()
    original, x = block_of(name), image()
    block = optimised_copy(original, level, min_bytes=1)
    y, found = gradient(torch.compile(block, backend="aot_eager", fullgraph=True), x)
    expected, exact = gradient(original, x)
    assert error(y, expected) < ROUNDING
    assert error(found, exact) < ROUNDING + tools.INT8_NOISE
    assert all(map(close, block.buffers(), original.buffers()))


every_convnext = pytest.mark.parametrize("name", ["torchvision convnext", "timm convnext"])


def under_autocast(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return block(x)


@every_convnext
def test_a_convnext_block_is_few_operators(name: str) -> None:
    """Each more takes the host time that a step of small layers is made of."""
    block, x = block_of(name), image()
    vramx.optimize(block, group_size=64)
    with Watch() as forward:
        y = under_autocast(block, x)
    with Watch() as backward:
        y.sum().backward()
    named = [
        [each.split("::")[1] for each in watch.seen if each.startswith("vramx::")]
        for watch in (forward, backward)
    ]
    assert named[0] == ["keep", "convolution", "norm", "two_linears"]
    assert named[1] == ["two_linears_backward", "norm_backward"]
    # Of torch's own: the input's cast, the addition and views; the scale's view in torchvision.
    work = [each for each in forward.seen if each in ("aten::_to_copy", "aten::add.Tensor")]
    assert sorted(work) == ["aten::_to_copy", "aten::add.Tensor"]
    assert len(forward.seen) <= 11


@every_convnext
def test_under_autocast_a_convnext_block_keeps_packs_alone(name: str) -> None:
    """Torch's norm, which has weights in float32, would keep its input there."""
    block, x = block_of(name), image(2, 64, 16, 16)
    vramx.optimize(block)
    held = held_bytes(lambda: [under_autocast(block, x)], x, *block.parameters()) / x.numel()
    assert held == pytest.approx(OF_CONVNEXT, rel=0.02)


@every_convnext
def test_under_autocast_a_convnext_block_is_the_original(name: str) -> None:
    original, x = block_of(name), image()
    block = optimised_copy(original)

    def run(module: nn.Module) -> list[Tensor]:
        y = under_autocast(module, x)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
        return [y, *torch.autograd.grad((y * weights).sum(), [x, *module.parameters()])]

    # Some ten roundings of bfloat16 in a row, independent, and in gradients int8's 1 %.
    bounds = [torch.finfo(torch.bfloat16).eps * 10**0.5, *[0.03] * 100]
    for ours, theirs, bound in zip(run(block), run(original), bounds, strict=False):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= bound * theirs.norm()
