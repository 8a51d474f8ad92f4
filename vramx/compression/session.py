"""The pair of saved-tensor hooks: what is packed, what is kept, what is found to be kept already.

policy decides, codec packs, saved.py stands for it in the graph, and a Table finds data that a
graph keeps already. Nothing outlives the graphs that use it. A Session belongs to one thread; a
saved tensor costs about ten microseconds of host time and never waits for a device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vramx.compression import codec as plain_codec
from vramx.compression import policy, random
from vramx.compression.compiler import run_uncompiled
from vramx.compression.config import MASK_BITS, Compression, Format
from vramx.compression.geometry import Geometry, covered_bytes, describe, flat
from vramx.compression.operations import PLAIN, STRIDED, Operation, OperationMode
from vramx.compression.policy import Rules
from vramx.compression.saved import (
    Codec,
    Copy,
    Holding,
    Payload,
    Reference,
    Restored,
    current_stream,
)
from vramx.compression.stats import CompressionStats

# A view that covers less of its storage than this is kept as a copy: the rest can be freed.
_MOST = 0.75


class PlainCodec:
    """The codec as it is; with `streams`, noise that depends on the order of calls only."""

    def __init__(self, streams: random.Streams | None = None) -> None:
        self._streams = streams

    def encode(self, elements: torch.Tensor, format: Format) -> Payload:
        return plain_codec.pack(elements, format, self._streams)

    def decode(self, payload: plain_codec.Packed) -> torch.Tensor:
        return plain_codec.unpack(payload)


class Signs:
    """Of a tensor, a bit for each element: above zero (or NaN), or not."""

    __slots__ = ("_dtype", "payload")

    def __init__(self, payload: Payload, dtype: torch.dtype) -> None:
        self.payload = payload
        self._dtype = dtype

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes

    def values(self, bits: torch.Tensor) -> torch.Tensor:
        """Return 1 and 0, which compare with zero as the elements did."""
        return bits.to(self._dtype)


class SignCodec:
    """Keeps the signs of elements, with another codec for the bits."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def encode(self, elements: torch.Tensor, format: Format) -> Payload:
        # Not above: a NaN is neither, and torch lets the gradient through it.
        return Signs(self._codec.encode(elements.le(0).logical_not_(), format), elements.dtype)

    def decode(self, payload: Signs) -> torch.Tensor:
        return payload.values(self._codec.decode(payload.payload))


class _Entry(weakref.ref[Any]):
    """Weakly, what is kept under a key, and the storage that the key speaks of."""

    __slots__ = ("key", "storage")

    key: Hashable
    storage: StorageWeakRef


