"""What a region calls and runs under beside its modules: hooks, modes of torch, and its switches.

Each program gives under vramx.checkpoint_modules the gradient that it gives without, and leaves
what its hooks have noted as one forward pass does.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checkpoint_tools import LEVELS, SMALL, WIDTH, check_near, quiet, seeds
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as of_every_module
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import vramx

__all__ = ["quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")

NAMED: dict[str, list[Tensor]] = {}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).view(4, 8, 2, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, y).transpose(1, 2).reshape(x.shape)
        return x + self.down(y.tanh() * torch.ones(()))


def gradients_of(
    change: Callable[[nn.Module], Any], around: Callable[[], Any], level: Any
) -> tuple[list[Tensor], Any]:
    """Return a step's gradients, which runs forward alone under a context; and what was noted."""
    torch.manual_seed(0)
    net = nn.Sequential(Heads(), Heads())
    noted = change(net)
    if level is not None:
        vramx.checkpoint_modules(net, Heads, level=level)
    for _ in range(2):
        net.zero_grad()
        with around():
            y = net(torch.linspace(-2, 2, 32 * WIDTH).view(32, WIDTH))
        y.square().mean().backward()
    return [p.grad for p in net.parameters()], noted() if callable(noted) else noted


def check_is_as_without(change: Callable[[nn.Module], Any], around: Callable[[], Any]) -> None:
    expected, noted = gradients_of(change, around, None)
    for level in ("keep", SMALL):
        found, noted_again = gradients_of(change, around, level)
        assert noted_again == noted
        check_near(found, expected, level)


# -- Hooks ----------------------------------------------------------------------------------------


Hook = Callable[..., Any]


def lists() -> tuple[Hook, Any]:
    outputs: list[Tensor] = []
    return lambda _, __, y: outputs.append(y.detach()), lambda: len(outputs)


def lists_of_a_file() -> tuple[Hook, Any]:
    NAMED.clear()

    def hook(_: Any, args: Any, __: Any) -> None:
        NAMED.setdefault("inputs", []).append(args[0])

    return hook, lambda: len(NAMED["inputs"])


