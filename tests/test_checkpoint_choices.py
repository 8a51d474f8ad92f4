"""What a region chooses, it chooses again: regions that compare keep their inputs exactly.

The inputs here lie on an edge, so that packed ones would fall on the other side: a test shows it.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_tools import SMALL, WIDTH, Packs, activation, bent, packs, quiet, seeds
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import vramx
from vramx import errors
from vramx.errors import RecomputationError, VramxWarning
from vramx.recompute import inputs, region, unbounded, verdicts, watch

__all__ = ["packs", "quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "_forgotten", "quiet")


@pytest.fixture
def _forgotten() -> None:
    """Forget what calls of other tests have shown."""
    verdicts._seen.clear()
    errors._said.clear()


def route(x: Tensor) -> Tensor:
    """Send each row to the expert of its largest column, as a mixture of experts does."""
    chosen = x.topk(1).indices.flatten()
    rows = [(x[chosen == expert] * (expert + 1.0)).sin() for expert in range(x.shape[1])]
    return torch.cat(rows)


def branch(x: Tensor) -> Tensor:
    return bent(x) if x.sum() > 0 else bent(x) * 2


def read(x: Tensor) -> Tensor:
    return bent(x) * float(x.detach().flatten().tolist()[0] > 0)


class Rounded(torch.autograd.Function):
    """Passes the gradient where the value is positive, which its forward does not show."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


def unseen(x: Tensor) -> Tensor:
    """Fill memory as a kernel does that is launched on its address."""
    mask = torch.empty(x.shape)
    mask.numpy()[...] = x.detach().numpy() > 0
    return bent(x) * mask


ROUGH: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: F.relu(x) * x,
    "a root": lambda x: x.square().sqrt() * x,
    "lengths that are bounded above": lambda x: (
        F.normalize(x) * x.norm(dim=1).clamp(max=1)[:, None]
    ),
    "the sum of sizes": lambda x: F.normalize(x, p=1),
    "a mask of values": lambda x: bent(x) * (x.cos() > 0.5),
    "memory of its own": lambda x: bent(x) * (torch.zeros(64, 16).copy_(x) > 0),
    "a view of memory of its own": lambda x: (
        bent(x)
        * (
            (memory := torch.zeros(2, 64, 16)),
            memory[0].copy_(x.detach()),
            memory.sum(0) > 0,
        )[2]
    ),
    "memory in a list": lambda x: (
        bent(x)
        * (
            (memory := [torch.zeros(64, 16)]),
            torch._foreach_add_(memory, [x.detach()]),
            memory[0] > 0,
        )[2]
    ),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3).sin(),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.3)).sin(),
    "relu in place": lambda x: (x * 1.0).relu_().sin(),
    "hardtanh": lambda x: F.hardtanh(x, 0.0, 2.0).sin(),
    "clamp": lambda x: x.clamp(min=0).sin(),
    "threshold": lambda x: F.threshold(x, 0.0, 0.0).sin(),
    "abs": lambda x: x.abs().sin(),
    "sign": lambda x: x.sign() * bent(x),
    "floor": lambda x: x.floor() * bent(x),
    "round": lambda x: (x + 0.5).round() * bent(x),
    "whole numbers": lambda x: (x + 1.0).long() * bent(x),
    "remainder": lambda x: x.remainder(1.0).sin(),
    "where": lambda x: torch.where(x > 0, bent(x), -bent(x)),
    "masked_fill": lambda x: bent(x).masked_fill(x < 0, 0.0),
    "maximum": lambda x: torch.maximum(x, torch.zeros(())).sin(),
    "max": lambda x: x.max(1).values.sin(),
    "amax": lambda x: x.amax(1).sin(),
    "max_pool": lambda x: F.max_pool1d(x[None], 4).sin(),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool1d(x[None], 4).sin(),
    "sort": lambda x: x.sort(1).values * torch.arange(x.shape[1]),
    "argmax": lambda x: bent(x) * x.argmax(1, keepdim=True),
    "topk": route,
    "median": lambda x: x.median(1).values.sin(),
    "bucketize": lambda x: bent(x) * torch.bucketize(x.detach(), torch.zeros(1)),
    "boolean index": lambda x: x[x.sum(1) > 0].sin(),
    "nonzero": lambda x: bent(x)[(x > 0).nonzero(as_tuple=True)],
    "branch": branch,
    "read past the dispatcher": read,
    "chances": lambda x: bent(x) * torch.bernoulli((x.detach() > 0).float()),
    "bits": lambda x: bent(x) * (x.detach().view(torch.int32) >= 0),
    "a rounded quotient": lambda x: bent(x) * x.div(torch.full((1,), 0.7), rounding_mode="floor"),
    "a distance": lambda x: 1 / (x[:, 6:10] - x[:, 5:9]).norm(dim=1),
    "by hand": lambda x: (x[:, 6:10] - x[:, 5:9]).square().sum(1).add(1e-12).rsqrt(),
    "in place": lambda x: x[1:].clone().sub_(x[:-1]).std(1),
    "the other way round": lambda x: torch.rsub(x[:1], x[1:]).pow(2).mean(1).sqrt(),
    "a norm of differences": lambda x: F.layer_norm(3 * x.diff(dim=1)[:, 5:9], (4,)),
    "quotient": lambda x: x / (x.sum(1, keepdim=True) + 1e-6),
    "own function": lambda x: bent(Rounded.apply(x)),
    "own kernel": unseen,
    "nested checkpoint": lambda x: torch_checkpoint(F.relu, x, use_reentrant=False).sin(),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros_like(x)),
    "vmap": torch.vmap(lambda row: row.clamp(min=0.0).sin()),
}


