"""The codec: what comes back, how far off, what a Packed is, and what is refused."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from codec_samples import FORMATS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vramx.compression.codec import codec, reference
from vramx.compression.codec.codec import Packed, layout_of, pack, unpack
from vramx.compression.config import MASK_FORMAT, ROUNDINGS, Format
from vramx.errors import InvalidValueError

EXPERIMENTS = [
    Format(bits, 32, symmetric, rounding)
    for bits, symmetric, rounding in itertools.product([2, 3, 5, 6, 7], [True, False], ROUNDINGS)
]
pytestmark = pytest.mark.usefixtures("seeded")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def steps(packed: Packed) -> Tensor:
    """Return the step of each element, read from the headers."""
    layout = layout_of(packed.numel, packed.format)
    header = packed.buffer[layout.code_bytes + layout.outlier_bytes :].view(torch.int16)
    scale = (header[:: 1 if layout.symmetric else 2].to(torch.int32) << 16).view(torch.float32)
    return scale.repeat_interleave(layout.group_size)[: packed.numel].double()


def bound(x: Tensor, packed: Packed) -> Tensor:
    """Return the largest error that the head of codec.py allows each element.

    2**-15 of a step is what float32 adds: 1/s and the product are off by 2**-23 of a code of at
    most 2**8. The tensor's own type rounds at the decoded value, which is x and at most a step.
    """
    s = steps(packed)
    share = 0.5 if packed.format.rounding == "nearest" else 1.0
    info = torch.finfo(packed.dtype)
    half_unit = info.eps / 2 * (x.double().abs() + s).clamp_min(info.tiny)
    rounding = torch.where(outliers(packed), x.double().abs() * 2.0**-8, (share + 2.0**-15) * s)
    return rounding + half_unit


def outliers(packed: Packed) -> Tensor:
    """Return which elements are kept as bfloat16, by the marks among their codes."""
    layout = layout_of(packed.numel, packed.format)
    codes = packed.buffer[: packed.numel].view(torch.int8)
    if not layout.has_outliers:
        return torch.zeros(packed.numel, dtype=torch.bool)
    return (codes == -128) | (codes == 127)


@pytest.mark.parametrize("extreme", [0, -1], ids=["least", "greatest"])
@pytest.mark.parametrize("format", [f for f in FORMATS if f.rounding == "stochastic"], ids=repr)
def test_no_code_wraps_at_the_extremes_of_the_noise(
    format: Format, extreme: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = partial(torch.full, fill_value=extreme & 0xFF, dtype=torch.int32)
    monkeypatch.setattr(reference, "noise_bytes", lambda n, *_: noise((n,)))
    peaks = torch.logspace(-37, 37, 256 * 999).view(-1, 256).repeat_interleave(4, 1)
    x = (peaks * torch.tensor([1.0, -1.0]).repeat(512)).view(-1)
    packed = pack(x, format)
    # A code that wraps is off by 2**bits steps.
    assert ((unpack(packed).double() - x.double()).abs() <= bound(x, packed)).all()


@pytest.mark.parametrize("format", FORMATS, ids=repr)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_nan_or_an_infinity_is_nan_without_outliers_in_all_of_its_group(
    format: Format, bad: float
) -> None:
    x = torch.randn(3 * format.group_size)
    x[format.group_size + 3] = bad
    packed = pack(x, format)
    is_nan = unpack(packed).view(3, -1).isnan()
    assert is_nan.any(1).tolist() == [False, True, False]
    has_outliers = codec.layout_of(x.numel(), format).has_outliers
    assert is_nan.sum() == (1 if has_outliers else format.group_size)
    assert is_nan[1, 3]


def test_what_is_not_finite_costs_its_group_one_outlier_however_many_kinds_there_are() -> None:
    x = torch.randn(128)
    x[:4] = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])
    x[9] = 1000.0
    found = unpack(pack(x, Format(rounding="nearest")))
    assert found[:4].isnan().all()
    assert found[9] == 1000.0
    rest = [*range(4, 9), *range(10, 128)]
    assert (found - x)[rest].abs().max() <= x[rest].abs().max() / 126
    x[1:] = torch.inf
    assert unpack(pack(x, Format())).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_of_3e38_stay_finite_at_8_bits_and_are_never_wrong(dtype: torch.dtype) -> None:
    x = torch.tensor([3e38, -3e38, 1e38, 0.0] * 300, dtype=dtype)
    packed = pack(x, Format())
    error = (unpack(packed).double() - x.double()).abs()
    assert (error <= bound(x, packed)).all()
    assert unpack(pack(x, Format(4, 64, False))).isnan().all()  # a range beyond float32


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_zeros_denormal_numbers_and_the_largest_of_float16_come_back(format: Format) -> None:
    assert not unpack(pack(torch.zeros(1000), format)).any()
    x = torch.randn(1000) * 1e-40
    assert ((unpack(pack(x, format)) - x).abs() <= 2.0**-126).all()  # the smallest step
    x = torch.full((2000,), 65504.0, dtype=torch.float16)
    x[::3] *= -1
    decoded = unpack(pack(x, format))
    assert decoded.isfinite().all()
    assert (decoded.sign() == x.sign()).all()


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 127, 128, 129, 10_000])
def test_masks_are_exact_and_bit_k_of_byte_j_is_element_8j_plus_k(numel: int) -> None:
    mask = torch.rand(numel) > 0.5
    packed = pack(mask, MASK_FORMAT)
    assert torch.equal(unpack(packed), mask)
    assert packed.nbytes == -(-numel // 128) * 16
    expected = np.packbits(mask.numpy(), bitorder="little").tolist()
    assert packed.buffer[: len(expected)].tolist() == expected


@given(
    numel=st.integers(0, 700),
    dtype=st.sampled_from(DTYPES),
    format=st.sampled_from([*FORMATS, *EXPERIMENTS]),
    exponent=st.integers(-4, 4),
    draw=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_any_tensor_comes_back_in_its_shape_and_within_the_bound(
    numel: int, dtype: torch.dtype, format: Format, exponent: int, draw: int
) -> None:
    generator = torch.Generator().manual_seed(draw)
    x = (torch.randn(numel, generator=generator) * 10.0**exponent).to(dtype)
    packed = pack(x, format)
    decoded = unpack(packed)
    assert (decoded.shape, decoded.dtype, decoded.device) == (x.shape, x.dtype, x.device)
    assert ((decoded.double() - x.double()).abs() <= bound(x, packed)).all()
    assert packed.nbytes == layout_of(numel, format).buffer_bytes


@pytest.mark.parametrize("numel", [4096, 4000])
def test_every_unpack_gives_equal_values_in_fresh_memory(numel: int) -> None:
    packed = pack(torch.randn(numel), Format())
    first, second = unpack(packed), unpack(packed)
    assert torch.equal(first, second)
    kept = second.clone()
    first.fill_(7)
    assert torch.equal(second, kept)
    assert torch.equal(unpack(packed), kept)
    assert first.untyped_storage().nbytes() == 4 * numel


@pytest.mark.parametrize("kind", [Tensor, torch.nn.Parameter])
def test_the_tensor_is_only_read_and_the_result_has_no_graph(kind: Any) -> None:
    x, nearest = torch.randn(500), Format(rounding="nearest")
    before = x.clone()
    packed = pack(torch.nn.Parameter(x) if kind is not Tensor else x.requires_grad_(), nearest)
    assert torch.equal(x.detach(), before)
    assert torch.equal(packed.buffer, pack(before, nearest).buffer)
    assert not packed.buffer.requires_grad
    assert not unpack(packed).requires_grad


def test_a_packed_is_weakly_referable_and_says_what_it_is() -> None:
    packed = pack(torch.randn(1000, dtype=torch.float16), Format(4, 64, False, "nearest"))
    text = "Packed(1000 x float16 in 576 bytes, 4 bits, group 64, asymmetric, nearest, cpu)"
    assert repr(packed) == text
    reference_to_it = weakref.ref(packed)
    del packed
    assert reference_to_it() is None


def mistakes() -> list[Any]:
    subclass = type("Sub", (Tensor,), {})
    x = torch.randn(8)
    with FakeTensorMode():
        fake = torch.empty(8)
    nested = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.strided)
    return [
        ([1.0], "cannot pack a list; accepted is a contiguous 1-D tensor of bfloat16"),
        (torch.arange(8), "cannot pack a tensor of int64"),
        (x > 0, "cannot pack a tensor of bool"),
        (x.to(torch.complex64), "cannot pack a tensor of complex64"),
        (torch.tensor(1.0), "cannot pack a tensor of shape ()"),
        (x.view(2, 4), "cannot pack a tensor of shape (2, 4)"),
        (x[::2], "cannot pack a tensor of shape (4,) and strides (2,)"),
        (x.to_sparse(), "cannot pack a tensor of layout torch.sparse_coo"),
        (x.to("meta"), "cannot pack a tensor on the meta device"),
        (x.as_subclass(subclass), "cannot pack a Sub"),
        (fake, "cannot pack a FakeTensor"),
        (nested, "cannot pack a nested tensor"),
    ]


@pytest.mark.parametrize("case", range(12))
def test_what_cannot_be_packed_is_named(case: int) -> None:
    value, text = mistakes()[case]
    with pytest.raises(InvalidValueError, match=re.escape(text)):
        pack(value, Format())
    with pytest.raises(InvalidValueError, match=r"float32; accepted is .* of bool"):
        pack(torch.randn(8), MASK_FORMAT)


class Launchers:
    """Stands in for vramx.kernels.launch: notes what it is called with, and does it in torch."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def launch(read: Tensor, written: Tensor, *layout: Any, **noise: Any) -> None:
            self.calls.append(name)
            more = [written.dtype] if name == "dequantize" else []
            more += [written.numel()] if name == "unpack_mask" else []
            written.copy_(getattr(reference, name)(read, *layout, *more, **noise))

        return launch


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> Launchers:
    stand_in = Launchers()
    monkeypatch.setattr(codec, "_launch", lambda device: stand_in)
    return stand_in


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_kernels_do_8_and_4_bits_and_masks_where_they_serve_the_device(
    format: Format, launchers: Launchers
) -> None:
    x, mask = torch.randn(1000, dtype=torch.bfloat16), torch.rand(1000) > 0.5
    packed = pack(x, format)
    error = (unpack(packed).double() - x.double()).abs()
    assert (error <= bound(x, packed)).all()
    assert torch.equal(unpack(pack(mask, MASK_FORMAT)), mask)
    assert launchers.calls == ["quantize", "dequantize", "pack_mask", "unpack_mask"]


@pytest.mark.parametrize(
    ("dtype", "format"), [(torch.float64, Format()), (torch.float32, Format(6, 64))], ids=str
)
def test_the_reference_does_what_kernels_do_not(dtype: Any, format: Format, launchers: Any) -> None:
    x = torch.randn(1000, dtype=dtype)
    assert unpack(pack(x, format)).dtype == dtype
    assert not launchers.calls


def test_a_cpu_needs_no_triton() -> None:
    program = (
        "import sys\n"
        "sys.modules['triton'] = None\n"  # an import of it fails
        "import torch, vramx.compression.codec.codec as codec, vramx.compression.config as config\n"
        "x = torch.randn(999)\n"
        "assert (codec.unpack(codec.pack(x, config.Format())) - x).norm() < 0.02 * x.norm()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
