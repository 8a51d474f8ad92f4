"""What a frame is calling is read from its code, where an autograd.Function's `apply` has no frame.

The stand-in for `apply` is a function in C that calls back; every release shows it.
"""

# ruff: noqa: PLW0108 - what a function of its own calls is what is tested

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from policy_tools import apply_has_a_frame

from vramx.compression.policy import applied
from vramx.compression.policy.operations import OperationMode

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 does not tell where in the source a call stands"
)
called: list[Any] = []


class Looks:
    """Its text, which `repr` asks for in C, is what the frame that calls `repr` seems to call."""

    def __repr__(self) -> str:
        frame = sys._getframe(1)
        called.append(applied._value(frame, applied._path(frame.f_code, frame.f_lasti) or ("_",)))
        return ""


here = SimpleNamespace(apply=repr, held=SimpleNamespace(apply=repr))


class Owner:
    apply = repr

    @property
    def made(self) -> Any:
        raise AssertionError("a property was asked")


owner = Owner()
sees_locals = pytest.mark.skipif(
    not applied._SEES_LOCALS, reason="before Python 3.13 a look at locals keeps them alive"
)


def by_a_local_name(looks: Looks) -> None:
    local = here
    local.apply(looks)


NAMED: dict[str, Callable[[Looks], Any]] = {
    "by name": lambda looks: repr(looks),
    "by attributes": lambda looks: here.held.apply(looks),
    "by a method": lambda looks: owner.apply(looks),  # a function in C binds to nothing
    "within another": lambda looks: len(here.held.apply(looks)),
    "within others": lambda looks: len(here.apply(looks)) + len("other"),
    "unpacked": lambda looks: here.apply(*[looks]),
}
UNKNOWN: dict[str, Callable[[Looks], Any]] = {
    "of a call": lambda looks: functools.partial(repr)(looks),
    "of an item": lambda looks: [repr][0](looks),
    "by another in C": lambda looks: list(map(repr, [looks])),
}


@pytest.mark.parametrize(
    "call",
    [*NAMED.values(), pytest.param(by_a_local_name, marks=sees_locals)],
    ids=[*NAMED, "local"],
)
def test_what_a_frame_calls_is_named(call: Callable[[Looks], Any]) -> None:
    called.clear()
    call(Looks())
    assert called == [repr]


@pytest.mark.parametrize("call", UNKNOWN.values(), ids=UNKNOWN)
def test_what_names_alone_do_not_tell_is_unknown(call: Callable[[Looks], Any]) -> None:
    called.clear()
    call(Looks())
    assert called[0] is not repr


def test_no_property_is_asked() -> None:
    frame = sys._getframe()
    assert isinstance(applied._value(frame, ("owner", "made")), property)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x * 2)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad


def test_a_look_keeps_no_local_alive() -> None:
    kept = Owner()
    seen = weakref.ref(kept)
    called.clear()
    here.apply(Looks())
    del kept
    assert called == [repr]
    assert seen() is None


@pytest.mark.skipif(apply_has_a_frame, reason="before torch 2.14 `apply` has a frame of its own")
def test_functions_that_are_called_again_begin_anew() -> None:
    mode, places = OperationMode(), []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        operation = mode.current(1)
        places.append((operation.name, operation.position))
        return tensor

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept), mode:
        for _ in range(2):
            Twice.apply(x)
    assert places == [("Twice", 0), ("Twice", 1)] * 2
