"""The state of a training that trials must leave as it was: taken once, put back as often as asked.

Weights, buffers, gradients, optimizers' states and options, whatever else has a state_dict(), the
attributes of modules, and the generators of torch, Python, numpy and vramx. Copies are on the host.
Put back is what the tensors hold, in place, so that who refers to them sees it. Not thread-safe;
costs a copy of what is kept.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vramx.compression.codec.random import restored_streams
from vramx.errors import InvalidValueError
from vramx.optimizers.copies import HOLDER, parameters_of
from vramx.optimizers.states import is_record
from vramx.planning.program import Found, is_leaf
from vramx.recompute.attributes import attributes_as_now
from vramx.recompute.generators import set_state, state_of
from vramx.recompute.hooks import hooks_as_now

Undo = Callable[[], None]


class KeptState:
    """What was taken of models, optimizers and others; restore() puts it back.

    Raises:
        InvalidValueError: an optimizer cannot be put back.
    """

    def __init__(self, found: Found) -> None:
        self._found = found
        self._undo: list[Undo] = []
        for model in found.models:
            self._undo += [undo_of_module(module) for module in model.modules()]
            self._undo += [undo_of_gradient(parameter) for parameter in model.parameters()]
            self._undo.append(attributes_as_now(model.modules()))
            self._undo.append(hooks_as_now(model.modules()))
        self._undo += _of_tensors_outside(found)
        self._undo += [_of_optimizer(each) for each in found.optimizers]
        self._undo += [_of_other(each) for each in found.others]
        self._undo += _of_generators(found)
        self._streams = restored_streams()
        self._streams.__enter__()

    def restore(self) -> None:
        """Put all back."""
        with torch.no_grad():
            for undo in self._undo:
                undo()

    def close(self) -> None:
        """Put all back for the last time."""
        self.restore()
        self._streams.__exit__(None, None, None)


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor's own memory: of a distributed one, what this process has of it."""
    local = getattr(tensor, "to_local", None)
    return (tensor if local is None else local()).detach()


def _saved(tensor: Tensor) -> Undo:
    own = _plain(tensor)
    kept = own.to("cpu", copy=True)

    def undo() -> None:
        # Not through the tensor itself: its version would say that a graph's input was changed. A
        # sparse one's elements are no memory that another has, too.
        (tensor if tensor.is_sparse else _plain(tensor).data).copy_(kept)

    return undo


def undo_of_module(module: nn.Module, *, has_weights: bool = True) -> Undo:
    """Return what puts back the training flag, buffers and, as of `has_weights`, weights."""
    values: dict[str, Any] = vars(module)  # past what setting them may do
    is_training = module.training
    own: list[dict[str, Any]] = [module._buffers, *([module._parameters] if has_weights else [])]
    tables = [(table, dict(table)) for table in own]
    parts = dict(module._modules)
    contents = [_saved(x) for _, kept in tables for x in kept.values() if x is not None]

    def undo() -> None:
        values["training"] = is_training
        for table, kept in tables:
            _fill(table, kept)
        _fill(module._modules, parts)
        for content in contents:
            content()

    return undo


def _fill(table: dict[str, Any], kept: dict[str, Any]) -> None:
    """Have a module what it had, in that order, and nothing that it has made since."""
    if list(table) != list(kept) or any(table[name] is not each for name, each in kept.items()):
        table.clear()
        table.update(kept)


def undo_of_gradient(parameter: Tensor) -> Undo:
    """Return what puts back the gradient that a parameter has, or has not."""
    gradient = parameter.grad
    content = None if gradient is None else _saved(gradient)

    def undo() -> None:
        parameter.grad = gradient
        if content is not None:
            content()

    return undo


