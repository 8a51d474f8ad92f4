"""The changes of one module, recorded in its __dict__ and carried out by a class of its own.

A changed module is of a subclass of its class, made once for each class, whose forward runs the
changes in the record. So nothing refers to the module (no cycle), copies and pickles carry their
own record, and what others put over a forward later stays where it is:

    module.__dict__["forward"]     of others, after ours: accelerate, a method set by hand
      forward of our subclass      reads module._vramx: the changes, the last one outermost
        Patch.inner                a forward that the instance had before; else that of its class

Parameters, names, hooks and state_dict stay, isinstance() holds, and the subclass bears the name of
its class. A class that others put over ours (FSDP2's, parametrize's) stays as well: without a
record, our forward is that of the class. Changing a module is not thread-safe; it costs
microseconds, and some hundred more for a class that is met first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from vramx.errors import InvalidValueError
from vramx.patch.change import Change
from vramx.patch.references import globals_of, parts_of
from vramx.patch.subclass import ORIGINAL, RECORD, Patch, Patched, is_ours, patched_class

# What may be looked at to find our forward below those of others.
_MOST_LINKS = 256
Kind = TypeVar("Kind", bound=Change)


def patch_of(module: nn.Module) -> Patch | None:
    """Return the record of a module; None where it has none."""
    patch: Patch | None = module.__dict__.get(RECORD)
    return patch


def find(module: nn.Module, kind: type[Kind]) -> Kind | None:
    """Return the change of a class that a module has; None where it has none.

    Example:
        >>> find(nn.Linear(2, 2), Change) is None
        True
    """
    patch = patch_of(module)
    for change in patch.changes if patch is not None else ():
        if isinstance(change, kind):
            return change
    return None


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without ours.

    Example:
        >>> original_class(nn.Linear(2, 2))
        <class 'torch.nn.modules.linear.Linear'>
    """
    cls = type(module)
    original: type[nn.Module] = vars(cls).get(ORIGINAL, cls)
    return original


def put(module: nn.Module, change: Change) -> None:
    """Make a change of a module: in place of one of the same class, else around those it has.

    Raises:
        InvalidValueError: the module's class cannot be given a subclass; nothing was changed.
    """
    before = patch_of(module)
    patch = before or Patch()
    old = find(module, type(change))
    if old is not None:
        changes = tuple(change if each is old else each for each in patch.changes)
    elif change.INNERMOST:
        changes = (change, *patch.changes)
    else:
        changes = (*patch.changes, change)
    _set_class(module, changes)
    if old is not None:
        old.undone()
    top = module.__dict__.get("forward")
    if top is not None and not reaches(module):
        # It was there before, or took the place of ours.
        patch = replace(patch, inner=module.__dict__.pop("forward"))
    module.__dict__[RECORD] = replace(patch, changes=changes)


def put_all(pairs: Sequence[tuple[nn.Module, Change]]) -> None:
    """Make changes of modules that had none of these classes, all or none of them.

    Raises:
        InvalidValueError: a module's class cannot be given a subclass; nothing was changed.
    """
    done: list[tuple[nn.Module, Change]] = []
    try:
        for module, change in pairs:
            put(module, change)
            done.append((module, change))
    except BaseException:
        for module, change in done:
            remove(module, change)
        raise


def remove(module: nn.Module, change: Change) -> bool:
    """Undo one change of a module; return whether the module had it."""
    patch = patch_of(module)
    if patch is None or not any(each is change for each in patch.changes):
        return False
    changes = tuple(each for each in patch.changes if each is not change)
    change.undone()
    if not changes:
        clear(module)
        return True
    _set_class(module, changes)
    module.__dict__[RECORD] = replace(patch, changes=changes)
    return True


def clear(module: nn.Module) -> tuple[Change, ...]:
    """Undo all changes of a module; return those that it had."""
    patch = module.__dict__.get(RECORD) or Patch()
    top = module.__dict__.get("forward")
    if is_ours(top):  # somebody took the forward off ours, and put ours back
        del module.__dict__["forward"]
        top = None
    passes = patch.inner is not None and top is not None and reaches(module)
    if passes:
        module.__dict__[RECORD] = Patch((), patch.inner)  # what is over ours comes through it
    else:
        module.__dict__.pop(RECORD, None)
    if top is None and patch.inner is not None:
        module.__dict__["forward"] = patch.inner
    if ORIGINAL in vars(type(module)):
        object.__setattr__(module, "__class__", original_class(module))
    for change in patch.changes:
        change.undone()
    return patch.changes


def reaches(module: nn.Module) -> bool:
    """Tell whether what is set as the forward of a changed module calls ours, as far as is seen."""
    top = module.__dict__.get("forward")
    # What is put over a forward may keep it in the module, as accelerate's _old_forward.
    kept = [value for name, value in module.__dict__.items() if name != "forward"]
    return top is None or any(map(is_ours, [*kept, *_within(top, module)]))


def _within(callable_: Any, module: nn.Module) -> Iterator[Any]:
    """Yield a callable and those that it refers to; no methods of other modules."""
    waiting, seen = [callable_], set[int]()
    while waiting and len(seen) < _MOST_LINKS:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, (nn.Module, type)) or not callable(found):
            continue
        owner = getattr(found, "__self__", module)
        if isinstance(owner, nn.Module) and owner is not module:
            continue
        seen.add(id(found))
        yield found
        waiting += _linked(found)


def _linked(found: Any) -> Iterator[Any]:
    if isinstance(found, MethodType):
        yield found.__func__
        if not isinstance(found.__self__, (nn.Module, type)):
            yield from getattr(found.__self__, "__dict__", {}).values()
    else:
        yield from (*parts_of(found), *globals_of(found).values())
    yield from getattr(found, "__dict__", {}).values()


def _set_class(module: nn.Module, changes: tuple[Change, ...]) -> None:
    cls = type(module)
    if issubclass(cls, Patched) and ORIGINAL not in vars(cls):
        return  # others' class is over ours, which reads the record all the same
    try:
        original: Any = original_class(module)  # mypy finds that a class of Modules has no hash
        wanted = patched_class(original, Patch(changes).mixins)
        if cls is not wanted:
            object.__setattr__(module, "__class__", wanted)
    except (AttributeError, TypeError, RuntimeError) as error:
        why = " ".join(str(error).split())
        if isinstance(module, torch.jit.ScriptModule):
            why = "it is of TorchScript; change the module that has it as a part"
        raise InvalidValueError(f"a {cls.__name__} cannot be changed: {why}") from None
