"""Calls that ask torch's checkpoint for nothing: what they save is made again without it."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

from vramx.compression import enclosing
from vramx.compression.config import Compression
from vramx.compression.saved import Reference
from vramx.errors import ModifiedInPlaceError, RecomputationError
from vramx.recompute import again
from vramx.recompute.call import Settings, run

pytestmark = pytest.mark.skipif(not enclosing.is_told(), reason="torch tells of no hooks here")

EXACT = Settings(None, None, {})
PACKED = Settings(Compression(min_bytes=0), None, {})


class Seen:
    """What calls note: of a class, which no recomputation sets back."""

    notes: ClassVar[list[Any]] = []
    fails: ClassVar[bool] = False


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
    monkeypatch.setattr(Seen, "notes", [])
    monkeypatch.setattr(Seen, "fails", False)


class Block(nn.Module):
    """Notes when it begins and ends; the last of its operations saves nothing."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        Seen.notes.append("begun")
        y = self.second(nn.functional.dropout(nn.functional.gelu(self.first(x)), self.dropout))
        Seen.notes.append("ended")
        return x + y


@pytest.fixture
def calls_of_torchs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Note what goes to torch's checkpoint."""
    found: list[Any] = []

    def noted(function: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(function)
        return torch_checkpoint(function, *args, **kwargs)

    monkeypatch.setattr("vramx.recompute.call.torch_checkpoint", noted)
    return found


def input_of(seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(8, 16, requires_grad=True)


def gradients(block: nn.Module, call: Callable[[Tensor], Tensor], seed: int = 1) -> list[Tensor]:
    x = input_of(seed)
    torch.manual_seed(2)
    call(x * 1).square().sum().backward()  # a leaf is kept as it is
    found = [x.grad, *(p.grad for p in block.parameters())]
    block.zero_grad()
    return [each for each in found if each is not None]


def is_same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_gradients_are_those_of_the_plain_call(calls_of_torchs: list[Any]) -> None:
    block = Block()
    expected = gradients(block, block)
    assert is_same(gradients(block, lambda x: run(block, (x,), {}, EXACT)), expected)
    packed = gradients(block, lambda x: run(block, (x,), {}, PACKED))
    assert not is_same(packed, expected)
    for found, each in zip(packed, expected, strict=True):
        assert torch.cosine_similarity(found.flatten(), each.flatten(), 0) > 0.999
    assert not calls_of_torchs


def test_a_recomputation_ends_with_the_last_tensor_that_is_saved() -> None:
    y = run(Block(), (input_of(),), {}, EXACT)
    assert Seen.notes == ["begun", "ended"]
    y.sum().backward()
    assert Seen.notes == ["begun", "ended", "begun"]


def test_each_backward_pass_recomputes_once() -> None:
    block, x = Block(), input_of()
    y = run(block, (x,), {}, EXACT).sum()
    first = torch.autograd.grad(y, (x, *block.parameters()), retain_graph=True)
    second = torch.autograd.grad(y, (x, *block.parameters()), retain_graph=True)
    assert is_same(list(first), list(second))
    assert Seen.notes.count("begun") == 3


def test_what_one_pass_leaves_is_not_the_next_ones() -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        Seen.notes.append("begun")
        return x.sin(), x.cos()

    x = input_of()
    first, second = run(two, (x,), {}, EXACT)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], x.cos())
    torch.testing.assert_close(torch.autograd.grad(second.sum(), x)[0], -x.sin())
    assert Seen.notes.count("begun") == 3


