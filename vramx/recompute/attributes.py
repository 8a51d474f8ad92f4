"""What a region's modules have in their own attributes: counters, lists, what the last call gave.

A module that counts its calls, appends a loss to a list or keeps the last keys would do so once
more when it is recomputed, and compute with what it finds then. So would one whose adapter, or
whose mode, is another by then. A recomputation has the attributes as they were before the first
run, and leaves them as it found them. Not responsible for parameters, buffers, parts and hooks
(members.py, buffers.py), nor for what is no attribute of a module.

So are those of other objects that a region's function is, is bound to, closes over or was given.
owners.py has what is kept of each. A call costs a microsecond for each module; a region is
recomputed by one thread at a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from vramx.patch.of_classes import found_of
from vramx.recompute.copies import FIXED, Copier, Forgetting, TooLargeError
from vramx.recompute.generators import is_generator, set_state, state_of
from vramx.recompute.kinds import OF_EVERY_MODULE
from vramx.recompute.noted import ANY_REGION, RegionKind
from vramx.recompute.owners import OwnerBefore, OwnersCopies
from vramx.recompute.shared import Pair
from vramx.recompute.tensors import version_of

_CALLABLES = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_WITHOUT = (nn.Module, Tensor, type, ModuleType, *FIXED, *_CALLABLES)


def _may_have_attributes(cls: Any) -> bool:
    """Tell whether objects of a class, which are no modules, have attributes of their own."""
    if issubclass(cls, _WITHOUT) or not cls.__dictoffset__:
        return False
    return str(cls.__module__).partition(".")[0] != "torch"


_has_attributes = found_of(_may_have_attributes)


class Attributes:
    """The attributes of modules before a region runs, and for those that recompute it.

    Also those of `others`, such as a trainer, where they have attributes of their own. `generators`
    are those of random numbers among them.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        others: Iterable[Any] = (),
        region: RegionKind = ANY_REGION,
    ) -> None:
        owners = {id(each): each for each in others if _has_attributes(type(each))}
        copies = OwnersCopies()
        self._before = [OwnerBefore(each, copies, region) for each in (*modules, *owners.values())]
        self.generators = [each for before in self._before for each in before.generators]
        self.generators += copies.generators
        self.are_to_be_watched = any(before.is_to_be_watched for before in self._before)

    def settle(self, memory: Collection[int] = (), elsewhere: Collection[int] = ()) -> None:
        """Note what the first run changed.

        Args:
            memory: what its operations wrote to, where it was watched.
            elsewhere: the ids of tensors that a recomputation has copies of without this.
        """
        for before in self._before:
            before.note(memory, elsewhere)
        changed = [before for before in self._before if before.has_changed]
        if changed:
            forgetting = Forgetting()
            for before in changed:
                before.forget_graphs(forgetting)

    @property
    def pairs(self) -> Iterator[Pair]:
        """The containers in attributes with their copies from before."""
        for before in self._before:
            yield from before.pairs

    @contextlib.contextmanager
    def restored(self, copier: Copier | None = None) -> Iterator[None]:
        """Have the modules the attributes of then meanwhile."""
        copier = Copier() if copier is None else copier
        found = [(before, before.others(copier)) for before in self._before]
        changed = [(before, others, before.now(others)) for before, others in found if others]
        try:
            for before, others, _ in changed:
                before.put(others)
            yield
        finally:
            for before, _, now in changed:
                before.put(now)


def attributes_as_now(modules: Iterable[Any]) -> Callable[[], None]:
    """Return what puts the attributes of modules or other objects, and what these hold, back.

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
        (own, {name: value for name, value in own.items() if name not in OF_EVERY_MODULE})
        for own in [each.__dict__ for each in modules]
    ]
    for _, values in before:
        for value in values.values():
            with contextlib.suppress(TooLargeError):
                copier.copy(value)
    held = [value for _, values in before for value in values.values() if is_generator(value)]
    held += copier.generators
    states = [(each, state_of(each)) for each in held]
    copies = {id(x): (x, version_of(x), x.detach().to("cpu", copy=True)) for x in copier.tensors}

    def put_back() -> None:
        for own, values in before:
            for name in own.keys() - values.keys() - OF_EVERY_MODULE:
                del own[name]
            own.update(values)
        copier.put_back()
        for generator, state in states:
            set_state(generator, state)
        for tensor, version, content in copies.values():
            if version_of(tensor) != version:
                tensor.data.copy_(content)

    return put_back
