"""Attention that keeps values and result packed: results, gradients, bytes, what takes a call.

On a CPU, on its fused kernel. The result and the gradient of v need nothing that is packed and must
be torch's own. For those of q and k: P are the probabilities, dS = P (dy v^T - rowsum(dy y)),
dq = scale dS k and dk = scale dS^T q. v is off by at most a step of its group
(vramx/compression/codec.py), and y is P v of that very v, so dS is off by at most
P (|dy| step_v^T + rowsum(|dy| P step_v)). Of k its mean over tokens changes nothing, for the rows
of dS sum to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from nn_elementwise_tools import step_of
from norm_tools import EXACT, INT4, held_bytes, sample
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramx.compression import codec
from vramx.compression.codec import layout_of
from vramx.compression.config import Compression, Format
from vramx.nn import attention_kernels as kernels
from vramx.nn import operators_attention
from vramx.nn.attention import Attended, scaled_dot_product_attention
from vramx.nn.functional import linear

BATCH, HEADS, KEY_HEADS, TOKENS, KEYS, SIZE = 2, 8, 2, 6, 9, 16
PACKED_QUERIES = Compression(policy={"scaled_dot_product_attention:0,1": "int8"})


def random_mask(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.7
    mask[..., 0] = True
    return mask


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.5},
    "bools": {"attn_mask": random_mask(BATCH, 1, TOKENS, KEYS)},
    "floats": {"attn_mask": sample(TOKENS, KEYS, seed=4).detach()},
    "keys only": {"attn_mask": random_mask(1, KEYS)},
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def inputs(dtype: torch.dtype = torch.float32, key_heads: int = KEY_HEADS) -> list[Tensor]:
    """Return q, k and v as projections give them: tokens first in memory."""
    shapes = [(TOKENS, HEADS), (KEYS, key_heads), (KEYS, key_heads)]
    return [
        sample(BATCH, tokens, heads, SIZE, seed=i, dtype=dtype)
        .detach().transpose(1, 2).requires_grad_()
        for i, (tokens, heads) in enumerate(shapes)
    ]  # fmt: skip


def attend(*tensors: Tensor, keep: Compression | None = None, **call: Any) -> Attended:
    return scaled_dot_product_attention(*tensors, enable_gqa=True, keep=keep, **call)


def torchs(q: Tensor, *of_keys: Tensor, **call: Any) -> Tensor:
    # Repeated here: torch 2.6 has its CPU kernel only for as many heads of keys as of queries.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in of_keys)
    return functional.scaled_dot_product_attention(q, k, v, **call)


def rows(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def incoming() -> Tensor:
    return sample(BATCH, HEADS, TOKENS, SIZE, seed=9).detach()


def tolerances(tensors: list[Tensor], call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return what the head of this file says of dq and dk, plus float32's roundings."""
    q, k, v = (x.detach().double() for x in tensors)
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    call = {name: value.double() if name == "attn_mask" and value.is_floating_point() else value
            for name, value in call.items()}  # fmt: skip
    wide = {**call, "attn_mask": call.get("attn_mask")}
    identity = torch.eye(KEYS, dtype=torch.float64).expand(BATCH, HEADS, KEYS, KEYS)
    with sdpa_kernel(SDPBackend.MATH):
        probabilities = functional.scaled_dot_product_attention(q, k, identity, **wide)
    dy = incoming().double().abs()
    step_v = step_of(tensors[2].detach().transpose(1, 2)).transpose(1, 2)
    step_v = step_v.repeat_interleave(HEADS // KEY_HEADS, 1)
    off = dy @ step_v.transpose(2, 3) + (dy * (probabilities @ step_v)).sum(-1, keepdim=True)
    off = probabilities * off * call.get("scale", SIZE**-0.5)
    of_q = off @ (k - k.mean(2, keepdim=True)).abs()
    of_k = (off.transpose(2, 3) @ q.abs()).unflatten(1, (KEY_HEADS, -1)).sum(2)
    return of_q + 1e-4, of_k + 1e-4


@every_call
def test_result_is_torchs(call: dict[str, Any]) -> None:
    tensors = inputs()
    attended = attend(*tensors, **call)
    assert attended.kept is not None
    assert torch.equal(attended.y, torchs(*tensors, **call))


@every_call
def test_gradients_are_within_the_steps(call: dict[str, Any]) -> None:
    tensors, dy = inputs(), incoming()
    found = torch.autograd.grad(attend(*tensors, **call).y, tensors, dy)
    exact = torch.autograd.grad(torchs(*tensors, **call), tensors, dy)
    for ours, theirs, bound in zip(found[:2], exact[:2], tolerances(tensors, call), strict=True):
        assert ((ours - theirs).abs() <= bound).all()
    # Sums of at most 24 terms of order 1.
    assert torch.allclose(found[2], exact[2], atol=1e-5)


KEY_BIAS = 100.0  # deviations of the keys
COSINE = 0.999


def worst_cosine_under_a_bias(dtype: torch.dtype = torch.float32, **call: Any) -> float:
    """Return the least cosine of dq, dk and dv, of keys with one large constant in each channel."""
    q, k, v = inputs(dtype)
    bias = sample(1, KEY_HEADS, 1, SIZE, seed=7, dtype=dtype).detach()
    tensors = [q, (k.detach() + KEY_BIAS * bias).requires_grad_(), v]
    dy = incoming().to(dtype)
    exact = torch.autograd.grad(
        torchs(*(wide := [x.detach().double().requires_grad_() for x in tensors]), **call),
        wide,
        dy.double(),
    )
    draws = [torch.autograd.grad(attend(*tensors, **call).y, tensors, dy) for _ in range(3)]
    return min(
        sum(float(functional.cosine_similarity(g.double().flatten(), e.flatten(), 0)) for g in gs)
        / len(draws)
        for e, *gs in zip(exact, *draws, strict=True)
    )


@pytest.mark.parametrize("name", ["plain", "causal", "scale", "bools", "keys only"])
def test_a_constant_on_all_keys_does_not_reach_the_gradients(name: str) -> None:
    assert worst_cosine_under_a_bias(**CALLS[name]) >= COSINE


def packed_result(call: Any, decoded: Any, mask: Tensor | None) -> tuple[Tensor, ...]:
    """Return what backward would have if it took a packed result: another than that of its v."""
    y, *state = kernels.forward(call, decoded, mask)
    flat = y.transpose(1, 2).reshape(-1)
    decoded_y = codec.unpack(codec.pack(flat, Format())).view_as(y.transpose(1, 2))
    return decoded_y.transpose(1, 2), *state


def test_a_packed_result_is_found_under_a_bias(monkeypatch: Any) -> None:
    """The defect: dq gets the mean key times what is missing in rowsum(dy y)."""
    monkeypatch.setattr(operators_attention, "_result_again", packed_result)
    assert worst_cosine_under_a_bias() < COSINE


def worst_cosine_where_sharp(sharpness: float, **call: Any) -> float:
    """Return the least cosine of dq and dk where next to all of a row's weight is on one key."""
    q, k, v = inputs(key_heads=HEADS)
    q = (sharpness * k.detach()[:, :, :TOKENS]).requires_grad_()
    dy = incoming()
    found = torch.autograd.grad(attend(q, k, v, **call).y, (q, k), dy)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(torchs(*wide, **call), wide[:2], dy.double())
    return min(
        float(functional.cosine_similarity(a.double().flatten(), b.flatten(), 0))
        for a, b in zip(found, exact, strict=True)
    )


@pytest.mark.parametrize("name", ["plain", "causal", "keys only"])
@pytest.mark.parametrize("sharpness", [1.0, 3.0, 6.0])
def test_gradients_are_right_where_attention_is_sharp(sharpness: float, name: str) -> None:
    """There dS is next to nothing, and so must its error be."""
    assert worst_cosine_where_sharp(sharpness, **CALLS[name]) >= COSINE


def test_a_packed_result_is_found_where_attention_is_sharp(monkeypatch: Any) -> None:
    monkeypatch.setattr(operators_attention, "_result_again", packed_result)
    assert worst_cosine_where_sharp(6.0) < COSINE


def worst_share_of_a_constant(**call: Any) -> float:
    """Return what dk sums to over tokens, which is zero, as a share of its sizes' sum."""
    tensors, dy = inputs(), incoming()
    _, dk, _ = torch.autograd.grad(attend(*tensors, **call).y, tensors, dy)
    return float((dk.sum(2).abs() / dk.abs().sum(2)).max())


@pytest.mark.parametrize("name", ["plain", "causal", "scale", "bools", "keys only"])
def test_what_all_tokens_have_in_common_has_no_gradient_through_the_keys(name: str) -> None:
    """A channel that is constant and large would bring what is left into the weights of keys."""
    # Of at most 24 terms, each off by half a unit of float32 of the largest partial sum.
    assert worst_share_of_a_constant(**CALLS[name]) <= 24 * 2**-24


def test_gradients_of_keys_that_have_a_sum_are_found(monkeypatch: Any) -> None:
    monkeypatch.setattr(operators_attention, "_result_again", packed_result)
    assert worst_share_of_a_constant() > 1e-3


def test_bound_of_the_steps_sees_four_bits() -> None:
    tensors, dy = inputs(), incoming()
    dq, _ = torch.autograd.grad(attend(*tensors, keep=INT4).y, tensors[:2], dy)
    exact, _ = torch.autograd.grad(torchs(*tensors), tensors[:2], dy)
    assert not ((dq - exact).abs() <= tolerances(tensors, {})[0]).all()


def test_queries_are_packed_where_the_policy_says_so() -> None:
    tensors, dy = inputs(), incoming()
    packed = held_bytes(lambda: attend(*tensors, keep=PACKED_QUERIES), *tensors)
    assert packed > held_bytes(lambda: attend(*tensors), *tensors)  # which holds the inputs
    found = torch.autograd.grad(attend(*tensors, keep=PACKED_QUERIES).y, tensors, dy)
    exact = torch.autograd.grad(torchs(*tensors), tensors, dy)
    for ours, theirs in zip(found, exact, strict=True):
        # Each element of q and k is off by 0.4 % of the largest of its group, about 3 deviations.
        assert 0 < (ours - theirs).norm() <= 0.06 * theirs.norm()


def buffer_bytes(numel: int) -> int:
    return layout_of(numel, Format()).buffer_bytes


def test_projection_shares_the_pack() -> None:
    tensors = inputs()
    weight = sample(5, HEADS * SIZE, seed=6)

    def both() -> Tensor:
        attended = attend(*tensors)
        return linear(rows(attended.y), weight, kept=attended.kept)

    of_y, probe = buffer_bytes(BATCH * HEADS * TOKENS * SIZE), 4
    of_v = buffer_bytes(tensors[2].numel())
    assert held_bytes(both, *tensors, weight) == of_y + of_v + 2 * probe
    assert held_bytes(lambda: attend(*tensors).y, *tensors) == of_v + probe


def test_projections_gradient_is_that_of_the_result() -> None:
    tensors, weight = inputs(), sample(5, HEADS * SIZE, seed=6)
    attended = attend(*tensors)
    dout = sample(BATCH, TOKENS, 5, seed=7).detach()
    y = linear(rows(attended.y), weight, kept=attended.kept)
    dweight, dq = torch.autograd.grad(y, [weight, tensors[0]], dout)
    exact = torchs(*tensors)
    expected, of_q = torch.autograd.grad(
        functional.linear(rows(exact), weight), [weight, tensors[0]], dout
    )
    step = step_of(exact.detach().transpose(1, 2)).flatten(2)
    bound = dout.double().abs().flatten(0, 1).t() @ step.flatten(0, 1)
    assert ((dweight - expected).abs() <= bound + 1e-4).all()
    assert (dq - of_q).norm() <= 0.05 * of_q.norm()


def test_pack_of_another_tensor_is_named() -> None:
    attended = attend(*inputs())
    with pytest.raises(ValueError, match="kept is of 1536 elements"):
        linear(torch.ones(2, HEADS * SIZE), sample(5, HEADS * SIZE), kept=attended.kept)


@pytest.mark.parametrize(
    ("keep", "call"),
    [(None, {}), (PACKED_QUERIES, CALLS["causal"]), (None, CALLS["bools"])],
    ids=["values", "queries too", "mask"],
)
def test_second_derivatives_reach_every_input(
    keep: Compression | None, call: dict[str, Any]
) -> None:
    """15 % is far above int8's noise and far below the 100 % of a path that was lost."""
    weight = sample(5, HEADS * SIZE, seed=6)

    def penalty(function: Callable[[list[Tensor]], Tensor]) -> tuple[Tensor, ...]:
        tensors = inputs()
        every = [*tensors, weight]
        total = function(tensors).square().sum()
        first = torch.autograd.grad(total, every, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), every)

    def ours(tensors: list[Tensor]) -> Tensor:
        attended = attend(*tensors, keep=keep, **call)
        return linear(rows(attended.y), weight, kept=attended.kept)

    def theirs(tensors: list[Tensor]) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return functional.linear(rows(torchs(*tensors, **call)), weight)

    for found, exact in zip(penalty(ours), penalty(theirs), strict=True):
        assert (found - exact).norm() <= 0.15 * exact.norm()


