"""Who sees an operator, and what its two routes cost; the functions are in test_nn_operators.py."""

from __future__ import annotations

import contextlib
import time
import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_tools import sample
from test_nn_operators import EVERY, HIDDEN, NEAREST, every_function, inputs, outcome
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from vramx.nn.activation import gelu
from vramx.nn.linear import linears
from vramx.nn.norm import rms_norm
from vramx.nn.operators import Operator, operator
from vramx.nn.relu import relu
from vramx.nn.unit_linear import gelu_linear


class WatchFunctions(TorchFunctionMode):
    """A mode that changes nothing and notes the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


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
        EVERY[name](*inputs())
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
    assert all(map(torch.equal, found, torch.autograd.grad(plain.sum(), leaves)))


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


@every_function
def test_batched_gradients_are_those_of_each(name: str) -> None:
    torch.manual_seed(0)
    leaves = inputs()
    result = EVERY[name](*leaves)
    batch = torch.randn(3, *result.shape, generator=torch.Generator().manual_seed(2))

    def gradients(of: Tensor, **options: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(result, leaves, of.to(result.dtype), True, **options)

    each = [torch.stack(several) for several in zip(*map(gradients, batch), strict=True)]
    torch.testing.assert_close(gradients(batch, is_grads_batched=True), tuple(each))


@every_function
@pytest.mark.parametrize("around", [contextlib.nullcontext, WatchFunctions])
def test_results_may_be_written_into(
    name: str, around: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    """What backward reads of them aside, which torch says in its own words."""
    rows = (2, 2, HIDDEN) if name in ("linear", "mlp", "two_linears") else (4, HIDDEN)
    found = []
    for write in (Tensor.add, Tensor.add_):
        torch.manual_seed(0)
        x, weight = leaves = inputs()
        before = x.detach().clone()
        with around():
            result = EVERY[name](x.view(rows), weight)
        write(result, 1.0).square().sum().backward()
        assert torch.equal(x, before)
        found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(found[1], found[0])


def test_forward_derivatives_are_refused() -> None:
    import torch.autograd.forward_ad as forward_ad

    x, _ = inputs()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        gelu(forward_ad.make_dual(x, torch.ones_like(x)), keep=NEAREST)


def test_eager_calls_take_less_host_time_than_torch_librarys() -> None:
    """Both are the minimum over repetitions: of the same work, the one with less around it.

    In time of the processor, for another program may have it in every repetition.
    """

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

        return min(timeit.repeat(step, timer=time.process_time, number=50, repeat=20))

    assert best_s(nothing) < 0.8 * best_s(torch.ops.vramx_test.nothing)
