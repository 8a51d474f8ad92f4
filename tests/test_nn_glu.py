"""Gated linear units that keep packed inputs: results, gradients, and what they keep."""

from __future__ import annotations

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
from torch.utils.checkpoint import checkpoint

from vramx.compression import random
from vramx.compression.config import Compression
from vramx.compression.hooks import compress
from vramx.errors import InvalidValueError
from vramx.nn.glu import geglu, swiglu
from vramx.nn.unit_linear import gelu_linear, glu_linear

NEAREST = Compression(rounding="nearest")


@pytest.fixture(scope="module")
def kernels() -> Callable[..., Evaluated]:
    return interpreted_nn().function


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def plain_swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(F.silu(gate) * up, weight, bias)


# -- Kernels against the composite -----------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_is_the_composite(
    name: str, shape: tuple[int, ...], kernels: Callable[..., Evaluated]
) -> None:
    inputs = [sample(*shape), sample(*shape, seed=1)]
    incoming, options = sample(*shape, seed=2), {"keep": FORMATS[name]}
    found = kernels("glu.swiglu", inputs, incoming, options)
    expected = evaluate("glu.swiglu", inputs, incoming, options)
    assert differs(found.result, expected.result) <= 1
    for a, b in zip(found.gradients, expected.gradients, strict=True):
        assert differs(a, b) <= 1
    assert len(found.packs) == len(expected.packs) == (0 if name == "exact" else 2)
    for pack, other in zip(found.packs, expected.packs, strict=True):
        assert torch.equal(pack, other)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_kernel_of_gelu_is_the_composite(
    approximate: str, kernels: Callable[..., Evaluated]
) -> None:
    inputs = [sample(5, 77), sample(5, 77, seed=1)]
    incoming, options = sample(5, 77, seed=2), {"approximate": approximate}
    found = kernels("glu.geglu", inputs, incoming, options)
    expected = evaluate("glu.geglu", inputs, incoming, options)
    assert differs(found.result, expected.result) <= 1
    assert all(
        differs(*pair) <= 1 for pair in zip(found.gradients, expected.gradients, strict=True)
    )


def test_kernel_in_bfloat16_is_off_by_one_unit(kernels: Callable[..., Evaluated]) -> None:
    shape, dtype = (5, 77), torch.bfloat16
    inputs = [sample(*shape, dtype=dtype), sample(*shape, seed=1, dtype=dtype)]
    incoming = sample(*shape, seed=2, dtype=dtype)
    found = kernels("glu.swiglu", inputs, incoming, {})
    expected = evaluate("glu.swiglu", inputs, incoming, {})
    assert differs_in_places(found.result, expected.result, UNIT_OF_BFLOAT16) <= 1
    for a, b in zip(found.gradients, expected.gradients, strict=True):
        assert differs_in_places(a, b, UNIT_OF_BFLOAT16) <= 1
    assert all(map(torch.equal, found.packs, expected.packs))


def test_kernel_of_the_linear_is_the_composite(kernels: Callable[..., Evaluated]) -> None:
    inputs = [sample(5, 77), sample(5, 77, seed=1), sample(9, 77, seed=2), sample(9, seed=3)]
    incoming = sample(5, 9, seed=4)
    found = kernels("unit_linear.glu_linear", inputs, incoming, {})
    expected = evaluate("unit_linear.glu_linear", inputs, incoming, {})
    assert differs(found.result, expected.result) <= 1
    assert all(
        differs(*pair) <= 1 for pair in zip(found.gradients, expected.gradients, strict=True)
    )
    assert all(map(torch.equal, found.packs, expected.packs))


def test_wrong_slope_would_be_seen(kernels: Callable[..., Evaluated]) -> None:
    inputs, incoming = [sample(5, 77), sample(5, 77, seed=1)], sample(5, 77, seed=2)
    found = kernels("glu.swiglu", inputs, incoming, {}, defect="slope without its second term")
    expected = evaluate("glu.swiglu", inputs, incoming, {})
    assert differs(found.gradients[0], expected.gradients[0]) > 1


