"""The kernels against the reference in Triton's interpreter, which fuses nothing: equal bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted_kernels import Noise, kernels
from torch import Tensor

from vramx.compression.codec import reference
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


def wrong_groups(x: Tensor, layout: Layout, noise: Noise | None, defect: str = "") -> int:
    """Count the groups that the kernel packs as the reference does not."""
    packed = kernels.quantize(x, layout, noise, defect=defect)
    return differences(packed, reference_of(x.clone(), layout, noise), layout)


@every_kind
@every_group
@every_rounding
def test_packed_bytes_equal_the_reference(kind: str, group: int, rounding: str) -> None:
    """A whole tile, and a short one that ends inside a group and takes more than one turn."""
    bits, symmetric = KINDS[kind]
    tile = launch.quantize_plan(bits, symmetric, group, rounding == "stochastic").tile
    layout = layout_of(kind, tile + tile // 2 + 5, group)
    assert wrong_groups(sample(layout.numel, group), layout, ROUNDINGS[rounding]) == 0


@every_kind
@pytest.mark.parametrize(
    ("dtype", "numel"),
    [*((torch.float32, numel) for numel in (1, 8, 65, 1000)), *((d, 65) for d in DTYPES[:2])],
    ids=str,
)
def test_packed_bytes_of_small_tensors_equal_the_reference(
    kind: str, dtype: torch.dtype, numel: int
) -> None:
    layout = layout_of(kind, numel, 64)
    assert wrong_groups(sample(numel, 64, dtype), layout, Noise()) == 0


DEFECTS = {
    "scale rounded to nearest": [*KINDS],
    "six rounds of Philox": [*KINDS],
    "noise added to a cut quotient": ["8sym", "8asym", "4sym", "4asym"],  # a bias of half a 256th
    "outliers in the scale": ["8sym"],
}


@pytest.mark.parametrize(("defect", "kind"), [(d, kind) for d in DEFECTS for kind in DEFECTS[d]])
def test_comparison_sees_a_defect_in_packing(kind: str, defect: str) -> None:
    layout = layout_of(kind, 4096)
    assert wrong_groups(sample(4096, 128), layout, Noise(), defect) > 0


@every_rounding
@pytest.mark.parametrize("kind", ["8asym", "4asym"])
def test_minimum_of_minus_zero_is_stored_as_plus_zero(kind: str, rounding: str) -> None:
    layout = layout_of(kind, 256)
    x = torch.tensor([0.0, -0.0, 1.0, 2.0] * 32 + [-0.0, 3.0, 1.0, 2.0] * 32)
    for packed in (
        kernels.quantize(x, layout, ROUNDINGS[rounding]),
        reference_of(x, layout, ROUNDINGS[rounding]),
    ):
        assert parts(packed, layout)[0].view(torch.int16)[:, 1].tolist() == [0, 0]


@pytest.mark.parametrize("defect", ["", "half rounded away"])
@every_kind
def test_ties_go_to_the_even_code(kind: str, defect: str) -> None:
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
@pytest.mark.parametrize(
    ("group", "dtype", "numel"),
    [
        *((group, torch.float32, 12345) for group in GROUPS),
        *((64, dtype, numel) for dtype in DTYPES for numel in (1, 64, 65, 1000)),
    ],
    ids=str,
)
def test_decoded_values_are_the_reference_s_to_one_unit(
    kind: str, group: int, dtype: torch.dtype, numel: int
) -> None:
    """One of bfloat16, to which the interpreter cuts where a GPU rounds; of others none."""
    layout = layout_of(kind, numel, group)
    packed = reference.quantize(sample(numel, group, dtype), layout)
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


@pytest.mark.parametrize("defect", ["decoded with an offset", "one outlier for both"])
def test_comparison_sees_a_defect_in_decoding(defect: str) -> None:
    layout = layout_of("8sym", 1000)
    packed = reference.quantize(sample(1000, 128), layout)
    decoded = kernels.dequantize(packed, layout, torch.bfloat16, defect)
    assert units_apart(decoded, reference.dequantize(packed, layout, torch.bfloat16)).max() > 1


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, -1)])
def test_outliers_come_back_exactly_and_cost_the_rest_nothing(
    signs: tuple[int, int], ties: bool
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
def test_groups_of_one_or_two_numbers_are_exact(values: Any, group: int) -> None:
    layout = layout_of("8sym", 5 * group + 3, group)
    x = torch.tensor(values).repeat(6 * group)[: layout.numel].bfloat16().float()
    packed = kernels.quantize(x, layout)
    assert differences(packed, reference_of(x, layout, None), layout) == 0
    assert torch.equal(kernels.dequantize(packed, layout, torch.float32), x)


@every_kind
@pytest.mark.parametrize(
    ("value", "loses"),
    [*((v, False) for v in (torch.nan, -torch.nan, torch.inf, -torch.inf)), (torch.inf, True)],
)
def test_what_is_not_finite_decodes_to_nan_and_no_other_group_does(
    kind: str, value: float, loses: bool
) -> None:
    """And a kernel that loses them is seen."""
    layout = layout_of(kind, 1000)
    x = sample(1000, 128)
    x[300] = x[999] = value
    lost = "NaN of an outlier not kept" if layout.has_outliers else "NaN not kept"
    packed = kernels.quantize(x, layout, Noise(), defect=lost if loses else "")
    nan = kernels.dequantize(packed, layout, torch.float32).isnan()
    expected = torch.zeros(1000, dtype=torch.bool)
    if layout.has_outliers:
        expected[300] = expected[999] = True
    else:
        expected[256:384] = expected[896:] = True
    assert torch.equal(nan, expected) != loses


@every_kind
@every_rounding
@pytest.mark.parametrize("numel", [0, 300])
def test_zeros_decode_to_zeros(kind: str, rounding: str, numel: int) -> None:
    layout = layout_of(kind, numel)
    packed = kernels.quantize(torch.zeros(numel), layout, ROUNDINGS[rounding])
    # Of the asymmetric minimum, zero, noise makes no code but 0 either: it is below a half.
    assert torch.equal(kernels.dequantize(packed, layout, torch.float32), torch.zeros(numel))


@every_kind
@pytest.mark.parametrize(
    ("dtype", "offset"), [*((dtype, 1) for dtype in DTYPES), (torch.bfloat16, 8)], ids=str
)
def test_view_at_an_odd_offset_packs_as_its_copy(
    kind: str, dtype: torch.dtype, offset: int
) -> None:
    view = sample(800, 128, dtype)[offset : offset + 700]
    assert wrong_groups(view, layout_of(kind, 700), Noise()) == 0


@every_kind
def test_codes_of_the_padding_are_zero(kind: str) -> None:
    layout = layout_of(kind, 129)
    packed = kernels.quantize(sample(129, 128) + 5, layout, Noise())
    per_byte = 8 // layout.bits
    codes = packed[: layout.groups * 128 // per_byte].view(layout.groups, -1)[1]
    assert (codes[1:] == 0).all()
    assert layout.bits == 8 or codes[0] < 16
