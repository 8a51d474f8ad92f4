"""The kernels that pack a function of what they read, in Triton's interpreter.

Of norms and roots all bytes must equal what the reference packs of numbers that torch computes;
arcsines and sines are the kernels' own polynomials, so what comes back is held to a bound.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted_kernels import Noise, kernels
from test_kernels import differences, reference_of
from torch import Tensor

from vramx.compression.codec import codec, reference, roots
from vramx.compression.codec.geometry import describe, flat
from vramx.compression.codec.mapping import ANGLES, ENDS, SIGN, Within
from vramx.compression.codec.normalised import Normal, Statistics
from vramx.compression.codec.rows import scaled
from vramx.compression.config import MASK_FORMAT, Format
from vramx.kernels.launch import Function
from vramx.kernels.layout import Layout

pytest.importorskip("triton")

FORMATS = {"8sym": (8, True, 128), "8asym": (8, False, 64), "4asym": (4, False, 64)}
# inner, period, and how often all of them repeat
REPETITIONS = {
    "rows of groups": (256, 21, 1),
    "rows": (200, 20, 1),
    "channels": (129, 5, 7),
    "small channels": (49, 30, 3),
    "channels last": (1, 48, 90),
}
ROUNDINGS = {"nearest": None, "stochastic": Noise()}
every_format = pytest.mark.parametrize("name", FORMATS)


def layout_of(name: str, numel: int) -> Layout:
    bits, symmetric, group = FORMATS[name]
    return Layout(numel, bits, group, symmetric)


def normal_of(repetition: str) -> tuple[Tensor, Function]:
    """Return numbers far from zero, of different scale; of two the deviation is none."""
    inner, period, times = REPETITIONS[repetition]
    torch.manual_seed(0)
    x = torch.randn(times, period, inner) * torch.logspace(-2, 2, period)[:, None]
    x += 100 * torch.randn(period, 1)
    rstd = x.var((0, 2), correction=0).rsqrt()
    rstd[1], rstd[2] = torch.inf, 0.0
    return x, Function("normal", x.mean((0, 2)), rstd, inner, period)


def numbers_of(x: Tensor, function: Function) -> tuple[Tensor, Tensor, Tensor]:
    """Return the roots that are packed, the factors and the means, as x has them."""
    mean, rstd = function.mean, function.rstd
    factor = torch.where((rstd > 0) & rstd.isfinite(), rstd, 1.0)[:, None]
    return roots.ROOT_OF_MOST.of((x - mean[:, None]) * factor), factor, mean[:, None]


@pytest.mark.parametrize(
    ("name", "rounding"), [*((name, "stochastic") for name in FORMATS), ("8sym", "nearest")]
)
@pytest.mark.parametrize("repetition", REPETITIONS)
def test_packed_bytes_of_a_norm_equal_the_reference_and_come_back(
    name: str, repetition: str, rounding: str
) -> None:
    x, function = normal_of(repetition)
    layout = layout_of(name, x.numel())
    numbers, factor, mean = numbers_of(x, function)
    packed = kernels.quantize_map(x.flatten(), layout, function, ROUNDINGS[rounding])
    expected = reference_of(numbers.flatten(), layout, ROUNDINGS[rounding])
    assert differences(packed, expected, layout) == 0
    back = kernels.dequantize_map(expected, layout, function, torch.float32)
    decoded = reference.dequantize(expected, layout, torch.float32).view_as(x)
    numbers = decoded * decoded.abs().clamp(max=2)
    assert torch.equal(back.view_as(x), numbers * (1 / factor) + mean)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("length", [8, 24, 200, 256])
@every_format
def test_packed_bytes_of_rows_equal_the_reference_and_come_back(
    name: str, length: int, rounding: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(21, length) * torch.logspace(-4, 4, 21)[:, None]
    x[3], x[7, 2], x[11, 5] = 0.0, torch.nan, torch.inf
    mapping, layout = scaled(x, length), layout_of(name, x.numel())
    assert mapping.function is not None
    packed = kernels.quantize_map(x.flatten(), layout, mapping.function, ROUNDINGS[rounding])
    expected = reference_of(mapping.of(x.flatten()), layout, ROUNDINGS[rounding])
    assert differences(packed, expected, layout) == 0
    back = kernels.dequantize_map(packed, layout, mapping.function, torch.float32)
    decoded = mapping.back(reference.dequantize(packed, layout, torch.float32), torch.float32)
    assert torch.equal(back.nan_to_num(5), decoded.nan_to_num(5))


def test_the_places_are_the_ones_that_are_meant() -> None:
    places = {name: Function("normal", inner=i).place(128) for name, (i, *_) in REPETITIONS.items()}
    assert list(places.values()) == ["group", "split", "split", "each", "each"]


@pytest.mark.parametrize("defect", ["the end repeated unmapped", "any deviation used"])
def test_comparison_sees_a_defect_of_norms(defect: str) -> None:
    x, function = normal_of("channels")
    layout = layout_of("8sym", x.numel())
    packed = kernels.quantize_map(x.flatten(), layout, function, defect=defect)
    expected = reference_of(numbers_of(x, function)[0].flatten(), layout, None)
    assert differences(packed, expected, layout) > 0


SATURATING = {"tanh": (torch.tanh, "TanhBackward0"), "sigmoid": (torch.sigmoid, "SigmoidBackward0")}


def saturated(name: str) -> Tensor:
    torch.manual_seed(0)
    y: Tensor = SATURATING[name][0](torch.randn(5000) * torch.logspace(-6, 1.5, 5000))
    return y


def less_exact(packed: Tensor, expected: Tensor, numbers: Tensor, layout: Layout) -> int:
    """Count the groups of which packed bytes are farther from what they stand for than others.

    Bytes themselves may differ: where a quotient lies next to a half a last bit of the number
    decides its code, and of a group that is next to equal which two are its outliers; and each
    machine's torch has sines of its own. Kernels' are 2e-7 off at most, as are these.
    """

    def errors(buffer: Tensor) -> Tensor:
        error = (reference.dequantize(buffer, layout, torch.float32) - numbers).abs()
        filled = layout.groups * layout.group_size - error.numel()
        return torch.nn.functional.pad(error, (0, filled)).view(layout.groups, -1).amax(1)

    return int((~(errors(packed) <= errors(expected) + 4e-7)).sum())


@every_format
@pytest.mark.parametrize("kind", SATURATING)
def test_angles_come_back_as_torch_computes_them(kind: str, name: str) -> None:
    y, layout = saturated(kind), layout_of(name, 5000)
    angle = ANGLES[SATURATING[kind][1]]
    packed = kernels.quantize_map(y, layout, Function(kind))
    expected = reference.quantize(angle.of(y), layout)
    assert less_exact(packed, expected, angle.of(y), layout) == 0
    back = kernels.dequantize_map(expected, layout, Function(kind), torch.float32)
    decoded = reference.dequantize(expected, layout, torch.float32)
    assert (back - angle.back(decoded, torch.float32)).abs().max() <= 4e-7


@pytest.mark.parametrize("kind", SATURATING)
def test_comparison_sees_one_series_for_all_angles(kind: str) -> None:
    y, layout = saturated(kind), layout_of("8sym", 5000)
    defect = "one series for all angles"
    packed = kernels.quantize_map(y, layout, Function(kind), defect=defect)
    angles = ANGLES[SATURATING[kind][1]].of(y)
    expected = reference.quantize(angles, layout)
    assert less_exact(packed, expected, angles, layout) > layout.groups / 8


@every_format
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", SATURATING)
def test_packed_bytes_of_ends_equal_the_reference_and_come_back(
    kind: str, rounding: str, name: str
) -> None:
    y, layout = saturated(kind), layout_of(name, 5000)
    y[77], y[1000], y[3001], y[4001], y[4002] = torch.nan, 1e-30, 1.0, 0.0, 1 - 2**-24
    ends = ENDS[SATURATING[kind][1]]
    assert ends.function == Function(f"ends of {kind}")
    packed = kernels.quantize_map(y, layout, ends.function, ROUNDINGS[rounding])
    expected = reference_of(ends.of(y), layout, ROUNDINGS[rounding])
    assert differences(packed, expected, layout) == 0
    back = kernels.dequantize_map(packed, layout, ends.function, torch.float32)
    decoded = ends.back(reference.dequantize(packed, layout, torch.float32), torch.float32)
    assert torch.equal(back.nan_to_num(5), decoded.nan_to_num(5))


@pytest.mark.parametrize("kind", SATURATING)
def test_ends_come_back_from_their_own_numbers(kind: str) -> None:
    """A number of float32, and a bit of the distance, off: 2e-5 of it at the most, next to zero."""
    ends, y = ENDS[SATURATING[kind][1]], saturated(kind).double()
    y = torch.cat([y.float(), torch.tensor([0.0, 1.0, 0.5, 2**-60, 1 - 2**-24])])
    back = ends.back(ends.of(y), torch.float32)
    for end in (0, 1) if kind == "sigmoid" else (-1, 0, 1):
        assert ((back - y).abs() <= 2e-5 * (y - end).abs() + (6e-8 if end else 0)).all()
    assert torch.equal(back[-5:-3], y[-5:-3])


BOUNDS = {"within 6": 6, "within 20": 20}


def mapping_of(kind: str, group: int) -> Any:
    return roots.ROOT if kind == "root" else Within(BOUNDS[kind], group)


def of_every_size(kind: str) -> Tensor:
    """Return numbers, a few of which are not finite, and for bounds a group that has one sign."""
    torch.manual_seed(0)
    x = torch.randn(5000) * torch.logspace(-10, 2, 5000)
    if kind != "root":
        x = torch.randn(5000) * torch.logspace(-3, 2, 5000).flip(0)
        x[1024:2048] = -30 - x[1024:2048].abs()
    x[77], x[3001], x[4001], x[4500] = torch.inf, torch.nan, -torch.inf, -50.0
    return x


@every_format
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", ["root", *BOUNDS])
def test_packed_bytes_of_a_mapping_equal_the_reference_and_come_back(
    name: str, rounding: str, kind: str
) -> None:
    x, layout = of_every_size(kind), layout_of(name, 5000)
    mapping = mapping_of(kind, layout.group_size)
    packed = kernels.quantize_map(x, layout, Function(kind), ROUNDINGS[rounding])
    assert (
        differences(packed, reference_of(mapping.of(x), layout, ROUNDINGS[rounding]), layout) == 0
    )
    back = kernels.dequantize_map(packed, layout, Function(kind), torch.float32)
    decoded = mapping.back(reference.dequantize(packed, layout, torch.float32), torch.float32)
    assert torch.equal(back.nan_to_num(5), decoded.nan_to_num(5))


@pytest.mark.parametrize("kind", BOUNDS)
def test_comparison_sees_arguments_without_a_bound(kind: str) -> None:
    x, layout = torch.randn(5000) * 100, layout_of("8sym", 5000)
    packed = kernels.quantize_map(x, layout, Function(kind), defect="arguments as they are")
    expected = reference.quantize(Within(BOUNDS[kind], layout.group_size).of(x), layout)
    assert differences(packed, expected, layout) > 0


@pytest.mark.parametrize("numel", [1, 8, 4096, 5001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_signs_come_back(numel: int, dtype: torch.dtype) -> None:
    x = torch.randn(numel).to(dtype)
    x[numel // 2], x[0] = torch.nan, 0.0
    bits = kernels.pack_signs(x)
    used = -(-numel // 8)
    assert torch.equal(bits[:used], reference.pack_mask(SIGN.of(x))[:used])
    back = kernels.unpack_signs(bits, numel, dtype)
    assert torch.equal(back, SIGN.back(SIGN.of(x), dtype))


# Which statistics an element has, and that the codec and the kernels agree on it.

SEEN: dict[str, Any] = {
    "rows": lambda: (torch.randn(3, 5, 48), (3, 5, 48), (3, 5, 1)),
    "matrices": lambda: (torch.randn(3, 5, 6, 8), (3, 5, 6, 8), (3, 5, 1, 1)),
    "groups": lambda: (torch.randn(3, 6, 4, 5), (3, 2, 3, 4, 5), (3, 2, 1, 1, 1)),
    "planes": lambda: (torch.randn(3, 6, 4, 5), (3, 6, 4, 5), (1, 6, 1, 1)),
    "last": lambda: (
        torch.randn(3, 6, 4, 5).to(memory_format=torch.channels_last),
        (3, 6, 4, 5),
        (1, 6, 1, 1),
    ),
    "compacted": lambda: (torch.randn(3, 6, 4, 9)[..., :5], (3, 6, 4, 5), (1, 6, 1, 1)),
}
OTHERS: dict[str, Any] = {
    "rows in turn": lambda: (torch.randn(5, 3, 48).transpose(0, 1), (3, 5, 48), (3, 5, 1)),
    "groups last": lambda: (
        torch.randn(3, 6, 4, 5).to(memory_format=torch.channels_last),
        (3, 2, 3, 4, 5),
        (3, 2, 1, 1, 1),
    ),
}


def normal(x: Tensor, size: tuple[int, ...], ones: tuple[int, ...]) -> Normal:
    torch.manual_seed(1)
    statistics = Statistics(torch.randn(ones), torch.rand(ones) + 0.5, size, ones)
    return Normal(statistics, describe(x))


@pytest.mark.parametrize("name", SEEN)
def test_kernels_know_which_statistics_an_element_has(name: str) -> None:
    x, *sizes = SEEN[name]()
    mapping = normal(x, *sizes)
    function = mapping.function
    elements = flat(x, describe(x))
    number = torch.arange(elements.numel()) // function.inner % function.period
    mean, rstd = function.mean.flatten()[number], function.rstd.flatten()[number]
    assert torch.equal(mapping.of(elements), roots.ROOT_OF_MOST.of((elements - mean) * rstd))


@pytest.mark.parametrize("name", OTHERS)
def test_other_orders_are_left_to_tensor_operations(name: str) -> None:
    x, *sizes = OTHERS[name]()
    mapping = normal(x, *sizes)
    elements = flat(x, describe(x))
    assert mapping.function is None
    torch.testing.assert_close(mapping.back(mapping.of(elements), torch.float32), elements)


class Launchers:
    """Stands for the kernels: notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.append(name)


@pytest.mark.parametrize(
    ("mapping", "form", "calls"),
    [
        (roots.ROOT, Format(), ["quantize_map", "dequantize_map"]),
        (Within(6, 128), Format(), ["quantize_map", "dequantize_map"]),
        (SIGN, MASK_FORMAT, ["pack_signs", "unpack_signs"]),
        (normal(*SEEN["rows"]()), Format(), ["quantize_map", "dequantize_map"]),
        (normal(*OTHERS["rows in turn"]()), Format(), ["quantize", "dequantize"]),
    ],
    ids=["root", "within", "sign", "rows", "rows in turn"],
)
def test_a_mapping_is_one_launch_where_the_kernels_have_it(
    monkeypatch: pytest.MonkeyPatch, mapping: Any, form: Format, calls: list[str]
) -> None:
    launchers = Launchers()
    monkeypatch.setattr(codec, "_launch", lambda device: launchers)
    packed = codec.pack(torch.randn(720, dtype=torch.bfloat16), form, None, mapping)
    assert codec.unpack(packed).dtype == torch.bfloat16
    assert launchers.calls == calls
