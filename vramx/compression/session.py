"""The pack hook: what is packed, what is kept, what is found to be kept already.

policy decides, codec packs, saved.py stands for it in the graph, and a Table finds data that a
graph keeps already. Nothing outlives the graphs that use it. A Session belongs to one thread; a
saved tensor costs 2 to 4 microseconds of host time where it is kept and 6 to 13 where it is packed
(without the codec; one core of a server, in a loop; within a model, whose own code takes the caches
meanwhile, about twice that), and never waits for a device.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import astuple, replace
from functools import partial

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from vramx.compression import attention, policy, random, third_party, writes
from vramx.compression import codec as plain_codec
from vramx.compression.angles import ANGLES, function_of
from vramx.compression.attention import Result
from vramx.compression.calls import STRIDED, Operation
from vramx.compression.compiler import run_uncompiled
from vramx.compression.config import MASK_BITS, Compression, Format
from vramx.compression.fakes import PLAIN
from vramx.compression.geometry import Geometry, covered_bytes, describe, flat
from vramx.compression.lifetime import current_stream, outlive
from vramx.compression.mapping import Mapping
from vramx.compression.normalised import MEAN_NORMS, Normal, Waiting
from vramx.compression.notices import tell_of_unknown
from vramx.compression.operations import OperationMode, transformed
from vramx.compression.policy import SavePolicy
from vramx.compression.roots import MAYBE_POWERS, ROOT, is_power
from vramx.compression.saved import Codec, Copy, Holding, Payload, Pending, Reference, Restored
from vramx.compression.sharing import Table, cast_source, range_key
from vramx.compression.signs import SIGN
from vramx.compression.slopes import BOUNDED, Within, bound_of
from vramx.compression.stats import CompressionStats

_TRANSFORMED = transformed.__name__
# Operations whose arguments are packed as functions of them.
_MAPPED = MAYBE_POWERS | BOUNDED
_numbers: dict[Hashable, int] = {}  # of formats
# A view that covers less of its storage than this is kept as a copy: the rest can be freed.
_MOST = 0.75


class PlainCodec:
    """The codec as it is; with `streams`, noise that depends on the order of calls only."""

    def __init__(self, streams: random.Streams | None = None) -> None:
        self._streams = streams

    def encode(
        self, elements: torch.Tensor, format: Format, mapping: Mapping | None = None
    ) -> Payload:
        return plain_codec.packed(elements, format, self._streams, mapping)

    def decode(self, payload: plain_codec.Packed, geometry: Geometry | None = None) -> torch.Tensor:
        return plain_codec.unpack(payload, None if geometry is None else geometry.dense)


class _Thread(threading.local):
    """What a thread has in common for all its contexts."""

    def __init__(self) -> None:
        self.table = Table()


_thread = _Thread()


class Session:
    """One entry into a context, on one thread: its pack hook.

    Args:
        options: what to do.
        stats: where to count.
        mode: tells which operation is saving; must be active while the hooks are.
        module: whose forward runs, so that its buffers are known; may be None.
        codec: where packed data is put; None is the codec as it is.
        only_weights: pack only what the gradients of weights alone read.
    """

    def __init__(
        self,
        options: Compression,
        stats: CompressionStats,
        mode: OperationMode,
        module: torch.nn.Module | None = None,
        codec: Codec | None = None,
        *,
        only_weights: bool = False,
    ) -> None:
        self._options = options
        self._stats = stats
        self._mode = mode
        self._rules = SavePolicy(options, module, only_weights=only_weights)
        self._codec = PlainCodec() if codec is None else codec
        self._table = _thread.table
        # By bits and the most of a group; with a number, which is faster to compare.
        self._formats: dict[tuple[int, int], tuple[Format, int]] = {}
        self._devices: set[int] = set()  # that noise was drawn on

    @run_uncompiled
    def pack(self, tensor: torch.Tensor) -> Reference | Restored | Pending | Result:
        """Take what an operation saves; called by torch, through C++, in the operation's frame."""
        operation = self._mode.current(1)
        name = operation.name
        if name == _TRANSFORMED or is_functorch_wrapped_tensor(tensor):
            return Reference(tensor)
        if operation.custom:  # whose frame the mode is active in
            with torch._C.DisableTorchFunction():
                return self._take_of_custom(tensor, operation)
        if operation.waiting is not None:
            operation.waiting.note(tensor)
        if name == attention.NAME:
            return self._take_of_attention(tensor, operation)
        return self._take(tensor, operation)

    def _take_of_custom(
        self, tensor: torch.Tensor, operation: Operation
    ) -> Reference | Restored | Pending:
        if operation.position == 0 and not third_party.is_known(operation.library, operation.name):
            # Its forward may have written into them.
            writes.note_anywhere() if operation.untold else writes.note(operation.tensors)
        return self._take(tensor, operation)

    def _take_of_attention(
        self, tensor: torch.Tensor, operation: Operation
    ) -> Reference | Restored | Pending | Result:
        result = attention.result_of(tensor, operation)
        if result is not None:
            # What torch would have held of it counts with whatever reads it next.
            self._stats.record(operation.name, "", 0, 0)
            return result
        saved = self._take(tensor, operation)
        attention.note(tensor, operation, saved)
        return saved

    def _take(self, tensor: torch.Tensor, operation: Operation) -> Reference | Restored | Pending:
        bits, reason, most = self._rules.choose(tensor, operation)
        if not bits:
            if reason == policy.UNKNOWN:
                tell_of_unknown(operation)
            return self._keep(tensor, operation, reason)
        if bits > MASK_BITS:
            if not tensor.requires_grad and self._mode.is_given(tensor, operation):
                return self._keep(tensor, operation, policy.INPUT)
            if operation.name in MEAN_NORMS and not operation.custom:
                return self._normalise(tensor, operation, bits)
        return self._compress(tensor, operation, (bits, most))

    def _normalise(
        self, tensor: torch.Tensor, operation: Operation, bits: int
    ) -> Pending | Reference | Restored:
        """Pack the input of a norm when its statistics are known, at the end of the call."""
        if operation.waiting is not None:  # which has its input already
            return self._keep(tensor, operation, policy.POLICY)
        operation.waiting = waiting = Waiting(tensor, partial(self._normalised, tensor, bits))
        return waiting.pending

    def _normalised(
        self, tensor: torch.Tensor, bits: int, operation: Operation
    ) -> Reference | Restored:
        if operation.waiting.statistics is None:
            return self._keep(tensor, operation, policy.POLICY)
        return self._compress(tensor, operation, (bits, 0))

    def _compress(
        self, tensor: torch.Tensor, operation: Operation, how: tuple[int, int]
    ) -> Reference | Restored:
        storage, geometry = tensor.untyped_storage(), describe(tensor)
        nbytes = geometry.covered * tensor.element_size()
        if self._table.find(id(storage), storage) is not None:
            self._stats.record(operation.name, policy.HELD, 0, 0, shared_bytes=nbytes)
            return Reference(tensor)
        outlive(tensor)
        form, number = self._formats.get(how) or self._format(*how)
        plain = (number, current_stream(tensor))
        place: tuple[Hashable, ...] = plain
        serves_all = False
        if operation.waiting is not None or operation.name in _MAPPED:
            kind, serves_all = _kind_of(operation)
            place = plain if kind is None else (*plain, kind)
        key = range_key(tensor, geometry, storage, place)
        holding = self._table.find(key, storage)
        if holding is None:
            match = operation.match(tensor)
            if match is None or not match.cast:
                holding = self._encode(tensor, geometry, operation, form)
            else:
                holding = self._pack_once(tensor, geometry, operation, form, place)
            self._table.add(key, storage, holding)
            if serves_all:
                # Whoever reads the same as it is, without a norm or a power, is served by it too.
                self._table.offer((plain, *key[1:]), storage, holding)
        else:
            self._stats.record(operation.name, "", 0, 0, shared_bytes=nbytes)
        return Restored(holding, geometry, shared=not operation.custom)

    def _format(self, bits: int, most: int) -> tuple[Format, int]:
        form = self._options.format(bits)
        if most and most < form.group_size:
            form = replace(form, group_size=most)
        # Of equal formats one number, as long as the process lives: there are few.
        number = _numbers.setdefault(astuple(form), len(_numbers))
        return self._formats.setdefault((bits, most), (form, number))

    def _pack_once(
        self, tensor: torch.Tensor, geometry: Geometry, operation: Operation, format: Format,
        place: Hashable,
    ) -> Holding:  # fmt: skip
        """Pack a cast of an argument, unless it is of memory whose cast is kept already."""
        source = cast_source(tensor, geometry, operation)
        if source is None:
            return self._encode(tensor, geometry, operation, format)
        storage = source.untyped_storage()
        key = (tensor.dtype, range_key(source, describe(source), storage, place))
        holding = self._table.find(key, storage)
        if holding is None:
            holding = self._encode(tensor, geometry, operation, format)
            self._table.add(key, storage, holding)
        else:
            nbytes = covered_bytes(tensor)
            self._stats.record(operation.name, "", nbytes, 0, shared_bytes=nbytes)
        assert isinstance(holding, Holding)
        return holding

    def _encode(
        self, tensor: torch.Tensor, geometry: Geometry, operation: Operation, format: Format
    ) -> Holding:
        device = tensor.get_device()
        if format.rounding == "stochastic" and device not in self._devices:
            self._devices.add(device)
            random.renew_on_replay(tensor.device)
        mapping = _mapping(tensor, geometry, operation, format)
        elements = tensor if tensor.is_contiguous() else flat(tensor, geometry)
        payload = self._codec.encode(elements, format, mapping)
        nbytes = geometry.covered * tensor.element_size()
        self._stats.record(operation.name, "", nbytes, payload.nbytes)
        return Holding(payload, self._codec, format)

    def _keep(
        self, tensor: torch.Tensor, operation: Operation, reason: str
    ) -> Reference | Restored:
        if type(tensor) in PLAIN and tensor.layout is STRIDED:
            nbytes = tensor.nbytes if tensor.is_contiguous() else covered_bytes(tensor)
            if reason in _EXAMINED and nbytes:
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self._rules.min_bytes:
                    return self._keep_large(tensor, storage, operation, reason)
        else:
            nbytes = tensor.numel() * tensor.element_size()
        self._stats.record(operation.name, reason, nbytes, nbytes)
        return Reference(tensor)

    def _keep_large(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, operation: Operation, reason: str
    ) -> Reference | Restored:
        """Keep a tensor of a large storage: the storage, or a copy where the rest can be freed."""
        name, geometry = operation.name, describe(tensor)
        nbytes = geometry.covered * tensor.element_size()
        range_bytes = geometry.span * tensor.element_size()
        if self._table.find(id(storage), storage) is not None:
            self._stats.record(name, reason, 0, 0, shared_bytes=nbytes)
            return Reference(tensor)
        # Of what is not small the rules have asked.
        if reason == policy.SMALL and self._rules.is_parameter(tensor, operation):
            self._stats.record(name, policy.PARAMETER, nbytes, nbytes)
            return Reference(tensor)
        beside_bytes = self._kept_beside(tensor, storage, operation)
        if range_bytes + beside_bytes >= _MOST * storage.nbytes():
            packed = self._is_packed(tensor, geometry, storage)
            reference = Reference(tensor)
            self._table.add(id(storage), storage, reference)
            kept_bytes = nbytes + beside_bytes
            self._stats.record(name, reason, 0 if packed else kept_bytes, kept_bytes)
            return reference
        outlive(tensor)
        key = range_key(tensor, geometry, storage, current_stream(tensor))
        holding = self._table.find(key, storage)
        if holding is None:
            copy = Copy(flat(tensor, geometry), compact=not geometry.whole)
            holding = Holding(copy, None)
            self._table.add(key, storage, holding)
            self._stats.record(name, reason, range_bytes, range_bytes)
        else:
            self._stats.record(name, reason, 0, 0, shared_bytes=nbytes)
        return Restored(holding, geometry, shared=not operation.custom)

    def _kept_beside(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, operation: Operation
    ) -> int:
        """Return the bytes of a storage that an attention's other arguments keep of it.

        It saves all three. Of one projection, they would be copied one after the other, and be as
        large as the storage together.
        """
        match = operation.match(tensor)
        if operation.name != attention.NAME or operation.custom or match is None:
            return 0
        found = {match.tensor.storage_offset(): 0}
        for other in attention.inputs(operation):
            if type(other) not in PLAIN or other.untyped_storage() is not storage:
                continue
            if not self._rules.choose(other, operation).bits:
                found.setdefault(other.storage_offset(), covered_bytes(other))
        return sum(found.values())

    def _is_packed(
        self, tensor: torch.Tensor, geometry: Geometry, storage: torch.UntypedStorage
    ) -> bool:
        """Tell whether the data is packed already: torch would have held it once."""
        stream = current_stream(tensor)
        keys = [
            range_key(tensor, geometry, storage, (number, stream))
            for _, number in self._formats.values()
        ]
        return any(self._table.find(key, storage) is not None for key in keys)


