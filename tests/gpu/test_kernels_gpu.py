"""The kernels on a GPU against the reference on the same GPU.

In the interpreter all bytes are equal (tests/test_kernels.py). A GPU's compiler fuses a
multiplication and an addition, which then rounds once instead of twice. Let t be the quotient in
exact arithmetic, |t| < 256, and 16 at 4 bits. The product is off by at most half a unit of
[128, 256), 2**-17, or of [8, 16), 2**-21. To the nearest, codes differ by one at most, and only
where t lies that close to the middle between two integers.

With noise the addition that may be fused rounds 256 t to an integer p, and a byte b is added to p:
p differs by one at most, a code not by more, and only where 256 t lies within 256 times as much of
a middle, and p + b and one less or more are not of the same code.
"""

from __future__ import annotations

import pytest
import torch
from test_kernels import every_dtype, every_kind, layout_of
from torch import Tensor

from vramx.compression.codec import reference
from vramx.kernels import launch
from vramx.kernels.layout import Layout

pytestmark = pytest.mark.gpu

MIDDLE = {8: 2.0**-17, 4: 2.0**-21}
GPU = "cuda:0"
STREAM = 2**31 + 5

every_group = pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 1024])
every_rounding = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])


def seed_and_epoch(device: str = GPU, epoch: int = 3) -> Tensor:
    return torch.tensor([-123456789012345, epoch], device=device)


def sample(numel: int, dtype: torch.dtype, device: str = GPU) -> Tensor:
    """Normal numbers; beyond the first thousand also zeros, denormals, one sign only, large."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    x[1024:2048] = 0
    x[2048:3072] *= 1e-39
    x[3072:4096] = x[3072:4096].abs() + 1
    x[4096:5120] = -x[4096:5120].abs()
    x[5120:6144] *= 1e4
    return x.to(dtype).to(device)


def quantize(
    x: Tensor, layout: Layout, noise: Tensor | None = None, stream: int = STREAM
) -> Tensor:
    buffer = torch.full((layout.buffer_bytes,), 0xAB, dtype=torch.uint8, device=x.device)
    launch.quantize(x, buffer, layout, noise=noise, stream=stream)
    return buffer


def dequantize(buffer: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    out = torch.full((layout.numel,), 12345.0, dtype=dtype, device=buffer.device)
    launch.dequantize(buffer, out, layout)
    return out


def codes_of(buffer: Tensor, layout: Layout) -> Tensor:
    """Return the codes as int64, padding included."""
    rows = buffer[: layout.groups * layout.group_size * layout.bits // 8].view(layout.groups, -1)
    if layout.bits == 4:
        rows = torch.cat([rows & 15, rows >> 4], 1)
    codes = rows.reshape(-1).long()
    top = 1 << (layout.bits - 1)
    return torch.where(codes >= top, codes - 2 * top, codes) if layout.symmetric else codes


def headers_of(buffer: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the scale and the minimum of each element, padding included, as float32."""
    words = buffer[layout.code_bytes + layout.outlier_bytes :].view(torch.bfloat16)
    words = words.float().view(layout.groups, -1)
    words = words.repeat_interleave(layout.group_size, 0)
    return words[:, 0], torch.zeros_like(words[:, 0]) if layout.symmetric else words[:, 1]


def open_codes(
    x: Tensor, buffer: Tensor, layout: Layout, noise: Tensor | None, stream: int
) -> Tensor:
    """Tell of which elements the code may be one or the other, as the head of this file says.

    t in float64, which has room for it.
    """
    scale, low = (part[: layout.numel] for part in headers_of(buffer, layout))
    t = (x.float() - low).double() * (1.0 / scale).double()
    middle = MIDDLE[layout.bits]
    if noise is None:
        return from_middle(t) <= middle
    below = (256 * t).floor() + noise_of_codes(layout, noise, stream)
    crosses = (below / 256).floor() != ((below + 1) / 256).floor()
    return (from_middle(256 * t) <= 256 * middle) & crosses