def on_the_edge() -> Tensor:
    """Return rows whose sums, and a third of whose elements, packing moves across zero."""
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    x[:, 5:10] = torch.randn(64, 5) * 1e-5
    x[:, 0] -= x.sum(1) - 1e-6
    return x.requires_grad_()


def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = on_the_edge()
    torch.manual_seed(1)
    function(leaf * 1.0).sum().backward()
    return leaf.grad


@pytest.mark.parametrize("name", ROUGH)
def test_a_region_that_compares_has_the_exact_gradient(name: str, packs: Packs) -> None:
    function = ROUGH[name]
    expected = gradient(function)
    # The first call is watched; the others go by what it has shown.
    for _ in range(2):
        found = gradient(lambda x: vramx.checkpoint(function, x, level=SMALL))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert packs.sizes == []


@pytest.mark.parametrize("name", ["leaky_relu", "clamp", "where", "own function", "bits"])
def test_the_edge_is_one_that_packing_crosses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect that the test above finds: nothing of what runs counts as a comparison."""
    monkeypatch.setattr(watch._First, "tell", lambda *_: None)
    monkeypatch.setattr(region.Region, "_refuse", lambda *_: None)
    monkeypatch.setattr(unbounded.Unbounded, "look_at", lambda *_: None)
    function = ROUGH[name]
    expected = gradient(function)
    found = gradient(lambda x: vramx.checkpoint(function, x, level=SMALL))
    # One step of 8 bits is 1/127 of the largest of a group; slopes here are below 4.
    assert (found - expected).abs().max() > 0.3


@pytest.fixture(scope="module")
def scripted() -> Callable[[Tensor], Tensor]:
    """Return what runs without Python, past modes that see functions of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has newer ways
        function: Callable[[Tensor], Tensor] = torch.jit.script(_clamped)
    return function


def _clamped(x: Tensor) -> Tensor:
    return (bent(x) / 2) * (x * 2)


def test_a_region_with_a_scripted_function_is_packed(
    scripted: Callable[[Tensor], Tensor], packs: Packs
) -> None:
    gradient(lambda x: vramx.checkpoint(lambda y: scripted(y) @ y.t(), x, level=SMALL))
    assert packs.sizes == [64 * 16]


