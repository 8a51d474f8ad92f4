"""The states of a few parameters as one range of bytes, and what an optimizer sees of them.

A bucket's states lie in one range of pinned memory. While the optimizer steps they are in a slot of
the device, laid out alike, so that one copy moves all of them. What the optimizer has in its
`state` are views: of the range or of the slot, made once for each and set by show().

    state[p]["exp_avg"]  ──►  view of the host's range   ◄── a copy each way ──►   view of the slot

The same goes for what lies in lists, dictionaries and objects that an optimizer has among its
states: these stay what they are, with their counters, and their tensors are replaced. Small
tensors, counters and what is no plain tensor stay where the optimizer has them. Knows nothing of
streams. Not thread-safe.
"""

from __future__ import annotations

import copy
import functools
import gc
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass
from torch.utils._pytree import tree_leaves, tree_map

from vramx.compression.fakes import PLAIN

# Copies of aligned ranges run at the full speed of the link, and any dtype may be viewed there.
_ALIGNMENT_BYTES = 512


States = Mapping[Any, dict[Any, Any]]


class Shown(NamedTuple):
    """One value of the states: where the optimizer has it, and the views that are there.

    `holder` is the state of a parameter, or a container or the attributes of an object in it.
    `tensors` are the plain ones of the value, which may be a tuple or a tensor of a subclass.
    """

    holder: Any
    key: Any
    value: Any
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, holder: Any, key: Any, value: Any) -> Shown:
        return cls(holder, key, value, tuple(plain_tensors(value)))

    def is_there(self) -> bool:
        """Tell whether the optimizer still has the value, with these tensors, under its key."""
        if self.holder[self.key] is not self.value:
            return False
        now = plain_tensors(self.value)
        return len(now) == len(self.tensors) and all(map(operator.is_, now, self.tensors))


class _Placed(NamedTuple):
    shown: Shown
    offsets: tuple[int | None, ...]  # of the plain tensors in the value; None: it does not move


@dataclass
class Bucket:
    """Parameters that are stepped together, and where their states lie.

    Attributes:
        nbytes: of all states that move; 0 before any were placed.
        layout: another object each time that states are placed.
    """

    parameters: list[Tensor]
    nbytes: int = 0
    layout: object = field(default_factory=object)
    _placed: list[_Placed] = field(default_factory=list)
    _keys: list[tuple[Any, ...]] = field(default_factory=list)  # of each holder

    @property
    def parameter_bytes(self) -> int:
        return sum(map(size_bytes, self.parameters))

    def place(self, state: States, moves: Callable[[Tensor], bool]) -> None:
        """Lay out the states that are there now, as far as `moves` says so."""
        self.nbytes, self.layout = 0, object()
        self._placed, self._keys = [], self._keys_in(state)
        for holder in self._holders(state):
            for key in _keys(holder):
                if _is_container(holder[key]):  # a holder itself
                    continue
                shown = Shown.of(holder, key, holder[key])
                offsets = tuple(self._offset(t) if moves(t) else None for t in shown.tensors)
                if any(offset is not None for offset in offsets):
                    self._placed.append(_Placed(shown, offsets))

    def image(self, memory: Tensor) -> list[Shown]:
        """Return the placed values as views of a range of bytes."""
        return [
            Shown.of(shown.holder, shown.key, _viewed(shown.value, offsets, memory))
            for shown, offsets in self._placed
        ]

    def image_apart(self, allocate: Callable[[int], Tensor]) -> list[Shown]:
        """Return the placed values with memory of its own for each tensor that moves."""

        def own(tensor: Tensor) -> Tensor:
            return _view(tensor, 0, allocate(size_bytes(tensor)))

        return [
            Shown.of(shown.holder, shown.key, _replaced(shown.value, offsets, own))
            for shown, offsets in self._placed
        ]

    def moving(self, image: Sequence[Shown]) -> Iterator[Tensor]:
        """Yield each plain tensor of an image that moves, in the order of all images."""
        for shown, (_, offsets) in zip(image, self._placed, strict=True):
            tensors = zip(shown.tensors, offsets, strict=True)
            yield from (tensor for tensor, offset in tensors if offset is not None)

    def placed(self) -> list[Shown]:
        """Return the values that were placed, or the image that stands for them."""
        return [shown for shown, _ in self._placed]

    def cloned(self) -> list[Shown]:
        """Return the placed values with copies of their tensors."""
        return [
            Shown.of(shown.holder, shown.key, mapped(shown.value, torch.clone))
            for shown, _ in self._placed
        ]

    def stand_for(self, image: Sequence[Shown]) -> None:
        """Let an image stand for the values that were placed, which are let go of."""
        pairs = zip(image, self._placed, strict=True)
        self._placed = [_Placed(shown, offsets) for shown, (_, offsets) in pairs]

    def is_shown(self, state: States, image: Sequence[Shown]) -> bool:
        """Tell whether the optimizer still has an image's values, and no others beside them."""
        return self._keys == self._keys_in(state) and all(shown.is_there() for shown in image)

    def unknown(self, state: States) -> list[str]:
        """Return the classes of what has tensors that cannot be moved."""
        values = (value for p in self.parameters for value in state.get(p, {}).values())
        return sorted({type(value).__name__ for value in values if hides_tensors(value)})

    def _offset(self, tensor: Tensor) -> int:
        offset = self.nbytes
        self.nbytes += -(-size_bytes(tensor) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return offset

    def _holders(self, state: States) -> list[Any]:
        """Return what has the values of each parameter: its state, and what holds some in it."""
        found: list[Any] = []
        for parameter in self.parameters:
            _add_holders(found, state.get(parameter, {}), len(found))
        return found

    def _keys_in(self, state: States) -> list[tuple[Any, ...]]:
        return [(id(each), *_keys(each)) for each in self._holders(state)]


def _add_holders(found: list[Any], holder: Any, first: int) -> None:
    """Add a holder and those in it, each once among those from `first` on."""
    found.append(holder)
    for value in holder.values() if isinstance(holder, dict) else holder:
        if type(value) in _WITHOUT_OTHERS:
            continue
        inner = value if _is_container(value) else value.__dict__ if is_record(value) else None
        if inner is not None and all(inner is not each for each in found[first:]):
            _add_holders(found, inner, first)


def _keys(holder: Any) -> Iterable[Any]:
    return holder if isinstance(holder, dict) else range(len(holder))


_WITHOUT_OTHERS = frozenset((Tensor, nn.Parameter, int, float, bool, str, type(None)))


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | deque)


