"""The kernels against the reference, in Triton's interpreter, and the layout's arithmetic.

The interpreter computes in numpy, one operation at a time: nothing is fused, so all bytes of a
packed tensor must equal the reference's. What the GPU does differently is tested in tests/gpu.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from interpreted_kernels import POISON, InterpretedKernels, Noise, mask_bytes
from torch import Tensor

from vramx.compression import reference
from vramx.kernels import launch
from vramx.kernels.layout import Layout

pytest.importorskip("triton")

GROUPS = (16, 128, 1024)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDINGS = {"nearest": None, "stochastic": Noise()}
KINDS = {"8sym": (8, True), "8asym": (8, False), "4sym": (4, True), "4asym": (4, False)}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_group = pytest.mark.parametrize("group", GROUPS)
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture(scope="module")
def kernels() -> Iterator[InterpretedKernels]:
    kernels = InterpretedKernels()
    yield kernels
    kernels.close()


def layout_of(kind: str, numel: int, group: int = 128) -> Layout:
    bits, symmetric = KINDS[kind]
    return Layout(numel, bits, group, symmetric)


def sample(numel: int, group: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, with groups that are all positive, all negative, zero, tiny and huge."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    limit = 6e4 if dtype == torch.float16 else 3e38
    # The interpreter takes bfloat16's denormals for zero; a GPU does not (see tests/gpu).
    tiny = 1e-33 if dtype == torch.bfloat16 else 1e-40
    for i, change in enumerate(
        (
            lambda x: x.abs() + 1,
            lambda x: -x.abs() - 1,
            torch.zeros_like,
            lambda x: x * tiny,
            lambda x: (x * limit).clamp(-limit / 2, limit / 2),
            lambda x: torch.where(x > 0, 0.0, -0.0),
        )
    ):
        part = x[(i + 1) * group : (i + 2) * group]
        part.copy_(change(part))
    return x.to(dtype)


def differences(packed: Tensor, expected: Tensor, layout: Layout) -> int:
    """Count the groups whose codes or header differ; of a NaN scale, only that it is one."""
    headers, codes = parts(packed, layout)
    expected_headers, expected_codes = parts(expected, layout)
    nan = headers[:, 0].isnan() & expected_headers[:, 0].isnan()
    equal = (headers.view(torch.int16) == expected_headers.view(torch.int16)).all(1)
    equal &= (codes == expected_codes).all(1)
    return int((~(equal | nan)).sum())


def parts(buffer: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the headers, scale first, outliers last, and the code bytes, a row a group."""
    sizes = [layout.code_bytes, layout.outlier_bytes, layout.header_bytes]
    _, outliers, headers = buffer.split(sizes)
    headers = headers.view(torch.bfloat16).view(layout.groups, -1)
    if layout.has_outliers:
        outliers = outliers.view(torch.bfloat16).view(layout.groups, 2)
        headers = torch.cat([headers, outliers], 1)
    used = layout.groups * layout.group_size * layout.bits // 8
    return headers, buffer[:used].view(layout.groups, -1)


def reference_of(flat: Tensor, layout: Layout, noise: Noise | None) -> Tensor:
    if noise is None:
        return reference.quantize(flat, layout)
    return reference.quantize(flat, layout, noise=noise.state(), stream=noise.stream)


def tile_of(layout: Layout, rounding: str) -> int:
    stochastic = rounding == "stochastic"
    return launch.quantize_plan(layout.bits, layout.symmetric, layout.group_size, stochastic).tile


