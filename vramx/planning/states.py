"""What an optimizer's states and its step take, of any torch.optim.Optimizer: measured on copies.

A copy of the optimizer takes steps for a copy of one parameter of each kind (shape, type and group)
until it holds no more than before, and what it then holds counts for each parameter of the kind
that has no states yet. So no optimizer is known by name. Neither the optimizer nor a parameter is
changed. Not thread-safe; needs memory for one parameter more, its gradient and its states, and for
two more of a smaller one; some steps a kind.
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

from vramx.errors import InvalidValueError, summary
from vramx.optimizers.copies import HOLDER, copy_of
from vramx.optimizers.rounds import Rounds
from vramx.optimizers.slots import SLOTS
from vramx.optimizers.states import is_record
from vramx.planning.meters import Meter
from vramx.sizes import MIB

# Some keep the gradients of their last steps, ten of them say: more is not looked for.
_MOST_STEPS = 16
# Beside parameters of so many bytes and more, counters and what a GPU rounds up are nothing.
_LARGE_BYTES = MIB
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
    late_share, kept_share = _shares_of_others(optimizer, cost, meter)
    largest = max(every, default=0)
    others = sum(every) - largest
    cost.step_bytes = math.ceil((1 + late_share) * largest + kept_share * others)
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
    """Return the tensors among an optimizer's states, and in its own objects among these."""
    found = list[Tensor]()
    for leaf in tree_leaves(states):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_record(leaf):
            found += tensors_of(vars(leaf))
    return found


def _trained(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield group, parameter


def _kind(group: dict[str, Any], parameter: nn.Parameter) -> Hashable:
    shape = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
    return id(group), type(parameter), *shape


def _shares_of_others(
    optimizer: Optimizer, cost: OptimizerCost, meter: Meter
) -> tuple[float, float]:
    """Return what there is of other parameters' temporaries beside those of one, as shares.

    The first is of the parameter before alone, whose last ones are let go of late; the second is of
    every other one: 1 where all are computed together, less where a step keeps something of each.
    """
    pairs = [(g, p) for g, p in _trained(optimizer) if cost.temporary_bytes[id(p)]]
    if len(pairs) < 2:
        return 0.0, 0.0
    large = [pair for pair in pairs if pair[1].nbytes >= _LARGE_BYTES]
    group, parameter = min(large, key=_numel, default=max(pairs, key=_numel))
    one = cost.temporary_bytes[id(parameter)]
    two, three = (_measured(optimizer, group, [parameter] * n, meter)[1] for n in (2, 3))
    kept = max(0, three - two) / one
    return max(0.0, (two - one) / one - kept), kept


def _numel(pair: tuple[dict[str, Any], nn.Parameter]) -> int:
    return pair[1].numel()


def _measured(
    optimizer: Optimizer, group: dict[str, Any], like: Sequence[nn.Parameter], meter: Meter
) -> tuple[int, int]:
    """Return the bytes of the states of copies of parameters, and of a step's temporaries."""
    with meter.watching(), torch.no_grad():
        copies = [nn.Parameter(parameter.detach().clone()) for parameter in like]
        for copied in copies:
            copied.grad = torch.full_like(copied, _GRADIENT)
        copy = _copy_of(optimizer, {**group, "params": copies})
        before = held = meter.allocated_bytes()
        temporary = 0
        for number in range(_MOST_STEPS):
            meter.reset_peak()
            _step(copy)
            meter.settle()
            after = meter.allocated_bytes()
            temporary = max(temporary, meter.peak_bytes() - after)
            if number and after <= held:
                break
            held = after
        return max(0, held - before), temporary


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
            f"what {name} takes cannot be measured ({summary(error)}); {_WAY_OUT}"
        ) from error
