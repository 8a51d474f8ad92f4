"""The attributes of one module, or other object, before a region runs: an owner of attributes.

Objects, and what containers hold, are copied before an owner's first run, which tells whether it
changes them, and later only if it does; all else is looked at in each call. What an attribute held
before stays until the region's graph is gone, without a graph of its own if a run put something
else there: that one may have what was there before it. An owner that writes into a tensor which it
has left alone in its first run, or into a large one, is warned of.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vramx.errors import warn_once
from vramx.recompute.buffers import copy_of, learning
from vramx.recompute.copies import FIXED, MOST_BYTES, Copier, Forgetting, TooLargeError, differs
from vramx.recompute.generators import is_generator
from vramx.recompute.kinds import OF_EVERY_MODULE, Kinds, is_inert, kinds_of
from vramx.recompute.noted import Noted, RegionKind, Regions
from vramx.recompute.objects import tensors_in
from vramx.recompute.shared import Pair, is_pair
from vramx.recompute.tensors import has_graph, storage_of, version_of, without_graph
from vramx.recompute.told import tell_of_write
from vramx.recompute.wholes import (
    CONTAINERS,
    as_now,
    has_no_other,
    is_whole,
    progress_of,
    tell_of_advance,
)

_ABSENT = object()
_NO_NAMES: frozenset[str] = frozenset()
_NOTHING: dict[str, Any] = {}  # nothing is put into it
_MOST_KINDS = 64  # of one module


class _Known(NamedTuple):
    """What is known of the attributes of a module that has run."""

    # Those that may change though they stay the same object, by what all are.
    looked_at: dict[Kinds, tuple[str, ...]]
    changed: set[str]  # of these, those that did
    written: set[str]  # of these, containers and objects that hold a tensor which a run wrote into
    regions: Regions  # those whose first run has shown it


# By whether the module trains.
_known: Noted[dict[bool, _Known]] = Noted()


def _known_of(owner: Any) -> dict[bool, _Known]:
    """Return what is known of an owner; of one without weak references, such as a SimpleNamespace,
    nothing is in any call."""
    if not _may_be_known(owner):
        return {}
    known = _known.beside(owner)
    found = known.get(owner)
    if found is None:
        known[owner] = found = {}
    return found


def _may_be_known(owner: Any) -> bool:
    return bool(type(owner).__weakrefoffset__)


def _trains(owner: Any) -> bool:
    return bool(getattr(owner, "training", False))


class OwnersCopies:
    """Copies of what attributes hold: of what several owners have there is one."""

    def __init__(self) -> None:
        self._copier = Copier()
        self._have_graphs: set[int] = set()  # the ids of copies
        self.generators = self._copier.generators  # of random numbers, within what was copied

    def copy(self, value: Any) -> tuple[Any, list[Tensor]]:
        """Return a copy, and the tensors within that were not met before."""
        met = len(self._copier.tensors)
        try:
            made = self._copier.copy(value)
            held = self._copier.tensors[met:]
            if any(map(has_graph, held)):
                self._have_graphs.add(id(made))
            return made, held
        except TooLargeError:
            self._copier = Copier()  # it is full, of what nobody has
            self._copier.generators = self.generators
            return as_now(value), []

    def copy_tensors(self, value: Any) -> list[Tensor]:
        """Have copies of the tensors that a value holds in the copy of it; return these."""
        try:
            held = {id(tensor): tensor for tensor in tensors_in(value)}
        except TooLargeError:
            return []
        if sum(map(_bytes_of, held.values())) > MOST_BYTES:
            return []
        made = [(tensor, copy_of(tensor)) for tensor in held.values()]
        for each in made:
            self._copier.have(*each)
        return [copy for _, copy in made]

    def has_graphs(self, made: Any) -> bool:
        """Tell whether a tensor in a copy has a graph."""
        return id(made) in self._have_graphs


class OwnerBefore:
    """The attributes of one module, or of what has a region's method, before it runs."""

    # Lives until backward: the fewer objects, the rarer Python's collector runs.
    __slots__ = (
        *("_changed", "_copied", "_going", "_held", "_is_first", "_is_new", "_is_training"),
        *("_keys", "_left_bytes", "_module", "_own", "_region", "_thens", "_values"),
        *("_with_generators", "_with_graphs", "_written"),
    )

    def __init__(self, module: Any, copies: OwnersCopies, region: RegionKind) -> None:
        self._module = module
        self._region = region
        self._is_training = _trains(module)
        self._own = vars(module)
        self._values = dict(self._own)
        self._is_new = self._is_first = False
        self._changed: set[str] | frozenset[str] = _NO_NAMES
        self._written: set[str] | frozenset[str] = _NO_NAMES
        self._copied: dict[str, list[Tensor]] = _NOTHING  # copies of what these hold
        self._thens: dict[str, Any] = _NOTHING
        self._with_graphs: list[str] = []  # containers and objects
        self._with_generators: list[str] = []  # of random numbers
        self._keys: dict[str, int] = {}  # the ids of containers of which there are copies
        self._left_bytes = MOST_BYTES  # of copies of tensors
        # What a container holds: the attribute's name, a tensor, its version.
        self._held: list[tuple[str, Tensor, int]] = []
        self._going: Sequence[tuple[Any, Any]] = ()  # what has no copies, and how far it was
        if is_inert(module):
            return
        known = _known_of(module).get(self._is_training)
        self._is_first = known is None or not known.regions.include(region)
        looked_at = None if known is None else known.looked_at.get(kinds_of(self._values))
        self._is_new = looked_at is None or self._is_first
        names: Iterable[str] = self._values
        if known is not None:
            self._changed, self._written = known.changed, known.written
        if looked_at is not None and not self._is_first:
            # What a run has changed may have been found while attributes were of other kinds.
            names = (*looked_at, *(self._changed & self._values.keys()))
        self._thens = thens = {name: self._then(name, copies) for name in self._names(names)}
        values = self._values
        self._keys = {
            name: id(values[name]) for name in thens if is_pair(values[name], thens[name])
        }
        if self._is_new:
            self._going = [(x, progress_of(x)) for x in values.values() if has_no_other(x)]

    @property
    def is_to_be_watched(self) -> bool:
        """Whether a module has tensors that its first run may write to without a new version."""
        if not self._is_first or not isinstance(self._module, nn.Module):
            return False
        values = self._values
        return bool(self._held) or any(isinstance(values[name], Tensor) for name in self._thens)

    @property
    def generators(self) -> list[Any]:
        return [self._values[name] for name in self._thens if is_generator(self._values[name])]

    @property
    def pairs(self) -> list[Pair]:
        return [(key, self._thens[name]) for name, key in self._keys.items()]

    def _then(self, name: str, copies: OwnersCopies) -> Any:
        """Return what an attribute is; of a tensor also its version."""
        value = self._values[name]
        if isinstance(value, FIXED) or is_generator(value):
            return value
        if isinstance(value, Tensor):
            # Of an owner of which nothing is known there would be copies in each call.
            may_write = name in self._changed or (self._is_new and _may_be_known(self._module))
            nbytes = _bytes_of(value)
            if not may_write or nbytes > self._left_bytes:
                return value, version_of(value)
            self._left_bytes -= nbytes
            return copy_of(value), version_of(value)
        if self._is_new or name in self._changed:
            if name in self._written:
                self._copied = {**self._copied, name: copies.copy_tensors(value)}
            met = len(copies.generators)
            made, held = copies.copy(value)
            if len(copies.generators) > met:
                self._with_generators.append(name)
            if copies.has_graphs(made):
                self._with_graphs.append(name)
            self._held += [(name, tensor, version_of(tensor)) for tensor in held]
            return made
        return as_now(value)

    def note(self, memory: Collection[int], elsewhere: Collection[int]) -> None:
        """Note what the module's first run changed, and wrote to memory.

        `elsewhere` are the ids of tensors that others put back.
        """
        own, values = self._own, self._values
        written = self._written_through(memory, elsewhere)
        for iterator, then in self._going:
            if progress_of(iterator) != then:
                tell_of_advance(iterator)
        self._going = ()
        if not self._is_new and not written and self._is_as_before(memory):
            return
        others = {name for name in self._names(own) if own[name] is not values.get(name, _ABSENT)}
        changed = written | others
        for name, then in self._thens.items():
            value = values[name]
            if name in changed or not self._was_written(name, then, memory):
                continue
            changed.add(name)
            if isinstance(value, Tensor) and then[0] is value:
                tell_of_write(self._module, name)
        changed.update(self._with_generators)  # to be copied, and so to be found, in each call
        if isinstance(self._changed, set):  # calls of the module that are to be recomputed have it
            self._changed |= changed
        else:
            self._changed = changed
        noted = _known_of(self._module)
        before = noted.get(self._is_training)
        looked_at = {} if before is None else before.looked_at
        if len(looked_at) > _MOST_KINDS:
            looked_at = {}
        for each in (values, own):
            looked_at[kinds_of(each)] = tuple(self._changing_in(each))
        regions = Regions() if before is None else before.regions
        regions.note(self._region)
        found = written if before is None else written | before.written
        noted[self._is_training] = _Known(looked_at, self._changed, found, regions)

    def _written_through(self, memory: Collection[int], elsewhere: Collection[int]) -> set[str]:
        """Return the containers and objects that hold a tensor which the run wrote into, and of
        which there is no copy; tell of them."""
        held, self._held = self._held, []
        written = set[str]()
        for name, tensor, version in held:
            if self._copied.get(name):
                continue
            if id(tensor) not in elsewhere and _is_written(tensor, version, memory):
                written.add(name)
                _tell_of_held(self._module, name, _bytes_of(tensor))
        return written

    @property
    def has_changed(self) -> bool:
        """Whether runs of the module have put something else in the place of an attribute."""
        return bool(self._changed)

    def forget_graphs(self, forgetting: Forgetting) -> None:
        """Hold no graph of what runs put something else in the place of."""
        for name in self._changed & self._values.keys():
            value, then = self._values[name], self._thens.get(name)
            if isinstance(value, Tensor):
                self._values[name] = bare = without_graph(value)
                if then is not None and then[0] is value:
                    self._thens[name] = bare, then[1]
            elif name in self._with_graphs:
                self._thens[name] = self._values[name] = forgetting.copy_of(then)
            elif then is not None:
                self._values[name] = then  # the run may have put one with a graph into the other

    def _is_as_before(self, memory: Collection[int] = ()) -> bool:
        """Tell whether all attributes are the same objects, and nothing was written into them."""
        own, values = self._own, self._values
        if len(own) != len(values) or any(map(is_not, own.values(), values.values())):
            return False
        return not any(self._was_written(name, then, memory) for name, then in self._thens.items())

    def _was_written(self, name: str, then: Any, memory: Collection[int]) -> bool:
        value = self._values[name]
        if isinstance(value, Tensor):
            return _is_written(value, then[1], memory)
        return differs(then, value)

    def _names(self, values: Iterable[str]) -> Iterator[str]:
        return (name for name in values if name not in OF_EVERY_MODULE)

    def _changing_in(self, values: dict[str, Any]) -> Iterator[str]:
        """Give the attributes that may be others though they stay the same object."""
        for name in self._names(values):
            value = values[name]
            if isinstance(value, FIXED):
                continue
            may_change = isinstance(value, (Tensor, *CONTAINERS)) or is_whole(type(value))
            if may_change or name in self._changed or is_generator(value):
                yield name

    def others(self, copier: Copier) -> dict[str, Any]:
        """Return the attributes that are others now as they were; _ABSENT: there was none."""
        own, values = self._own, self._values
        # What a run changed another would: also where the program has put it back since.
        if not self._changed and self._is_as_before():
            return {}
        for tensor in itertools.chain.from_iterable(self._copied.values()):
            copier.have(tensor, learning(tensor.detach().clone(), tensor))  # to be written into
        added = {*self._names(own), *self._changed} - values.keys()
        found = dict.fromkeys(added, _ABSENT)
        for name in self._names(values):
            value = self._then_of(name, copier)
            if own.get(name, _ABSENT) is not value or name in self._changed:
                found[name] = value
        return found

    def _then_of(self, name: str, copier: Copier) -> Any:
        value, then = self._values[name], self._thens.get(name, _ABSENT)
        if then is _ABSENT:
            return value
        if isinstance(value, Tensor):
            kept, version = then
            # One that was written to without a copy of before is all that there is.
            may_be_written = name in self._changed and kept is not value
            if version == version_of(value) and not may_be_written:
                return value
            return learning(kept.detach().clone(), kept)
        return copier.copy_of(then) if name in self._changed or differs(then, value) else value

    def put(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if value is _ABSENT:
                self._own.pop(name, None)
            else:
                self._own[name] = value

    def now(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self._own.get(name, _ABSENT) for name in names}


def _is_written(tensor: Tensor, version: int, memory: Collection[int]) -> bool:
    if version_of(tensor) != version:
        return True
    return bool(memory) and tensor.layout is torch.strided and storage_of(tensor) in memory


def _tell_of_held(module: Any, name: str, nbytes: int) -> None:
    is_copied = _may_be_known(module) and nbytes <= MOST_BYTES
    later = ", and from the next step on what was there before" if is_copied else ""
    warn_once(
        f"a region under vramx.checkpoint writes into a tensor that {name} of "
        f"{type(module).__name__} holds: a recomputation finds it written, and writes into it once "
        f"more{later}; update it outside of the region, or register a buffer",
        stacklevel=7,
    )


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
