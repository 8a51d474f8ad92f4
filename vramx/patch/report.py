"""restore() and report(): what was done to a model, all of it, and undoing that.

Both look at every module below the given one, so that wrappers of others (DDP, FSDP, torch.compile,
accelerate) need not be taken off. Not thread-safe; microseconds a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramx.errors import InvalidValueError, brief
from vramx.patch import function, module
from vramx.patch.change import Change, Restorable
from vramx.patch.subclass import Patched
from vramx.patch.table import table

_ACCEPTED = "accepted are a Module, a class of Modules, a function and an optimizer"
_INERT = "a class that others made of ours stays, and does nothing of its own"
_OVER = "what others put over the forward stays"
_AWAY = "its forward was replaced since, by what does not call this"


@dataclass(frozen=True)
class ReportRow:
    """One module: its name, its class, what is done with its calls, what came of that, a note."""

    name: str
    module: str
    done: str
    effect: str = ""
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What is done with the modules of a model, or what restore() has undone; text by str().

    Rows are of changed modules, as model.named_modules() has them; len() is their number.
    `unchanged` counts the others.
    """

    rows: tuple[ReportRow, ...]
    unchanged: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.unchanged} modules, none of them changed"
        rows = [(r.name, r.module, r.done, r.effect, r.note) for r in self.rows]
        text = table(("name", "class", "done", "so far", "note"), rows)
        return f"{text}\n{self.unchanged} other modules are as they were"


def report(target: Any) -> Report:
    """Return what vramx does with a model's modules, a class of them, a function or an optimizer.

    Raises:
        InvalidValueError: the target is none of these.

    Sync: none.

    Example:
        >>> import torch, vramx
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> _ = vramx.checkpoint_modules(model, where=torch.nn.Linear)
        >>> [(row.name, row.done) for row in report(model).rows]
        [('0', 'recomputed, input in int8')]
    """
    if isinstance(target, nn.Module):
        return report_on(target, target.modules())
    if (held := _restorable(target)) is not None:
        return _report_of_one(held)
    if isinstance(target, torch.optim.Optimizer):  # nothing was done to it
        return Report(())
    return Report(tuple(_row_of(target, change) for change in changes_of(target)))


def report_on(model: nn.Module, modules: Iterable[nn.Module]) -> Report:
    """Return the report of some of a model's modules."""
    chosen = set(map(id, modules))
    named = [(name, part) for name, part in model.named_modules() if id(part) in chosen]
    return _report_of([row for name, part in named for row in _rows(name, part)], model)


def restore(target: Any) -> Report:
    """Undo everything that vramx did to a model, a class of modules, a function, or an optimizer.

    In whatever order it was done, and whatever wraps the model since. What others did stays; a
    function's wrapper stays where it is and does nothing. Of a model whose class, or one of whose
    modules' classes, was decorated, restore(that class) undoes that: other models have it as well.

    Returns:
        What was undone; len() is the number of modules. A second time, nothing.

    Raises:
        InvalidValueError: the target is neither a Module, nor a class of them, nor callable.

    Example:
        >>> import torch, vramx
        >>> layer = vramx.compressed_activations(torch.nn.Linear(8, 8))
        >>> len(vramx.restore(layer)), len(vramx.restore(layer))
        (1, 0)
    """
    if isinstance(target, nn.Module):
        rows = []
        for name, part in list(target.named_modules()):
            before = part.__dict__.get("forward")
            changes = module.clear(part)
            if changes:
                note = _rest(part, before)
                rows.append(ReportRow(name, type(part).__name__, _done(changes), note=note))
        return _report_of(rows, target)
    if (held := _restorable(target)) is not None:
        undone = _report_of_one(held)
        held.vramx_restore()
        return undone
    if isinstance(target, torch.optim.Optimizer):  # nothing was done to it
        return Report(())
    changes = changes_of(target)
    if isinstance(target, type):
        function.clear_class(target)
    else:
        function.clear_function(target)
    return Report(tuple(_row_of(target, change) for change in changes))


def changes_of(target: Any) -> tuple[Change, ...]:
    """Return the changes of a class's own methods, or of a function.

    Raises:
        InvalidValueError: the target is neither.
    """
    if isinstance(target, type) and issubclass(target, nn.Module):
        holders = [function.holder_of(method) for method in vars(target).values()]
    elif callable(target) and not isinstance(target, type):
        holders = [function.holder_of(target)]
    else:
        raise InvalidValueError(f"{brief(target)} is not accepted; {_ACCEPTED}")
    return tuple(h.change for h in holders if h is not None and h.change and str(h.change))


def class_changes(cls: type) -> Iterator[tuple[type, Change]]:
    """Yield the classes that a class's forward is from and that were changed, and the changes."""
    for base in cls.__mro__:
        if issubclass(base, nn.Module) and "forward" in vars(base):
            holder = function.holder_of(vars(base)["forward"])
            if holder is not None and holder.change is not None:
                yield base, holder.change


def _rows(name: str, part: nn.Module) -> Iterator[ReportRow]:
    word = type(part).__name__
    patch = module.patch_of(part)
    if patch is not None and patch.changes:
        note = "" if module.reaches(part) else _AWAY
        yield ReportRow(name, word, _done(patch.changes), _effect(patch.changes), note)
    for cls, change in class_changes(type(part)):
        note = f"by its class, as of all instances: restore({cls.__name__}) undoes it"
        yield ReportRow(name, word, str(change), change.effect(), note)


def _restorable(target: Any) -> Restorable | None:
    """Return what is changed and no module, in wrappers such as accelerate's of an optimizer."""
    while not isinstance(target, Restorable):
        target = getattr(target, "optimizer", None)
        if target is None or isinstance(target, nn.Module):
            return None
    return target


def _report_of_one(held: Restorable) -> Report:
    done, effect = held.vramx_done()
    return Report((ReportRow("(optimizer)", type(held).__name__, done, effect),))


def _row_of(target: Any, change: Change) -> ReportRow:
    name = getattr(target, "__qualname__", None) or type(target).__name__
    return ReportRow(name, type(target).__name__, str(change), change.effect())


def _report_of(rows: list[ReportRow], model: nn.Module) -> Report:
    changed = {row.name for row in rows}
    return Report(tuple(rows), sum(name not in changed for name, _ in model.named_modules()))


def _done(changes: tuple[Change, ...]) -> str:
    return "; ".join(map(str, changes))


def _effect(changes: tuple[Change, ...]) -> str:
    return "; ".join(filter(None, (change.effect() for change in changes)))


def _rest(part: nn.Module, before: object) -> str:
    """Say what stays of others; `before` is what was set as the forward."""
    if isinstance(part, Patched):
        return _INERT
    return _OVER if before is not None and part.__dict__.get("forward") is before else ""
