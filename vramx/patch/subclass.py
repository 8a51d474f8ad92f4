"""The class of a changed module, and its record: what runs the changes, and how copies are made.

A subclass of the module's class, made once for each, that bears its name. Its forward reads the
record in the module's __dict__; without one it is that of the class. Pure but for the classes that
are in use; any thread. A call costs a microsecond, and reads a record that is never written to.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakSet

import torch

from vramx.errors import InvalidValueError
from vramx.patch.change import Change
from vramx.patch.of_classes import made_of
from vramx.patch.own_class import asked_of_class, asked_of_super

# In the __dict__ of a changed module, its record; in that of our classes, the class below them.
RECORD, ORIGINAL = "_vramx", "_vramx_original"
# In that of our classes, what their forward is once another has taken its place.
_OUTLIVED = "_vramx_outlived"


@dataclass(frozen=True, eq=False)
class Patch:
    """What was done to a module: the changes, the innermost first, and the forward it had."""

    changes: tuple[Change, ...] = ()
    inner: Any = None

    @property
    def mixins(self) -> tuple[type, ...]:
        """The classes that the changes want before the module's own."""
        return tuple(change.mixin for change in self.changes if change.mixin is not None)


# Our forwards as what wraps the forward of each subclass has left them.
_WRAPPED = WeakSet[FunctionType]()


