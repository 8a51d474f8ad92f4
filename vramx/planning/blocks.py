"""Which modules of a model are its blocks: those that repeat, or else its parts.

A block is a module with children of its own, of a class that the model has more than once, and the
outermost such; those that vramx.optimize knows are blocks however often they are there. A stage,
which has a list of modules that occur more often than it does, is none: its members are. Members of
a ModuleList or a Sequential go first: only a model without any has other modules looked at. A model
in which nothing repeats has its parts for blocks. Nothing is run or changed for good; costs
milliseconds.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from vramx.errors import InvalidValueError
from vramx.nn.families import family_of
from vramx.nn.families.swap import RECOMPUTE_MLP, Swapped, unswap
from vramx.nn.optimize import optimize
from vramx.patch.module import find, patch_of

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Block:
    """A repeated block.

    Attributes:
        known: vramx.optimize can swap it.
        has_mlp: and can recompute a feed-forward part of it: "recompute_mlp" is "int8" elsewhere.
    """

    name: str
    module: nn.Module
    known: bool
    has_mlp: bool


def find_blocks(model: nn.Module) -> tuple[Block, ...]:
    """Return the blocks of a model, as model.named_modules() has them.

    Raises:
        InvalidValueError: there are none, or the model is optimised already.

    Example:
        >>> [block.name for block in find_blocks(nn.Sequential(nn.TransformerEncoderLayer(8, 2)))]
        ['0']
    """
    if any(find(module, Swapped) is not None for module in model.modules()):
        raise InvalidValueError("the model is optimised already; call vramx.restore(model) first")
    found = list(_outermost(model, _member_of_a_list(model))) or list(_outermost(model))
    found = found or _parts(model)
    if not found:
        raise InvalidValueError(
            f"{type(model).__name__} has no blocks; accepted are models with modules in them that "
            "have parameters"
        )
    for name, block in found:
        changes = [c for part in block.modules() if (p := patch_of(part)) for c in p.changes]
        if changes:
            raise InvalidValueError(
                f"{name} is changed already ({changes[0]}); call vramx.restore(model) first"
            )
    names = [glob.escape(name) for name, _ in found]
    report = optimize(model, dict.fromkeys(names, RECOMPUTE_MLP))
    for module in model.modules():
        unswap(module)
    done = {row.name: row.done for row in report.swapped}
    return tuple(
        Block(name, module, name in done, done.get(name) == RECOMPUTE_MLP) for name, module in found
    )


def _parts(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the children that have parameters, of lists the members; of a wrapper those within."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, child in model.named_children():
        if next(child.parameters(), None) is not None:
            is_called = type(child) not in (nn.ModuleList, nn.ModuleDict)
            parts = [(prefix + name, child)] if is_called else _parts(child, f"{prefix}{name}.")
            found |= {id(part): (path, part) for path, part in parts if id(part) not in found}
    alone = [*found.values()]
    return (len(alone) == 1 and _parts(alone[0][1], f"{alone[0][0]}.")) or alone


def _member_of_a_list(model: nn.Module) -> Callable[[nn.Module], bool]:
    members = {
        id(child)
        for parent in model.modules()
        if type(parent) in _LISTS
        for child in parent.children()
    }
    return lambda module: id(module) in members


def _outermost(
    model: nn.Module, accepts: Callable[[nn.Module], bool] = lambda _: True
) -> Iterator[tuple[str, nn.Module]]:
    counts = Counter(type(module) for module in model.modules())
    stack = [(name, child) for name, child in reversed(list(model.named_children()))]
    seen = set()
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if _is_block(module, counts) and accepts(module):
            yield name, module
        else:
            children = reversed(list(module.named_children()))
            stack += [(f"{name}.{child_name}", child) for child_name, child in children]


def _is_block(module: nn.Module, counts: Counter[type]) -> bool:
    if type(module) in _LISTS:
        return False
    family = family_of(module)
    if family is not None:
        return family.RECOMPUTES
    has_parts = _has_children(module) and next(module.parameters(), None) is not None
    return counts[type(module)] > 1 and has_parts and not _is_stage(module, counts)


def _is_stage(module: nn.Module, counts: Counter[type]) -> bool:
    return any(
        _has_children(member) and counts[type(member)] > counts[type(module)]
        for child in module.children()
        if type(child) in _LISTS
        for member in child.children()
    )


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
