"""Activation functions that keep a packed input, alone and with the Linear that follows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from interpreted_nn import Evaluated, evaluate, interpreted_nn
from nn_elementwise_tools import (
    EXACT,
    FORMATS,
    SHAPES,
    UNIT_OF_BFLOAT16,
    differs,
    differs_in_places,
    gradients,
    leaves,
    relative_error,
    sample,
    saved_by,
    step_of,
)
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from vramx.compression.config import Compression
from vramx.errors import InvalidValueError
from vramx.nn.activation import gelu, silu
from vramx.nn.relu import relu
from vramx.nn.unit_linear import gelu_linear, silu_linear

NEAREST = Compression(rounding="nearest")
KINDS = [("silu", {}), ("gelu", {}), ("gelu", {"approximate": "tanh"})]
MODULE_OF = {"gelu": "activation.gelu", "silu": "activation.silu", "relu": "relu.relu"}
every_kind = pytest.mark.parametrize(("name", "options"), KINDS, ids=["silu", "gelu", "tanh"])


@pytest.fixture(scope="module")
def kernels() -> Callable[..., Evaluated]:
    return interpreted_nn().function


# -- Kernels against the composite -----------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@every_kind
def test_kernel_is_the_composite(
    name: str, options: dict[str, str], shape: tuple[int, ...], kernels: Callable[..., Evaluated]
) -> None:
    inputs, incoming = [sample(*shape)], sample(*shape, seed=2)
    found = kernels(f"activation.{name}", inputs, incoming, options)
    expected = evaluate(f"activation.{name}", inputs, incoming, options)
    assert differs(found.result, expected.result) <= 1
    assert differs(found.gradients[0], expected.gradients[0]) <= 1
    assert torch.equal(found.packs[0], expected.packs[0])


@pytest.mark.parametrize("keep", FORMATS)
def test_kernel_of_every_format_is_the_composite(
    keep: str, kernels: Callable[..., Evaluated]
) -> None:
    inputs, incoming, options = [sample(5, 77)], sample(5, 77, seed=2), {"keep": FORMATS[keep]}
    found = kernels("activation.gelu", inputs, incoming, options)
    expected = evaluate("activation.gelu", inputs, incoming, options)
    assert differs(found.gradients[0], expected.gradients[0]) <= 1
    assert all(map(torch.equal, found.packs, expected.packs))


@every_kind
def test_kernel_is_right_far_from_zero(
    name: str, options: dict[str, str], kernels: Callable[..., Evaluated]
) -> None:
    """Where exp over- or underflows, and at zero: the values and slopes have their limits."""
    x = torch.tensor([-1e15, -1e4, -90.0, -12.0, -0.0, 0.0, 1e-30, 12.0, 90.0, 1e4, 1e15])
    call = (f"activation.{name}", [x], torch.ones(11), {**options, "keep": EXACT})
    found, expected = kernels(*call), evaluate(*call)
    assert torch.allclose(found.result, expected.result, rtol=2**-20, atol=2**-20)
    assert torch.allclose(found.gradients[0], expected.gradients[0], rtol=2**-20, atol=2**-20)


def test_kernel_of_the_linear_is_the_composite(kernels: Callable[..., Evaluated]) -> None:
    inputs = [sample(5, 77), sample(9, 77, seed=2), sample(9, seed=3)]
    for name in ("gelu_linear", "silu_linear"):
        found = kernels(f"unit_linear.{name}", inputs, sample(5, 9, seed=4), {})
        expected = evaluate(f"unit_linear.{name}", inputs, sample(5, 9, seed=4), {})
        assert differs(found.result, expected.result) <= 1
        for a, b in zip(found.gradients, expected.gradients, strict=True):
            assert differs(a, b) <= 1


def test_kernel_in_bfloat16_is_off_by_one_unit(kernels: Callable[..., Evaluated]) -> None:
    inputs = [sample(5, 77, dtype=torch.bfloat16)]
    incoming = sample(5, 77, seed=2, dtype=torch.bfloat16)
    found = kernels("activation.silu", inputs, incoming, {})
    expected = evaluate("activation.silu", inputs, incoming, {})
    assert differs_in_places(found.result, expected.result, UNIT_OF_BFLOAT16) <= 1
    assert differs_in_places(found.gradients[0], expected.gradients[0], UNIT_OF_BFLOAT16) <= 1


def off_by(found: Tensor, exact: Tensor, rounding: float) -> float:
    """Return the largest error of GELU in bounds of _gelu_of_halves() and the rounding after it."""
    bound = exact.abs() * (1 + 2**-14) * rounding + exact.abs() * 2**-14 + 2**-24
    return float(((found.double() - exact).abs() / bound).max())


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float16, 2.0**-11), (torch.bfloat16, UNIT_OF_BFLOAT16)]
)
def test_gelu_of_every_half_is_right_to_its_bound(
    dtype: torch.dtype, rounding: float, kernels: Callable[..., Evaluated]
) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    call = ("activation.gelu", [x], torch.ones_like(x), {"keep": EXACT})
    found = kernels(*call).result
    exact = torch.special.ndtr(x.double()) * x.double()
    assert off_by(found[x.isfinite()], exact[x.isfinite()], rounding) <= 1
    assert torch.equal(found.isnan(), x.isnan())
    assert found[x == math.inf] == math.inf
    assert found[x == -math.inf] == 0
    if dtype == torch.float16:
        wrong = kernels(*call, defect="a polynomial of degree 4").result
        assert off_by(wrong[x.isfinite()], exact[x.isfinite()], rounding) > 1


def test_wrong_slope_would_be_seen(kernels: Callable[..., Evaluated]) -> None:
    inputs, incoming = [sample(5, 77)], sample(5, 77, seed=2)
    found = kernels("activation.gelu", inputs, incoming, {}, defect="slope of the activation")
    expected = evaluate("activation.gelu", inputs, incoming, {})
    assert differs(found.gradients[0], expected.gradients[0]) > 1


@pytest.mark.parametrize("numel", [1, 7, 8, 4096, 4096 * 2 + 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_of_relu_is_exact(
    dtype: torch.dtype, numel: int, kernels: Callable[..., Evaluated]
) -> None:
    x, incoming = sample(numel, dtype=dtype), sample(numel, seed=1, dtype=dtype)
    x[::5] = 0
    x[1::41] = torch.nan
    found = kernels("relu.relu", [x], incoming, {})
    assert torch.equal(found.result.nan_to_num(7), F.relu(x).nan_to_num(7))
    assert torch.equal(found.gradients[0], torch.where(x <= 0, 0, incoming))


# -- Derivatives -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: gelu(x, keep=EXACT),
        lambda x: gelu(x, "tanh", keep=EXACT),
        lambda x: silu(x, keep=EXACT),
        relu,
    ],
    ids=["gelu", "tanh", "silu", "relu"],
)
def test_derivatives_to_second_order_are_right(function: Callable[[Tensor], Tensor]) -> None:
    (x,) = leaves(sample(3, 5, dtype=torch.float64))
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("function", [gelu_linear, silu_linear])
def test_derivatives_of_the_linear_to_second_order_are_right(
    function: Callable[..., Tensor],
) -> None:
    shapes = [(3, 5), (4, 5), (4,)]
    inputs = leaves(
        *(sample(*shape, seed=seed, dtype=torch.float64) for seed, shape in enumerate(shapes))
    )

    def call(*tensors: Tensor) -> Tensor:
        return function(*tensors, keep=EXACT)

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize(
    ("function", "plain", "curvature"), [(gelu, F.gelu, 0.8), (silu, F.silu, 0.5)]
)
def test_gradient_of_int8_is_within_the_codecs_bound(
    function: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], curvature: float
) -> None:
    x, incoming = sample(64, 256), sample(64, 256, seed=2)
    (found,) = gradients(function, [x], incoming)
    (exact,) = gradients(plain, [x.double()], incoming.double())
    bound = incoming.double().abs() * curvature * step_of(x)
    assert ((found - exact).abs() <= bound * 1.001 + 1e-6).all()


def test_gradient_of_int8_is_unbiased() -> None:
    """Of the mean over N draws, beyond the second order of the step: |gelu'''| s**2 / 8 an element.

    Each draw is off by less than 0.8 s |dy| and their mean, if unbiased, by a normal error of at
    most 0.8 s / 2 / sqrt(N); over 4096 elements 6 standard deviations are passed with p < 1e-5.
    Rounding to nearest, which repeats one error N times, must not pass.
    """
    draws, x = 256, sample(4096)
    incoming = torch.ones_like(x)
    (exact,) = gradients(F.gelu, [x.double()], incoming.double())
    step = step_of(x)
    bound = 0.8 * step / 2 * 6 / math.sqrt(draws) + 2 * step**2 / 8 + 1e-6

    def passes(keep: Compression) -> bool:
        total = torch.zeros_like(exact)
        for _ in range(draws):
            total += gradients(lambda x: gelu(x, keep=keep), [x], incoming)[0]
        return bool(((total / draws - exact).abs() <= bound).all())

    assert passes(Compression())
    assert not passes(NEAREST)


def test_bfloat16_is_as_near_to_float64_as_torch_is() -> None:
    shapes, dtype = [(64, 128), (32, 128), (32,)], torch.bfloat16
    inputs = [sample(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    incoming = sample(64, 32, seed=9, dtype=dtype)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(F.gelu(x), weight, bias)

    exact = gradients(plain, [tensor.double() for tensor in inputs], incoming.double())
    torchs = gradients(plain, inputs, incoming)
    found = gradients(lambda *t: gelu_linear(*t, keep=EXACT), inputs, incoming)
    for a, b, c in zip(found, torchs, exact, strict=True):
        assert relative_error(a, c) <= 2 * relative_error(b, c)


# -- What is kept, and the rest of torch -----------------------------------------------------------


def test_only_packs_are_kept() -> None:
    x, weight = leaves(sample(64, 256), sample(8, 256, seed=1))
    calls: list[tuple[Callable[..., Tensor], list[Tensor], float]] = [
        (gelu, [x], 1 + 6 / 128),
        (gelu_linear, [x, weight], 1 + 6 / 128),
        (relu, [x], 1 / 8),
    ]
    for function, inputs, kept in calls:
        saved = saved_by(function, inputs)
        assert [tensor.dtype for tensor in saved] == [torch.uint8]
        assert saved[0].numel() == kept * x.numel()


def test_nothing_is_kept_without_gradients() -> None:
    with torch.no_grad():
        for function in (gelu, silu, relu):
            assert not function(torch.ones(3, requires_grad=True)).requires_grad


def test_compiles_to_one_graph() -> None:
    def call(x: Tensor, weight: Tensor) -> Tensor:
        return gelu_linear(relu(silu(x, keep=NEAREST)), weight, keep=NEAREST)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs, incoming = [sample(8, 128), sample(4, 128, seed=1)], sample(8, 4, seed=2)
    for a, b in zip(
        gradients(compiled, inputs, incoming), gradients(call, inputs, incoming), strict=True
    ):
        assert differs(a, b) <= 1


@pytest.mark.parametrize("name", ["gelu", "silu", "relu"])
def test_layout_of_convolutions_stays(name: str, kernels: Callable[..., Evaluated]) -> None:
    """Whatever the layout of the gradient that comes in; by the composite and by the kernel."""
    x = sample(2, 16, 4, 4).to(memory_format=torch.channels_last)
    incoming = sample(2, 16, 4, 4, seed=1)
    (exact,) = gradients(getattr(F, name), [x], incoming)
    for found in (
        evaluate(MODULE_OF[name], [x], incoming, {}),
        kernels(MODULE_OF[name], [x], incoming, {}),
    ):
        assert found.result.is_contiguous(memory_format=torch.channels_last)
        assert differs(found.result, getattr(F, name)(x)) <= 1
        assert ((found.gradients[0] - exact).abs() <= incoming.abs() * 0.8 * x.max() / 126).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: gelu(x, "tan"), "'none' and 'tanh'"),
        (lambda x: silu(x.bool()), "torch.bool"),
        (lambda x: gelu_linear(x, x.new_ones(4)), "weight has shape"),
    ],
)
def test_mistakes_are_named(call: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        call(torch.ones(3, 4))
