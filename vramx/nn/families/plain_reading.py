"""What a block computes that no family names, read from a trace of its forward.

torch.fx records the forward once, for tensors of any size: what asks a tensor for its numbers, or
takes another way by a shape, cannot be recorded, and is not read; nor is what draws random numbers,
switches gradients, or changes or has what may have a state. plain_following.py then says what the
record computes. Nothing is computed on the block's device, and the block is as it was. Some ten
milliseconds a block; not thread-safe.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vramx.nn.families.plain_code import OF_EVERY_MODULE, ByPath, Ran, look_through
from vramx.nn.families.plain_following import follow
from vramx.nn.families.plain_plan import (
    Constants,
    Members,
    NotPlainError,
    Plan,
    is_linear,
    is_table,
)
from vramx.nn.families.plain_record import traced
from vramx.nn.families.questions import part_of, unhooked, untouched
from vramx.patch.module import original_class
from vramx.patch.subclass import RECORD
from vramx.recompute.generators import is_generator

_FEWEST_LINEARS, _MOST_LINEARS, _MOST_PARTS = 4, 6, 32
_SIZES = ((2, 3), (3, 5))  # rows and tokens with which a record is followed
_PLAIN = (int, float, bool, str, type(None))
_SETTLED = (
    *(nn.Module, Tensor, type, torch.dtype, torch.device, torch.Size),
    *(FunctionType, BuiltinFunctionType, MethodType),
)


def may_be_plain(module: nn.Module) -> bool:
    """Tell whether a module may be a block, by the number of its parts and what it takes."""
    parts, waiting, linears = 0, [module], 0
    while waiting and parts <= _MOST_PARTS:
        part = waiting.pop()
        parts += 1
        linears += is_linear(part)
        waiting += () if is_linear(part) else part.children()
    fits = not waiting and _FEWEST_LINEARS <= linears <= _MOST_LINEARS
    return fits and next((p.name for p in _parameters_of(module)), "") == "x"


def read(module: nn.Module) -> Plan:
    """Return what a block computes in training.

    Raises:
        NotPlainError: something else than a Plan says, or nothing that can be read.
    """
    try:
        return _read(module)
    except NotPlainError:
        raise
    except Exception as error:  # whatever a program does with what is no tensor, or has no data
        text = str(error).strip().partition("\n")[0]
        raise NotPlainError(f"its forward cannot be read: {text[:80]}") from None


def _read(module: nn.Module) -> Plan:
    others = _parameters_of(module)[1:]
    if any(p.default is p.empty or p.kind is p.POSITIONAL_ONLY for p in others):
        raise NotPlainError("its forward takes more than x")
    for part in module.modules():
        is_called = type(part).forward is not nn.Module.forward
        if original_class(part) is not type(part) or (is_called and not untouched(part)):
            raise NotPlainError(f"its {type(part).__name__} has hooks or another forward")
        for name, value in () if is_linear(part) else _own_attributes(part):
            if not _is_known(value) or (isinstance(value, Tensor) and not is_table(value)):
                found = f"its {type(part).__name__} has {name}, which may have a state"
                raise NotPlainError(found)
    _check_places(module)
    graph, through, steps = traced(module)
    reads, constants = look_through(module, Ran(through, steps))
    plans = [follow(graph, module, *sizes) for sizes in _SIZES]
    if repr(plans[0]) != repr(plans[1]):
        raise NotPlainError("what it computes depends on the shape")
    return plans[0]._replace(
        through=through,
        defaults={p.name: p.default for p in others},
        reads=reads,
        members=tuple(_members_of(module, reads, constants)),
    )


def _check_places(module: nn.Module) -> None:
    """Refuse what is in two places: a record has one of them, and later there may be two."""
    for found in (module.named_modules, module.named_parameters, module.named_buffers):
        places = Counter(id(each) for _, each in found(remove_duplicate=False))
        twice = next((name for name, each in found() if places[id(each)] > 1), None)
        if twice is not None:
            raise NotPlainError(f"its {twice} is in two places")


def _members_of(module: nn.Module, reads: Any, constants: ByPath) -> Iterator[Members]:
    """Yield what is known of modules that have parts, or were called and read, parents first."""
    found: list[tuple[int, str, str, Any]] = [(-1, "", "", module)]
    for count, (_, _, path, part) in enumerate(found):  # which grows
        for name, each in part._modules.items():
            at = f"{path}.{name}".lstrip(".")
            has_parts = each is not None and not is_linear(each) and each._modules
            if has_parts or at in reads.through:
                found.append((count, name, at, each))
    of_part = defaultdict[str, dict[str, Any]](dict)
    paths = sorted((path for *_, path, _ in found), key=len, reverse=True)
    for at, known in constants:
        path = next(path for path in paths if not path or f"{at}.".startswith(f"{path}."))
        within = at[len(path) :].lstrip(".")
        of_part[path].update({f"{within}.{name}".lstrip("."): value for name, value in known})
    for parent, name, path, part in found:
        tables = (part._parameters, part._buffers)
        yield Members(
            parent,
            name,
            [*part._modules, *part._parameters, *part._buffers],
            tuple((key, type(of)) for key, of in part._modules.items() if not _may_change(of)),
            tuple(key for of in tables for key, each in of.items() if each is None),
            frozenset(key for key in part.__dict__ if key != RECORD),
            reads.names,
            Constants(of_part[path]) if of_part[path] else None,
        )


def _may_change(part: Any) -> bool:
    """Tell whether there may be another module in the place of one: a Linear gets adapters."""
    return part is not None and is_linear(part)


def is_as_read(module: Any, plan: Plan) -> bool:
    """Tell whether the parts that were read have no hooks, and attributes are what they were.

    In a graph it is asked once, and what it reads is guarded, but for what is no attribute.
    """
    compiles = torch.compiler.is_compiling()
    if not plan.reads.hold(module, compiles):
        return False
    parts: list[Any] = []
    for known in plan.members:
        name = known.name
        part = parts[known.parent]._modules[name] if name else module
        parts.append(part)
        # That the forward is its class's is among what is read.
        if (
            not part.training
            or (name and not unhooked(part))
            or not _has_members(part, known, compiles)
        ):
            return False
    # Which a graph cannot look at.
    if not compiles and not all(is_table(part_of(module, path)) for path in plan.tables):
        return False
    for path in plan.nothing:
        if not untouched(part_of(module, path)):
            return False
    dropout = plan.attention.dropout
    return not isinstance(dropout, str) or untouched(part_of(module, dropout))


def _has_members(part: Any, known: Members, compiles: bool) -> bool:
    """Tell whether a module has what it had; its linears and tensors may be others."""
    _, _, keys, kinds, absent, others, names, constants = known
    modules, own = part._modules, part.__dict__
    if [*modules, *part._parameters, *part._buffers] != keys:
        return False
    for key, kind in kinds:
        if type(modules[key]) is not kind:
            return False
    for key in absent:
        if getattr(part, key, None) is not None:
            return False
    if constants is not None and not constants.hold(part, compiles):
        return False
    # Which graphs of some releases cannot count.
    return compiles or len(own) - (RECORD in own) == len(others) or not _has_new(own, others, names)


def _has_new(own: dict[str, Any], others: frozenset[str], names: frozenset[str] | None) -> bool:
    """Tell whether a module has an attribute that its code may name, and had not."""
    new = [key for key in own if key not in others and key != RECORD]
    return bool(new) if names is None else not names.isdisjoint(new)


def _parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(type(module).forward).parameters.values())[1:]


def _own_attributes(part: Any) -> list[tuple[str, Any]]:
    return [(k, v) for k, v in part.__dict__.items() if k not in OF_EVERY_MODULE]


def _is_known(value: Any, depth: int = 3) -> bool:
    """Tell whether an attribute is of a kind that nothing moves in: settings, and modules."""
    if isinstance(value, _SETTLED) or type(value) in _PLAIN:
        return True
    held: Any = None
    if type(value) in (list, tuple, set):
        held = value
    elif type(value) is dict:
        held = value.values()
    elif not is_generator(value):
        held = getattr(value, "__dict__", None)  # of a config
        held = None if held is None else held.values()
    return depth > 0 and held is not None and all(_is_known(each, depth - 1) for each in held)
