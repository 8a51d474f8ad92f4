"""All that a region's function reaches beside its arguments, as it is when the region first runs.

Each file beside this one has a part of it: variables of the function, what modules are made of
(members.py), their buffers and attributes, and generators of random numbers. What helpers in a file
and classes have there is not restored: it is every thread's, and two that recompute at once would
leave each other's. A switch among it that has changed is told of (switches.py). Belongs to one run
of one region, and to those that recompute it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from vramx.patch.of_classes import found_of
from vramx.recompute.attributes import Attributes
from vramx.recompute.buffers import Buffers
from vramx.recompute.functions import Variables
from vramx.recompute.generators import Generators
from vramx.recompute.hooks import Hooks
from vramx.recompute.kinds import Chosen
from vramx.recompute.members import Members
from vramx.recompute.modes import Modes
from vramx.recompute.noted import kind_of
from vramx.recompute.objects import Before
from vramx.recompute.reached import modules_of
from vramx.recompute.shared import Shared
from vramx.recompute.switches import Switches


class Surroundings:
    """What a function reaches, taken now; `are_new` if modules are, whose run is to be watched."""

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: Iterable[Any],
        arguments: tuple[Any, Any] = ((), {}),
        *,
        draws_again: bool = True,
    ) -> None:
        leaves = tuple(leaves)
        self._shared = Shared(arguments)
        self._function = function
        modules, linked = _with_hidden(modules_of(function, leaves))
        hooks = Hooks(modules)
        if hooks.of_attributes:  # which may reach others
            given = (*leaves, *hooks.of_attributes)
            modules, linked = _with_hidden(modules_of(function, given))
            hooks = Hooks(modules)
        self._hooks = hooks
        self._variables = Variables(function, hooks.functions, hooks.of_attributes)
        region = kind_of(function, modules)
        self.buffers = Buffers(modules, region)
        # A lazy module is to be found as its first run makes it.
        modules = [module for module in modules if not _is_to_be_made(module)]
        owners = hooks.owners
        bound = (each for each in owners if isinstance(each, nn.Module))
        sharders = [each for each in modules if _is_sharder(type(each))]
        sharded = {id(part) for each in sharders for part in each.modules()} if sharders else ()
        parts = {id(each): each for each in (*modules, *linked, *bound)}
        for each in sharded:  # whose weights are attributes, and which are here now says FSDP's own
            parts.pop(each, None)
        others = [*self._variables.objects, *owners]
        self._attributes = Attributes(parts.values(), others, region)
        self.are_new = self.buffers.are_new or self._attributes.are_to_be_watched
        self._members = Members(modules, leaves, sharded)
        self._modes = Modes()
        self._switches = Switches(modules, self._variables.functions)
        self._reads_all = _is_of_a_module(function)
        self._generators: list[Generators] = []
        if draws_again:
            in_objects = (x for leaf in leaves if isinstance(leaf, Before) for x in leaf.generators)
            held = (*leaves, *in_objects, *self._attributes.generators)
            self._generators.append(Generators((function, *hooks.functions), modules, held))

    def settle(self) -> None:
        """Note what the first run changed."""
        self._modes.settle()
        self._switches.settle()
        self._variables.settle()
        memory = self.buffers.memory
        self.buffers.settle()
        written = self.buffers.written
        self._attributes.settle(memory, written)
        self._members.forget_graphs()
        if self._reads_all:
            self._members.settle(written)

    @contextlib.contextmanager
    def restored(self, arguments: tuple[Any, Any] = ((), {})) -> Iterator[Callable[..., Any]]:
        """Have all as it was meanwhile; gives the function with its variables.

        `arguments` are those that it is to be called with.
        """
        pairs = (*self._attributes.pairs, *self._variables.pairs)
        copier = self._shared.copier(arguments, pairs)
        self._switches.check()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._modes.restored())
            stack.enter_context(self._members.restored())
            stack.enter_context(self.buffers.restored())
            stack.enter_context(self._attributes.restored(copier))
            for generators in self._generators:
                stack.enter_context(generators.restored())
            again = self._variables.again(copier)
            stack.enter_context(self._hooks.replaced(again))
            yield again(self._function)


@found_of
def _is_sharder(cls: Any) -> bool:
    """Tell whether modules of a class are FSDP1's, around others."""
    return bool(cls.__module__.startswith("torch.distributed.fsdp"))


def _is_to_be_made(module: nn.Module) -> bool:
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()


def _is_of_a_module(function: Any) -> bool:
    """Tell whether a function is a module, or its forward: it reads the parameters that it has.

    What closes over a model may read one layer of it.
    """
    if isinstance(function, functools.partial) and function.args:
        return isinstance(function.args[0], nn.Module)
    return isinstance(getattr(function, "__self__", function), nn.Module)


# Attributes that may hold modules which are no parts of theirs, such as a parent.
_linking = Chosen((list, tuple, nn.Module))
_MOST_ITEMS = 1024  # of a list, that are looked at in each call: 20 microseconds


def linked_to(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Give the modules that modules have in attributes, by themselves or in a list or tuple.

    Example:
        >>> child, parent = nn.ReLU(), nn.GELU()
        >>> child.parents = [parent]
        >>> list(linked_to([child])) == [parent]
        True
    """
    for module in modules:
        own = vars(module)
        for name in _linking.names_of(module):
            value = own[name]
            held = value[:_MOST_ITEMS] if isinstance(value, (list, tuple)) else (value,)
            yield from (each for each in held if isinstance(each, nn.Module))


def _with_hidden(
    modules: Sequence[nn.Module],
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return modules with what they have in attributes without its being a part of them.

    And all that they have there. What they are parts of, such as a parent, is not hidden.

    Example:
        >>> layer = nn.ReLU()
        >>> layer.teacher = [nn.Sequential(nn.Tanh())]
        >>> [len(each) for each in _with_hidden([layer])]
        [3, 1]
    """
    known = set(map(id, modules))
    linked = list(linked_to(modules))
    hidden: dict[int, nn.Module] = {}
    for each in linked:
        parts = {id(part): part for part in each.modules()}
        if known.isdisjoint(parts):
            hidden.update(parts)
    linked += linked_to(hidden.values())
    return [*modules, *hidden.values()], linked