class Patched:
    """What our classes have before the original one: how copies are made."""

    _vramx: Patch | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        original = vars(cls).get(ORIGINAL)
        if original is None:
            super().__init_subclass__(**options)
            return
        # Ours is no subclass that the original's author wrote: registries are not told of it. But
        # what wraps the forward of each subclass, as checkpointing of transformers does, wants the
        # outermost forward to be its own.
        hook = _wrapping_hook(original)
        if hook is not None:
            hook(cls)
            _WRAPPED.add(vars(cls)["forward"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        make, args, *rest = reduced
        state, *others = rest or (None,)
        cls = type(self)
        if ORIGINAL in vars(cls):
            # The class has no name to be found by: it is made again from the original one.
            names = vars(cls)
            # Where it is not said which, the class is one that is made for each module.
            original = names[ORIGINAL] if cls in (make, *args) else None
            args = tuple(original if value is cls else value for value in args)
            make = original if make is cls else make
            make, args = _make, (original, names["_vramx_mixins"], make, args)
        return make, args, (state, self.__dict__.get(RECORD)), *others

    def __setstate__(self, states: tuple[Any, Patch | None]) -> None:
        state, patch = states
        if state is not None:
            super().__setstate__(state)  # type: ignore[misc]
        if patch is None:
            return
        inner = patch.inner
        if state is None:  # it was made anew, and with it the forward that it has
            inner = self.__dict__.pop("forward", None)
        elif is_ours(inner):  # a method is pickled by its name, which finds ours
            inner = None
        self.__dict__[RECORD] = replace(patch, inner=inner)

    def __prepare_scriptable__(self) -> Any:
        """Answer torch.jit.script, which compiles the source of a module's own class."""
        if self._vramx is None:
            return self
        raise InvalidValueError(
            f"a {type(self).__name__} that vramx has changed cannot be scripted: TorchScript "
            "compiles its class, which does not have the change; call vramx.restore() first"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        patch = self.__dict__.get(RECORD) if name == "forward" else None
        if patch is not None and value == _class_forward(self):
            # Who had another forward set before ours gives the class's back, to what is below ours.
            self.__dict__[RECORD] = replace(patch, inner=None)
            self.__dict__.pop("forward", None)
        elif name == "__class__":
            object.__setattr__(self, name, _class_for(self, value))
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        patch = self.__dict__.get(RECORD) if name == "forward" else None
        if patch is not None and patch.inner is not None and "forward" not in self.__dict__:
            self.__dict__[RECORD] = replace(patch, inner=None)
        else:
            super().__delattr__(name)


def _class_for(module: Any, wanted: Any) -> Any:
    """Return the class of a module that others give a class: it keeps its changes.

    A lazy module becomes another once it has run; parametrizations that are removed give back the
    first base of the class that they find.
    """
    if not issubclass(wanted, torch.nn.Module):
        wanted = vars(type(module))[ORIGINAL].__bases__[0]
    patch = module.__dict__.get(RECORD)
    if patch is None:
        return vars(wanted).get(ORIGINAL, wanted)
    return wanted if issubclass(wanted, Patched) else patched_class(wanted, patch.mixins)


class StandIn(ABCMeta):
    """The metaclass of our classes: what is set on one is meant for the class that it stands for.

    So a forward that a program gives `type(module)` is that of all modules of the class, is still
    there after restore(), and the changes are around it. A program may also make a class of
    `type(module)` and one of its own, as libraries that learn to learn do: theirs is often an
    abstract one, and Python wants one metaclass to be a class of the other.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        original = _stood_for(cls)
        if original is None:
            super().__setattr__(name, value)
            return
        if name == "forward":
            # What the program puts around ours calls what there was.
            vars(cls)[_OUTLIVED].append(original.forward)
            super().__setattr__(_OUTLIVED, [])
            super().__setattr__(name, _forward_of(original, vars(cls)[_OUTLIVED]))
        setattr(original, name, value)

    def __delattr__(cls, name: str) -> None:
        original = _stood_for(cls)
        if original is None:
            super().__delattr__(name)
        else:
            delattr(original, name)


_made = WeakSet[type]()


def _stood_for(cls: type) -> Any:
    """Return the class that a finished one of ours stands for; None where it is none of ours."""
    return vars(cls)[ORIGINAL] if cls in _made else None


@made_of
def _metaclass_over(metaclass: type) -> Any:
    return StandIn if metaclass is type else type("StandIn", (StandIn, metaclass), {})


def _class_forward(module: Any) -> Any:
    original = next(vars(cls)[ORIGINAL] for cls in type(module).__mro__ if ORIGINAL in vars(cls))
    return MethodType(original.forward, module)


def _make(original: Any, mixins: Any, make: Any, args: Any) -> Any:
    made = make(*args)
    object.__setattr__(made, "__class__", patched_class(original or type(made), mixins))
    return made


def is_ours(forward: Any) -> bool:
    """Tell whether a forward is ours itself, and not something around it."""
    function = getattr(forward, "__func__", forward)
    if getattr(function, "__code__", None) is _CODE:
        return True
    return isinstance(function, FunctionType) and function in _WRAPPED


def _wrapping_hook(original: Any) -> Any:
    """Return the __init_subclass__ that made a class's forward; None: it was not made by one."""
    code = getattr(original.forward, "__code__", None)
    for base in original.__mro__:
        hook = getattr(vars(base).get("__init_subclass__"), "__func__", None)
        if code is not None and code in getattr(getattr(hook, "__code__", None), "co_consts", ()):
            return hook
    return None


@made_of
def patched_class(original: Any, mixins: tuple[type, ...]) -> Any:
    """Return our subclass of a class, with mixins before it."""
    outlived: list[Any] = []
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "forward": _forward_of(original, outlived),
        _OUTLIVED: outlived,
        ORIGINAL: original,
        "_vramx_mixins": mixins,
    }
    below, asked = asked_of_super(original), asked_of_class(original)
    if "__deepcopy__" in asked:
        asked["__deepcopy__"] = _copied_alike(asked["__deepcopy__"])
    names = {name: vars(original)[name] for name in below} | asked | names
    patched = type("Patched", (Patched,), below) if below else Patched
    metaclass_below: Any = type(original)  # mypy finds that a metaclass has no hash
    metaclass = _metaclass_over(metaclass_below)
    # Named as the original: what looks for a module by its class's name must find it.
    bases = (*_layout_of(original), patched, *mixins, original)
    made = metaclass(original.__name__, bases, names)
    _made.add(made)
    return made


def _layout_of(original: Any) -> tuple[type, ...]:
    """Return what a class has to have first, so that modules of `original` can become its own.

    Python lets an object change its class where both have added the object's __dict__ to the same
    class: to `object`, as Patched and Module have. Where one without comes before Module among the
    bases (abc.ABC, typing.Generic), `original` has added it to that one.
    """
    added = original
    while _SLOTS(added) == _SLOTS(added.__base__):
        added = added.__base__
    below = added.__base__
    if below is object:
        return ()
    metaclass: Any = type(below)
    layout = metaclass("Layout", (_Bare,), {})
    try:
        layout.__bases__ = (below,)  # which tells no registry of its author's of a subclass
    except TypeError:
        # From Python 3.15 on, Generic is put below no class that is there; without __orig_bases__
        # it refuses one that names no types.
        layout = metaclass("Layout", (below,), {"__orig_bases__": ()})
    return (layout,)


class _Bare:
    __slots__ = ()


_SLOTS = attrgetter("__basicsize__", "__dictoffset__", "__weakrefoffset__")


def _copied_alike(copied: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the method of a class that copies its modules otherwise, for modules with a record."""

    def method(self: Any, memo: dict[int, Any], /) -> Any:
        found = _make(None, type(self)._vramx_mixins, copied, (self, memo))
        found.__setstate__((None, copy.deepcopy(self.__dict__.get(RECORD), memo)))
        return found

    return method


def _forward_of(original: Any, outlived: list[Any]) -> Callable[..., Any]:
    """Return our forward over a class; one in `outlived` is what it has to be from then on.

    What torch 2.6 compiles of it may look for `torch` among the globals of this module.
    """

    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if outlived:
            return outlived[0](self, *args, **kwargs)
        # What others keep of ours outlives the record, and the class.
        patch = getattr(self, "_vramx", None)
        call: Any = None if patch is None else patch.inner
        if call is None:
            call = functools.partial(original.forward, self)
        for change in () if patch is None else patch.changes:
            call = functools.partial(change.run, self, call)
        return call(*args, **kwargs)

    known = original.forward
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        if hasattr(known, name):
            setattr(forward, name, getattr(known, name))
    # And no __wrapped__: who looks for a forward below others' wrappers must stop at ours.
    with contextlib.suppress(TypeError, ValueError):  # it has none
        forward.__signature__ = inspect.signature(known)  # type: ignore[attr-defined]
    return forward


_CODE = _forward_of(torch.nn.Identity, []).__code__