LAYER = torch.linspace(-0.5, 0.5, 16 * 64).sin().view(16, 64)
SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: F.scaled_dot_product_attention(
        *((x @ torch.ones(16, 8))[None, None],) * 3, is_causal=True
    ),
    "norm by hand": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "gelu": lambda x: (F.gelu(x) * F.silu(x) * F.softplus(x.mean(0))) @ torch.ones(16, 4),
    "dropout": lambda x: F.dropout(bent(x), 0.5),
    "convolution": lambda x: F.conv1d(x[None], torch.ones(3, 64, 5), padding=2).square(),
    "average pooling": lambda x: bent(F.avg_pool1d(x[None], 4)),
    "given positions": lambda x: bent(x[torch.arange(0, 64, 2)]),
    "a causal mask of its own": lambda x: bent(x).masked_fill(
        torch.arange(16) > torch.arange(64)[:, None], 0.0
    ),
    "rotation": lambda x: torch.cat((-x[:, 8:], x[:, :8]), 1) * torch.arange(16).float().cos(),
    "half precision": lambda x: (x.bfloat16() @ LAYER.bfloat16()).float().softmax(-1),
    "scaled": lambda x: (x / 8).square() - x.mean(),
    "cross entropy": lambda x: F.cross_entropy(x @ torch.ones(16, 16), torch.arange(64) % 16),
    "lists": lambda x: torch.stack([bent(part) for part in x.chunk(4, 1)], 0),
    "noise": lambda x: bent(x) + torch.randn_like(x),
    "normalize": F.normalize,
    "a rotation, interleaved": lambda x: (x[:, ::2] * 0.6 - x[:, 1::2] * 0.8) @ torch.ones(8, 4),
    "a loss of squares": lambda x: (x - x.roll(1, 0)).square().mean() + bent(x).mean(),
    "a mix with the one before": lambda x: F.layer_norm(
        (x[:1] + (x[1:] - x[:1]) * 0.3) @ torch.ones(16, 16), (16,)
    ),
    "a layer norm by hand": lambda x: (
        (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True).sqrt() + 1e-5)
    ),
    "a standard deviation": lambda x: x * x.std(1, keepdim=True).clamp(min=1e-6).reciprocal(),
    "stochastic depth": lambda x: bent(x) * (torch.rand(64, 1) < 0.5),
    "stochastic depth, rounded": lambda x: bent(x) * (0.5 + x.new_empty(64, 1).uniform_()).floor(),
    "a mask that it makes": lambda x: bent(x).masked_fill(torch.ones(64, 16).triu(1).bool(), 0.0),
    "a bias of positions": lambda x: bent(x) + torch.arange(1.0, 17.0).log().exp(),
    "a mean over a mask": lambda x: bent(x).sum(0) / torch.ones(64, 1).cumsum(0).sum().clamp(min=1),
    "a temperature": lambda x: (x @ x.t()) / torch.full((1,), 0.7),
    "an integer of its own": lambda x: bent(x) * int(torch.ones(1).sum()),
    "numbers of its own": lambda x: bent(x) * LAYER.tolist()[0][0],
    "memory of its own": lambda x: bent(x) * (LAYER.untyped_storage().nbytes() > 0),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_a_smooth_region_is_packed(name: str, packs: Packs) -> None:
    for _ in range(2):
        gradient(lambda x: vramx.checkpoint(SMOOTH[name], x, level=SMALL))
    assert packs.sizes == [64 * 16] * 2


# Of a hidden state and of scores on which a mask has been put.
LOWER = torch.ones(64, 64, dtype=torch.bool).tril(-40)
SOFTMAXES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scores that are added": lambda x, s: (x @ LAYER + s).softmax(-1) @ x,
    "in place": lambda x, s: (x @ LAYER).add_(s.clone()).softmax(-1) @ x,
    "masked once more": lambda x, s: (x @ LAYER + s).masked_fill(LOWER, -1e4).softmax(-1) @ x,
    "with others beside them": lambda x, s: torch.cat((x @ LAYER, s), 1).softmax(-1)[:, :64] @ x,
    "a mask of attention": lambda x, s: F.scaled_dot_product_attention(
        *((x @ torch.ones(16, 8))[None, None],) * 3, attn_mask=s
    ),
    "logits": lambda x, s: F.cross_entropy(s, torch.arange(64)) + bent(x),
}


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min, -1e4])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_what_a_softmax_takes_is_kept_exactly_and_the_rest_packed(
    name: str, hidden: float, packs: Packs
) -> None:
    def gradients(call: Callable[..., Tensor]) -> list[Tensor]:
        x = (torch.randn(64, 16) * 0.5).requires_grad_()
        mask = torch.ones(64, 64, dtype=torch.bool).triu(1)
        scores = torch.randn(64, 64).masked_fill(mask, hidden).requires_grad_()
        call(x * 1, scores * 1).square().sum().backward()  # a leaf would not be packed
        assert x.grad is not None
        assert scores.grad is not None
        return [x.grad, scores.grad]

    torch.manual_seed(0)
    expected = gradients(SOFTMAXES[name])
    torch.manual_seed(0)
    found = gradients(lambda *both: vramx.checkpoint(SOFTMAXES[name], *both, level=SMALL))
    assert packs.sizes == [64 * 16]
    for one, other in zip(found, expected, strict=True):
        assert F.cosine_similarity(one.flatten(), other.flatten(), 0) > 0.99


