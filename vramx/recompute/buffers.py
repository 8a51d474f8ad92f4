"""Buffers that a region changes: a recomputation finds them as the first run did, and leaves them.

Running statistics of a batch norm move once a step, not twice; so do the vectors of a power
iteration, an average, or a counter, and parameters, as of a network that follows another, or of a
layer that makes its weight shorter. What a region writes is told by versions and addresses, and in
the first run of a module, in training and in evaluation, by its operations, for versions do not
tell of a write through `.data`. A module may be part of several regions and run in one of them, as
one that a hook of its parent calls: it is watched in the first run of each. What a module wrote
once, it is taken to write in each call. For a recomputation modules have copies of it. One that a
first run passes over, as a layer that is dropped by chance, is watched in the next ones.

Parameters may be all of a model: the first run of a module copies each just before an operation
writes to it, and small ones that need no gradient, as a counter or the state of a generator that a
library keeps in one, ahead. Of those that it gives other memory, or that it left alone in its first
run, there is no copy, nor of such buffers. A recomputation of that one call has the new ones, and a
warning says so.

A region is recomputed by one thread at a time. A call costs a look at each buffer of its modules
and a copy of those that it writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from vramx.recompute.noted import ANY_REGION, Noted, RegionKind, Regions
from vramx.recompute.stand_ins import (
    as_before,
    as_they_lay,
    is_small_constant,
    may_be_had_otherwise,
    may_share_memory,
)
from vramx.recompute.tensors import storage_of, version_of
from vramx.recompute.told import tell_of_write

_Members = dict[str, Any]  # the buffers of a module, or its parameters


class _OfScript:
    """Buffers of a module of TorchScript, which has them elsewhere: its dicts are views."""

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self._module = module

    def get(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


class _Kept(NamedTuple):
    members: _Members | _OfScript
    name: str
    value: Tensor | None  # as it was before; None: what it is now will do


class _Seen(NamedTuple):
    module: nn.Module
    members: _Members
    name: str
    tensor: Tensor
    version: int
    address: int  # -1: not to be looked at
    numel: int


class _Written(NamedTuple):
    names: set[str]  # of what a module writes
    regions: Regions  # those whose first run has shown it
    passed: list[RegionKind]  # those whose watched runs have passed it over, once for each


# Runs of regions that are watched for a module which they pass over. Where layers are dropped with
# a chance of a half, all but one of 256 are seen so; what is never run costs as many slow calls.
_MOST_PASSES = 8


# By whether the module trains; absent: not known yet.
_written: Noted[dict[bool, _Written]] = Noted()
# Norms whose statistics something else reads in training too, as a convolution that scales by them.
_is_read: Noted[bool] = Noted()


class Buffers:
    """The buffers of a region's modules, for one run of it and for those that recompute it."""

    def __init__(self, modules: Iterable[nn.Module], region: RegionKind = ANY_REGION) -> None:
        self._region = region
        self._seen: list[_Seen] = []
        self._copies: dict[tuple[int, str], Tensor] = {}
        self._kept: list[_Kept] = []
        # Whether a module has not run yet, so that it is to be watched.
        self.are_new = False
        self._memory: set[int] = set()  # that operations wrote to
        self._uncopied: dict[int, list[_Seen]] | None = None  # parameters, by their memory
        self._known: set[tuple[int, str]] = set()  # what its module has written before
        self._left_alone: set[tuple[int, str]] = set()  # buffers that it has not
        self._statistics: dict[int, nn.Module] = {}  # by their memory, of norms that are new
        self._given: set[int] | None = None  # memory that operations took, where they are watched
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):  # whose operations nobody sees
                own = _OfScript(module)
                every = module.named_buffers(recurse=False)
                self._kept += (_Kept(own, name, x.detach().clone()) for name, x in every)
                continue
            noted = _written.beside(module).get(module, {}).get(module.training)
            is_known = noted is not None and noted.regions.include(self._region)
            written = noted.names if noted is not None and is_known else None
            is_norm = isinstance(module, _NormBase)
            # A norm in training does not read its statistics.
            is_read = written is None or not is_norm or module in _is_read.beside(module)
            for members, name, tensor in _changeable(module, written):
                self.are_new = self.are_new or written is None
                is_buffer = members is module._buffers
                if is_lazy(tensor):  # the first run makes it, and writes it
                    self._seen.append(_Seen(module, members, name, tensor, -1, -1, -1))
                    continue
                address = -1 if isinstance(module, nn.RNNBase) else _address(tensor)
                version, numel = version_of(tensor), tensor.numel()
                self._seen.append(_Seen(module, members, name, tensor, version, address, numel))
                is_statistic = is_buffer and is_norm
                if is_statistic and written is None:
                    self._statistics[storage_of(tensor)] = module
                if written is not None and name in written:
                    self._known.add((id(module), name))
                elif written is not None and is_buffer and not is_statistic:
                    self._left_alone.add((id(module), name))
                is_copied = is_buffer or is_small_constant(tensor)
                may_write = is_copied if written is None else name in written
                if may_write and (is_read or not is_statistic):
                    self._copies[id(module), name] = copy_of(tensor)

    def before_write(self, targets: Iterable[Any]) -> None:
        """Copy the parameters that an operation is about to write to."""
        if self._uncopied is None:
            self._uncopied = {}
            for seen in self._seen:
                if (
                    seen.numel >= 0
                    and seen.members is seen.module._parameters
                    and seen.tensor.layout is torch.strided
                ):
                    self._uncopied.setdefault(storage_of(seen.tensor), []).append(seen)
        for target in tree_leaves(list(targets)):
            if isinstance(target, Tensor) and target.layout is torch.strided:
                for seen in self._uncopied.pop(storage_of(target), ()):
                    copy = seen.tensor.detach().clone()
                    self._copies.setdefault((id(seen.module), seen.name), copy)

    def note_read(self, arguments: Iterable[Any], written: Collection[Any]) -> None:
        """Note what an operation takes, and norms whose statistics it does not only write to."""
        own = {id(target) for target in written}
        given = self._given = set() if self._given is None else self._given
        for tensor in tree_leaves(list(arguments)):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = storage_of(tensor)
                given.add(storage)
                module = self._statistics.get(storage)
                if module is not None and id(tensor) not in own:
                    _is_read.beside(module)[module] = True

    def note_write(self, targets: Iterable[Any]) -> None:
        """Note the memory of tensors, and of those in lists, that an operation wrote to."""
        for target in targets:
            if isinstance(target, (list, tuple)):
                self.note_write(target)
            elif isinstance(target, Tensor) and target.layout is torch.strided:
                self._memory.add(storage_of(target))

    def _is_written(self, seen: _Seen) -> bool:
        now: Any = seen.members.get(seen.name)
        if seen.members is seen.module._parameters and seen.numel >= 0:
            # One that is another is members.py's; a library that moves weights about gives them
            # other memory, and back.
            if now is not seen.tensor and seen.tensor.requires_grad:
                return False
            if now is seen.tensor and now.numel() != seen.numel:
                return False
        if now is not seen.tensor or version_of(now) != seen.version:
            return True
        if seen.address >= 0 and _address(now) != seen.address:
            return True
        return self._memory_is_written(now)

    def _memory_is_written(self, tensor: Tensor) -> bool:
        if not self._memory or tensor.layout is not torch.strided:
            return False
        return storage_of(tensor) in self._memory

    def _has_run(self, module: nn.Module) -> bool:
        """Tell whether a watched run came by a module, as what its operations took tells.

        It may have passed it over, as one that drops layers by chance, or has experts, does.
        """
        if self._given is None:
            return True
        own: list[Any] = [*module._parameters.values(), *module._buffers.values()]
        plain = [tensor for tensor in own if may_share_memory(tensor)]
        return not plain or any(storage_of(tensor) in self._given for tensor in plain)

    def settle(self) -> None:
        """Note what the first run wrote."""
        moved: dict[nn.Module, dict[str, _Members]] = {}
        for seen in self._seen:
            names = moved.setdefault(seen.module, {})
            if (id(seen.module), seen.name) in self._known or self._is_written(seen):
                names[seen.name] = seen.members
        for module, names in moved.items():
            written = _written.beside(module).setdefault(module, {})
            noted = written.setdefault(module.training, _Written(set(), Regions(), []))
            noted.names.update(names)
            if self._has_run(module) or len(noted.passed) == _MOST_PASSES:
                noted.regions.note(self._region)
            else:
                noted.passed.append(self._region)
            # The kernels of norms write statistics without a new version.
            if isinstance(module, _NormBase) and _moves(module, names):
                names.update(dict.fromkeys(module._buffers, module._buffers))
            for name, members in names.items():
                value = self._copies.get((id(module), name))
                if value is None and members is module._parameters:
                    tell_of_write(module, name)
                elif (id(module), name) in self._left_alone:
                    tell_of_write(module, name, "which it left alone before", "in each call")
                self._kept.append(_Kept(members, name, value))
        self._seen, self._copies, self._memory, self._uncopied = [], {}, set(), None
        self._statistics, self._given = {}, None
        self._known, self._left_alone = set(), set()

    @property
    def memory(self) -> set[int]:
        """What operations of a first run wrote to, until it has settled."""
        return self._memory

    @property
    def written(self) -> set[int]:
        """The ids of the tensors that a recomputation has copies of."""
        return {id(kept.members.get(kept.name)) for kept in self._kept}

    def _written_so_far(self) -> Iterator[_Kept]:
        """Give what a first run that goes on has written: a gradient within it recomputes it."""
        for seen in self._seen:
            is_norm = isinstance(seen.module, _NormBase)
            is_buffer = seen.members is seen.module._buffers and seen.numel >= 0
            if is_buffer and (is_norm or self._is_written(seen)):
                value = self._copies.get((id(seen.module), seen.name))
                yield _Kept(seen.members, seen.name, value)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Have the modules write into copies meanwhile."""
        kept = [*self._kept, *self._written_so_far()]
        own = [(each, each.members.get(each.name)) for each in kept]
        sources = [now if each.value is None else each.value for each, now in own]
        copies = as_they_lay(sources, [now for _, now in own])
        for (each, now), copy in zip(own, copies, strict=True):
            made: Any = copy
            if copy is not None and isinstance(now, nn.Parameter):
                made = nn.Parameter(copy, requires_grad=now.requires_grad)
            elif each.value is not None:
                made = learning(copy, each.value)
            each.members[each.name] = made
        themselves = [
            (now, each.value) for each, now in own if may_be_had_otherwise(now, each.value)
        ]
        try:
            with as_before(themselves):
                yield
        finally:
            for each, now in own:
                each.members[each.name] = now


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy without the graph, which says whether the tensor had one."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def learning(copy: Any, source: Tensor) -> Any:
    """Return a copy that requires a gradient where its source does, and may be written into.

    A state that is handed on from call to call has a graph; operations save others without one.
    """
    return copy.requires_grad_().clone() if source.requires_grad else copy


def _changeable(
    module: nn.Module, written: Collection[str] | None
) -> Iterator[tuple[_Members, str, Tensor]]:
    """Give what a module may change while it runs: buffers, and parameters without a gradient.

    Of those that learn what it has written; all of them where it has not run yet.
    """
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield module._buffers, name, buffer
    bounded = getattr(module, "max_norm", None) is not None  # an embedding's rows: once is enough
    for name, parameter in module._parameters.items():
        if type(parameter) is not nn.Parameter:
            continue
        may_change = written is None or name in written
        if not parameter.requires_grad or (may_change and not bounded):
            yield module._parameters, name, parameter


def _address(tensor: Tensor) -> int:
    """Return where a plain tensor lies, unseen by a region around this one; -1 of any other."""
    if not may_share_memory(tensor):
        return -1
    with torch._C.DisableTorchFunction():
        return tensor.data_ptr()


def _moves(module: Any, names: Collection[str]) -> bool:
    # A batch norm counts its calls; an instance norm does not.
    return bool(names) or (module.training and module.track_running_stats)