def test_backward_can_be_repeated() -> None:
    tensors = inputs()
    total = attend(*tensors).y.square().sum()
    first, second = (torch.autograd.grad(total, tensors, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def three_dimensions() -> list[Tensor]:
    return [sample(2, 5, SIZE, seed=i) for i in range(3)]


def wider_values() -> list[Tensor]:
    return [*inputs()[:2], sample(BATCH, KEY_HEADS, KEYS, 2 * SIZE, seed=3)]


@pytest.mark.parametrize(
    ("tensors", "call"),
    [
        (inputs(), {"keep": EXACT}),
        (inputs(), {"dropout_p": 0.5}),
        (inputs(), {"attn_mask": sample(TOKENS, KEYS)}),
        (three_dimensions(), {}),
        (wider_values(), {}),
    ],
    ids=["not enabled", "dropout on a CPU", "mask with a gradient", "3-D", "wider values"],
)
def test_what_no_kernel_takes_is_torchs(tensors: list[Tensor], call: dict[str, Any]) -> None:
    theirs = {name: value for name, value in call.items() if name != "keep"}
    torch.manual_seed(3)
    y, kept = attend(*tensors, **call)
    torch.manual_seed(3)
    expected = functional.scaled_dot_product_attention(*tensors, enable_gqa=True, **theirs)
    assert kept is None
    assert torch.equal(y, expected)
    dy = torch.ones_like(y)
    for ours, exact in zip(
        torch.autograd.grad(y, tensors, dy), torch.autograd.grad(expected, tensors, dy), strict=True
    ):
        assert torch.equal(ours, exact)


def test_nothing_is_kept_without_gradients() -> None:
    tensors = [x.detach() for x in inputs()]
    assert attend(*tensors).kept is None
    with torch.no_grad():
        assert attend(*inputs()).kept is None


def test_a_kernel_that_is_switched_off_is_not_used() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert attend(*inputs()).kept is None


def test_autocast_computes_in_its_type() -> None:
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        attended, expected = attend(*tensors), torchs(*tensors)
    assert attended.y.dtype == torch.bfloat16
    assert torch.equal(attended.y, expected)
    dq, *_ = torch.autograd.grad(attended.y, tensors, incoming().bfloat16())
    assert dq.dtype == torch.float32


@pytest.mark.parametrize("keep", [None, PACKED_QUERIES], ids=["values", "queries too"])
def test_compiles_to_one_graph(keep: Compression | None) -> None:
    torch.compiler.reset()
    tensors, weight = inputs(), sample(5, HEADS * SIZE, seed=6)

    def block(*tensors: Tensor) -> Tensor:
        attended = attend(*tensors, keep=keep, is_causal=True)
        return linear(rows(attended.y), weight, kept=attended.kept)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), block(*tensors))
    every = [*tensors, weight]
    expected = torch.autograd.grad(block(*tensors).sum(), every)
    found = torch.autograd.grad(compiled(*tensors).sum(), every)
    for ours, theirs in zip(found, expected, strict=True):
        # Two draws of int8's noise, in q and k as well: see above.
        assert (ours - theirs).norm() <= 0.1 * theirs.norm()


