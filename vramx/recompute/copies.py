"""Copies of objects and containers around the same tensors, and whether one differs by now.

What a call may change is copied before it: lists, dictionaries, objects with attributes, and what
these hold. Numbers, functions, modules, tensors, files and locks are shared. Not responsible for
when copies are made (objects.py, attributes.py, functions.py), nor for whole types such as arrays
and iterators (wholes.py). Some tenths of a microsecond for each value; any thread.
"""

from __future__ import annotations

import copy
import enum
import functools
import sys
import types
from collections import OrderedDict, deque
from operator import is_not
from typing import Any

from torch import Tensor, nn

from vramx.patch.of_classes import found_of
from vramx.recompute.generators import is_generator
from vramx.recompute.tensors import without_graph
from vramx.recompute.wholes import CONTAINERS, another, as_now, is_other, is_whole

# Numbers and words.
FIXED = (str, bytes, int, float, complex, type(None))
_PLAIN = (dict, list, set, deque)  # which have no attributes of their own
# An OrderedDict knows its order beside what a dict knows.
_BASES = (OrderedDict, *_PLAIN)
# What has no state that a call changes, or is one thing that copies would make two of.
SHARED = (
    *(*FIXED, type, enum.Enum, Tensor, nn.Module),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(functools.partial, range, slice),
)
# A cache has some hundred values. What has more, such as a reference to a whole program, is shared.
# So are arrays of more bytes, such as a file of tokens that is mapped.
_LARGEST, MOST_BYTES = 10_000, 64 << 20


class TooLargeError(Exception):
    """There are more values, or more bytes of arrays, than an argument of a layer has."""


# What most arguments are of, which have neither. Dynamo of torch 2.6 to 2.8 traces no set of types.
_NO_CACHES: list[type] = [type(None), bool, int, float, str, tuple, Tensor]


def is_cache(value: Any) -> bool:
    """Tell whether a value is a cache of keys and values, by what it does and not by its name."""
    if type(value) in _NO_CACHES:
        return False
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def has_state(value: Any) -> bool:
    """Tell whether a call may change what a value holds, so that it is copied."""
    if type(value).__module__.partition(".")[0] == "torch":
        return False  # generators, devices, process groups
    if hasattr(type(value), "__del__") and not is_cache(value):
        return False  # a copy that goes would close the original's file or process
    return isinstance(value, CONTAINERS) or bool(
        getattr(value, "__dict__", None) or _slots(type(value))
    )


def _has_slots_alone(cls: Any) -> bool:
    """Tell whether objects of a class of the program's have all of their state in slots."""
    if issubclass(cls, (*SHARED, *CONTAINERS, tuple)) or cls.__dictoffset__:
        return False
    return bool(_slots(cls)) and str(cls.__module__).partition(".")[0] not in _LIBRARIES


_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy"}
has_slots_alone = found_of(_has_slots_alone)