def test_gate_and_up_have_noise_of_their_own(kernels: Callable[..., Evaluated]) -> None:
    """Of equal tensors with one stream every code would be equal, and their product biased."""
    x, incoming = sample(5, 77), sample(5, 77, seed=2)
    packs = kernels("glu.swiglu", [x, x], incoming, {}).packs
    assert not torch.equal(*packs)
    defective = kernels("glu.swiglu", [x, x], incoming, {}, defect="one stream for gate and up")
    assert torch.equal(*defective.packs)


# -- Derivatives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [swiglu, geglu], ids=["swiglu", "geglu"])
def test_derivatives_to_second_order_are_right(function: object) -> None:
    inputs = leaves(*(sample(3, 5, seed=seed, dtype=torch.float64) for seed in (0, 1)))

    def call(gate: Tensor, up: Tensor) -> Tensor:
        return function(gate, up, keep=EXACT)  # type: ignore[operator]

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_derivatives_of_the_linear_to_second_order_are_right(activation: str) -> None:
    shapes = [(3, 5), (3, 5), (4, 5), (4,)]
    inputs = leaves(
        *(sample(*shape, seed=seed, dtype=torch.float64) for seed, shape in enumerate(shapes))
    )

    def call(*tensors: Tensor) -> Tensor:
        return glu_linear(*tensors, activation=activation, keep=EXACT)

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("biased", [False, True], ids=["product", "bias"])
@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "swiglu"])
def test_residual_is_added_and_learns_to_second_order(gated: bool, biased: bool) -> None:
    shapes = [(3, 5), (3, 5), (4, 5), (4,), (3, 4)]
    inputs = leaves(*(sample(*s, seed=i, dtype=torch.float64) for i, s in enumerate(shapes)))

    def call(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        options = {"residual": residual, "keep": EXACT}
        ours = bias if biased else None
        if gated:
            return glu_linear(gate, up, weight, ours, **options)
        return gelu_linear(gate * up, weight, ours, **options)

    gate, up, weight, bias, residual = inputs
    inner = F.silu(gate) * up if gated else F.gelu(gate * up)
    exact = F.linear(inner, weight, bias if biased else None) + residual
    assert torch.allclose(call(*inputs), exact, rtol=1e-12, atol=1e-12)
    used = inputs if biased else [*inputs[:3], inputs[3].detach(), inputs[4]]
    assert torch.autograd.gradcheck(call, used)
    assert torch.autograd.gradgradcheck(call, used)


def test_residual_of_a_wider_type_gives_the_result_its_type() -> None:
    gate, weight, residual = (sample(*s, dtype=torch.bfloat16) for s in ((8, 16), (4, 16), (8, 4)))
    narrow = glu_linear(gate, gate, weight, residual=residual)
    wide = glu_linear(gate, gate, weight, residual=residual.float())
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    # The sum is rounded once in the one, the product in the other.
    assert differs(narrow.float(), wide, 2.0**-7) <= 1


def test_gradients_of_int8_are_within_the_codecs_bound() -> None:
    """With |silu'| <= 1.1 and |silu''| <= 0.5; the last factor is for float32's rounding."""
    gate, up, incoming = sample(64, 256), sample(64, 256, seed=1), sample(64, 256, seed=2)
    dgate, dup = gradients(swiglu, [gate, up], incoming)
    exact = gradients(plain_swiglu, [gate.double(), up.double()], incoming.double())
    size, of_gate, of_up = incoming.double().abs(), step_of(gate), step_of(up)
    bound_of_dup = size * 1.1 * of_gate
    bound_of_dgate = size * (1.1 * of_up + 0.5 * of_gate * (up.double().abs() + of_up))
    assert ((dup - exact[1]).abs() <= bound_of_dup * 1.001 + 1e-6).all()
    assert ((dgate - exact[0]).abs() <= bound_of_dgate * 1.001 + 1e-6).all()


def test_second_derivative_through_int8_reaches_the_inputs() -> None:
    gate, up = leaves(sample(64, 256), sample(64, 256, seed=1))

    def penalty(function: object) -> list[Tensor]:
        first = torch.autograd.grad(
            function(gate, up).sum(),
            (gate, up),
            create_graph=True,  # type: ignore[operator]
        )
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), (gate, up)))

    for found, exact in zip(penalty(swiglu), penalty(plain_swiglu), strict=True):
        assert relative_error(found, exact) < 0.05  # a step is 1/127 of a group's largest


