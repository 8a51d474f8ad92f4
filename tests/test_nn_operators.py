"""The two routes of an operator: around torch.library in eager mode, through it where one watches.

What is called is the public functions, at sizes at which a call is host time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_elementwise_tools import differs
from norm_tools import sample
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
)

from vramx.compression import reference
from vramx.compression.config import Compression
from vramx.nn.activation import gelu
from vramx.nn.attention import scaled_dot_product_attention
from vramx.nn.convolution import conv2d
from vramx.nn.dropout import dropout_add
from vramx.nn.feed_forward import TwoLinears, two_linears
from vramx.nn.glu import swiglu
from vramx.nn.linear import linear, linears
from vramx.nn.loss import linear_cross_entropy
from vramx.nn.mlp import mlp
from vramx.nn.norm import layer_norm, rms_norm
from vramx.nn.relu import relu
from vramx.nn.unit_linear import gelu_linear, glu_linear

HIDDEN = 128
NEAREST = Compression(rounding="nearest")
EXACT = Compression(level="keep")
Function = Callable[[Tensor, Tensor], Tensor]


def attend(x: Tensor, w: Tensor) -> Tensor:
    q, k = x.view(1, 4, 2, 64), (x @ w).view(1, 4, 2, 64)
    return scaled_dot_product_attention(q, k, k * 2, keep=NEAREST).y


# Of x and of a square weight.
FUNCTIONS: dict[str, Function] = {
    "norm": lambda x, w: layer_norm(x, w[0], w[1], residual=x, keep=NEAREST).y,
    "linear": lambda x, w: linear(x, w, w[0], NEAREST),
    "linears": lambda x, w: torch.cat(
        linears(rms_norm(x, keep=NEAREST), [w, w[:3]], [None, w[0, :3]]), 1
    ),
    "mlp": lambda x, w: mlp(rms_norm(x, w[0], keep=NEAREST), [w, w, w], residual=x),
    "two_linears": lambda x, w: two_linears(
        rms_norm(x, w[0], keep=NEAREST), TwoLinears([w, w], [w[0], None], "gelu", w[1]), x, NEAREST
    ),
    "two_linears_exact": lambda x, w: two_linears(
        x, TwoLinears([w, w], [None, w[0]], "silu"), keep=EXACT
    ),
    "conv2d": lambda x, w: conv2d(
        x.view(4, 8, 4, 4), w.view(-1, 8, 2, 2)[:8], w[0, :8], padding=1, keep=NEAREST
    ),
    "gelu": lambda x, w: gelu(x * w[0], keep=NEAREST),
    "gelu_linear": lambda x, w: gelu_linear(x, w, w[0], residual=x, keep=NEAREST),
    "gelu_linear_exact": lambda x, w: gelu_linear(x, w, keep=EXACT),
    "swiglu": lambda x, w: swiglu(x, x * w[0], keep=NEAREST),
    "glu_linear": lambda x, w: glu_linear(x, x * w[0], w, keep=NEAREST),
    "attention": attend,
    "relu": lambda x, w: relu(x * w[0]),
    "dropout": lambda x, w: dropout_add(x * w[0], x, 0.5),
}
ONCE_ONLY: dict[str, Function] = {
    "loss": lambda x, w: linear_cross_entropy(x, w, torch.arange(len(x))),
    "losses": lambda x, w: linear_cross_entropy(x, w, torch.arange(len(x)), reduction="none"),
}
every_function = pytest.mark.parametrize("name", [*FUNCTIONS, *ONCE_ONLY])
every_smooth_function = pytest.mark.parametrize("name", FUNCTIONS)


def inputs() -> tuple[Tensor, Tensor]:
    # Small weights: a saturated softmax would amplify roundings.
    weight = sample(HIDDEN, HIDDEN, seed=1).detach() / HIDDEN**0.5
    return sample(4, HIDDEN), weight.requires_grad_()


class Watch(TorchDispatchMode):
    """A mode that changes nothing and notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def outcome(name: str) -> list[Tensor]:
    """Return a function's result, its gradients and those of their squares where it has these."""
    torch.manual_seed(0)
    function = (FUNCTIONS | ONCE_ONLY)[name]
    leaves = inputs()
    result = function(*leaves)
    twice = name in FUNCTIONS
    first = torch.autograd.grad((result**2).sum(), leaves, create_graph=twice)
    penalty = sum((gradient**2).sum() for gradient in first)
    second = torch.autograd.grad(penalty, leaves) if twice else ()
    return [result.detach(), *first, *second]