@every_kind
@every_group
@every_rounding
def test_packed_bytes_equal_the_reference(
    kernels: InterpretedKernels, kind: str, group: int, rounding: str
) -> None:
    """A whole tile, and a short one that ends inside a group and takes more than one turn."""
    tile = tile_of(layout_of(kind, 1, group), rounding)
    layout = layout_of(kind, tile + tile // 2 + 5, group)
    x = sample(layout.numel, group)
    packed = kernels.quantize(x, layout, ROUNDINGS[rounding])
    assert differences(packed, reference_of(x, layout, ROUNDINGS[rounding]), layout) == 0


@every_kind
@every_dtype
@pytest.mark.parametrize("numel", [1, 8, 65, 1000])
def test_packed_bytes_of_small_tensors_equal_the_reference(
    kernels: InterpretedKernels, kind: str, dtype: torch.dtype, numel: int
) -> None:
    layout = layout_of(kind, numel, 64)
    x = sample(numel, 64, dtype)
    packed = kernels.quantize(x, layout, Noise())
    assert differences(packed, reference_of(x, layout, Noise()), layout) == 0


@pytest.mark.parametrize("defect", ["scale rounded to nearest", "six rounds of Philox"])
@every_kind
def test_comparison_sees_a_defect_in_packing(
    kernels: InterpretedKernels, kind: str, defect: str
) -> None:
    layout = layout_of(kind, 2048)
    x = sample(2048, 128)
    packed = kernels.quantize(x, layout, Noise(), defect=defect)
    assert differences(packed, reference_of(x, layout, Noise()), layout) > 0


@pytest.mark.parametrize("kind", ["4sym", "4asym"])
def test_comparison_sees_a_bias_of_half_a_256th_in_the_noise(
    kernels: InterpretedKernels, kind: str
) -> None:
    layout = layout_of(kind, 4096)
    x = sample(4096, 128)
    packed = kernels.quantize(x, layout, Noise(), defect="noise added to a cut quotient")
    assert differences(packed, reference_of(x, layout, Noise()), layout) > 0


@every_rounding
@pytest.mark.parametrize("kind", ["8asym", "4asym"])
def test_minimum_of_minus_zero_is_stored_as_plus_zero(
    kernels: InterpretedKernels, kind: str, rounding: str
) -> None:
    layout = layout_of(kind, 256)
    x = torch.tensor([0.0, -0.0, 1.0, 2.0] * 32 + [-0.0, 3.0, 1.0, 2.0] * 32)
    for packed in (
        kernels.quantize(x, layout, ROUNDINGS[rounding]),
        reference_of(x, layout, ROUNDINGS[rounding]),
    ):
        assert parts(packed, layout)[0].view(torch.int16)[:, 1].tolist() == [0, 0]


@pytest.mark.parametrize("defect", ["", "half rounded away"])
@every_kind
def test_ties_go_to_the_even_code(kernels: InterpretedKernels, kind: str, defect: str) -> None:
    """With a peak just below the largest code the scale is 1, and every half is a tie."""
    layout = layout_of(kind, 2048)
    largest = {"8sym": 126, "8asym": 255, "4sym": 7, "4asym": 15}[kind]
    lowest = 1 - largest if layout.symmetric else 0
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(2 * lowest, 2 * largest - 1, (2048,), generator=generator) / 2
    x[::128] = largest * (1 - 2**-9)
    x[1::128] = lowest
    if layout.has_outliers:
        x[2::128], x[3::128] = 1000.0, -500.0
    packed = kernels.quantize(x, layout, defect=defect)
    assert (differences(packed, reference_of(x, layout, None), layout) > 0) == bool(defect)


@every_kind
@every_group
def test_decoded_floats_equal_the_reference(
    kernels: InterpretedKernels, kind: str, group: int
) -> None:
    layout = layout_of(kind, 12345, group)
    packed = reference.quantize(sample(layout.numel, group), layout)
    decoded = kernels.dequantize(packed, layout, torch.float32)
    expected = reference.dequantize(packed, layout, torch.float32)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)


@every_kind
@every_dtype
@pytest.mark.parametrize("numel", [1, 64, 65, 1000])
def test_decoded_values_are_the_reference_s_to_one_unit(
    kernels: InterpretedKernels, kind: str, dtype: torch.dtype, numel: int
) -> None:
    """One unit of the type, because the interpreter cuts to bfloat16 where a GPU rounds."""
    layout = layout_of(kind, numel, 64)
    packed = reference.quantize(sample(numel, 64, dtype), layout)
    decoded = kernels.dequantize(packed, layout, dtype)
    expected = reference.dequantize(packed, layout, dtype)
    assert units_apart(decoded, expected).max() <= (dtype == torch.bfloat16)


def units_apart(a: Tensor, b: Tensor) -> Tensor:
    """Count the steps between numbers of one type, by their place in the order of that type."""
    size = torch.int32 if a.dtype == torch.float32 else torch.int16

    def place(x: Tensor) -> Tensor:
        bits = x.view(size).long()
        return torch.where(bits < 0, -(bits & torch.iinfo(size).max), bits)

    return (place(a) - place(b)).abs()


