"""What predict() traces: a step as a program has it, or plan's loop around a model.

A Program names the values that it is made of, so that a copy of it can be made of copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from vramx.errors import InvalidValueError
from vramx.optimizers.copies import copy_of
from vramx.planning.loop import FRESH, STEPPED, Loop, loop_of
from vramx.planning.program import check_step
from vramx.planning.states import rounds_of
from vramx.planning.steps import Step, check_sample


class Program(NamedTuple):
    """A step and the values that it is made of, which a copy of it is made of as well."""

    values: tuple[Any, ...]
    run: Callable[..., Callable[[], Any]]  # from copies of the values to what takes a step
    said: tuple[str, ...] = ()  # of what it leaves out


def program_of(
    step: Any, arguments: Sequence[Any], optimizer: Any, gradients: str | None
) -> Program:
    if not isinstance(step, nn.Module):
        if optimizer is not None:
            raise InvalidValueError("optimizer is for a model; a step calls its own optimizer")
        check_step(step)
        return Program((step, *arguments), lambda step, *rest: lambda: step(*rest))
    if len(arguments) != 1:
        raise InvalidValueError(
            f"a model is followed by one sample, not by {len(arguments)}; a tuple is for several "
            "arguments"
        )
    check_sample(step, arguments[0])
    loop, said = loop_of(step, optimizer, gradients)

    def run(model: nn.Module, sample: Any, optimizers: list[Any]) -> Callable[[], Any]:
        return _LoopStep(model, sample, Loop(optimizers, loop.gradients))

    return Program((step, arguments[0], loop.optimizers), run, tuple(said))


class _LoopStep:
    """A step of plan's loop, of which the optimizers are taken as well."""

    def __init__(self, model: nn.Module, sample: Any, loop: Loop) -> None:
        if not model.training:
            model.train()
        # Those whose states wait on the host may step in backward themselves.
        self._last = list(loop.optimizers)
        self._copies: list[Any] = []
        if loop.gradients == STEPPED:
            self._last = [each for each in loop.optimizers if rounds_of(each) is not None]
            for each in loop.optimizers:
                if each not in self._last:
                    self._copies += _step_in_backward(each)
        trained = [p for p in model.parameters() if p.requires_grad]
        firsts = iter([True])

        def begin() -> None:  # and no method: a copy of a model is not to wait for the collector
            if next(firsts, False) or loop.gradients == FRESH:
                loop.prepare(trained)

        self._step = Step(model, sample, begin, lambda: loop.before_backward(trained))

    def __call__(self) -> None:
        self._step()
        for each in self._last:
            each.step()


def _step_in_backward(optimizer: Any) -> list[Any]:
    """Have each parameter stepped, by a copy of its optimizer, as soon as its gradient is there.

    Returns:
        The copies: the caller's, for a parameter that refers to one refers to itself.
    """
    copies = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own = copy_of(optimizer, {**group, "params": [parameter]})
            copies.append(own)
            parameter.register_post_accumulate_grad_hook(partial(_step, weakref.ref(own)))
    return copies


def _step(own: Callable[[], Any], learned: Tensor) -> None:
    optimizer = own()
    type(optimizer).step(optimizer)
    learned.grad = None
