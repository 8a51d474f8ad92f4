"""A step that fails at any operation leaves nothing behind: the next one is as without it.

Each way of keeping less trains a small network, and an operation of the step, each in turn, runs
out of memory or is interrupted, in forward, in a recomputation and in backward.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import TorchDispatchMode

import vramx
from vramx.compression import enclosing
from vramx.compression.config import Compression
from vramx.compression.policy.operations import OperationMode
from vramx.errors import VramxError
from vramx.nn import passes

PACKED = Compression(min_bytes=0, rounding="nearest")
# So many operations of a step fail, from its first to its last: in a second or two.
POINTS = 12


class Fails(TorchDispatchMode):
    """Raises at the n-th operation; 0: at none."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        super().__init__()
        self.seen = 0
        self._number = number
        self._error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.seen == self._number:
            raise self._error("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Has statistics, a buffer and an attribute that a call changes, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = nn.functional.gelu(self.norm(self.linear(x)))
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return x + nn.functional.dropout(y, 0.2) * self.calls


def checkpointed(block: Block) -> Callable[[Tensor], Tensor]:
    return lambda x: vramx.checkpoint(block, x, level=PACKED)


def encoder(level: str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, activation="gelu", batch_first=True)
    vramx.optimize(layer.train(), level, rounding="nearest")
    return layer


def packed(*, checkpoints: bool) -> nn.Module:
    block = Block()
    if checkpoints:
        vramx.checkpoint_modules(block, nn.Linear, level=PACKED)
    return vramx.compressed_activations(block, PACKED)


WAYS: dict[str, Callable[[], Any]] = {
    "hooks": lambda: packed(checkpoints=False),
    "hooks around a checkpoint": lambda: packed(checkpoints=True),
    "checkpoint": Block,
    **{f"optimize {x}": lambda x=x: encoder(x) for x in ("int8", "recompute_mlp", "recompute_all")},
}


class Training:
    """Steps of one way, each from the same weights and statistics."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = WAYS[way]()
        self._call: Any = self.module
        if isinstance(self.module, Block) and way == "checkpoint":
            self._call = checkpointed(self.module)
        self._state = {key: x.clone() for key, x in self.module.state_dict().items()}

    def reset(self) -> None:
        self.module.load_state_dict(self._state)
        self.module.zero_grad()
        if isinstance(self.module, Block):
            self.module.calls = 0
        torch.manual_seed(1)

    def step(self) -> None:
        shape = (4, 8) if isinstance(self.module, Block) else (3, 4, 8)
        x = torch.randn(shape, requires_grad=True) * 1  # no leaf, which is kept as it is
        self._call(x).square().sum().backward()

    def results(self) -> list[Tensor]:
        self.reset()
        self.step()
        found = [x.clone() for x in self.module.state_dict().values()]
        found += [p.grad.clone() for p in self.module.parameters() if p.grad is not None]
        return [*found, torch.rand(2)]

    def may_have_moved(self, after: list[Tensor]) -> bool:
        """Tell whether each buffer is as before the step or as after it: none moved twice."""
        pairs = zip(self._state.values(), self.module.state_dict().values(), after, strict=False)
        return all(torch.equal(now, a) or torch.equal(now, b) for a, now, b in pairs)


def alive() -> int:
    # What a failed backward has left in this thread's queue goes with the next backward.
    one = torch.ones(1, requires_grad=True)
    (one * 2).backward()
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Have Python's collector pass over what is there already, which takes most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_fails_anywhere_leaves_the_next_as_it_was(way: str) -> None:
    training = Training(way)
    training.results()  # what is watched once is not watched again
    expected = training.results()
    members = [id(x) for x in (*training.module.buffers(), *training.module.parameters())]
    training.reset()
    with Fails(0, KeyboardInterrupt) as counting:
        training.step()
    training.reset()
    before = alive()
    for number in range(1, counting.seen + 1, counting.seen // POINTS):
        error = KeyboardInterrupt if number % 2 else torch.OutOfMemoryError
        training.reset()
        with pytest.raises(error), Fails(number, error):
            training.step()
        assert enclosing.top_hooks() is None
        assert _len_torch_function_stack() == 0
        assert not passes.saves_are_brief()
        assert training.may_have_moved(expected), number
        training.module.zero_grad()
        assert alive() == before, number
        found = training.results()
        assert all(map(torch.equal, found, expected)), number
        del found
    assert members == [id(x) for x in (*training.module.buffers(), *training.module.parameters())]


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (saved_tensors_hooks, "__enter__"),
        (enclosing, "note"),
        (OperationMode, "__enter__"),
        (OperationMode, "__exit__"),
        (enclosing, "forget"),
        (saved_tensors_hooks, "__exit__"),
    ],
)
def test_an_interrupt_while_hooks_come_and_go_leaves_none(
    owner: Any, name: str, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = getattr(owner, name)
    waiting = [KeyboardInterrupt]

    def interrupted(*args: Any) -> Any:
        if waiting and not is_done:
            raise waiting.pop()
        result = function(*args)
        if waiting:
            raise waiting.pop()
        return result

    monkeypatch.setattr(owner, name, interrupted)
    context = vramx.compress()
    with pytest.raises(KeyboardInterrupt), context:
        pass
    assert enclosing.top_hooks() is None
    assert enclosing.top_hook() is None
    assert _len_torch_function_stack() == 0
    with pytest.raises(VramxError, match="not entered on this thread"):
        context.__exit__()


def test_an_interrupt_while_a_checkpoint_puts_hooks_on_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enter = saved_tensors_hooks.__enter__

    def interrupted(self: Any) -> None:
        enter(self)
        raise KeyboardInterrupt

    block, x = Block(), torch.randn(4, 8, requires_grad=True) * 1
    monkeypatch.setattr(saved_tensors_hooks, "__enter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        vramx.checkpoint(block, x, level=PACKED)
    assert enclosing.top_hooks() is None