def test_bfloat16_is_as_near_to_float64_as_torch_is() -> None:
    """Twice torch's own error: the result of the Linear and all gradients, with nothing packed."""
    shapes, dtype = [(64, 128), (64, 128), (32, 128), (32,)], torch.bfloat16
    inputs = [sample(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    incoming = sample(64, 32, seed=9, dtype=dtype)
    wide = [tensor.double() for tensor in inputs]
    exact = gradients(plain_swiglu_linear, wide, incoming.double())
    plain = gradients(plain_swiglu_linear, inputs, incoming)
    found = gradients(lambda *t: glu_linear(*t, keep=EXACT), inputs, incoming)
    for a, b, c in zip(found, plain, exact, strict=True):
        assert relative_error(a, c) <= 2 * relative_error(b, c)
    result = plain_swiglu_linear(*wide)
    error = relative_error(glu_linear(*inputs), result)
    assert error <= 2 * relative_error(plain_swiglu_linear(*inputs), result)


def test_backward_may_run_twice() -> None:
    gate, up = leaves(sample(8, 128), sample(8, 128, seed=1))
    result = swiglu(gate, up).sum()
    first = torch.autograd.grad(result, (gate, up), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(result, (gate, up))))


def test_frozen_weight_gets_no_gradient() -> None:
    gate, up = leaves(sample(8, 128), sample(8, 128, seed=1))
    glu_linear(gate, up, weight := sample(4, 128, seed=2)).sum().backward()
    assert gate.grad is not None
    assert weight.grad is None


# -- What is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kept"), [("int8", 1 + 6 / 128), ("int4", 0.5 + 4 / 64)])
def test_only_the_two_packs_are_kept(name: str, kept: float) -> None:
    gate, up, weight = leaves(sample(64, 256), sample(64, 256, seed=1), sample(8, 256, seed=2))
    keep = FORMATS[name]
    for saved in (
        saved_by(lambda gate, up: swiglu(gate, up, keep=keep), [gate, up]),
        saved_by(lambda *tensors: glu_linear(*tensors, keep=keep), [gate, up, weight]),
    ):
        assert [tensor.dtype for tensor in saved] == [torch.uint8] * 2
        assert sum(tensor.numel() for tensor in saved) == 2 * kept * gate.numel()


def test_inputs_are_freed_once_they_are_packed() -> None:
    gate, up = leaves(sample(8, 128), sample(8, 128, seed=1))
    inner = gate * 2
    seen = torch.multiprocessing.reductions.StorageWeakRef(inner.untyped_storage())
    result = swiglu(inner, up)
    del inner
    assert seen.expired()
    result.sum().backward()
    assert gate.grad is not None


def test_nothing_is_packed_without_gradients() -> None:
    gate, up = leaves(sample(8, 128), sample(8, 128, seed=1))
    before = random.next_stream()
    with torch.no_grad():
        assert not swiglu(gate, up).requires_grad
    swiglu(gate.detach(), up.detach())
    assert random.next_stream() == before + 1


# -- With the rest of torch ------------------------------------------------------------------------


def test_compiles_to_one_graph() -> None:
    inputs = [sample(8, 128), sample(8, 128, seed=1), sample(4, 128, seed=2), sample(4, seed=3)]

    def call(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return glu_linear(gate, swiglu(up, up, keep=NEAREST), weight, bias, keep=NEAREST)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    incoming = sample(8, 4, seed=4)
    for a, b in zip(
        gradients(compiled, inputs, incoming), gradients(call, inputs, incoming), strict=True
    ):
        assert differs(a, b) <= 1


def test_compiled_graph_draws_new_noise_every_time() -> None:
    compiled = torch.compile(swiglu, fullgraph=True, backend="aot_eager")
    inputs, incoming = [sample(8, 128), sample(8, 128, seed=1)], sample(8, 128, seed=2)
    first, second = (gradients(compiled, inputs, incoming) for _ in range(2))
    assert not torch.equal(first[1], second[1])


def test_autocast_casts_as_linear_does() -> None:
    gate, up, weight = leaves(sample(8, 128), sample(8, 128, seed=1), sample(4, 128, seed=2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = glu_linear(gate, up, weight)
        expected = F.linear(F.silu(gate) * up, weight)
    assert found.dtype == expected.dtype == torch.bfloat16
    found.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_works_inside_a_checkpoint() -> None:
    inputs, incoming = [sample(8, 128), sample(8, 128, seed=1)], sample(8, 128, seed=2)

    def call(gate: Tensor, up: Tensor) -> Tensor:
        found = checkpoint(lambda g, u: swiglu(g, u, keep=NEAREST), gate, up, use_reentrant=False)
        assert isinstance(found, Tensor)
        return found

    plain = gradients(lambda g, u: swiglu(g, u, keep=NEAREST), inputs, incoming)
    assert all(map(torch.equal, gradients(call, inputs, incoming), plain))


def test_enclosing_compression_does_not_pack_packs() -> None:
    inputs, incoming = leaves(sample(64, 128), sample(64, 128, seed=1)), sample(64, 128, seed=2)
    with compress(level="int4", min_bytes=1):
        inside = swiglu(*inputs, keep=NEAREST)
    found = torch.autograd.grad(inside, inputs, incoming)
    plain = gradients(lambda g, u: swiglu(g, u, keep=NEAREST), inputs, incoming)
    assert all(map(torch.equal, found, plain))


def test_halves_of_a_wider_tensor_are_taken() -> None:
    both = sample(8, 256)

    def call(x: Tensor) -> Tensor:
        return swiglu(*x.chunk(2, -1), keep=EXACT)

    (found,) = gradients(call, [both], sample(8, 128, seed=1))
    (exact,) = gradients(lambda x: plain_swiglu(*x.chunk(2, -1)), [both], sample(8, 128, seed=1))
    assert differs(found, exact) <= 1


def test_empty_tensors_pass() -> None:
    gate, up, weight = leaves(torch.zeros(0, 8), torch.zeros(0, 8), torch.ones(4, 8))
    glu_linear(gate, swiglu(gate, up), weight).sum().backward()
    assert gate.grad is not None
    assert gate.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros(4, 8))


def test_non_finite_groups_give_nan_gradients() -> None:
    gate, up = sample(2, 128), sample(2, 128, seed=1)
    gate[0, 3] = torch.inf
    _, dup = gradients(swiglu, [gate, up], torch.ones(2, 128))
    assert dup[0].isnan().all()
    assert not dup[1].isnan().any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: swiglu(x, x[:1]), "one shape"),
        (lambda x: swiglu(x.long(), x), "gate is a tensor of torch.int64"),
        (lambda x: geglu(x, x, "sigmoid"), "'none' and 'tanh'"),
        (lambda x: glu_linear(x, x, x.new_ones(2, 5)), "last size"),
        (lambda x: glu_linear(x, x, x.new_ones(2, 4), x.new_ones(3)), "bias has shape"),
        (lambda x: glu_linear(x, x, x.new_ones(2, 4), activation="relu"), "'silu', 'gelu'"),
    ],
)
def test_mistakes_are_named(call: object, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        call(torch.ones(3, 4))  # type: ignore[operator]
