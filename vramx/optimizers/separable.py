"""Whether an optimizer treats each parameter by itself: stepping some at a time is then the same.

What torch, torchao and bitsandbytes have does, but for LBFGS. Another one is tried: a small model
is trained with it twice, at once and one parameter at a time, and has to come out alike to the bit,
with all that the optimizer knows beside its states: Prodigy's estimate is of all parameters. One
that cannot be copied for that is not known, and so refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from vramx.errors import InvalidValueError, summary
from vramx.optimizers.copies import ORIGINAL, copy_of, parameters_of

# By the beginning of their class's module and name.
KNOWN = ("torch.optim.", "torchao.", "bitsandbytes.")
_SHAPES = ((64, 96), (96,), (64, 64), (48,))
_STEPS = 3


def check(optimizer: Optimizer) -> None:
    """Raise where stepping some parameters at a time would not be what stepping all of them is.

    Raises:
        InvalidValueError: it would not, or that cannot be found out.
    """
    cls = type(optimizer)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidValueError(
            f"{name} steps all parameters as one vector: its states cannot wait"
        )
    if name.startswith(KNOWN):
        return
    try:
        at_once, apart = _train(optimizer, _step_at_once), _train(optimizer, _step_apart)
    except Exception as error:
        raise InvalidValueError(
            f"{name} is not known, and cannot be tried on a small model: {summary(error)}"
        ) from error
    if not _are_alike(at_once, apart):
        raise InvalidValueError(
            f"{name} does not treat each parameter by itself: a small model that was stepped one "
            "parameter at a time came out otherwise. Its states cannot wait on the host"
        )


def inner_step(cls: Any) -> Callable[..., Any]:
    """Return a class's step without the hooks that torch puts around it."""
    step: Callable[..., Any] = cls.step
    # A program's own function around torch's has what is torch's among its attributes, too.
    if getattr(step, "__code__", None) is _HOOKS:
        step = vars(step)["__wrapped__"]
    return step


# Of what torch puts around the step of a class.
_HOOKS: Any = getattr(Optimizer.profile_hook_step(lambda _: None), "__code__", None)


@contextmanager
def apart(
    optimizer: Optimizer, numbers: Numbers
) -> Iterator[Callable[[Sequence[Tensor], Callable[[], None]], None]]:
    """Yield what runs a function, the optimizer's step, for some parameters alone."""
    step_some = step_of_one(optimizer)
    if step_some is not None:
        yield lambda some, _: step_some(some)
        return
    parameters = parameters_of(optimizer)
    with gradients_apart(parameters) as show:

        def run_some(some: Sequence[Tensor], run: Callable[[], None]) -> None:
            show(some)
            numbers.run(optimizer, run)

        yield run_some


def step_of_one(optimizer: Optimizer) -> Callable[[Sequence[Tensor]], None] | None:
    """Return what steps some parameters, where an optimizer has a step of one and loops over all.

    FlashOptim has (0.1, FlashOptimizer.step_param). A visit of a parameter that has no gradient
    takes its loop two microseconds, which is much where it happens anew for each bucket.
    """
    loop = inner_step(getattr(type(optimizer), ORIGINAL, type(optimizer)))
    is_known = loop.__module__.startswith("flashoptim.") and (
        loop.__qualname__ == "FlashOptimizer.step"
    )
    if not is_known or getattr(optimizer, "_gradient_release", True):  # its step does nothing then
        return None
    step: Callable[..., None] = optimizer.step_param  # type: ignore[attr-defined]
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def step_some(some: Sequence[Tensor]) -> None:
        for parameter in some:
            if id(parameter) in groups:
                step(parameter, groups[id(parameter)])

    return step_some


@contextmanager
def gradients_apart(parameters: Sequence[Tensor]) -> Iterator[Callable[[Sequence[Tensor]], None]]:
    """Hide all gradients; the yielded function shows those of some parameters alone.

    Optimizers pass over parameters without a gradient, so what they count or number by the places
    of parameters in their groups stays right. In the end each has its own again, unless the
    optimizer took it away.
    """
    # In backward few have one, and this is done for each bucket.
    hidden = [p for p in parameters if p.grad is not None]
    held = {id(p): p.grad for p in hidden}
    shown: list[Tensor] = []

    def hide() -> None:
        for parameter in shown:
            held[id(parameter)], parameter.grad = parameter.grad, None
        shown.clear()

    def show(some: Sequence[Tensor]) -> None:
        hide()
        shown.extend(p for p in some if id(p) in held)  # the others are in no group any more
        for parameter in shown:
            parameter.grad = held[id(parameter)]

    for parameter in hidden:
        parameter.grad = None
    try:
        yield show
    finally:
        hide()
        for parameter in hidden:
            parameter.grad = held[id(parameter)]