def test_comparison_sees_a_defect_in_decoding(kernels: InterpretedKernels) -> None:
    layout = layout_of("8sym", 1000)
    packed = reference.quantize(sample(1000, 128), layout)
    decoded = kernels.dequantize(packed, layout, torch.bfloat16, "decoded with an offset")
    assert units_apart(decoded, reference.dequantize(packed, layout, torch.bfloat16)).max() > 1


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, -1)])
def test_outliers_come_back_exactly_and_cost_the_rest_nothing(
    kernels: InterpretedKernels, signs: tuple[int, int], ties: bool
) -> None:
    layout = layout_of("8sym", 1024)
    x = sample(1024, 1 << 20).bfloat16().float()
    rest = x.clone()
    for at, sign in zip((5, 77), signs, strict=True):
        x[at::128] = sign * (1000.0 if ties else 1000.0 + 8 * at)
        rest[at::128] = 0
    decoded = kernels.dequantize(kernels.quantize(x, layout), layout, torch.float32)
    outliers = rest == 0
    assert torch.equal(decoded[outliers], x[outliers])
    peak = rest.view(-1, 128).abs().amax(1, keepdim=True)
    # Half a step: rounded up, the step is 2**-7 more than a 126th of the peak at most.
    assert ((decoded - x).view(-1, 128).abs() <= peak / 126 * (1 + 2**-7) / 2 * 1.001).all()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("values", [(3.0,), (3.0, -3.0), (3.0, 1e-3), (0.0, 2.0), (-0.0, 0.0)])
def test_groups_of_one_or_two_numbers_are_exact(
    kernels: InterpretedKernels, values: tuple[float, ...], group: int
) -> None:
    layout = layout_of("8sym", 5 * group + 3, group)
    x = torch.tensor(values).repeat(6 * group)[: layout.numel].bfloat16().float()
    packed = kernels.quantize(x, layout)
    assert differences(packed, reference_of(x, layout, None), layout) == 0
    assert torch.equal(kernels.dequantize(packed, layout, torch.float32), x)


def test_comparison_sees_outliers_in_the_scale(kernels: InterpretedKernels) -> None:
    layout = layout_of("8sym", 2048)
    x = sample(2048, 128)
    packed = kernels.quantize(x, layout, defect="outliers in the scale")
    assert differences(packed, reference_of(x, layout, None), layout) > 0


def test_comparison_sees_one_outlier_for_both(kernels: InterpretedKernels) -> None:
    layout = layout_of("8sym", 1000)
    packed = reference.quantize(sample(1000, 128), layout)
    decoded = kernels.dequantize(packed, layout, torch.bfloat16, "one outlier for both")
    assert units_apart(decoded, reference.dequantize(packed, layout, torch.bfloat16)).max() > 1


@every_kind
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_group_that_is_not_finite_decodes_to_nan_and_no_other_does(
    kernels: InterpretedKernels, kind: str, value: float
) -> None:
    layout = layout_of(kind, 1000)
    x = sample(1000, 128)
    x[300] = value
    x[999] = value
    decoded = kernels.dequantize(kernels.quantize(x, layout, Noise()), layout, torch.float32)
    nan = decoded.isnan()
    assert nan[256:384].all()
    assert nan[896:].all()
    assert not nan[:256].any()
    assert not nan[384:896].any()


@every_kind
def test_the_test_of_nan_sees_a_kernel_that_loses_them(
    kernels: InterpretedKernels, kind: str
) -> None:
    layout = layout_of(kind, 128)
    x = torch.zeros(128)
    x[5] = torch.inf
    defect = "NaN of an outlier not kept" if layout.has_outliers else "NaN not kept"
    packed = kernels.quantize(x, layout, defect=defect)
    assert not kernels.dequantize(packed, layout, torch.float32).isnan().any()


@every_kind
@every_rounding
def test_zeros_decode_to_zeros(kernels: InterpretedKernels, kind: str, rounding: str) -> None:
    layout = layout_of(kind, 300)
    packed = kernels.quantize(torch.zeros(300), layout, ROUNDINGS[rounding])
    # Of the asymmetric minimum, zero, noise makes no code but 0 either: it is below a half.
    assert (kernels.dequantize(packed, layout, torch.float32) == 0).all()


@every_kind
@every_rounding
@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float16, 65504.0), (torch.bfloat16, 3e38), (torch.float32, 3e38)],
    ids=str,
)
def test_largest_numbers_stay_finite(
    kernels: InterpretedKernels, kind: str, rounding: str, dtype: torch.dtype, largest: float
) -> None:
    layout = layout_of(kind, 256)
    x = torch.linspace(0, largest, 256).to(dtype)  # one sign: the range must not overflow
    packed = kernels.quantize(x, layout, ROUNDINGS[rounding])
    assert kernels.dequantize(packed, layout, dtype).isfinite().all()