@pytest.mark.parametrize("mask", [None, torch.zeros(64, 64, requires_grad=True)])
@pytest.mark.parametrize("turn", [1.0, torch.full((16,), 0.5)])
@pytest.mark.parametrize("by_hand", [False, True])
def test_queries_and_keys_of_attention_are_kept_exactly_and_the_value_packed(
    by_hand: bool, turn: Any, mask: Tensor | None, packs: Packs
) -> None:
    """With a mask that learns torch computes scores as products of matrices."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (x[None, None] * turn for x in (q, k))
        if not by_hand:
            return F.scaled_dot_product_attention(q, key=k, value=v[None, None], attn_mask=mask)
        scores = (q @ k.transpose(-1, -2)).bfloat16().float() / 4.0
        return (scores if mask is None else scores + mask).softmax(-1) @ v

    q, k, v = ((torch.randn(64, 16) * s).requires_grad_() for s in (6.0, 6.0, 1.0))
    inputs = [q * 1, k * 1, v * 1]
    exact = torch.autograd.grad(attend(*inputs).sum(), inputs)
    packed = torch.autograd.grad(vramx.checkpoint(attend, *inputs, level=SMALL).sum(), inputs)
    assert packs.sizes == [64 * 16]
    for one, other in zip(packed, exact, strict=True):
        assert F.cosine_similarity(one.flatten(), other.flatten(), 0) > 0.99


def test_what_meets_an_input_in_scores_behind_a_layer_keeps_that_input_alone(packs: Packs) -> None:
    layer = nn.Linear(16, 16)

    def general(states: Tensor, query: Tensor) -> Tensor:
        return (layer(query) @ states.t()).softmax(-1) @ LAYER.t()

    states, query = (torch.randn(64, 16).requires_grad_() for _ in range(2))
    vramx.checkpoint(general, states * 1, query * 1, level=SMALL).square().sum().backward()
    assert packs.sizes == [64 * 16]
    head = nn.Linear(16, 64)
    vramx.checkpoint(
        lambda x: head(x).softmax(-1), query * 1, level=SMALL
    ).square().sum().backward()
    assert packs.sizes == [64 * 16] * 2


# Of points: how often each turns.
TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "bands": lambda x: (x[..., None] * 2.0 ** torch.arange(8)).flatten(1).sin(),
    "band by band": lambda x: torch.cat([(x * 2.0**band).cos() for band in range(8)], 1),
    "a projection": lambda x: (x @ torch.logspace(-1, 2, 24).view(3, 8)).sin(),
    "a sum by hand": lambda x: ((x[:, None] * torch.full((8, 3), 60.0)).sum(-1) + 1).cos(),
    "in steps": lambda x: (x.neg() * 8 / 0.125 - 1).cos(),
    "as they are": torch.sin,
}


@pytest.mark.parametrize("name", TURNS)
def test_positions_that_are_encoded_are_kept_exactly_and_the_rest_packed(
    name: str, packs: Packs
) -> None:
    far = 2000.0 if name == "as they are" else 1.0
    x, hidden = (torch.randn(64, 3) * far).requires_grad_(), torch.randn(64, 16).requires_grad_()

    def field(x: Tensor, hidden: Tensor) -> Tensor:
        turns = TURNS[name](x)
        return turns @ torch.ones(turns.shape[1], 16).cumsum(0).cos() + hidden @ torch.ones(16, 16)

    def gradient(call: Callable[..., Tensor]) -> Tensor:
        return torch.autograd.grad(call(x * 1, hidden * 1).square().sum(), x)[0]

    packed = gradient(lambda *both: vramx.checkpoint(field, *both, level=SMALL))
    assert packs.sizes == [64 * 16]
    assert F.cosine_similarity(packed.flatten(), gradient(field).flatten(), 0) > 0.99


# Functions that want the elements exactly, of what norms of torch give.
SHARPENED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax, rows": lambda x: (F.layer_norm(x, (64,)) * 50).softmax(-1),
    "softmax, of squares": lambda x: (F.rms_norm(x, (64,)) * 50).softmax(-1),
    "softmax, groups": lambda x: (F.group_norm(x, 4) * 50).softmax(-1),
    "softmax, channels": lambda x: (F.batch_norm(x, None, None, training=True) * 50).softmax(-1),
    "sine": lambda x: (F.layer_norm(x, (64,)) * 50).sin(),
    "scores": lambda x: (F.layer_norm(x, (64,)) @ F.layer_norm(x, (64,)).T / 16).softmax(-1),
}


@pytest.mark.parametrize("name", SHARPENED)
def test_what_a_norm_gives_to_a_softmax_or_a_sine_is_of_exact_inputs(
    name: str, packs: Packs
) -> None:
    x, hidden = (torch.randn(64, 64).requires_grad_() for _ in "ab")

    def block(x: Tensor, hidden: Tensor) -> Tensor:
        return SHARPENED[name](x) @ bent(hidden)

    def gradient(call: Callable[..., Tensor]) -> Tensor:
        y = call(x * 1, hidden * 1)
        return torch.autograd.grad(y, x, torch.ones_like(y).cumsum(0).cos())[0]

    found = gradient(lambda *both: vramx.checkpoint(block, *both, level=SMALL))
    assert packs.sizes == [64 * 64]
    assert F.cosine_similarity(found.flatten(), gradient(block).flatten(), 0) > 0.99


# What a gate lets through, and a norm of it.
GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a norm": lambda x, gate: F.rms_norm(x * F.silu(gate), (128,)),
    "of parts": lambda x, gate: F.layer_norm((torch.cat((x, x)) * gate.repeat(2, 1))[8:72], (128,)),
    "a length": lambda x, gate: F.normalize(torch.addcmul(x * 0.01, x, gate), dim=-1),
    "by hand": lambda x, gate: x * gate * ((x * gate).square().mean(-1, True) + 1e-6).rsqrt(),
}


@pytest.mark.parametrize("name", GATED)
def test_what_is_gated_before_a_norm_is_kept_exactly(name: str, packs: Packs) -> None:
    """A row may be nothing but small elements of one that meet large ones of the other."""
    large = [(torch.rand(64, 128) < 0.03) * 100 + 0.01 for _ in "ab"]
    x, gate = ((torch.randn(64, 128) * each).requires_grad_() for each in large)
    mixed = torch.randn(128, 16)

    def block(x: Tensor, gate: Tensor) -> Tensor:
        return GATED[name](x, gate) @ mixed

    def gradient(call: Callable[..., Tensor]) -> Tensor:
        y = call(x * 1, gate * 1)
        return torch.cat(torch.autograd.grad(y, (x, gate), torch.ones_like(y).cumsum(0).cos()))

    found = gradient(lambda *both: vramx.checkpoint(block, *both, level=SMALL))
    assert packs.sizes == []
    torch.testing.assert_close(found, gradient(block), rtol=0, atol=0)


# Positions, which are large, and features beside them.
APART_IN_ROWS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "sizes": lambda x: x.split((8, 40), -1),
    "slices": lambda x: (x[..., :8], x[..., 8:]),
    "columns": lambda x: (
        x.index_select(-1, torch.arange(8)),
        x.index_select(-1, torch.arange(8, 48)),
    ),
    "of a view": lambda x: x.view(4, 16, 48).split((8, 40), -1),
}


@pytest.mark.parametrize("name", APART_IN_ROWS)
def test_what_is_taken_apart_within_rows_is_kept_exactly(name: str, packs: Packs) -> None:
    x = (torch.randn(64, 48) * torch.cat((torch.full((8,), 1e4), torch.ones(40)))).requires_grad_()
    mixed = torch.linspace(0, 9, 40 * 16).sin().view(40, 16)

    def block(x: Tensor) -> Tensor:
        positions, features = APART_IN_ROWS[name](x)
        return F.normalize(positions, dim=-1).sum(-1, keepdim=True) * (features.square() @ mixed)

    def gradient(call: Callable[..., Tensor]) -> Tensor:
        y = call(x * 1)
        return torch.autograd.grad(y, x, torch.ones_like(y).cumsum(0).cos())[0]

    found = gradient(lambda x: vramx.checkpoint(block, x, level=SMALL))
    assert packs.sizes == []
    torch.testing.assert_close(found, gradient(block), rtol=0, atol=0)


def test_parts_of_whole_groups_are_packed(packs: Packs) -> None:
    x = torch.randn(16, 384).requires_grad_()

    def block(x: Tensor) -> Tensor:
        first, rest = x.split((128, 256), -1)
        return first.square().mean() * bent(rest)

    vramx.checkpoint(block, x * 1, level=SMALL)
    assert packs.sizes == [16 * 384]


def test_a_square_by_hand_before_a_norm_is_packed_as_what_is_normalised(packs: Packs) -> None:
    gradient(
        lambda x: vramx.checkpoint(
            lambda y: y * ((y * y).mean(-1, keepdim=True) + 1e-6).rsqrt(), x, level=SMALL
        )
    )
    assert packs.sizes == [64 * 16]


def test_what_keeps_inputs_exact_is_named_once() -> None:
    def chosen(x: Tensor) -> Tensor:
        return F.relu(x).sin()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for rows in (4, 8, 8):
            vramx.checkpoint(chosen, activation(rows, 16), level=SMALL)
    (text,) = (str(warning.message) for warning in seen if warning.category is VramxWarning)
    assert "keeps the inputs of test_what_keeps" in text
    assert "aten::relu is not known to be smooth" in text


class Switch(nn.Module):
    """Rounds when an attribute says so, which no argument shows, nor what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = False

    def forward(self, x: Tensor) -> Tensor:
        return bent(x.round() if self.rounds else x)


