"""What norms, powers, saturating functions and ReLU save, packed by the kernels of a GPU.

A step of the numbers that are packed bounds what comes back; launches are one each.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import vramx
from vramx.compression.codec import codec, roots
from vramx.compression.codec.geometry import describe
from vramx.compression.codec.mapping import ANGLES, ENDS, SIGN
from vramx.compression.codec.normalised import Normal, Statistics
from vramx.compression.codec.rows import scaled
from vramx.compression.config import MASK_FORMAT, Format

pytestmark = pytest.mark.gpu

NEAREST = Format(rounding="nearest")
# Sizes of x, and of its statistics: groups in a row, two rows a group, and several.
SEEN = {
    "group": ((513, 1024), (513, 1)),
    "split": ((33, 48, 200), (1, 48, 1)),
    "each": ((65, 96, 49), (1, 96, 1)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("place", SEEN)
def test_a_norm_s_input_comes_back(place: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    size, ones = SEEN[place]
    x = torch.randn(size, device="cuda").to(dtype)
    mean, rstd = torch.randn(ones, device="cuda"), torch.rand(ones, device="cuda") + 0.5
    mapping = Normal(Statistics(mean, rstd, size, ones), describe(x))
    assert mapping.function is not None
    assert mapping.function.place(128) == place
    packed = codec.pack(x.flatten(), NEAREST, None, mapping)
    back = codec.unpack(packed).view(size).float()
    normal = (x.float() - mean) * rstd
    packed_numbers = roots.ROOT_OF_MOST.of(normal).abs()
    half_step = packed_numbers.max() / 126 * (1 + 2**-7) / 2
    # By how much what a root stands for changes with it, up to 2; halves beyond change by 2.
    slope = (2 * packed_numbers).clamp(max=4)
    unit = torch.finfo(dtype).eps * x.float().abs().max()
    off = ((back - x.float()) * rstd).abs()
    assert (off <= half_step * slope + half_step**2 + 2 * unit).all()


@pytest.mark.parametrize(
    ("call", "mapping"),
    [
        (torch.tanh, ANGLES["TanhBackward0"]),
        (torch.sigmoid, ANGLES["SigmoidBackward0"]),
        (torch.tanh, ENDS["TanhBackward0"]),
        (torch.sigmoid, ENDS["SigmoidBackward0"]),
        (torch.sin, roots.ROOT),
    ],
    ids=["tanh", "sigmoid", "ends of tanh", "ends of sigmoid", "root"],
)
def test_functions_come_back(call: Callable[[Tensor], Tensor], mapping: codec.Mapping) -> None:
    torch.manual_seed(0)
    y = call(4 * torch.randn(100_003, device="cuda"))
    back = codec.unpack(codec.pack(y, NEAREST, None, mapping))
    # The slope of each way back is at most 2, of angles in quarter turns pi / 2, of numbers up to
    # 1; of numbers of ends, up to 10, it is at most a half.
    largest = max(1, float(mapping.of(y).abs().max()) / 4)
    assert (back - y).abs().max() <= largest / 126 * (1 + 2**-7) + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("length", [8, 24, 100, 200, 1000])
def test_rows_come_back_each_in_its_own_scale(length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (
        torch.randn(1003, length, device="cuda")
        * torch.logspace(-3, 3, 1003, device="cuda")[:, None]
    )
    x = x.to(dtype)
    back = codec.unpack(codec.pack(x.view(-1), NEAREST, None, scaled(x, length))).view_as(x)
    largest = x.float().abs().amax(1, keepdim=True)
    # Of roots up to 1, of which a half step is 1 / 252 and the slope of the way back 2.
    unit = torch.finfo(dtype).eps
    off = (back.float() - x.float()).abs() / largest
    assert off.max() <= 1 / 126 * (1 + 2**-7) + 1e-4 + unit


def test_signs_come_back() -> None:
    x = torch.randn(100_003, device="cuda")
    x[5] = torch.nan
    back = codec.unpack(codec.pack(x, MASK_FORMAT, None, SIGN))
    assert torch.equal(back, (~(x <= 0)).float())


def test_a_norm_adds_one_launch_to_a_call_and_one_to_its_backward() -> None:
    norm = nn.LayerNorm(1024, device="cuda")
    x = torch.randn(64, 32, 1024, device="cuda", requires_grad=True)

    def launches(packs: bool) -> int:
        activity = torch.profiler.ProfilerActivity.CUDA
        with torch.profiler.profile(activities=[activity]) as seen:
            with vramx.compress("int8" if packs else "keep", min_bytes="64KiB"):
                y = norm(x * 1)
            y.sum().backward()
            torch.cuda.synchronize()
        return sum(e.count for e in seen.key_averages() if e.self_device_time_total)

    for packs in (True, False):
        launches(packs)  # compiles
    assert launches(True) == launches(False) + 2
