"""Hooks and functions of modules: a recomputation calls them with what they reached then.

A hook that keeps outputs in a list, counts, or adds noise would do so once more, with what it finds
then. So it is called as functions.py has it, with copies of the containers that it closes over or
names, and what it is bound to is an owner of attributes, as a module is. So is a function that a
module has as an attribute, or in a list or a dictionary, such as one that a program gives to it.
Hooks of torch, such as those of a sharding library, are called as they are. Which hooks modules
have is members.py's; those that torch calls for every module are the ones that there were. A call
costs a look at each module of the region.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as of_every_module

from vramx.recompute.attributes import attributes_as_now
from vramx.recompute.functions import variables_as_now
from vramx.recompute.kinds import Chosen

_OTHERS = ("torch", "vramx", "builtins")
_FUNCTIONS = (FunctionType, functools.partial)
# For every module: hooks, and how they are called, by the number of the hook.
_EVERY: tuple[dict[int, Any], ...] = (
    of_every_module._global_forward_hooks,
    of_every_module._global_forward_pre_hooks,
)
_HOW: tuple[dict[int, bool], ...] = (
    of_every_module._global_forward_hooks_with_kwargs,
    of_every_module._global_forward_hooks_always_called,
)
_NONE: tuple[dict[int, Any], ...] = tuple({} for _ in (*_EVERY, *_HOW))


class Hooks:
    """The forward hooks of modules, and functions in their attributes, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = tuple(modules)
        self._places: list[tuple[dict[Any, Any], Any, Any]] = [
            (own, key, hook)
            for module in modules
            for own in (module._forward_hooks, module._forward_pre_hooks)
            for key, hook in own.items()
            if is_of_program(hook)
        ]
        attributes = [(vars(each), name) for each in modules for name in _functions_of(each)]
        self._places += ((own, name, own[name]) for own, name in attributes)
        self.of_attributes = [each for own, name in attributes for each in _held_by(own[name])]
        self._of_every = of_every = _hooks_of_every_module()
        if of_every is not _NONE:
            of_places = zip(_EVERY, of_every, strict=False)
            self._places += [(own, *each) for own, then in of_places for each in then.items()]
        held = (each for _, _, hook in self._places for each in _held_by(hook))
        self.functions = list({id(each): each for each in held}.values())

    @property
    def owners(self) -> list[Any]:
        """What hooks are bound to, and hooks that are objects."""
        bound = map(_below, self.functions)
        found = [each.__self__ if type(each) is MethodType else each for each in bound]
        return [each for each in found if type(each) is not FunctionType]

    @contextlib.contextmanager
    def replaced(self, again: Callable[[Any], Any]) -> Iterator[None]:
        """Have each hook in the form that `again` gives it meanwhile."""
        with self._of_every_module_restored(), self._of_modules_replaced(again):
            yield

    @contextlib.contextmanager
    def _of_every_module_restored(self) -> Iterator[None]:
        """Have the hooks of every module those of then meanwhile, but for torch's."""
        then, now = self._of_every, _hooks_of_every_module()
        changed = list(zip((*_EVERY, *_HOW), then, now, strict=True)) if then != now else []
        for own, before, after in changed:
            _exchange(own, after, before)
        try:
            yield
        finally:
            for own, before, after in changed:
                _exchange(own, before, after)

    @contextlib.contextmanager
    def _of_modules_replaced(self, again: Callable[[Any], Any]) -> Iterator[None]:
        made = [(own, key, hook, _again(hook, again)) for own, key, hook in self._places]
        changed = [each for each in made if each[2] is not each[3]]
        for own, key, hook, other in changed:
            if own.get(key) is hook:
                own[key] = other
        try:
            yield
        finally:
            for own, key, hook, other in changed:
                if own.get(key) is other:
                    own[key] = hook


def _functions_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's attributes that are functions of the program.

    Another forward is a library's that moves weights about: it is called as it is.

    Example:
        >>> module = nn.Module()
        >>> module.call = lambda x: x
        >>> _functions_of(module)
        ('call',)
    """
    own = vars(module)
    return tuple(name for name in _functions.names_of(module) if _has_functions(own[name]))


def _held_by(value: Any) -> Collection[Any]:
    """Return a hook, or a function, as one of a list; of a container what it holds."""
    if type(value) is dict:
        return value.values()
    return value if type(value) in (list, tuple) else [value]


def _has_functions(value: Any) -> bool:
    """Tell whether an attribute is a function of the program, or holds nothing else."""
    held = _held_by(value)
    return bool(held) and all(isinstance(x, _FUNCTIONS) and is_of_program(x) for x in held)


_functions = Chosen((*_FUNCTIONS, list, tuple, dict), left=frozenset({"forward"}))


def _again(value: Any, again: Callable[[Any], Any]) -> Any:
    """Return a hook, a function, or a container of some, in the form that `again` gives them."""
    held = _held_by(value)
    made = list(map(again, held))
    if all(map(operator.is_, made, held)):
        return value
    if type(value) is dict:
        return dict(zip(value, made, strict=True))
    return type(value)(made) if type(value) in (list, tuple) else made[0]


def _hooks_of_every_module() -> tuple[dict[int, Any], ...]:
    """Return the program's hooks that torch calls for every module, and how it calls them."""
    if not any(_EVERY):
        return _NONE
    hooks = [{key: hook for key, hook in own.items() if is_of_program(hook)} for own in _EVERY]
    how = [{key: own[key] for key in own if any(key in each for each in hooks)} for own in _HOW]
    return (*hooks, *how)


def _exchange(own: dict[int, Any], out: dict[int, Any], put: dict[int, Any]) -> None:
    """Put others in the place of some hooks, in the order of their numbers."""
    rest = {key: value for key, value in own.items() if key not in out}
    own.clear()
    own.update(sorted({**rest, **put}.items()))


def _below(hook: Any) -> Any:
    while type(hook) is functools.partial:
        hook = hook.func
    return hook


def is_of_program(hook: Any) -> bool:
    """Tell whether a hook is none of torch's or ours.

    Example:
        >>> is_of_program(print), is_of_program(lambda *_: None)
        (False, True)
    """
    hook = _below(hook)
    owner = hook.__func__ if type(hook) is MethodType else hook
    module = getattr(owner, "__module__", None) or type(owner).__module__
    return str(module).partition(".")[0] not in _OTHERS


def hooks_as_now(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Return what puts back what forward hooks of modules have noted, and where."""
    hooks = Hooks(modules)
    variables = variables_as_now(hooks.functions)
    attributes = attributes_as_now(each for each in hooks.owners if hasattr(each, "__dict__"))

    def put_back() -> None:
        variables()
        attributes()

    return put_back
