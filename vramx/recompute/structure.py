"""The tensors of a call's arguments as a flat list, and the arguments again from such a list.

What torch's pytree knows is opened, and dataclasses that it does not know as well. Anything else is
a leaf and passes by reference. One object is one leaf, wherever it lies: attention of a tensor with
itself is one product, and with its equal two. Not responsible for what happens to the leaves. Pure
functions; a walk over the arguments, microseconds for those of a usual layer.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch.utils._pytree as pytree

from vramx.recompute.copies import FIXED


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A dataclass among the leaves: its place, a copy without its values, and their structure."""

    position: int
    shell: Any
    names: tuple[str, ...]
    inner: Structure


@dataclasses.dataclass(frozen=True)
class Structure:
    """How to rebuild a value from its leaves.

    The leaves of the pytree come first, None where a dataclass lay; those of each dataclass follow.
    `order` has the number of the leaf for each place; it is empty if every place has its own.
    """

    spec: pytree.TreeSpec
    opened: tuple[_Opened, ...]
    leaf_count: int
    order: tuple[int, ...] = ()

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the value anew: new containers around these leaves."""
        if self.order:
            leaves = [leaves[number] for number in self.order]
        own = list(leaves[: self.spec.num_leaves])
        start = self.spec.num_leaves
        for part in self.opened:
            end = start + part.inner.leaf_count
            own[part.position] = _refill(part, part.inner.rebuild(leaves[start:end]))
            start = end
        return pytree.tree_unflatten(own, self.spec)


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a value and its structure.

    Example:
        >>> leaves, structure = flatten(((1, [2]), {"a": 3}))
        >>> leaves, structure.rebuild([10, 20, 30])
        ([1, 2, 3], ((10, [20]), {'a': 30}))
    """
    leaves, structure = _flatten(value, frozenset())
    numbers: dict[int, int] = {}
    own: list[Any] = []
    order: list[int] = []
    for leaf in leaves:
        number = len(own) if isinstance(leaf, FIXED) else numbers.setdefault(id(leaf), len(own))
        if number == len(own):
            own.append(leaf)
        order.append(number)
    if len(own) < len(leaves):
        structure = dataclasses.replace(structure, order=tuple(order))
    return own, structure


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a value alone.

    Example:
        >>> leaves_of((1, [2, None]))
        [1, 2, None]
    """
    return flatten(value)[0]


def _flatten(value: Any, around: frozenset[int]) -> tuple[list[Any], Structure]:
    leaves, spec = pytree.tree_flatten(value)
    opened = []
    for position, leaf in enumerate(list(leaves)):
        # A dataclass may point back at one that holds it.
        if not _is_dataclass(leaf) or id(leaf) in around:
            continue
        names = tuple(f.name for f in dataclasses.fields(leaf) if hasattr(leaf, f.name))
        values = tuple(getattr(leaf, name) for name in names)
        inner_leaves, inner = _flatten(values, around | {id(leaf)})
        opened.append(_Opened(position, _empty_copy(leaf, names), names, inner))
        leaves[position] = None
        leaves.extend(inner_leaves)
    return leaves, Structure(spec, tuple(opened), len(leaves))


def _is_dataclass(leaf: Any) -> bool:
    # One that is a container too keeps its items twice, and only its own class can fill both.
    return (
        dataclasses.is_dataclass(leaf)
        and not isinstance(leaf, type)
        and not isinstance(leaf, (dict, list, tuple))
    )


def _empty_copy(value: Any, names: tuple[str, ...]) -> Any:
    shell = copy.copy(value)
    for name in names:
        object.__setattr__(shell, name, None)
    return shell


def _refill(part: _Opened, values: tuple[Any, ...]) -> Any:
    # Past __init__ and past a frozen __setattr__: the copy is what the fields already made it.
    value = copy.copy(part.shell)
    for name, field_value in zip(part.names, values, strict=True):
        object.__setattr__(value, name, field_value)
    return value