def test_operators_say_what_they_return() -> None:
    call = (kernels.HOST, 0.0, False, None)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for of_queries in ([-1, 0, 0, 0, 0], [8, 128, 1, 0, 0]):
        how = (*call, [8, 128, 1, 0, 0], of_queries)
        nobody = (None, None, None, None, 0)
        arguments = (*inputs(), None, *nobody, *how)
        torch.library.opcheck(torch.ops.vramx.attention.default, arguments, test_utils=tests)
        q, k, v = (x.detach() for x in inputs())
        with torch.no_grad():
            _, _, y, _, *kept, sums, seed, offset = torch.ops.vramx.attention(
                q, k, v, *arguments[3:]
            )
        packs = kept[:3]
        q, k = (q, k) if of_queries[0] == -1 else packs[:2]
        shapes, needs = (list(incoming().shape), list(v.shape), v.dtype), [False] * 3
        for result in ([], [y, sums, seed, offset]):
            given = (result, incoming(), None, *nobody, *how, *shapes, needs)
            torch.library.opcheck(
                torch.ops.vramx.attention_backward.default,
                (q, k, packs[2], None, *given),
                test_utils=tests,
            )


# -- The kernels of CUDA: which, and that they are called by arguments they have -------------------


def of_cuda(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int = 64, **options: Any
) -> int:
    monkeypatch.setattr(kernels, "_allowed", lambda device: (256, True, True))
    q, k = torch.empty(2, 4, 8, size, dtype=dtype), torch.empty(2, 4, 16, size, dtype=dtype)
    mask = options.pop("mask", None)
    return kernels._of_cuda(q, k, mask, kernels.Call(0, 0.0, options.pop("causal", False), None))


