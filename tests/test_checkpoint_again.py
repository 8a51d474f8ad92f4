"""Calls that ask torch's checkpoint for nothing: what they save is made again without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from checkpoint_tools import check_near, plain
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import dropout
from torch.utils import checkpoint
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

from vramx.compression import enclosing
from vramx.compression.config import Compression
from vramx.compression.hooks import compress
from vramx.errors import ModifiedInPlaceError, RecomputationError
from vramx.recompute import again, call

pytestmark = pytest.mark.skipif(not enclosing.is_told(), reason="torch tells of no hooks here")

Function = Callable[[Tensor], Tensor]
EXACT = call.Settings(None, None, {})
PACKED = call.Settings(Compression(min_bytes=0), None, {})


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call.run(function, args, kwargs, EXACT)


class Seen:
    """What calls note: of a class, which no recomputation sets back."""

    notes: ClassVar[list[Any]] = []
    fails: ClassVar[bool] = False


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seen, "notes", [])
    monkeypatch.setattr(Seen, "fails", False)


class Block(nn.Module):
    """Notes when it begins; the last of its operations saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        Seen.notes.append("begun")
        return x + self.second(nn.functional.gelu(self.first(x)))


@pytest.fixture
def calls_of_torchs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Note what goes to torch's checkpoint."""
    found: list[Any] = []

    def noted(function: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(function)
        return torch_checkpoint(function, *args, **kwargs)

    monkeypatch.setattr("vramx.recompute.call.torch_checkpoint", noted)
    return found


def input_of() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 16, requires_grad=True)


def gradients(block: nn.Module, function: Function) -> list[Tensor]:
    """Return the gradients through a function of the block, and what is drawn after it."""
    x = input_of()
    torch.manual_seed(2)
    y = function(x * 1)  # a leaf is kept as it is
    found = grad(dropout(y).square().sum(), (x, *block.parameters()))
    return [*found, torch.rand(3)]


def test_gradients_are_those_of_the_plain_call(calls_of_torchs: list[Any]) -> None:
    block = Block()
    expected = gradients(block, block)
    check_near(gradients(block, partial(run, block)), expected, "keep")
    packed = gradients(block, lambda x: call.run(block, (x,), {}, PACKED))
    check_near(packed, expected)
    assert not torch.equal(packed[0], expected[0])
    assert not calls_of_torchs


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return dropout(x)


def set_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    kept = dropout(x)
    torch.set_rng_state(state)
    return kept


def cast(block: Function, x: Tensor) -> Tensor:
    with torch.autocast("cpu"):  # of the dtype that is set for it
        return block(x)