def a_counter_that_scales() -> tuple[Hook, Any]:
    count = 0

    def hook(_: Any, __: Any, y: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return y * (1 + count / 10)

    return hook, lambda: count


HOOKS = (lists, lists_of_a_file, a_counter_that_scales)


@pytest.mark.parametrize("make", HOOKS)
def test_hooks_note_and_draw_once_a_call(make: Callable[[], tuple[Hook, Any]]) -> None:
    def hook_parts(net: nn.Module) -> Any:
        hook, noted = make()
        for part in net:
            part.up.register_forward_hook(hook)
        net[1].down.register_forward_hook(hook)
        return noted

    check_is_as_without(hook_parts, contextlib.nullcontext)


def noting_and_scaling() -> Iterator[list[float]]:
    """Scale what each module gives, by how many have run, and note it."""
    noted: list[float] = []

    def before(_: Any, args: Any) -> None:
        noted.append(float(args[0].detach().norm()))

    def scale(_: Any, __: Any, kwargs: Any, y: Tensor) -> Tensor:
        noted.append(len(kwargs))
        return y * (1 + len(noted) / 100)

    hooks = [
        of_every_module.register_module_forward_pre_hook(before),
        of_every_module.register_module_forward_hook(scale, with_kwargs=True),
    ]
    yield noted
    for hook in hooks:
        hook.remove()
    # torch leaves a mark of it there, and warns each compiled module's caller of global hooks.
    of_every_module._global_forward_hooks_with_kwargs.clear()


@pytest.mark.parametrize("when", ["before backward", "after it", "in it"])
@LEVELS
def test_hooks_of_every_module_note_and_compute_once_a_call(when: str, level: Any) -> None:
    def step(level: Any) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        net = nn.Sequential(Heads(), Heads())
        if level is not None:
            vramx.checkpoint_modules(net, Heads, level=level)
        with contextlib.contextmanager(noting_and_scaling)() as noted:
            y = net(torch.linspace(-2, 2, 32 * WIDTH).view(32, WIDTH))
            if when == "after it":
                y.square().mean().backward()
        with contextlib.contextmanager(noting_and_scaling)() as others:
            if when == "in it":
                y.square().mean().backward()
            assert not others
        if when == "before backward":
            y.square().mean().backward()
        assert not of_every_module._global_forward_hooks
        assert not of_every_module._global_forward_pre_hooks
        return [p.grad for p in net.parameters()], noted

    expected, noted = step(None)
    found, again = step(level)
    assert again == noted
    check_near(found, expected, level)


def test_hooks_stay_where_and_what_they_are() -> None:
    net, outputs = nn.Sequential(Heads()), list[Tensor]()
    handle = net[0].up.register_forward_hook(lambda _, __, y: outputs.append(y.detach()))
    (before,) = net[0].up._forward_hooks.values()
    vramx.checkpoint_modules(net, Heads, level="keep")
    net(torch.ones(32, WIDTH)).sum().backward()
    assert list(net[0].up._forward_hooks.values()) == [before]
    handle.remove()
    assert not net[0].up._forward_hooks


# -- Modes and switches ---------------------------------------------------------------------------


class Scaling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 1.5 if func is F.linear else result


class Rounding(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 1.5 if func is torch.ops.aten.tanh.default else result


FACTOR = contextvars.ContextVar("FACTOR", default=1.0)


@contextlib.contextmanager
def doubled() -> Iterator[None]:
    token = FACTOR.set(2.0)
    yield
    FACTOR.reset(token)


def scaled_by_a_variable(net: nn.Module) -> None:
    for part in net:
        part.up.register_forward_hook(lambda _, __, y: y * FACTOR.get())


AROUND: dict[str, Callable[[], Any]] = {
    "functions": Scaling,
    "operators": Rounding,
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "context variables": doubled,
}


@pytest.mark.parametrize("name", AROUND)
def test_a_recomputation_runs_under_what_forward_ran_under(name: str) -> None:
    check_is_as_without(scaled_by_a_variable, AROUND[name])
    assert FACTOR.get() == 1.0


def test_a_recomputation_tries_kernels_of_attention_as_torch_did_at_its_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core: Any = torch._C
    before: list[int] = core._get_sdp_priority_order()
    settled, plain, orders = [*before[1:], before[0]], F.scaled_dot_product_attention, []

    def attention(*tensors: Tensor) -> Tensor:
        """As torch's on a Hopper, which puts cuDNN's kernel first when it is first called."""
        if not orders:
            core._set_sdp_priority_order(settled)
        orders.append(core._get_sdp_priority_order())
        return plain(*tensors)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    x = torch.randn(2, 2, 8, WIDTH, requires_grad=True)
    try:
        vramx.checkpoint(
            lambda x: F.scaled_dot_product_attention(x, x, x).sin(), x
        ).sum().backward()
        assert core._get_sdp_priority_order() == settled
    finally:
        core._set_sdp_priority_order(before)
    assert orders == [settled, settled]


@LEVELS
def test_a_recomputation_has_the_default_dtype_of_its_call(level: Any) -> None:
    x = torch.randn(8, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.set_default_dtype(torch.float64)
    try:
        y = vramx.checkpoint(lambda x: (x @ torch.eye(WIDTH)).square(), x * 1, level=level)
    finally:
        torch.set_default_dtype(torch.float32)
    y.sum().backward()
    assert torch.get_default_dtype() == torch.float32
    check_near([x.grad], [2 * x.detach()], level)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return (weight.triu() + weight.triu(1).T).exp() / WIDTH


@LEVELS
def test_a_recomputation_has_the_weights_that_were_cached_for_its_call(level: Any) -> None:
    def gradients(level: Any, around: Callable[[], Any] = contextlib.nullcontext) -> list[Tensor]:
        torch.manual_seed(0)
        part = Heads()
        parametrize.register_parametrization(part.up, "weight", Symmetric())
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), part, part)
        if level is not None:
            vramx.checkpoint_modules(net, Heads, level=level)
        with parametrize.cached():
            y = net(torch.linspace(-2, 2, 32 * WIDTH).view(32, WIDTH))
        with around():
            y.square().mean().backward()
            assert bool(parametrize._cache_enabled) == (around is parametrize.cached)
            assert not parametrize._cache
        return [p.grad for p in net.parameters()]

    expected = gradients(None)
    check_near(gradients(level), expected, level)
    check_near(gradients(level, parametrize.cached), expected, level)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:  # in backward
            raise ArithmeticError
        return x.sin()


@pytest.mark.skipif(torch.__version__ < "2.8", reason="compiles otherwise under a mode")
@pytest.mark.parametrize("level", ["keep", SMALL], ids=["exact", "int8"])
def test_a_compiled_part_of_a_region_is_recomputed_as_it_ran(level: Any) -> None:
    part = nn.Linear(WIDTH, WIDTH)
    part.compile(backend="aot_eager")
    norm = nn.LayerNorm(WIDTH)
    x = torch.randn(8, WIDTH, requires_grad=True)
    vramx.checkpoint(lambda x: part(norm(x)).tanh(), x * 1, level=level).sum().backward()
    expected = torch.autograd.grad(F.linear(norm(x), part.weight, part.bias).tanh().sum(), x)[0]
    if level == "keep":
        torch.testing.assert_close(x.grad, expected)
    else:  # packed where a release shows what is in it
        check_near([x.grad], [expected])


def test_what_is_put_on_a_tensor_is_there_again() -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    y = x * 1
    y.scale = 3.0
    vramx.checkpoint(lambda x: (x * x.scale).sin(), y, level=SMALL).sum().backward()
    check_near([x.grad], [3 * (3 * x.detach()).cos()])


class Labelled(Tensor):
    """Says what a tensor is of, which operations on it do not."""

    __torch_function__ = torch._C._disabled_torch_function_impl


@LEVELS
def test_a_tensor_is_of_its_class_again(level: Any) -> None:
    def region(x: Tensor) -> Tensor:
        return (x * x.scale).sin() if isinstance(x, Labelled) else x.exp()

    x = torch.randn(8, WIDTH, requires_grad=True)
    y = (x * 1).as_subclass(Labelled)
    y.scale = 3.0
    vramx.checkpoint(region, y, level=level).sum().backward()
    check_near([x.grad], [3 * (3 * x.detach()).cos()], level)


def test_modes_are_left_when_a_recomputation_fails() -> None:
    with Scaling(), sdpa_kernel(SDPBackend.MATH):
        y = vramx.checkpoint(Failing(), torch.ones(8, requires_grad=True) * 1, level="keep")
    with pytest.raises(ArithmeticError):
        y.sum().backward()
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.backends.cuda.flash_sdp_enabled()