@every_kind
@every_dtype
@pytest.mark.parametrize("offset", [1, 8])
def test_view_at_an_odd_offset_packs_as_its_copy(
    kernels: InterpretedKernels, kind: str, dtype: torch.dtype, offset: int
) -> None:
    layout = layout_of(kind, 700)
    view = sample(800, 128, dtype)[offset : offset + 700]
    packed = kernels.quantize(view, layout, Noise())
    assert differences(packed, reference_of(view.clone(), layout, Noise()), layout) == 0


@every_kind
def test_codes_of_the_padding_are_zero(kernels: InterpretedKernels, kind: str) -> None:
    layout = layout_of(kind, 129)
    packed = kernels.quantize(sample(129, 128) + 5, layout, Noise())
    per_byte = 8 // layout.bits
    codes = packed[: layout.groups * 128 // per_byte].view(layout.groups, -1)[1]
    assert (codes[1:] == 0).all()
    assert layout.bits == 8 or codes[0] < 16


@every_kind
def test_empty_tensor_launches_nothing(kernels: InterpretedKernels, kind: str) -> None:
    layout = layout_of(kind, 0)
    packed = kernels.quantize(torch.empty(0), layout, Noise())
    assert kernels.dequantize(packed, layout, torch.float32).numel() == 0


@pytest.mark.parametrize("block", [0, 2**32 - 256, 2**32, 2**40 + 512])
@pytest.mark.parametrize(("rows", "cols"), [(32, 8), (4, 64)])
def test_noise_is_philox_of_a_64_bit_counter(
    kernels: InterpretedKernels, block: int, rows: int, cols: int
) -> None:
    noise = Noise()
    blocks = torch.arange(rows * cols // 8) + block
    word = 0xFFFFFFFF
    words = reference.philox(
        [blocks & word, blocks >> 32, torch.tensor(noise.stream), torch.tensor(noise.epoch)],
        [torch.tensor(noise.seed & word), torch.tensor((noise.seed >> 32) & word)],
    )
    halves = torch.stack([half for w in words for half in (w & 0xFFFF, w >> 16)], 1).view(-1)
    # (h + 1/2) / 2**16 - 1/2 needs 17 bits: float32 has it exactly.
    expected = ((halves * 2 + 1).double() / 2**17 - 0.5).float()
    torch.testing.assert_close(
        kernels.noise(block, rows, cols, noise), expected, rtol=0, atol=0, equal_nan=False
    )


@pytest.mark.parametrize("change", [{"seed": 7}, {"epoch": 4}, {"stream": 6}])
def test_noise_depends_on(kernels: InterpretedKernels, change: dict[str, int]) -> None:
    other = kernels.noise(0, 4, 64, Noise(**change))
    assert (kernels.noise(0, 4, 64, Noise()) != other).float().mean() > 0.9


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 4096, 4097, 9000])
@pytest.mark.parametrize("offset", [0, 3])
def test_mask_bits_equal_the_reference(
    kernels: InterpretedKernels, numel: int, offset: int
) -> None:
    flags = (torch.randn(numel + offset, generator=torch.Generator().manual_seed(1)) > 0)[offset:]
    used = (numel + 7) // 8
    assert torch.equal(kernels.pack_mask(flags)[:used], reference.pack_mask(flags.clone())[:used])


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 4096, 4097, 9000])
def test_mask_is_restored_exactly(kernels: InterpretedKernels, numel: int) -> None:
    flags = torch.randn(numel, generator=torch.Generator().manual_seed(2)) > 0
    restored = kernels.unpack_mask(kernels.pack_mask(flags), numel)
    assert torch.equal(restored, flags.view(torch.uint8))


def test_supported_on_the_cpu_where_triton_interprets(kernels: InterpretedKernels) -> None:
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


@pytest.mark.parametrize(("numel", "size"), [(0, 0), (1, 16), (128, 16), (129, 32)])
def test_layout_of_a_mask_is_a_bit_an_element(numel: int, size: int) -> None:
    assert mask_bytes(numel) == size
    assert Layout(numel, 1, 128, True).buffer_bytes == size


def test_poison_is_no_code_that_a_test_expects() -> None:
    assert POISON not in (0, 1, 255)
