"""The kernels' noise and masks, in Triton's interpreter, and the layout's arithmetic.

The noise of the kernels is that of the reference, bit for bit.
"""

from __future__ import annotations

import sys

import pytest
import torch
from interpreted_kernels import Noise, kernels
from test_kernels import KINDS, every_group, every_kind, layout_of

from vramx.compression.codec import reference
from vramx.kernels import launch

pytest.importorskip("triton")


@pytest.mark.parametrize("block", [0, 2**32 - 256, 2**32, 2**40 + 512])
@pytest.mark.parametrize(("rows", "cols"), [(32, 16), (4, 64)])
def test_noise_is_philox_of_a_64_bit_counter(block: int, rows: int, cols: int) -> None:
    noise = Noise()
    blocks = torch.arange(rows * cols // 16) + block
    word = 0xFFFFFFFF
    words = reference.philox(
        [blocks & word, blocks >> 32, torch.tensor(noise.stream), torch.tensor(noise.epoch)],
        [torch.tensor(noise.seed & word), torch.tensor((noise.seed >> 32) & word)],
    )
    expected = torch.stack([(w >> 8 * i) & 0xFF for w in words for i in range(4)], 1).view(-1)
    assert torch.equal(kernels.noise(block, rows, cols, noise), expected)


@pytest.mark.parametrize("change", [{"seed": 7}, {"epoch": 4}, {"stream": 6}])
def test_noise_depends_on(change: dict[str, int]) -> None:
    other = kernels.noise(0, 4, 64, Noise(**change))
    assert (kernels.noise(0, 4, 64, Noise()) != other).float().mean() > 0.9


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 4096, 4097, 9000])
@pytest.mark.parametrize("offset", [0, 3])
def test_mask_bits_equal_the_reference_and_come_back(numel: int, offset: int) -> None:
    flags = (torch.randn(numel + offset, generator=torch.Generator().manual_seed(1)) > 0)[offset:]
    packed, used = kernels.pack_mask(flags), (numel + 7) // 8
    assert torch.equal(packed[:used], reference.pack_mask(flags.clone())[:used])
    assert torch.equal(kernels.unpack_mask(packed, numel), flags.view(torch.uint8))


def test_supported_on_the_cpu_where_triton_interprets() -> None:
    assert kernels.supported("cpu")
    assert not kernels.supported("meta")


def test_not_supported_on_the_cpu_where_triton_compiles() -> None:
    if "triton" in sys.modules and not isinstance(
        launch.mask_plan(packs=True).kernel, sys.modules["triton"].JITFunction
    ):
        pytest.skip("this process interprets")
    assert not launch.supported(torch.device("cpu"))


@every_kind
@every_group
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 1000, 2**32 + 1])
def test_layout_sizes_are_those_of_the_format(kind: str, group: int, numel: int) -> None:
    layout = layout_of(kind, numel, group)
    bits, _ = KINDS[kind]
    groups = (numel + group - 1) // group
    assert layout.groups == groups
    assert 0 <= layout.code_bytes - groups * group * bits // 8 < 16
    assert layout.code_bytes % 16 == 0
    beside_the_codes = {"8sym": 6, "8asym": 4, "4sym": 2, "4asym": 4}[kind]
    assert layout.buffer_bytes == layout.code_bytes + groups * beside_the_codes