def _mapping(
    tensor: torch.Tensor, geometry: Geometry, operation: Operation, format: Format
) -> Mapping | None:
    """Return what is packed in place of a tensor's elements; None: these."""
    if format.bits == MASK_BITS:
        return None if tensor.dtype == torch.bool else SIGN
    if operation.waiting is not None:
        return Normal(operation.waiting.statistics, geometry)
    if type(tensor.grad_fn).__name__ in ANGLES:
        function = function_of(tensor, operation)
        if function:
            return ANGLES[function]
    if operation.name not in _MAPPED:
        return None
    # A product's factor too, where roots cost little: what follows may leave only small products.
    if is_power(operation) or (operation.name in MAYBE_POWERS and format.bits == 8):
        return ROOT
    bound = bound_of(operation)
    return Within(bound, format.group_size) if bound else None


def _kind_of(operation: Operation) -> tuple[Hashable | None, bool]:
    """Return what is packed in place of a tensor, None if its elements are; and whether these come
    back near wherever they lie."""
    if operation.waiting is not None:
        return operation.waiting.statistics.kind, True
    if operation.name in MAYBE_POWERS:
        return "roots" if is_power(operation) else None, True
    bound = bound_of(operation)
    return (("within", bound) if bound else None), False


# Kept for what they are, not for whose memory they lie in: a look at the storage may save memory.
_EXAMINED = frozenset(
    {policy.SMALL, policy.POLICY, policy.STATISTIC, policy.UNKNOWN, policy.DERIVATIVE}
)