def test_flash_takes_halves_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert of_cuda(monkeypatch, dtype) == kernels.FLASH


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"mask": torch.ones(8, 16)}),
        (torch.bfloat16, {"causal": True}),
        (torch.bfloat16, {"size": 264}),
    ],
    ids=["float32", "mask", "causal and not square", "large heads"],
)
def test_efficient_takes_the_others(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    assert of_cuda(monkeypatch, dtype, **options) == kernels.EFFICIENT


def test_no_kernel_takes_odd_sizes_and_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_cuda(monkeypatch, torch.bfloat16, size=60) == kernels.NO_KERNEL
    assert of_cuda(monkeypatch, torch.float64) == kernels.NO_KERNEL


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("kernel", [kernels.FLASH, kernels.EFFICIENT])
def test_kernels_of_cuda_accept_the_call(kernel: int, masked: bool) -> None:
    """On tensors without data, which torch checks against the operators' own declarations."""
    call = kernels.Call(kernel, 0.0, False, None)
    q, k, v = (
        torch.empty(2, heads, tokens, 64, dtype=torch.bfloat16, device="meta")
        for heads, tokens in ((4, 8), (2, 10), (2, 10))
    )
    mask = torch.ones(8, 10, dtype=torch.bool, device="meta") if masked else None
    y, *state = kernels.forward(call, (q, k, v), mask)
    found = kernels.backward(call, torch.empty_like(y), (q, k, v, y), mask, state)
    assert y.shape == q.shape
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("shape", [(8, 10), (1, 10), (2, 1, 8, 10), (2, 1, 1, 10), (1, 1, 8, 1)])
def test_rows_of_a_prepared_mask_are_aligned(shape: tuple[int, ...]) -> None:
    q = torch.empty(2, 4, 8, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 4, 10, 64, dtype=torch.bfloat16, device="meta")
    mask = torch.ones(shape, dtype=torch.bool, device="meta")
    prepared = kernels.prepared_mask(mask, q, k)
    assert prepared is not None
    assert prepared.shape == (2, 4, 8, 10)
    assert all(stride % 16 == 0 for stride in prepared.stride()[:3])
    assert prepared.stride(3) == 1