def _slots(cls: type) -> list[str]:
    found: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def differs(then: Any, now: Any, around: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Tell whether what was copied is another thing by now.

    Example:
        >>> differs([1, {"a": 2}], [1, {"a": 2}]), differs([1], [1, 2])
        (False, True)
    """
    if then is now or (id(then), id(now)) in around:
        return False
    if type(then) is not type(now):
        return True
    if isinstance(now, FIXED):
        return bool(then != now)
    if type(now) in _PLAIN and _holds_the_same(then, now):
        return False
    if is_whole(type(now)):
        return is_other(then, now)
    pairs = _parts(then), _parts(now)
    if not pairs[1] or pairs[0].keys() != pairs[1].keys():
        return bool(pairs[0] or pairs[1]) or not has_state(now)
    around = around | {(id(then), id(now))}
    return any(differs(part, pairs[1][key], around) for key, part in pairs[0].items())


def _holds_the_same(then: Any, now: Any) -> bool:
    """Tell whether two plain containers have the very same items: nearly all have."""
    if type(now) is set:
        return bool(then == now)
    if len(then) != len(now) or any(map(is_not, then, now)):
        return False
    return type(now) is not dict or not any(map(is_not, then.values(), now.values()))


def _parts(value: Any) -> dict[Any, Any]:
    """Return what an object or a container holds, by where it is."""
    parts: dict[Any, Any] = {}
    if isinstance(value, dict):
        parts.update((("item", key), dict.__getitem__(value, key)) for key in value)
    elif isinstance(value, (list, deque, tuple)):
        parts.update((("item", i), item) for i, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        parts.update((("item", item), None) for item in value)
    parts.update(getattr(value, "__dict__", {}))
    names = (name for name in _slots(type(value)) if hasattr(value, name))
    parts.update((name, getattr(value, name)) for name in names)
    return parts


class Copier:
    """Copies objects and containers, each once.

    `tensors` and `generators`, of random numbers, are those that it met, which it shares.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.generators: list[Any] = []
        self._copies: dict[int, Any] = {}
        self._pairs: list[tuple[Any, Any]] = []
        self._tuples: list[tuple[Any, Any]] = []
        self._left_bytes = MOST_BYTES

    def copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return self._copies.get(id(value), value)
        if isinstance(value, SHARED):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if len(self._copies) >= _LARGEST:
            raise TooLargeError
        return self._copied(value)

    def have(self, tensor: Tensor, made: Tensor) -> None:
        """Have a copy of a tensor in what holds it and is copied from now on."""
        self._copies.setdefault(id(tensor), made)

    def take(self, value: Any, made: Any) -> None:
        """Have something else for a copy of a container, and its containers for those in it."""
        if self._copies.get(id(value)) is made:
            return
        self._copies[id(value)] = made
        if isinstance(value, set):
            return
        parts = _parts(made)
        for at, part in _parts(value).items():
            if type(part) in CONTAINERS and type(parts.get(at)) is type(part):
                self.take(part, parts[at])

    def copy_of(self, then: Any) -> Any:
        """Return a copy of what was copied before; of too much one that shares what it holds."""
        try:
            return self.copy(then)
        except TooLargeError:
            return as_now(then)

    def _copied(self, value: Any) -> Any:
        if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
            return self._copied_tuple(value)
        if is_whole(type(value)):
            self._left_bytes -= getattr(value, "nbytes", 0)
            if self._left_bytes < 0:
                raise TooLargeError
            self._copies[id(value)] = made = another(value, self._copies)
            return made
        if is_generator(value):
            self.generators.append(value)
            return value
        if not has_state(value):
            return value
        shallow = another_of(value)
        # Known before its parts are copied, which may refer to it.
        self._copies[id(value)] = shallow
        if shallow is not value:
            self._pairs.append((value, shallow))
            self._fill(shallow, value)
        return shallow

    def _copied_tuple(self, value: Any) -> Any:
        """Return the tuple itself where nothing in it was copied."""
        parts = tuple(map(self.copy, value))
        if not any(map(is_not, parts, value)):
            return value
        made = parts if type(value) is tuple else type(value)(*parts)
        self._tuples.append((value, made))
        return made

    def put_back(self) -> None:
        """Have what was copied hold again what it held then, in place."""
        originals = {id(shallow): value for value, shallow in self._pairs}
        for value, made in self._tuples:  # the inner ones first
            parts = tuple(originals.get(id(x), x) for x in made)
            if not any(map(is_not, parts, value)):
                originals[id(made)] = value
        for value, shallow in self._pairs:
            then = {at: originals.get(id(x), x) for at, x in _parts(shallow).items()}
            now = _parts(value)
            if then.keys() != now.keys() or any(then[at] is not x for at, x in now.items()):
                _refill(value, then)

    def _fill(self, shallow: Any, value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                dict.__setitem__(shallow, key, self.copy(dict.__getitem__(value, key)))
        elif isinstance(value, (list, deque)):
            base = _base_of(value)
            for i, item in enumerate(list(value)):
                base.__setitem__(shallow, i, self.copy(item))
        for name, part in list(getattr(shallow, "__dict__", {}).items()):
            shallow.__dict__[name] = self.copy(part)
        for name in _slots(type(value)):
            if hasattr(value, name):
                object.__setattr__(shallow, name, self.copy(getattr(value, name)))


class Forgetting(Copier):
    """Copies in which no tensor has a graph, of what was copied before.

    A state of before is kept by the graph of a call. If it had the graph of the call before, that
    one's state of before would stay as well, and so on.
    """

    def copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self._copies:
                self.tensors.append(value)  # for its id to stay its own
                self._copies[id(value)] = without_graph(value)
            return self._copies[id(value)]
        return value if is_whole(type(value)) else super().copy(value)


def _base_of(container: Any) -> Any:
    """Return the container of Python's own that one is, whose methods refuse and count nothing."""
    kinds = (kind for kind in _BASES if isinstance(container, kind))
    return next(kinds, None)


def _refill(value: Any, parts: dict[Any, Any]) -> None:
    """Have an object or a container hold these parts, as _parts() has them, and no others."""
    items = {at[1]: x for at, x in parts.items() if isinstance(at, tuple)}
    base = _base_of(value)
    if base is not None:
        base.clear(value)
    if isinstance(value, dict):
        for key, x in items.items():
            base.__setitem__(value, key, x)
    elif isinstance(value, (list, deque)):
        base.extend(value, items.values())
    elif isinstance(value, set):
        base.update(value, items)
    named = {at: x for at, x in parts.items() if isinstance(at, str)}
    slots = set(_slots(type(value)))
    if hasattr(value, "__dict__"):
        vars(value).clear()
        vars(value).update({name: x for name, x in named.items() if name not in slots})
    for name in slots & named.keys():
        object.__setattr__(value, name, named[name])


def another_of(value: Any) -> Any:
    """Return another object that holds the same; itself where there is only the one."""
    try:
        if _is_restored(type(value)):
            is_a_name = isinstance(value.__reduce_ex__(_PROTOCOL), str)
            return value if is_a_name else _filled(object.__new__(type(value)), value)
        made = copy.copy(value)
    except Exception:  # a lock, a file, a connection: there is only the one
        return value
    if type(made) is type(value):
        parts, own = _parts(made), _parts(value)
        if parts.keys() == own.keys() and not any(own[at] is not x for at, x in parts.items()):
            return made
    # A class that says how it is copied may leave out what it works out again, or make it anew.
    try:
        made = object.__new__(type(value))
    except TypeError:  # it is a container
        return value
    return _filled(made, value)


_PROTOCOL = 4  # of pickle, which copy.copy() asks for


def _is_restored(cls: Any) -> bool:
    """Tell whether copy.copy() would run code of a class on the copy, which may do more than fill
    it: an optimizer puts the hooks of all optimizers around its step."""
    is_plain = cls.__new__ is object.__new__ and not hasattr(cls, "__copy__")
    return is_plain and hasattr(cls, "__setstate__")


def _filled(made: Any, value: Any) -> Any:
    _refill(made, _parts(value))
    return made