# What a call does with the block, and what it runs under.
WAYS: dict[str, tuple[Callable[[Function, Tensor], Tensor], Callable[[], Any]]] = {
    "numbers are drawn": (lambda block, x: dropout(block(dropout(x))), nullcontext),
    "numbers are drawn in a fork": (lambda block, x: block(forked(x)) * x, nullcontext),
    "numbers are drawn and set back": (lambda block, x: block(set_back(x)) * x, nullcontext),
    "autocast": (lambda block, x: block(x), partial(torch.autocast, "cpu", torch.bfloat16)),
    "autocast of a dtype that is set": (
        cast, partial(torch.autocast, "cpu", torch.float16, enabled=False),
    ),
    "torch's checkpoint within": (
        lambda block, x: block(torch_checkpoint(block, x, use_reentrant=False)), nullcontext,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_recomputation_runs_as_its_call_did_and_leaves_nothing_behind(way: str) -> None:
    block, was = Block(), torch.get_autocast_dtype("cpu")
    within, around = WAYS[way]

    def through(call: Callable[..., Tensor]) -> list[Tensor]:
        def function(x: Tensor) -> Tensor:
            with around():
                return call(lambda x: within(block, x), x)

        return gradients(block, function)

    check_near(through(run), through(plain), "keep")
    assert torch.get_autocast_dtype("cpu") == was


def test_autocast_of_a_backward_pass_is_not_that_of_the_recomputation() -> None:
    block, x = Block(), input_of()
    found = []
    for y in (block(x), run(block, x)):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(grad(y.square().sum(), (x, *block.parameters())))
    check_near(*found, "keep")


def test_each_backward_pass_recomputes_once() -> None:
    block, x = Block(), input_of()
    y = run(block, x).sum()
    check_near(*(grad(y, (x, *block.parameters()), retain_graph=True) for _ in "12"), "keep")
    assert Seen.notes.count("begun") == 3


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    Seen.notes.append("begun")
    return x.sin().exp(), x.cos().tanh()


def test_what_one_pass_leaves_is_not_the_next_ones() -> None:
    x = input_of()
    for found, expected in zip(run(two, x), two(x), strict=True):
        assert torch.equal(*grad(found.sum(), x), *grad(expected.sum(), x))
    assert Seen.notes.count("begun") == 4


@pytest.mark.skipif(not hasattr(checkpoint, "GraphExecGroup"), reason="torch has no such groups")
def test_backward_passes_of_a_group_share_what_is_made() -> None:
    x = input_of()
    one, other = run(two, x)
    with checkpoint.GraphExecGroup():
        one.sum().backward(retain_graph=True)
        other.sum().backward(retain_graph=True)
    assert len(Seen.notes) == 2
    torch.testing.assert_close(x.grad, *grad(sum(two(x)).sum(), x))


def test_derivatives_of_derivatives_are_those_of_the_plain_call() -> None:
    block, x = Block(), input_of()
    found = []
    for y in (block(x), run(block, x)):
        (first,) = grad(y.square().sum(), x, create_graph=True)
        found.append(grad(first.square().sum(), (x, *block.parameters())))
    torch.testing.assert_close(*found)


def test_an_input_that_is_written_into_is_an_error() -> None:
    doubled = input_of() * 2
    y = run(Block(), doubled)
    doubled.mul_(2)
    with pytest.raises(ModifiedInPlaceError, match=r"version.*argument of a call under vramx"):
        y.sum().backward()


def test_a_batch_that_is_normalised_in_place_behind_its_block_is_named_as_an_argument() -> None:
    block = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(1, 1, 3))
    batch = torch.ones(1, 1, 4, 4)
    y = block(batch)
    batch.div_(2)
    y.sum().backward()  # of the padded batch, which is a copy
    y = run(block, batch)
    batch.div_(2)
    with pytest.raises(ModifiedInPlaceError, match="change a copy of it"):
        y.sum().backward()


# What a call does when it runs a second time.
OTHERWISE: dict[str, tuple[Function, str]] = {
    "saves less": (lambda x: x.sin(), "saved 1 tensors, and the forward pass 2"),
    "another shape": (lambda x: x[1:].sin().cos(), "where the forward pass saved another"),
    "another dtype": (lambda x: x.double().sin().cos(), "where the forward pass saved another"),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_call_that_saves_otherwise_the_second_time_is_an_error(name: str) -> None:
    otherwise, words = OTHERWISE[name]

    def function(x: Tensor) -> Tensor:
        Seen.notes.append("called")
        return x.sin().cos() if len(Seen.notes) == 1 else otherwise(x)

    y = run(function, input_of())
    with pytest.raises(RecomputationError, match=words):
        y.sum().backward()


def test_an_error_in_a_recomputation_reaches_the_caller_and_the_next_pass_is_right() -> None:
    def failing(x: Tensor) -> Tensor:
        if Seen.fails:
            raise ValueError("not now")
        return x.sin().cos()

    x = input_of()
    y = run(failing, x).sum()
    Seen.fails = True
    with pytest.raises(ValueError, match="not now"):
        y.backward(retain_graph=True)
    Seen.fails = False
    torch.testing.assert_close(*grad(y, x), -x.sin().sin() * x.cos())


def test_arguments_that_need_no_gradient_and_objects_pass_as_they_are() -> None:
    def function(x: Tensor, mask: Tensor, *, scale: dict[str, Any]) -> Tensor:
        Seen.notes.append((mask.requires_grad, scale["by"], type(scale["index"])))
        return (x.sin().masked_fill(mask, 0.0) * scale["by"]).sin()

    scale = {"by": 2.0, "index": torch.arange(3)}
    run(function, input_of(), torch.eye(8, 16).bool(), scale=scale).sum().backward()
    assert Seen.notes == [(False, 2.0, Tensor)] * 2


# -- Where torch's checkpoint serves ---------------------------------------------------------------


def test_hooks_of_others_see_what_a_call_keeps(calls_of_torchs: list[Any]) -> None:
    seen = list[Tensor]()
    with saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        y = run(Block(), input_of())
    y.sum().backward()
    assert len(calls_of_torchs) == 1
    assert [tuple(each.shape) for each in seen if each.dim() == 2] == [(8, 16)]


def test_within_torchs_checkpoint_torchs_serves(calls_of_torchs: list[Any]) -> None:
    block = Block()
    expected = gradients(block, block)
    outer = partial(torch_checkpoint, partial(run, block), use_reentrant=False)
    check_near(gradients(block, outer), expected, "keep")
    assert calls_of_torchs


def test_modes_and_other_devices_are_torchs() -> None:
    assert again.serves([torch.ones(2), "word"])
    assert not again.serves([torch.ones(2, device="meta")])
    with torch.inference_mode():
        assert not again.serves([torch.ones(2)])
    with FakeTensorMode():
        assert not again.serves([1])


@pytest.mark.parametrize(
    "context", [set_checkpoint_early_stop(False), set_checkpoint_debug_enabled(True)]
)
def test_what_a_program_asks_of_torchs_checkpoint_has_torchs(
    context: Any, calls_of_torchs: list[Any]
) -> None:
    with context:
        run(Block(), input_of()).sum().backward()
    assert len(calls_of_torchs) == 1


class ReadsTwice(torch.autograd.Function):
    """Asks twice for what it saved, as functions of linear operators do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        assert torch.equal(*ctx.saved_tensors, *ctx.saved_tensors)
        return gradient * ctx.saved_tensors[0].cos()


def test_a_call_within_compress_is_made_again_here_and_may_be_read_twice(
    calls_of_torchs: list[Any],
) -> None:
    block = Block()

    def function(x: Tensor) -> Tensor:
        return ReadsTwice.apply(block(x))  # type: ignore[no-any-return]

    def in_compress(x: Tensor) -> Tensor:
        with compress(min_bytes=0) as stats:
            y: Tensor = run(function, x)
        assert stats.tensors == 0
        return y

    check_near(gradients(block, in_compress), gradients(block, function), "keep")
    assert not calls_of_torchs


def by_is_grads_batched(y: Tensor, of: list[Tensor], gradients: Tensor) -> tuple[Tensor, ...]:
    return grad(y, of, gradients, is_grads_batched=True)


def by_vmap(y: Tensor, of: list[Tensor], gradients: Tensor) -> tuple[Tensor, ...]:
    return torch.vmap(lambda gradient: grad(y, of, gradient))(gradients)


@pytest.mark.parametrize("jacobian", [by_is_grads_batched, by_vmap])
def test_passes_that_are_batched_share_a_recomputation_with_the_random_numbers_of_the_call(
    jacobian: Callable[..., tuple[Tensor, ...]],
) -> None:
    block = Block()

    def gradients(settings: call.Settings | None) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        leaf = torch.randn(4, 16, requires_grad=True)
        x = leaf * 1.0
        y = dropped(x) if settings is None else call.run(dropped, (x,), {}, settings)
        return jacobian(y.sum(0), [leaf, *block.parameters()], torch.eye(16))

    def dropped(x: Tensor) -> Tensor:
        return dropout(block(dropout(x)))

    expected = gradients(None)
    Seen.notes.clear()
    check_near(gradients(EXACT), expected, "keep")
    assert Seen.notes == ["begun", "begun"]
    check_near(gradients(PACKED), expected)