def test_rounding_that_was_not_there_before_is_an_error_once(packs: Packs) -> None:
    switch = Switch()

    def step() -> Tensor:
        return gradient(lambda x: vramx.checkpoint(switch, x, level=SMALL))

    step()
    switch.rounds = True
    with pytest.raises(RecomputationError, match=r"Switch .* aten::round.*kept exactly"):
        step()
    torch.testing.assert_close(step(), gradient(switch), rtol=0, atol=0)
    assert packs.sizes == [64 * 16] * 2


class Mode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (F.gelu(x) if self.training else F.relu(x)).cumsum(-1)


MODE = Mode()


def either(x: Tensor, smooth: bool) -> Tensor:
    return (F.gelu(x) if smooth else F.relu(x)).cumsum(-1)


# By the module's mode, by an argument, and by what a lambda is over: one stands in a loop for all.
APART: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "mode": lambda x, smooth: vramx.checkpoint(MODE.train(smooth), x, level=SMALL),
    "argument": lambda x, smooth: vramx.checkpoint(either, x, smooth, level=SMALL),
    "lambda": lambda x, smooth: (
        lambda block: vramx.checkpoint(lambda y: block(y).cumsum(-1), x, level=SMALL)
    )(nn.GELU() if smooth else nn.ReLU()),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", APART)
