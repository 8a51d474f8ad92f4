"""Optimizers in their wrappers, and copies of them that step other parameters."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from vramx.errors import InvalidValueError

# Of an optimizer of ours, its Rounds; of its class, the one below it.
HOLDER, ORIGINAL = "_vramx_rounds", "_vramx_original"


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that others' wrappers (accelerate's) are around."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


# Whose wrappers call the step and no more.
_WRAPPERS = ("accelerate.", "lightning.", "lightning_fabric.", "pytorch_lightning.")


def unknown_wrapper(optimizer: Any) -> Any:
    """Return what is around an optimizer and may do more in its step than that does, or None."""
    inner = unwrapped(optimizer)
    while optimizer is not inner:
        if not any(base.__module__.startswith(_WRAPPERS) for base in type(optimizer).__mro__):
            return optimizer
        optimizer = optimizer.optimizer
    return None


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters, in the order of its groups, each once."""
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return list(dict.fromkeys(every))  # torch warns of one that is in a group twice, and steps it


def copy_of(optimizer: Optimizer, *groups: dict[str, Any]) -> Optimizer:
    """Return an optimizer of the same class and options, of other groups and without states.

    Without hooks, without what is vramx's own, and without what is bound to the original, all of
    which would change that.

    Raises:
        InvalidValueError: the optimizer has its parameters elsewhere too, and a copy would step
            these.
    """
    cls: Any = getattr(type(optimizer), ORIGINAL, type(optimizer))
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("step", "state", "param_groups", HOLDER)
        and getattr(value, "__self__", None) is not optimizer
    }
    known = set(map(id, parameters_of(optimizer)))
    for name, value in own.items():
        if any(id(leaf) in known for leaf in tree_leaves(value)):
            raise InvalidValueError(
                f"{cls.__name__} has its parameters in {name!r} beside its groups: a copy of it "
                "would step them"
            )
    copy: Optimizer = object.__new__(cls)
    hooks: dict[str, Any] = {name: OrderedDict() for name in own if name.endswith("_hooks")}
    copy.__dict__.update(own | hooks)
    # What an optimizer counts among its states is of no parameter.
    counted = {k: v for k, v in vars(optimizer)["state"].items() if not isinstance(k, Tensor)}
    copy.state, copy.param_groups = defaultdict(dict, deepcopy(counted)), [*groups]
    return copy