class Table:
    """Find what is kept already, by the live memory that it was made from.

    A key names a storage by the address of its control block; the entry's weak reference keeps that
    address from being given away, so that a key can only mean the storage that it was made for, and
    `expired` says whether its data still exists. An entry goes with the last user of what it finds.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Hashable) -> Any:
        entry = self._entries.get(key)
        if entry is None or entry.storage.expired():
            return None
        return entry()

    def add(self, key: Hashable, tensor: torch.Tensor, kept: Any) -> None:
        entry = _Entry(kept, self._drop)
        entry.key = key
        entry.storage = StorageWeakRef(tensor.untyped_storage())
        self._entries[key] = entry

    def _drop(self, entry: _Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]


class _Thread(threading.local):
    """What a thread has in common for all its contexts."""

    def __init__(self) -> None:
        self.table = Table()


_thread = _Thread()


class Session:
    """One entry into a context, on one thread: a pair of saved-tensor hooks.

    Args:
        options: what to do.
        stats: where to count.
        mode: tells which operation is saving; must be active while the hooks are.
        module: whose forward runs, so that its buffers are known; may be None.
        codec: where packed data is put; None is the codec as it is.
    """

    def __init__(
        self,
        options: Compression,
        stats: CompressionStats,
        mode: OperationMode,
        module: torch.nn.Module | None = None,
        codec: Codec | None = None,
    ) -> None:
        self._options = options
        self._stats = stats
        self._mode = mode
        self._rules = Rules(options, module)
        self._codec = PlainCodec() if codec is None else codec
        self._table = _thread.table
        self._devices: set[torch.device] = set()  # that something was packed on

    def pack(self, tensor: torch.Tensor) -> Reference | Restored:
        """Take what an operation saves; called by torch, through C++, in the operation's frame."""
        operation = self._mode.current(1)
        choice = self._rules.choose(tensor, operation)
        name = operation.name
        if choice.bits:
            return self._compress(tensor, operation, self._options.format(choice.bits), name)
        return self._keep(tensor, operation, choice.reason, name)

    @staticmethod
    def unpack(saved: Reference | Restored) -> torch.Tensor:
        """Give back what was taken; called by torch in backward, any number of times."""
        return saved.open()

    def _compress(
        self, tensor: torch.Tensor, operation: Operation | None, format: Format, name: str
    ) -> Reference | Restored:
        nbytes = covered_bytes(tensor)
        if self._table.find(_storage_key(tensor)) is not None:
            self._stats.record(name, policy.HELD, 0, 0, shared_bytes=nbytes)
            return Reference(tensor)
        geometry = describe(tensor)
        place = (format, current_stream(tensor.device))
        key = (place, _range_key(tensor, geometry))
        holding = self._table.find(key)
        if holding is not None:
            self._stats.record(name, "", 0, 0, shared_bytes=nbytes)
        else:
            holding = self._pack_once(tensor, geometry, operation, place, name)
            self._table.add(key, tensor, holding)
        return Restored(holding, geometry, shared=_shares(operation))

    def _pack_once(
        self,
        tensor: torch.Tensor,
        geometry: Geometry,
        operation: Operation | None,
        place: tuple[Format, int],
        name: str,
    ) -> Holding:
        """Pack memory that is new, unless it is a cast of memory whose cast is kept already."""
        nbytes = covered_bytes(tensor)
        source = _cast_source(tensor, geometry, operation)
        key: Hashable = None
        if source is not None:
            key = (place, tensor.dtype, _range_key(source, describe(source)))
            found = self._table.find(key)
            if found is not None:
                self._stats.record(name, "", nbytes, 0, shared_bytes=nbytes)
                assert isinstance(found, Holding)
                return found
        if tensor.device not in self._devices:
            self._devices.add(tensor.device)
            random.renew_on_replay(tensor.device)
        signs = place[0].bits == MASK_BITS and tensor.dtype != torch.bool
        codec = SignCodec(self._codec) if signs else self._codec
        payload = codec.encode(flat(tensor, geometry), place[0])
        holding = Holding(payload, codec)
        if source is not None:
            self._table.add(key, source, holding)
        self._stats.record(name, "", nbytes, payload.nbytes)
        return holding

    def _keep(
        self, tensor: torch.Tensor, operation: Operation | None, reason: str, name: str
    ) -> Reference | Restored:
        if type(tensor) not in PLAIN or tensor.layout != STRIDED:
            nbytes = tensor.numel() * tensor.element_size()
            self._stats.record(name, reason, nbytes, nbytes)
            return Reference(tensor)
        nbytes = covered_bytes(tensor)
        if reason not in _EXAMINED:
            self._stats.record(name, reason, nbytes, nbytes)
            return Reference(tensor)
        storage_bytes = tensor.untyped_storage().nbytes()
        if nbytes == 0 or storage_bytes < self._rules.min_bytes:
            self._stats.record(name, reason, nbytes, nbytes)
            return Reference(tensor)
        return self._keep_large(tensor, operation, reason, name)

    def _keep_large(
        self, tensor: torch.Tensor, operation: Operation | None, reason: str, name: str
    ) -> Reference | Restored:
        """Keep a tensor of a large storage: the storage, or a copy where the rest can be freed."""
        nbytes = covered_bytes(tensor)
        if self._table.find(_storage_key(tensor)) is not None:
            self._stats.record(name, reason, 0, 0, shared_bytes=nbytes)
            return Reference(tensor)
        if self._rules.is_parameter(tensor, operation):
            self._stats.record(name, policy.PARAMETER, nbytes, nbytes)
            return Reference(tensor)
        geometry = describe(tensor)
        range_bytes = geometry.span * tensor.element_size()
        if range_bytes >= _MOST * tensor.untyped_storage().nbytes():
            reference = Reference(tensor)
            self._table.add(_storage_key(tensor), tensor, reference)
            self._stats.record(name, reason, nbytes, nbytes)
            return reference
        key = (current_stream(tensor.device), _range_key(tensor, geometry))
        holding = self._table.find(key)
        if holding is None:
            copy = Copy(flat(tensor, geometry), compact=not geometry.whole)
            holding = Holding(copy, None)
            self._table.add(key, tensor, holding)
            self._stats.record(name, reason, range_bytes, range_bytes)
        else:
            self._stats.record(name, reason, 0, 0, shared_bytes=nbytes)
        return Restored(holding, geometry, shared=_shares(operation))


run_uncompiled(Session.pack)
run_uncompiled(Session.unpack)

# Kept for what they are, not for whose memory they lie in: a look at the storage may save memory.
_EXAMINED = frozenset({policy.SMALL, policy.POLICY, policy.STATISTIC})


def _shares(operation: Operation | None) -> bool:
    return operation is not None and not operation.custom


def _storage_key(tensor: torch.Tensor) -> Hashable:
    return int(tensor.untyped_storage()._cdata)


def _range_key(tensor: torch.Tensor, geometry: Geometry) -> Hashable:
    """Name the elements that a tensor has now; in-place changes give it another version."""
    views = None if geometry.whole else (geometry.size, tensor.stride())
    return (
        tensor.untyped_storage()._cdata,
        tensor.dtype,
        geometry.start,
        geometry.span,
        tensor._version,
        views,
    )


def _cast_source(
    tensor: torch.Tensor, geometry: Geometry, operation: Operation | None
) -> torch.Tensor | None:
    """Return the argument of which a saved tensor is a cast that the operation itself made.

    Autocast casts one input once for each layer that reads it. The argument is alive and given to
    this very call, so that its storage, range and version name the data that was cast; the cast is
    the whole of a fresh storage, in the order of its source.
    """
    if operation is None or operation.custom or tensor.grad_fn is None or not geometry.whole:
        return None
    if geometry.span * tensor.element_size() != tensor.untyped_storage().nbytes():
        return None
    match = operation.match(tensor)
    if match is None or not match.cast:
        return None
    source = match.argument.tensor
    plain = type(source) in PLAIN and source.layout == STRIDED
    return source if plain and source.numel() == geometry.span else None
