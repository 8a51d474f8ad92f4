"""What a call that asks torch's checkpoint for nothing keeps and gives, and when it lets it go."""

from __future__ import annotations

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

from vramx.compression import enclosing
from vramx.compression.saved import Reference
from vramx.recompute import again
from vramx.recompute.call import Settings, run

pytestmark = pytest.mark.skipif(not enclosing.is_told(), reason="torch tells of no hooks here")

EXACT = Settings(None, None, {})


class Watched(torch.autograd.Function):
    """Doubles; notes what it saves, and how much of that is alive when backward has read one."""

    made: ClassVar[list[weakref.ref[Tensor]]] = []
    alive: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = x * 2
        Watched.made.append(weakref.ref(kept))
        ctx.save_for_backward(kept)
        return kept.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        del kept
        gc.collect()
        Watched.alive.append(sum(each() is not None for each in Watched.made))
        return 2 * dy


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "made", [])
    monkeypatch.setattr(Watched, "alive", [])


def input_of() -> Tensor:
    return torch.randn(8, 16, requires_grad=True)


def test_what_was_made_goes_when_it_was_given() -> None:
    def four(x: Tensor) -> Tensor:
        for _ in range(4):
            x = Watched.apply(x)
        return x

    run(four, (input_of(),), {}, EXACT).sum().backward()
    assert Watched.alive == [3, 2, 1, 0]
    assert all(each() is None for each in Watched.made)


def test_what_the_graph_no_longer_asks_for_is_not_kept() -> None:
    def three(x: Tensor) -> tuple[Tensor, Tensor]:
        return Watched.apply(x), Watched.apply(Watched.apply(x)).sin()

    one, other = run(three, (input_of(),), {}, EXACT)
    del other
    one.sum().backward()
    assert Watched.alive == [0]


def test_what_is_kept_of_a_recomputation_does_not_hold_its_graph() -> None:
    x = input_of()
    numbers = again._Numbers()
    assert [numbers(x), numbers(x)] == [0, 1]
    assert again._Keep(numbers, torch.sin)(x.sin()).grad_fn is None


def test_a_call_leaves_a_number_for_each_saved_tensor_and_no_cycle() -> None:
    def many(x: Tensor) -> Tensor:
        for _ in range(200):
            x = x.sin()
        return x

    x = input_of()
    run(many, (x,), {}, EXACT).sum().backward()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        y = run(many, (x,), {}, EXACT).sum()
        objects = len(gc.get_objects()) - before
        y.backward()
        del y
        left = len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert objects < 100  # fewer than one for each of the tensors
    assert left < 10  # what torch's pytree leaves for the collector


def test_threads_that_run_backward_through_one_call_get_its_gradient() -> None:
    def long(x: Tensor) -> Tensor:
        for _ in range(30):
            x = x.sin() * 1.01
        return x

    x = torch.randn(64, 64, requires_grad=True)
    y = run(long, (x,), {}, EXACT).sum()
    (expected,) = grad(y, x, retain_graph=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            every = list(pool.map(lambda _: grad(y, x, retain_graph=True)[0], range(20)))
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(each, expected) for each in every)


def test_a_saved_tensor_that_is_read_while_the_call_goes_on_is_what_it_saved() -> None:
    def reading(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        first: Any = y.grad_fn
        y = y.exp()
        one = first._saved_self
        z = y.tanh()
        last: Any = z.grad_fn
        return z, one.detach(), last._saved_result.detach()

    x = input_of()
    z, one, last = run(reading, (x,), {}, EXACT)
    assert torch.equal(one, x)
    assert torch.equal(last, z)


def test_a_function_that_catches_every_exception_is_ended_all_the_same() -> None:
    def falling_back(x: Tensor) -> Tensor:
        try:
            return x.sin().cos()
        except Exception:
            return x.tanh()

    class Kept:
        def held(self, tensor: Tensor) -> Reference:
            return Reference(tensor)

    x = input_of()
    y = again.run(falling_back, (x,), Kept())
    torch.testing.assert_close(*grad(y.sum(), x), -x.sin().sin() * x.cos())
