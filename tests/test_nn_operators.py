"""The two routes of an operator: around torch.library in eager mode, through it where one watches.

What is called is the public functions, at sizes at which a call is host time and nothing else.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_tools import sample
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

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
from vramx.nn.operators import Operator, _flattened, _grouped, operator
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


class WatchFunctions(TorchFunctionMode):
    """The same for torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
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
def test_eager_mode_goes_around_the_dispatcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Operator, args: Any) -> bool:
        assert not watched(self, args)
        return False

    watched = Operator.is_watched
    monkeypatch.setattr(Operator, "is_watched", refuse)
    outcome(name)


@every_function
def test_a_function_mode_sees_operators(name: str) -> None:
    with WatchFunctions() as watch:
        (FUNCTIONS | ONCE_ONLY)[name](*inputs())
    assert any("vramx" in each for each in watch.seen)


def test_selective_checkpoints_choose_operators_by_name() -> None:
    chosen: list[str] = []

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func is torch.ops.vramx.unit_linear.default:
            chosen.append("recomputed" if context.is_recompute else "computed")
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    leaves = inputs()
    y = checkpoint(
        lambda x, w: gelu_linear(gelu(x, keep=NEAREST), w, keep=NEAREST), *leaves,
        use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )  # fmt: skip
    found = torch.autograd.grad(y.sum(), leaves)
    assert chosen[0] == "computed"
    plain = gelu_linear(gelu(leaves[0], keep=NEAREST), leaves[1], keep=NEAREST)
    for ours, expected in zip(found, torch.autograd.grad(plain.sum(), leaves), strict=True):
        assert torch.equal(ours, expected)


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


def test_tensors_without_memory_have_shapes() -> None:
    x = torch.empty(4, HIDDEN, device="meta", requires_grad=True)
    assert gelu(x).shape == x.shape
    assert rms_norm(x).y.is_meta


def test_subclasses_and_symbolic_proxies_are_given_to_torch() -> None:
    seen: list[str] = []

    class Noted(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    relu(sample(4, HIDDEN).detach().as_subclass(Noted))
    linears(rms_norm(sample(4, HIDDEN)), [sample(HIDDEN, HIDDEN).as_subclass(Noted)])
    assert {each.rpartition("vramx.")[2] for each in seen if "vramx" in each} >= {
        "relu.default", "linears.default",
    }  # fmt: skip


def test_transforms_are_given_to_torch() -> None:
    """torch.func has no rule for the operators, and says so or computes; it is never passed by."""
    x, _ = inputs()
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: gelu(x, keep=NEAREST).sum())(x.detach())


def test_forward_derivatives_are_refused() -> None:
    import torch.autograd.forward_ad as forward_ad

    x, _ = inputs()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        gelu(forward_ad.make_dual(x, torch.ones_like(x)), keep=NEAREST)


def test_lists_come_back_as_they_were() -> None:
    args = [1, ["a", "b"], [], None, [3]]
    flat = _flattened(args, (1, 2))
    assert flat == [1, "a", "b", None, [3]]
    assert _grouped(flat, [(1, 2), (2, 0)]) == args


# The others view their rows as so many images or heads.
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in ("attention", "conv2d")])
def test_a_graph_serves_rows_of_every_number(name: str) -> None:
    torch.compiler.reset()
    function, (_, weight) = FUNCTIONS[name], inputs()
    compiled = torch.compile(function, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (4, 12, 7):
        x = sample(rows, HIDDEN)
        gradients = []
        for called in (function, compiled):
            torch.manual_seed(0)
            gradients += torch.autograd.grad((called(x, weight) ** 2).sum(), x)
        if name != "dropout":  # a compiled graph draws its masks elsewhere
            torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-2)
        assert gradients[0].shape == x.shape


def test_eager_calls_take_less_host_time_than_torch_librarys() -> None:
    """Both are the minimum over repetitions: of the same work, the one with less around it."""

    @operator("vramx_test::nothing", schema="(Tensor x, Tensor[] xs, int[] form) -> Tensor")
    def nothing(x: Tensor, xs: list[Tensor], form: list[int]) -> Tensor:
        return torch.empty_like(x)

    nothing.register_fake(lambda x, xs, form: torch.empty_like(x))
    nothing.register_autograd(
        lambda ctx, dy: (dy, [None, None], None), setup_context=lambda ctx, inputs, output: None
    )
    x = torch.ones(2, requires_grad=True)
    others = [torch.ones(2), torch.ones(2)]

    def best_s(call: Callable[..., Tensor]) -> float:
        def step() -> None:
            call(x, others, [1, 2]).backward(x.detach())

        return min(timeit.repeat(step, number=50, repeat=20))

    assert best_s(nothing) < 0.8 * best_s(torch.ops.vramx_test.nothing)