class Numbers:
    """The numbers of an optimizer's groups, as the parts of one step find and leave them.

    Some optimizers count steps there, all of them or those of a group that has gradients. Each part
    finds what the first part did; in the end each number is as the last part that changed it left
    it. What others change between two parts, as a rate, stays.
    """

    def __init__(self) -> None:
        self._changes: dict[int, dict[str, _Change]] = {}  # by the group's id

    def run(self, optimizer: Optimizer, part: Callable[[], None]) -> None:
        """Run a part of a step."""
        for group in optimizer.param_groups:
            self._take_back(group)
        before = [dict(group) for group in optimizer.param_groups]
        part()
        for group, then in zip(optimizer.param_groups, before, strict=True):
            self._note(group, then)

    def _take_back(self, group: dict[str, Any]) -> None:
        changes = self._changes.get(id(group), {})
        for name, change in list(changes.items()):
            if group.get(name, _ABSENT) is change.now:
                _put(group, name, change.then)
            else:
                del changes[name]  # others have changed it since

    def _note(self, group: dict[str, Any], then: dict[str, Any]) -> None:
        changes = self._changes.setdefault(id(group), {})
        for name, change in changes.items():
            if group.get(name, _ABSENT) is change.then:  # this part has not counted
                _put(group, name, change.now)
        if len(group) == len(then) and not any(map(is_not, group.values(), then.values())):
            return
        for name, value in group.items():
            if name != "params" and value is not then.get(name, _ABSENT):
                before = changes[name].then if name in changes else then.get(name, _ABSENT)
                changes[name] = _Change(before, value)


class _Change(NamedTuple):
    then: Any
    now: Any


_ABSENT = object()


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        group.pop(name, None)
    else:
        group[name] = value


def _train(optimizer: Optimizer, step: Callable[[Optimizer], None]) -> list[Any]:
    """Return a small model's parameters, and the numbers that an optimizer has beside states."""
    known = parameters_of(optimizer)[0]
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(shape: tuple[int, ...]) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device="cpu")
        return drawn.to(known.device, known.dtype)

    groups = [
        {**group, "params": [torch.nn.Parameter(normal(shape)) for shape in shapes]}
        for group, shapes in _kinds_of_groups(optimizer)
    ]
    small = copy_of(optimizer, *groups)
    parameters = parameters_of(small)
    devices = [known.device] if known.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        for _ in range(_STEPS):
            for parameter in parameters:
                parameter.grad = normal(tuple(parameter.shape))
            step(small)
    beside = {k: v for k, v in vars(small).items() if k != "state" and not k.endswith("_hooks")}
    known_besides = (leaf for leaf in tree_leaves(beside) if isinstance(leaf, (Tensor, float, int)))
    return [*parameters, *known_besides]


def _kinds_of_groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Give a group of each kind, by what is switched on in it, with shapes of its parameters.

    Some, as Muon, are for matrices alone, or treat those of one group otherwise.
    """
    kinds: dict[Any, tuple[dict[str, Any], set[int]]] = {}
    for group in optimizer.param_groups:
        words = {k: v if isinstance(v, (bool, str, type(None))) else 0 for k, v in group.items()}
        _, dimensions = kinds.setdefault(tuple(sorted(words.items())), (group, set()))
        dimensions.update(parameter.dim() for parameter in group["params"])
    for group, dimensions in kinds.values():
        yield group, [shape for shape in _SHAPES if len(shape) in dimensions] or _SHAPES


def _are_alike(some: list[Any], others: list[Any]) -> bool:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return torch.equal(one, other)
        return bool(one == other or one != one != other != other)

    return len(some) == len(others) and all(map(same, some, others))


def _step_at_once(optimizer: Optimizer) -> None:
    inner_step(type(optimizer))(optimizer)


def _step_apart(optimizer: Optimizer) -> None:
    parameters = parameters_of(optimizer)
    numbers = Numbers()
    with gradients_apart(parameters) as show:
        for parameter in parameters:
            show([parameter])
            numbers.run(optimizer, lambda: inner_step(type(optimizer))(optimizer))
