"""What a region's modules note in their own attributes: counters, lists, what the last call gave.

A module that counts its calls, appends a loss to a list or keeps the last keys would do so once
more when it is recomputed, and compute with what it finds then. A recomputation has the attributes
as they were before the first run, and leaves them as the first run did. Not responsible for
parameters and buffers (buffers.py), nor for what is no attribute of a module.

Objects, and what containers hold, are copied before a module's first run, which tells whether it
changes them, and later only if it does; all else is looked at in each call. What an attribute held
before stays until the region's graph is gone. A module that writes into a tensor which it has left
alone in its first run is warned of. A call costs a microsecond for each module; a region is
recomputed by one thread at a time.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_not
from typing import Any, NamedTuple

from torch import Tensor, nn

from vramx.recompute.buffers import tell_of_write
from vramx.recompute.generators import is_generator, set_state, state_of
from vramx.recompute.objects import FIXED, Copier, TooLargeError, differs, version_of

# What every module has: its members, hooks and what is done to it. The others are its class's.
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_vramx", "forward", "_compiled_call_impl"})
_CONTAINERS = (dict, list, set, deque)
# Of a container that is looked at in each call.
_MOST_ITEMS = 256
_ABSENT = object()


class _Known(NamedTuple):
    """What is known of the attributes of a module that has run."""

    size: int  # of all that it has
    looked_at: tuple[str, ...]  # of those that may change though they stay the same object
    changed: set[str]  # of these, those that did


class _Kept(NamedTuple):
    own: dict[str, Any]  # of a module
    name: str
    then: Any  # what it was before
    is_written: bool  # it is a copy of a tensor that was written to


# By whether the module trains.
_known: weakref.WeakKeyDictionary[nn.Module, dict[bool, _Known]] = weakref.WeakKeyDictionary()


class _Before:
    """The attributes of one module before it runs."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._is_training = module.training
        self._own = vars(module)
        self._values = dict(self._own)
        known = _known.get(module, {}).get(self._is_training)
        self._is_new = known is None or known.size != len(self._values)
        self._changed = set[str]() if known is None else known.changed
        names = self._values if self._is_new or known is None else known.looked_at
        self._thens = {name: self._then(name) for name in names if name not in _OF_EVERY_MODULE}

    @property
    def generators(self) -> list[Any]:
        return [self._values[name] for name in self._thens if is_generator(self._values[name])]

    def _then(self, name: str) -> Any:
        """Return what an attribute is; of a tensor also its version."""
        value = self._values[name]
        if isinstance(value, FIXED) or is_generator(value):
            return value
        if isinstance(value, Tensor):
            may_write = self._is_new or name in self._changed
            return value.detach().clone() if may_write else value, version_of(value)
        if self._is_new or name in self._changed:
            with contextlib.suppress(TooLargeError):
                return Copier().copy(value)
        elif type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS:
            return copy.copy(value)
        return value

    def changes(self) -> list[_Kept]:
        """Return what is not as it was."""
        own, values = self._own, self._values
        is_same = len(own) == len(values) and not any(map(is_not, own.values(), values.values()))
        if is_same and not self._is_new and not self._thens:
            return []
        found = [kept for name in values for kept in self._change(name)]
        found += [_Kept(own, name, _ABSENT, False) for name in own if name not in values]
        self._note(found)
        return found

    def _change(self, name: str) -> Iterator[_Kept]:
        value, now = self._values[name], self._own.get(name, _ABSENT)
        if name in _OF_EVERY_MODULE:
            return
        if now is not value:
            yield _Kept(self._own, name, value, is_written=False)
        elif isinstance(value, Tensor):
            then, version = self._thens.get(name, (value, version_of(value)))
            if version != version_of(value):
                if then is value:
                    tell_of_write(self._module, name)
                    then = value.detach().clone()
                yield _Kept(self._own, name, then, is_written=True)
        elif name in self._thens and differs(self._thens[name], value):
            yield _Kept(self._own, name, self._thens[name], is_written=False)

    def _note(self, found: list[_Kept]) -> None:
        own, changed = self._own, self._changed
        changed.update(kept.name for kept in found)
        looked_at = tuple(
            name
            for name, value in own.items()
            if name not in _OF_EVERY_MODULE
            and not isinstance(value, FIXED)
            and (
                isinstance(value, (Tensor, *_CONTAINERS)) or name in changed or is_generator(value)
            )
        )
        known = _Known(len(own), looked_at, changed)
        _known.setdefault(self._module, {})[self._is_training] = known


class Attributes:
    """The attributes of modules before a region runs, and for those that recompute it.

    `generators` are those of random numbers among them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = list(map(_Before, modules))
        self.generators = [each for before in self._before for each in before.generators]
        self._kept: list[_Kept] = []

    def settle(self) -> None:
        """Note what the first run changed."""
        self._kept = [kept for before in self._before for kept in before.changes()]
        self._before = []

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Have the modules the attributes of then meanwhile."""
        now = [(each, each.own.get(each.name, _ABSENT)) for each in self._kept]
        copier = Copier()
        for each in self._kept:
            _put(each, each.then.clone() if each.is_written else copier.copy(each.then))
        try:
            yield
        finally:
            for each, value in now:
                _put(each, value)


def _put(kept: _Kept, value: Any) -> None:
    if value is _ABSENT:
        kept.own.pop(kept.name, None)
    else:
        kept.own[kept.name] = value


def attributes_as_now(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Return what puts the attributes of modules, and what these hold, back in place.

    Of tensors copies are on the host. What has too many values to be copied is left.

    Example:
        >>> layer = nn.ReLU()
        >>> put_back = attributes_as_now([layer])
        >>> layer.inplace = True
        >>> put_back()
        >>> layer
        ReLU()
    """
    copier = Copier()
    before = [
        (own, {name: value for name, value in own.items() if name not in _OF_EVERY_MODULE})
        for own in map(vars, modules)
    ]
    for _, values in before:
        for value in values.values():
            with contextlib.suppress(TooLargeError):
                copier.copy(value)
    held = [value for _, values in before for value in values.values() if is_generator(value)]
    states = [(each, state_of(each)) for each in held]
    copies = {id(x): (x, version_of(x), x.detach().to("cpu", copy=True)) for x in copier.tensors}

    def put_back() -> None:
        for own, values in before:
            for name in own.keys() - values.keys() - _OF_EVERY_MODULE:
                del own[name]
            own.update(values)
        copier.put_back()
        for generator, state in states:
            set_state(generator, state)
        for tensor, version, content in copies.values():
            if version_of(tensor) != version:
                tensor.data.copy_(content)

    return put_back