def show(image: Sequence[Shown]) -> None:
    """Let the optimizer have the values of an image."""
    for shown in image:
        shown.holder[shown.key] = shown.value


def apart(states: Any) -> Any:
    """Return states, which may be a state_dict(), with a storage for each tensor in its memory.

    Of one that is a part of a range a pickle would have the whole range, and torch.save refuses
    those that have others of another type in it.
    """
    return tree_map(_apart, states)


def _apart(leaf: Any) -> Any:
    if is_record(leaf):
        copied = copy.copy(leaf)
        vars(copied).update({key: apart(held) for key, held in vars(leaf).items()})
        return copied
    return _changed(_with_own_storage, leaf)


def _with_own_storage(tensor: Tensor) -> Tensor:
    nbytes = size_bytes(tensor)
    # A range has states alone; one without data, or a user's expanded one, has no bytes to take.
    if type(tensor) is not Tensor or tensor.untyped_storage().nbytes() == nbytes:
        return tensor
    if not nbytes or not is_dense(tensor):
        return tensor
    start = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[start : start + nbytes]
    return tensor.new_empty(0).set_(storage, 0, tensor.size(), tensor.stride())


def is_record(value: Any) -> bool:
    """Tell whether a state's value is an object of the optimizer's own that has tensors.

    Such are FlashOptim's, which have a quantised tensor and its scales.
    """
    if isinstance(value, Tensor | type) or not hasattr(value, "__dict__"):
        return False
    return any(isinstance(held, Tensor) for held in vars(value).values())


def hides_tensors(value: Any) -> bool:
    """Tell whether a state's value has tensors that are not reached, as an object with slots."""
    if isinstance(value, Tensor) or is_record(value):
        return False
    return any(
        not isinstance(leaf, Tensor)
        and any(isinstance(held, Tensor) for held in gc.get_referents(leaf))
        for leaf in tree_leaves(value)
    )


def is_plain(value: Any) -> bool:
    """Tell whether a value is a tensor of no subclass, and no parameter."""
    return type(value) in PLAIN and not isinstance(value, nn.Parameter)


def plain_tensors(value: Any) -> list[Tensor]:
    """Return the plain tensors in a state's value, those inside of tensor subclasses too.

    Example:
        >>> [t.shape[0] for t in plain_tensors({"a": torch.zeros(2), "b": [torch.zeros(3), 4]})]
        [2, 3]
    """
    if is_plain(value):
        return [value]
    found: list[Tensor] = []

    def note(leaf: Tensor) -> Tensor:
        found.append(leaf)
        return leaf

    mapped(value, note)
    return found


def is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor's elements fill a range of memory, each once, in any order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def size_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _viewed(value: Any, offsets: Sequence[int | None], memory: Tensor) -> Any:
    places = (offset for offset in offsets if offset is not None)
    return _replaced(value, offsets, lambda tensor: _view(tensor, next(places), memory))


def _replaced(value: Any, offsets: Sequence[int | None], made: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with others for its tensors that move."""
    if is_plain(value):
        return value if offsets[0] is None else made(value)
    left = iter(offsets)
    return mapped(value, lambda tensor: tensor if next(left) is None else made(tensor))


def _view(tensor: Tensor, offset: int, memory: Tensor) -> Tensor:
    """Return a range of bytes as a tensor like another."""
    elements = memory[offset : offset + size_bytes(tensor)].view(tensor.dtype)
    if tensor.is_contiguous():
        return elements.view(tensor.shape)
    return elements.as_strided(tensor.size(), tensor.stride())


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with its plain tensors changed; what cannot be taken apart stays."""
    return tree_map(functools.partial(_changed, change), value)


# A function inside mapped() that calls itself would be a cycle, and keep until the next collection
# of garbage what `change` holds: a slot of the device.
def _changed(change: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if is_traceable_wrapper_subclass(leaf):
        return transform_subclass(leaf, lambda _, inner: _changed(change, inner))
    return change(leaf) if is_plain(leaf) else leaf