def test_derivatives_of_derivatives_are_those_of_the_plain_call() -> None:
    block = Block()

    def second(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = input_of()
        (found,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(found.square().sum(), (x, *block.parameters())))

    expected = second(block)
    for found, each in zip(second(lambda x: run(block, (x,), {}, EXACT)), expected, strict=True):
        torch.testing.assert_close(found, each)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_random_numbers_are_drawn_again_and_those_that_follow_are_as_without(
    dropout: float,
) -> None:
    block = Block(dropout)
    expected = gradients(block, block)
    after = torch.rand(3)
    assert is_same(gradients(block, lambda x: run(block, (x,), {}, EXACT)), expected)
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("way", ["forked", "set back"])
def test_random_numbers_that_a_call_sets_back_are_drawn_again(way: str) -> None:
    block = Block()

    def drawing(x: Tensor) -> Tensor:
        if way == "forked":
            with torch.random.fork_rng():
                kept = nn.functional.dropout(x)
        else:
            state = torch.get_rng_state()
            kept = nn.functional.dropout(x)
            torch.set_rng_state(state)
        return block(kept) * x

    def followed(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: nn.functional.dropout(call(x))

    expected = gradients(block, followed(drawing))
    found = gradients(block, followed(lambda x: run(drawing, (x,), {}, EXACT)))
    assert is_same(found, expected)


def test_a_dtype_of_autocast_that_is_off_is_as_it_was() -> None:
    block, was = Block(), torch.get_autocast_dtype("cpu")

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            y: Tensor = block(x)
        return y

    def off(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def within(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float16, enabled=False):
                return call(x)

        return within

    found = gradients(block, off(lambda x: run(cast, (x,), {}, EXACT)))
    assert torch.get_autocast_dtype("cpu") == was
    assert is_same(found, gradients(block, off(cast)))


def test_autocast_is_as_it_was() -> None:
    block = Block()

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run(block, (x,), {}, EXACT)

    def plain(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = block(x)
        return y

    assert is_same(gradients(block, cast), gradients(block, plain))

    def cast_in_backward(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = input_of()
        y = call(x).square().sum()
        with torch.autocast("cpu", torch.bfloat16):
            return list(torch.autograd.grad(y, (x, *block.parameters())))

    found = cast_in_backward(lambda x: run(block, (x,), {}, EXACT))
    assert is_same(found, cast_in_backward(block))


def test_what_was_made_goes_when_it_was_given() -> None:
    def call(x: Tensor) -> Tensor:
        for _ in range(4):
            x = Watched.apply(x)
        return x

    run(call, (input_of(),), {}, EXACT).sum().backward()
    assert Watched.alive == [3, 2, 1, 0]
    assert all(each() is None for each in Watched.made)


def test_what_is_kept_of_a_recomputation_does_not_hold_its_graph() -> None:
    x = input_of()
    numbers = again._Numbers()
    assert [numbers(x), numbers(x)] == [0, 1]
    keep = again._Keep(numbers)
    assert keep(x.sin()).grad_fn is None


def test_an_input_that_is_written_into_is_an_error() -> None:
    block, x = Block(), input_of()
    doubled = x * 2
    y = run(block, (doubled,), {}, EXACT)
    doubled.mul_(2)
    with pytest.raises(ModifiedInPlaceError, match="version"):
        y.sum().backward()


def test_a_call_that_saves_less_the_second_time_is_an_error() -> None:
    def other(x: Tensor) -> Tensor:
        Seen.notes.append("called")
        return x.sin().cos() if len(Seen.notes) == 1 else x.sin()

    y = run(other, (input_of(),), {}, EXACT)
    with pytest.raises(RecomputationError, match="saved 1 tensors, and the forward pass 2"):
        y.sum().backward()


def test_a_function_that_catches_every_exception_is_ended_all_the_same() -> None:
    def falling_back(x: Tensor) -> Tensor:
        try:
            y = x.sin()
            y = y.cos()
        except Exception:
            y = x.tanh()
        return y

    class Kept:
        def held(self, tensor: Tensor) -> Reference:
            return Reference(tensor)

    x = input_of()
    again.run(falling_back, (x,), Kept()).sum().backward()
    torch.testing.assert_close(x.grad, -x.sin().sin() * x.cos())


@pytest.mark.parametrize("other", [lambda x: x[1:], lambda x: x.double()])
def test_a_call_that_saves_another_tensor_the_second_time_is_an_error(
    other: Callable[[Tensor], Tensor],
) -> None:
    def call(x: Tensor) -> Tensor:
        Seen.notes.append("called")
        return (x if len(Seen.notes) == 1 else other(x)).sin().cos()

    y = run(call, (input_of(),), {}, EXACT)
    with pytest.raises(RecomputationError, match="where the forward pass saved another"):
        y.sum().backward()


def test_an_error_in_a_recomputation_reaches_the_caller_and_the_next_pass_is_right() -> None:
    def failing(x: Tensor) -> Tensor:
        if Seen.fails:
            raise ValueError("not now")
        return x.sin().cos()

    x = input_of()
    y = run(failing, (x,), {}, EXACT).sum()
    Seen.fails = True
    with pytest.raises(ValueError, match="not now"):
        y.backward(retain_graph=True)
    Seen.fails = False
    y.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, -x.sin().sin() * x.cos())


def test_arguments_that_need_no_gradient_and_objects_pass_as_they_are() -> None:
    block = Block()

    def call(x: Tensor, mask: Tensor, *, scale: dict[str, Any]) -> Tensor:
        Seen.notes.append((mask.requires_grad, scale["by"], type(scale["index"])))
        y: Tensor = block(x).masked_fill(mask, 0.0) * scale["by"]
        return y.sin()

    mask = torch.eye(8, 16).bool()
    y = run(call, (input_of(), mask), {"scale": {"by": 2.0, "index": torch.arange(3)}}, EXACT)
    y.sum().backward()
    assert [each for each in Seen.notes if isinstance(each, tuple)] == [(False, 2.0, Tensor)] * 2


def test_threads_that_run_backward_through_one_call_get_its_gradient() -> None:
    def long(x: Tensor) -> Tensor:
        for _ in range(30):
            x = x.sin() * 1.01
        return x

    x = torch.randn(64, 64, requires_grad=True)
    y = run(long, (x,), {}, EXACT).sum()
    (expected,) = torch.autograd.grad(y, x, retain_graph=True)

    def found(_: int) -> list[Tensor]:
        return [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(5)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            every = [each for one in pool.map(found, range(4)) for each in one]
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


@pytest.mark.skipif(not hasattr(checkpoint, "GraphExecGroup"), reason="torch has no such groups")
def test_backward_passes_of_a_group_share_what_is_made() -> None:
    x = input_of()

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        Seen.notes.append("called")
        return x.sin().exp(), x.cos().tanh()

    one, other = run(two, (x,), {}, EXACT)
    with checkpoint.GraphExecGroup():
        one.sum().backward(retain_graph=True)
        other.sum().backward(retain_graph=True)
    assert len(Seen.notes) == 2
    expected = x.sin().exp() * x.cos() - x.sin() * (1 - x.cos().tanh() ** 2)
    torch.testing.assert_close(x.grad, expected)


def test_what_the_graph_no_longer_asks_for_is_not_kept() -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return Watched.apply(x), Watched.apply(Watched.apply(x)).sin()

    one, other = run(two, (input_of(),), {}, EXACT)
    del other
    one.sum().backward()
    assert Watched.alive == [0]


# -- Where torch's checkpoint serves ---------------------------------------------------------------


def test_hooks_of_others_see_what_a_call_keeps(calls_of_torchs: list[Any]) -> None:
    block, seen = Block(), list[Tensor]()
    with saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        y = run(block, (input_of(),), {}, EXACT)
    y.sum().backward()
    assert len(calls_of_torchs) == 1
    assert [tuple(each.shape) for each in seen if each.dim() == 2] == [(8, 16)]


def test_within_torchs_checkpoint_torchs_serves(calls_of_torchs: list[Any]) -> None:
    block = Block()
    expected = gradients(block, block)

    def outer(x: Tensor) -> Tensor:
        return run(block, (x,), {}, EXACT)

    found = gradients(block, lambda x: torch_checkpoint(outer, x, use_reentrant=False))
    assert is_same(found, expected)
    assert calls_of_torchs


def test_torchs_checkpoint_within_a_call_is_recomputed_too() -> None:
    block = Block()
    expected = gradients(block, lambda x: block(block(x)))

    def nested(x: Tensor) -> Tensor:
        return block(torch_checkpoint(block, x, use_reentrant=False))

    assert is_same(gradients(block, lambda x: run(nested, (x,), {}, EXACT)), expected)


def test_modes_and_other_devices_are_torchs() -> None:
    assert again.serves([torch.ones(2), "word"])
    assert not again.serves([torch.ones(2, device="meta")])
    with torch.inference_mode():
        assert not again.serves([torch.ones(2)])
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert not again.serves([1])


@pytest.mark.parametrize(
    "context", [set_checkpoint_early_stop(False), set_checkpoint_debug_enabled(True)]
)
def test_what_a_program_asks_of_torchs_checkpoint_has_torchs(
    context: Any, calls_of_torchs: list[Any]
) -> None:
    with context:
        run(Block(), (input_of(),), {}, EXACT).sum().backward()
    assert len(calls_of_torchs) == 1


# -- What it leaves --------------------------------------------------------------------------------


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