@every_function
def test_both_routes_compute_the_same(name: str) -> None:
    found = outcome(name)
    with Watch() as watch:
        expected = outcome(name)
    assert any(each.startswith("vramx::") for each in watch.seen)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@every_function
def test_both_routes_save_the_same_tensors_in_the_same_order(name: str) -> None:
    def saved() -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []

        def note(tensor: Tensor) -> Tensor:
            found.append((tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad))
            return tensor

        leaves = inputs()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            (FUNCTIONS | ONCE_ONLY)[name](*leaves)
        return found

    found = saved()
    with Watch():
        assert saved() == found


@every_function
def test_backward_can_be_repeated(name: str) -> None:
    torch.manual_seed(0)
    leaves = inputs()
    total = (FUNCTIONS | ONCE_ONLY)[name](*leaves).square().sum()
    first, second = (torch.autograd.grad(total, leaves, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@every_function
def test_nothing_is_packed_or_kept_without_gradients(name: str, monkeypatch: Any) -> None:
    for pack in ("quantize", "pack_mask"):
        monkeypatch.setattr(reference, pack, None)
    with torch.no_grad():
        assert not (FUNCTIONS | ONCE_ONLY)[name](*inputs()).requires_grad
    with pytest.raises(TypeError, match="not callable"):
        gelu(relu(inputs()[0]))  # which packs


@every_smooth_function
def test_a_checkpoint_gives_the_same_gradients(name: str) -> None:
    torch.manual_seed(0)
    leaves = inputs()
    y = checkpoint(FUNCTIONS[name], *leaves, use_reentrant=False)
    found = torch.autograd.grad((y**2).sum(), leaves)
    torch.manual_seed(0)
    plain = torch.autograd.grad((FUNCTIONS[name](*leaves) ** 2).sum(), leaves)
    for ours, expected in zip(found, plain, strict=True):
        assert torch.equal(ours, expected)


# Attention's result is a view that torch's kernel makes.
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "attention"])
def test_results_can_be_written_to(name: str) -> None:
    """What an autograd.Function returns as a view of its own making cannot."""
    leaves = inputs()
    torch.manual_seed(0)
    expected = torch.autograd.grad((FUNCTIONS[name](*leaves) * 2).sum(), leaves)
    torch.manual_seed(0)
    found = torch.autograd.grad(FUNCTIONS[name](*leaves).mul_(2).sum(), leaves)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("function", [gelu, swiglu, linear, lambda x, w: rms_norm(x, w[0]).y])
def test_compiled_calls_draw_new_noise(function: Any) -> None:
    torch.compiler.reset()
    x, weight = inputs()
    others = [] if function is gelu else [x * 2 if function is swiglu else weight]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    first, second = (
        torch.autograd.grad((compiled(x, *others) ** 2).sum(), (others or [x])[0]) for _ in range(2)
    )
    assert not torch.equal(*first, *second)


# The others view their rows as so many images or heads.
@pytest.mark.parametrize(
    "name", [n for n in (*FUNCTIONS, *ONCE_ONLY) if n not in ("attention", "conv2d")]
)
def test_a_graph_serves_rows_of_every_number(name: str) -> None:
    torch.compiler.reset()
    function, (_, weight) = (FUNCTIONS | ONCE_ONLY)[name], inputs()
    compiled = torch.compile(function, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (4, 12, 7):
        x = sample(rows, HIDDEN)
        gradients = []
        for called in (function, compiled):
            torch.manual_seed(0)
            gradients.append(torch.autograd.grad((called(x, weight) ** 2).sum(), [x, weight]))
        for expected, found in zip(*gradients, strict=True):
            assert found.shape == expected.shape
            if name != "dropout":  # a compiled graph draws its masks elsewhere
                assert differs(found, expected) <= 4