def _of_optimizer(optimizer: Optimizer) -> Undo:
    if HOLDER in vars(optimizer):
        raise InvalidValueError(
            f"the states of a {type(optimizer).__name__} wait on the host, from where trials could "
            "not put them back; fit the batch before vramx.offload_optimizer, or give state=()"
        )
    around = set[int]()
    undos = [_undo_of_states(optimizer.state, around)]
    # What steps count may stand in groups, or in the optimizer itself.
    undos += [_undo_of_options(each, around) for each in (*optimizer.param_groups, vars(optimizer))]

    def undo() -> None:
        for each in undos:
            each()

    return undo


def _undo_of_options(own: dict[str, Any], around: set[int]) -> Undo:
    """Return what puts back what a group or an optimizer has beside parameters and states."""
    kept = {name: value for name, value in own.items() if name not in _APART}
    contents = [_undo_of_states(value, around) for value in kept.values()]

    def undo() -> None:
        for name in own.keys() - kept.keys() - _APART:
            del own[name]
        own.update(kept)
        for content in contents:
            content()

    return undo


_APART = {"params", "state", "param_groups"}


def _undo_of_states(value: Any, around: set[int]) -> Undo:
    """Return what puts back, in place, what a container of states, or an object in it, has."""
    if id(value) in around or not (isinstance(value, _CONTAINERS) or is_record(value)):
        return _saved(value) if isinstance(value, Tensor) else _nothing
    around.add(id(value))
    holder = value if isinstance(value, _CONTAINERS) else vars(value)
    kept = copy.copy(holder)  # what numbers it has, and which tensors
    within = kept.values() if isinstance(kept, dict) else kept
    contents = [_undo_of_states(each, around) for each in within]

    def undo() -> None:
        if not isinstance(holder, tuple):
            holder.clear()
            (holder.update if isinstance(holder, dict) else holder.extend)(kept)
        for content in contents:
            content()

    return undo


_CONTAINERS = (dict, list, tuple, deque)


def _nothing() -> None: ...


def _of_tensors_outside(found: Found) -> list[Undo]:
    """Return what puts back weights that are of no model, averages, and others on their device.

    What lies elsewhere, or takes more than all that is trained, may be a whole dataset.
    """
    of_models = {id(t) for model in found.models for t in (*model.parameters(), *model.buffers())}
    stepped = [p for optimizer in found.optimizers for p in parameters_of(optimizer)]
    trained = [*stepped, *(p for model in found.models for p in model.parameters())]
    devices = {tensor.device for tensor in trained}
    most = sum(tensor.nbytes for tensor in trained)
    outside = {id(t): t for t in (*stepped, *found.tensors) if id(t) not in of_models}
    near = [each for each in outside.values() if each.device in devices]
    kept = [each for each in near if _can_be_written(each) and each.nbytes <= most]
    return [*map(_saved, kept), *(undo_of_gradient(t) for t in kept if is_leaf(t))]


def _can_be_written(tensor: Tensor) -> bool:
    """Tell whether a tensor has memory of which each element is in one place."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    if tensor.is_inference():
        return False
    return type(tensor) is not Tensor or torch._debug_has_internal_overlap(tensor) != 1


def _of_other(value: Any) -> Undo:
    kept = copy.deepcopy(value.state_dict())
    return lambda: value.load_state_dict(copy.deepcopy(kept))


@contextlib.contextmanager
def generators_as_before(found: Found) -> Iterator[None]:
    """Put back the random numbers of torch, on the host and on devices, Python and numpy.

    And those of the generators that a program refers to.
    """
    undo = _of_generators(found)
    try:
        yield
    finally:
        for each in undo:
            each()


def _of_generators(of: Found) -> list[Undo]:
    host, python = torch.get_rng_state(), random.getstate()
    found: list[Undo] = [lambda: torch.set_rng_state(host), lambda: random.setstate(python)]
    if torch.cuda.is_initialized():
        devices = torch.cuda.get_rng_state_all()
        found.append(lambda: torch.cuda.set_rng_state_all(devices))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        found.append(lambda: numpy.random.set_state(state))
    return [*found, *(partial(set_state, each, state_of(each)) for each in of.generators)]
