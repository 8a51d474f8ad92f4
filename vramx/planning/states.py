"""What an optimizer's states and its step take, of any torch.optim.Optimizer: measured on copies.

A copy of the optimizer takes two steps for a copy of one parameter of each kind (shape, type and
group), and what it then holds counts for each parameter of the kind that has no states yet. So no
optimizer is known by name. Neither the optimizer nor a parameter is changed. Not thread-safe; needs
memory for one parameter more, its gradient and its states; some steps a kind.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from vramx.errors import InvalidValueError, cause
from vramx.optimizers.copies import HOLDER, copy_of
from vramx.optimizers.rounds import Rounds
from vramx.optimizers.slots import SLOTS
from vramx.planning.meters import Meter

# Of two parameters at once, against one: twice as much where their temporaries are there together.
_TOGETHER = 1.5
_GRADIENT = 1e-3
_WAY_OUT = "plan without it, and give the bytes of its states as reserve"


@dataclass
class OptimizerCost:
    """What an optimizer takes.

    Attributes:
        states_bytes: of states that do not exist yet.
        waiting_bytes: of states that wait on the host between steps.
        slots_bytes: what states that wait on the host take of the device while some are stepped.
        step_bytes: what a step of all parameters takes for a moment.
        temporary_bytes: what a step of one of them does, by the parameter's id.
    """

    states_bytes: int = 0
    waiting_bytes: int = 0
    slots_bytes: int = 0
    step_bytes: int = 0
    temporary_bytes: dict[int, int] = field(default_factory=dict)


def cost_of(optimizer: Optimizer, meter: Meter) -> OptimizerCost:
    """Measure an optimizer's states and step.

    Raises:
        InvalidValueError: a copy of it takes no step.
    """
    cost, found = OptimizerCost(), dict[Hashable, tuple[int, int]]()
    waiting: dict[int, int] = {}  # the bytes of states that wait on the host, by parameter
    rounds = rounds_of(optimizer)
    buckets = rounds.buckets() if rounds is not None else []
    elsewhere = {id(parameter) for bucket in buckets for parameter in bucket}
    for group, parameter in _trained(optimizer):
        kind = _kind(group, parameter)
        if kind not in found:
            found[kind] = _measured(optimizer, group, [parameter], meter)
        states, temporary = found[kind]
        cost.temporary_bytes[id(parameter)] = temporary
        if id(parameter) in elsewhere:
            waiting[id(parameter)] = states
        elif not has_states(optimizer, parameter):
            cost.states_bytes += states
    of_buckets = [sum(waiting.get(id(p), 0) for p in bucket) for bucket in buckets]
    cost.slots_bytes = SLOTS * max(of_buckets, default=0)
    if rounds is not None:
        kept = rounds.kept_of(of_buckets)
        cost.waiting_bytes = sum(of_buckets) - kept
        cost.states_bytes += 0 if rounds.has_states() else kept
    every = cost.temporary_bytes.values()
    times = _times_of_one(optimizer, cost, meter)
    largest = math.ceil(times * max(every, default=0))
    cost.step_bytes = sum(every) if times > _TOGETHER else largest
    return cost


def rounds_of(optimizer: Optimizer) -> Rounds | None:
    """Return what steps an optimizer whose states wait on the host."""
    rounds: Rounds | None = vars(optimizer).get(HOLDER)
    return rounds


def has_states(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    """Tell whether an optimizer holds tensors for a parameter that are where it is."""
    states = tensors_of(optimizer.state[parameter]) if parameter in optimizer.state else []
    return any(state.dim() and state.device == parameter.device for state in states)


def tensors_of(states: Any) -> list[Tensor]:
    """Return the tensors among an optimizer's states."""
    return [leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor)]


def _trained(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield group, parameter


def _kind(group: dict[str, Any], parameter: nn.Parameter) -> Hashable:
    shape = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
    return id(group), type(parameter), *shape


def _times_of_one(optimizer: Optimizer, cost: OptimizerCost, meter: Meter) -> float:
    """Return what a step has temporaries of for two parameters at once, against one.

    Twice as much where all are there together; between where the last one's is let go of late.
    """
    pairs = [(g, p) for g, p in _trained(optimizer) if cost.temporary_bytes[id(p)]]
    if len(pairs) < 2:
        return 1.0
    group, parameter = min(pairs, key=lambda pair: pair[1].numel())
    both = _measured(optimizer, group, [parameter, parameter], meter)[1]
    return max(1.0, both / cost.temporary_bytes[id(parameter)])


def _measured(
    optimizer: Optimizer, group: dict[str, Any], like: Sequence[nn.Parameter], meter: Meter
) -> tuple[int, int]:
    """Return the bytes of the states of copies of parameters, and of a step's temporaries."""
    with meter.watching(), torch.no_grad():
        copies = [nn.Parameter(parameter.detach().clone()) for parameter in like]
        for copied in copies:
            copied.grad = torch.full_like(copied, _GRADIENT)
        copy = _copy_of(optimizer, {**group, "params": copies})
        before = meter.allocated_bytes()
        _step(copy)
        meter.settle()
        after = meter.allocated_bytes()
        meter.reset_peak()
        _step(copy)
        meter.settle()
        return max(0, after - before), max(0, meter.peak_bytes() - after)


def _copy_of(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    try:
        return copy_of(optimizer, group)
    except InvalidValueError as error:
        raise InvalidValueError(f"{error}; {_WAY_OUT}") from None


def _step(copy: Optimizer) -> None:
    name = type(copy).__name__
    try:
        MethodType(type(copy).step, copy)()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a class that is made or called otherwise
        raise InvalidValueError(
            f"what {name} takes cannot be measured ({cause(error)}); {_WAY_OUT}"
        ) from error