def test_calls_that_may_choose_otherwise_are_known_apart(
    name: str, first: bool, packs: Packs
) -> None:
    for smooth in (first, not first, first):
        found = gradient(lambda x, s=smooth: APART[name](x, s))
        exact = gradient(lambda x, s=smooth: either(x, s))
        assert torch.equal(found, exact) != smooth
    assert len(packs.sizes) == (2 if first else 1)


def test_an_input_that_would_be_packed_moves_to_the_host_exactly(
    packs: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = []
    monkeypatch.setattr(inputs.offload, "put_exact", lambda x, share: moved.append((len(x), share)))
    vramx.checkpoint(ROUGH["relu"], activation(8, 16), level=SMALL, offload="cpu").sum()
    assert (moved, packs.sizes) == ([(128, "cpu")], [])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torchs_checkpoint_within_a_context_has_its_choices_again(use_reentrant: bool) -> None:
    def run(x: Tensor) -> Tensor:
        with vramx.compress(min_bytes=0):
            return torch_checkpoint(ROUGH["relu"], x, use_reentrant=use_reentrant)

    torch.testing.assert_close(gradient(run), gradient(ROUGH["relu"]), rtol=0, atol=0)


def test_a_region_without_anything_to_pack_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("watched")

    monkeypatch.setattr(watch.Watch, "__init__", refused)
    large = vramx.Compression(min_bytes=1 << 20)
    vramx.checkpoint(F.relu, activation(), level=large).sum().backward()
    vramx.checkpoint(F.relu, activation(), level="keep").sum().backward()
    with contextlib.suppress(AssertionError):
        vramx.checkpoint(F.relu, activation(), level=SMALL)
        pytest.fail("the region with an input to pack was not watched")


def test_a_verdict_holds_no_tensor_whose_method_it_is_of() -> None:
    matrix = activation()
    gone = weakref.ref(matrix)
    vramx.checkpoint(matrix.matmul, activation(WIDTH, 8), level=SMALL).sum().backward()
    del matrix
    assert gone() is None