def from_middle(t: Tensor) -> Tensor:
    """Return how far numbers are from the middle between two integers."""
    return (t - t.floor() - 0.5).abs()


def noise_of_codes(layout: Layout, noise: Tensor, stream: int) -> Tensor:
    """Return the byte of noise of each element."""
    found = reference.noise_bytes(layout.groups * layout.group_size, noise, stream)
    if layout.bits == 4:
        pairs = found.view(-1, layout.group_size // 2, 2)
        found = torch.cat([pairs[..., 0], pairs[..., 1]], 1).view(-1)
    return found[: layout.numel]


def unexplained(x: Tensor, layout: Layout, noise: Tensor | None, stream: int = STREAM) -> int:
    """Count what fusing does not explain: headers, padding, and codes away from a middle."""
    packed = quantize(x, layout, noise)
    expected = reference.quantize(x, layout, noise=noise, stream=stream)
    for part, other in zip(headers_of(packed, layout), headers_of(expected, layout), strict=True):
        if not torch.equal(part.view(torch.int32), other.view(torch.int32)):
            return layout.numel
    codes, others = codes_of(packed, layout), codes_of(expected, layout)
    apart = (codes - others).abs()
    wrong = (apart[: layout.numel] > 0) & ~open_codes(x, packed, layout, noise, stream)
    return int((wrong | (apart[: layout.numel] > 1)).sum() + apart[layout.numel :].sum())


@every_kind
@every_group
@every_dtype
@every_rounding
def test_packed_is_the_reference_s(
    kind: str, group: int, dtype: torch.dtype, stochastic: bool
) -> None:
    layout = layout_of(kind, 1_000_003, group)
    x = sample(layout.numel, dtype)
    assert unexplained(x, layout, seed_and_epoch() if stochastic else None) == 0


@every_kind
def test_comparison_sees_other_noise(kind: str) -> None:
    layout = layout_of(kind, 100_000)
    x = sample(layout.numel, torch.bfloat16)
    assert unexplained(x, layout, seed_and_epoch(), stream=STREAM + 1) > 1000


@every_kind
def test_stochastic_codes_that_fusing_changes_are_rare(kind: str) -> None:
    """Noise spreads t evenly, so it is within 2**-16 of a middle for 2**-15 of the elements.

    At 4 bits p is open for less than 2**-12 of them, a normal x being spread itself, and of those
    the noise makes another code of one in 256: less than 2**-20.
    """
    layout = layout_of(kind, 1 << 22)
    x = sample(layout.numel, torch.bfloat16)
    codes = codes_of(quantize(x, layout, seed_and_epoch()), layout)
    packed = reference.quantize(x, layout, noise=seed_and_epoch(), stream=STREAM)
    assert (codes != codes_of(packed, layout)).double().mean() <= (
        1e-4 if layout.bits == 8 else 1e-5
    )


@every_kind
@every_group
@every_dtype
def test_decoded_is_the_reference_s(kind: str, group: int, dtype: torch.dtype) -> None:
    """To the bit: code times scale has at most 16 bits, so that fusing rounds nothing away."""
    layout = layout_of(kind, 1_000_003, group)
    packed = reference.quantize(sample(layout.numel, dtype), layout)
    decoded = dequantize(packed, layout, dtype)
    assert torch.equal(decoded, reference.dequantize(packed, layout, dtype))


@every_kind
@every_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_decodes_to_nan_and_no_other_group_does(
    kind: str, dtype: torch.dtype, value: float
) -> None:
    layout = layout_of(kind, 100_000)
    x = sample(layout.numel, dtype)
    x[[0, 10_000, 99_999]] = value
    nan = dequantize(quantize(x, layout, seed_and_epoch()), layout, dtype).isnan()
    groups = torch.nn.functional.pad(nan, (0, -layout.numel % 128), value=True).view(-1, 128)
    assert groups.any(1).nonzero().view(-1).tolist() == [0, 78, 781]
    if layout.has_outliers:
        assert nan.nonzero().view(-1).tolist() == [0, 10_000, 99_999]
    else:
        assert groups.all(1).sum() == 3


@every_kind
@every_dtype
@pytest.mark.parametrize("offset", [1, 3, 8])
def test_view_at_an_odd_offset_packs_and_decodes_as_its_copy(
    kind: str, dtype: torch.dtype, offset: int
) -> None:
    layout = layout_of(kind, 50_001)
    view = sample(60_000, dtype)[offset : offset + layout.numel]
    packed = quantize(view, layout, seed_and_epoch())
    assert torch.equal(packed, quantize(view.clone(), layout, seed_and_epoch()))
    out = torch.zeros(60_000, dtype=dtype, device=GPU)
    launch.dequantize(packed, out[offset : offset + layout.numel], layout)
    assert torch.equal(out[offset : offset + layout.numel], dequantize(packed, layout, dtype))
    assert (out[:offset] == 0).all()
    assert (out[offset + layout.numel :] == 0).all()


@pytest.mark.parametrize("numel", [1, 4095, 4096, 4097, 10_000_001])
@pytest.mark.parametrize("offset", [0, 5])
def test_mask_is_packed_as_the_reference_and_restored(numel: int, offset: int) -> None:
    flags = (torch.randn(numel + offset, device=GPU) > 0)[offset:]
    size = Layout(numel, 1, 128, True).buffer_bytes
    buffer = torch.full((size,), 0xAB, dtype=torch.uint8, device=GPU)
    launch.pack_mask(flags, buffer)
    used = (numel + 7) // 8
    assert torch.equal(buffer[:used], reference.pack_mask(flags)[:used])
    restored = torch.zeros(numel, dtype=torch.bool, device=GPU)
    launch.unpack_mask(buffer, restored)
    assert torch.equal(restored, flags)


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["8sym", "4asym"])
def test_more_elements_than_an_int32_counts(kind: str) -> None:
    """A million elements over and over: each round must have the codes of the first."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    rounds, once = (1 << 11) + 2, 1 << 20
    base = sample(once, torch.bfloat16)
    layout = layout_of(kind, rounds * once + 5)
    x = torch.empty(layout.numel, dtype=torch.bfloat16, device=GPU)
    x[:-5].view(rounds, once).copy_(base)
    x[-5:] = base[:5]
    packed = quantize(x, layout)
    first = quantize(base, layout_of(kind, once))
    share = once * layout.bits // 8
    assert (packed[: rounds * share].view(rounds, share) == first[:share]).all()
    decoded = dequantize(packed, layout, torch.bfloat16)
    expected = dequantize(first, layout_of(kind, once), torch.bfloat16)
    assert (decoded[:-5].view(rounds, once) == expected).all()
    short = dequantize(quantize(base[:5], layout_of(kind, 5)), layout_of(kind, 5), torch.bfloat16)
    assert torch.equal(decoded[-5:], short)


def test_launches_on_the_current_stream() -> None:
    layout = layout_of("8sym", 1 << 22)
    x = torch.zeros(layout.numel, device=GPU)
    source = sample(layout.numel, torch.float32)
    expected = quantize(source, layout)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # on another stream the kernels would read the zeros
        x.copy_(source)
        packed = quantize(x, layout)
        decoded = dequantize(packed, layout, torch.float32)
    side.synchronize()
    assert torch.equal(packed, expected)
    assert torch.equal(decoded, dequantize(expected, layout, torch.float32))


def test_one_binary_serves_every_size_and_stream() -> None:
    layout = layout_of("8sym", 100_003)
    x = sample(layout.numel, torch.bfloat16)
    noise = seed_and_epoch()
    quantize(x, layout, noise)
    kernel = launch.quantize_plan(8, True, 128, True).kernel
    caches = kernel.device_caches if hasattr(kernel, "device_caches") else None
    if caches is None:
        pytest.skip("this triton keeps its cache elsewhere")
    before = len(caches[0][0])
    for numel, stream in [(1, 1), (16, 16), (100_000, 2**32 - 1)]:
        quantize(x[:numel], layout_of("8sym", numel), noise, stream)
    assert len(caches[0][0]) == before
