"""Attention that keeps values and result packed: results, gradients, bytes, what takes a call.

On a CPU, on its fused kernel. The result and the gradient of v need nothing that is packed and must
be torch's own. For those of q and k: P are the probabilities, dS = P (dy v^T - rowsum(dy y)),
dq = scale dS k and dk = scale dS^T q. v is off by at most a step of its group
(vramx/compression/codec/codec.py), and y is P v of that very v, so dS is off by at most
P (|dy| step_v^T + rowsum(|dy| P step_v)). Of k its mean over tokens changes nothing, for the rows
of dS sum to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from norm_tools import EXACT, INT4, held_bytes, sample, step_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramx.compression.config import Compression
from vramx.nn import attention_kernels as kernels
from vramx.nn.attention import Attended, attention_linear, scaled_dot_product_attention
from vramx.nn.functional import linear
from vramx.nn.readers import Behind

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


def both_gradients(
    tensors: list[Tensor], keep: Compression | None = None, **call: Any
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return ours and torch's."""
    found = torch.autograd.grad(attend(*tensors, keep=keep, **call).y, tensors, incoming())
    return found, torch.autograd.grad(torchs(*tensors, **call), tensors, incoming())


@every_call
def test_gradients_are_within_the_steps(call: dict[str, Any]) -> None:
    tensors = inputs()
    found, exact = both_gradients(tensors, **call)
    for ours, theirs, bound in zip(found[:2], exact[:2], tolerances(tensors, call), strict=True):
        assert ((ours - theirs).abs() <= bound).all()
    # Sums of at most 24 terms of order 1.
    assert torch.allclose(found[2], exact[2], atol=1e-5)


def test_bound_of_the_steps_sees_four_bits() -> None:
    tensors = inputs()
    (dq, *_), (exact, *_) = both_gradients(tensors, keep=INT4)
    assert not ((dq - exact).abs() <= tolerances(tensors, {})[0]).all()


def test_queries_are_packed_where_the_policy_says_so() -> None:
    tensors = inputs()
    packed = held_bytes(lambda: attend(*tensors, keep=PACKED_QUERIES), *tensors)
    assert packed > held_bytes(lambda: attend(*tensors), *tensors)  # which holds the inputs
    for ours, theirs in zip(*both_gradients(tensors, keep=PACKED_QUERIES), strict=True):
        # Each element of q and k is off by 0.4 % of the largest of its group, about 3 deviations.
        assert 0 < (ours - theirs).norm() <= 0.06 * theirs.norm()


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
def test_second_derivatives_reach_every_input(keep: Any, call: dict[str, Any]) -> None:
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


@pytest.mark.parametrize(
    ("tensors", "call"),
    [
        (inputs(), {"keep": EXACT}),
        (inputs(), {"dropout_p": 0.5}),
        (inputs(), {"attn_mask": sample(TOKENS, KEYS)}),
        ([sample(2, 5, SIZE, seed=i) for i in range(3)], {}),
        ([*inputs()[:2], sample(BATCH, KEY_HEADS, KEYS, 2 * SIZE, seed=3)], {}),
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
    found, exact = (torch.autograd.grad(each.sum(), tensors) for each in (y, expected))
    assert all(map(torch.equal, found, exact))


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


@pytest.mark.parametrize("of_queries", [[-1, 0, 0, 0, 0], [8, 128, 1, 0, 0]], ids=["values", "too"])
def test_backward_takes_a_result_that_was_kept(of_queries: list[int]) -> None:
    # As behind dropout, which no CPU kernel has: there only CUDA's kernels call it so.
    q, k, v = (x.detach() for x in inputs())
    how = (kernels.HOST, 0.0, False, None, [8, 128, 1, 0, 0], of_queries)
    nobody = (None, None, None, None, 0)
    _, _, y, _, *packs = torch.ops.vramx.attention(q, k, v, None, *nobody, *how)
    _, sums, *_ = kernels.forward(kernels.Call(*how[:4]), (q, k, v), None)  # type: ignore[misc]
    seed = offset = q.new_empty(0)
    q, k = (q, k) if of_queries[0] == -1 else packs[:2]
    shapes, needs = (list(incoming().shape), list(v.shape), v.dtype), [False] * 3
    given = ([y, sums, seed, offset], incoming(), None, *nobody, *how, *shapes, needs)
    torch.library.opcheck(
        torch.ops.vramx.attention_backward.default,
        (q, k, packs[2], None, *given),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_kernel_that_drops_is_called_without_gradients_too(
    dropout_p: float, with_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a reentrant checkpoint's two passes only one has gradients, and both are to drop alike."""
    calls: list[float] = []

    def noted(call: kernels.Call, *others: Any) -> Any:
        calls.append(call.dropout_p)
        y, sums, *_ = forward(call._replace(dropout_p=0.0), *others)
        return y, sums, torch.tensor(0), torch.tensor(0)

    forward = kernels.forward
    monkeypatch.setattr(kernels, "choose", lambda *_, **__: kernels.HOST)
    monkeypatch.setattr(kernels, "forward", noted)
    tensors, weight = inputs(), sample(5, HEADS * SIZE, seed=6)
    with torch.set_grad_enabled(with_gradients):
        attended = attend(*tensors, dropout_p=dropout_p)
        linear(rows(attended.y), weight, kept=attended.kept)
        q, k, v = tensors
        attention_linear((q, k, v), Behind(weight), dropout_p=dropout_p, enable_gqa=True)
    assert calls == ([dropout_p] * 2 if with_gradients or dropout_p else [])
