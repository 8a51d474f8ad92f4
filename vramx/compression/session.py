"""The pack hook: what is packed, and what is found to be packed already.

policy decides, plans.py remembers what follows, codec packs, keeping.py keeps, saved.py stands for
it in the graph, and a Table finds data that a graph keeps already. But for plans nothing outlives
the graphs that use it. A Session belongs to one thread; a saved tensor costs up to 2 microseconds
of host time where it is kept, 5 to 7 where it is packed, and 12 as a norm's input (without the
codec; one core, in a loop; within a model, whose own code takes the caches meanwhile, about twice
that), and never waits for a device.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from functools import partial

import torch

from vramx.compression import attention, differences, parts
from vramx.compression.attention import Result
from vramx.compression.codec import codec as plain_codec
from vramx.compression.codec import random
from vramx.compression.codec.geometry import Geometry, can_spread, covered_bytes, describe, flat
from vramx.compression.codec.mapping import Mapping, Slope
from vramx.compression.codec.normalised import Normal, Waiting
from vramx.compression.codec.rows import scaled
from vramx.compression.compiler import run_uncompiled
from vramx.compression.config import MASK_BITS, Compression, Format
from vramx.compression.fakes import PLAIN
from vramx.compression.keeping import Keeper
from vramx.compression.lifetime import outlive
from vramx.compression.notices import tell_of_unknown
from vramx.compression.parts import Joined
from vramx.compression.policy import policy, third_party, writes
from vramx.compression.policy.calls import Operation
from vramx.compression.policy.operations import OperationMode, transformed
from vramx.compression.policy.plans import Plan, Planner
from vramx.compression.policy.policy import SavePolicy
from vramx.compression.saved import Codec, Holding, Payload, Pending, Reference, Restored
from vramx.compression.sharing import Table, cast_source, range_key
from vramx.compression.stats import CompressionStats

_TRANSFORMED = transformed.__name__


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
        self._stats = stats
        self._mode = mode
        self._rules = SavePolicy(options, module, only_weights=only_weights)
        self._planner = planner = Planner(options, self._rules)
        self._codec = PlainCodec() if codec is None else codec
        self._table = _thread.table
        # Not a method of this: the mode would hold what holds it.
        mode.on_difference = partial(differences.keep, self._table, stats)
        self._keep = Keeper(stats, self._rules, planner, self._table).keep
        self._devices: set[int] = set()  # that noise was drawn on

    @run_uncompiled
    def pack(self, tensor: torch.Tensor) -> Reference | Restored | Pending | Result | Joined:
        """Take what an operation saves; called by torch, through C++, in the operation's frame."""
        operation = self._mode.operation
        if operation is None:
            operation = self._mode.current(1)
        else:
            operation.position += 1
        name = operation.name
        if name == _TRANSFORMED:
            return Reference(tensor)
        if operation.custom:  # whose frame the mode is active in
            with torch._C.DisableTorchFunction():
                return self._take_of_custom(tensor, operation)
        if operation.waiting is not None:
            operation.waiting.later.append(tensor)
        if type(tensor) not in PLAIN:  # whose class may have its own way of everything
            with torch._C.DisableTorchFunction():
                if parts.is_distributed(type(tensor)):
                    return self._take_part(tensor, operation)
                return self._take(tensor, operation)
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
        reason = self._rules.plainly_kept(tensor)
        if reason:
            self._stats.record(operation.name, reason, tensor.nbytes, tensor.nbytes)
            return Reference(tensor)
        plan = self._planner.plan(tensor, operation)
        if plan is None:
            return Reference(tensor)
        if not plan.bits:
            if plan.is_counted_only:
                self._stats.record(operation.name, plan.reason, plan.nbytes, plan.nbytes)
                return Reference(tensor)
            if plan.reason == policy.UNKNOWN:
                tell_of_unknown(operation)
            return self._keep(tensor, operation, plan.reason)
        if plan.bits > MASK_BITS:
            if not tensor.requires_grad and self._mode.is_given(tensor, operation):
                return self._keep(tensor, operation, policy.INPUT)
            if plan.normalises:
                return self._normalise(tensor, operation, plan)
        return self._compress(tensor, operation, plan, plan.mapping)

    def _take_part(
        self, tensor: torch.Tensor, operation: Operation
    ) -> Reference | Restored | Pending | Joined:
        """Take a distributed tensor as what this process has of it."""
        part = parts.part_of(tensor)
        if parts.packs_part(tensor, part, operation, self._rules.min_bytes):
            call = parts.call_of_parts(operation)
            plan = self._planner.plan(part, call)
            if plan is not None and plan.bits:
                saved = self._compress(part, call, plan, plan.mapping)
                return Joined(saved, tensor) if type(saved) is Restored else Reference(tensor)
        return self._take(tensor, operation)

    def _normalise(
        self, tensor: torch.Tensor, operation: Operation, plan: Plan
    ) -> Pending | Reference | Restored:
        """Pack the input of a norm when its statistics are known, at the end of the call."""
        if operation.waiting is not None:  # which has its input already
            return self._keep(tensor, operation, policy.POLICY)
        operation.waiting = waiting = Waiting(tensor, partial(self._normalised, tensor, plan))
        return waiting.pending

    def _normalised(
        self, tensor: torch.Tensor, plan: Plan, operation: Operation
    ) -> Reference | Restored:
        statistics = operation.waiting.statistics
        if statistics is None:
            return self._keep(tensor, operation, policy.POLICY)
        mapping = Normal(statistics, plan.geometry)
        return self._compress(tensor, operation, plan, mapping, statistics.kind)

    def _compress(
        self, tensor: torch.Tensor, operation: Operation, plan: Plan, mapping: Mapping | None,
        kind: Hashable | None = None,
    ) -> Reference | Restored:  # fmt: skip
        """Pack a tensor, or find it packed; `kind` is that of a mapping that the plan has not."""
        storage, geometry = tensor.untyped_storage(), plan.geometry
        if self._table.find(id(storage), storage) is not None:
            self._stats.record(operation.name, policy.HELD, 0, 0, shared_bytes=plan.nbytes)
            return Reference(tensor)
        if operation.custom and not can_spread(tensor):
            return self._keep(tensor, operation, policy.LAYOUT)
        plain = (plan.number, outlive(tensor))
        serves_all = plan.serves_all if kind is None else True
        kind = plan.kind if kind is None else kind
        place: tuple[Hashable, ...] = plain if kind is None else (*plain, kind)
        key = range_key(tensor, geometry, storage, place)
        holding = self._table.find(key, storage)
        if holding is None:
            if plan.is_cast:
                holding = self._pack_once(tensor, operation, plan, mapping, place)
            else:
                holding = self._encode(tensor, operation, plan, mapping)
            self._table.add(key, storage, holding)
            if isinstance(mapping, Slope):
                differences.note(tensor, holding, self._table)
            if serves_all:
                # Whoever reads the same as it is, without a norm or a power, is served by it too.
                self._table.offer((plain, *key[1:]), storage, holding)
        else:
            self._stats.record(operation.name, "", 0, 0, shared_bytes=plan.nbytes)
        return Restored(holding, geometry, tensor.stride() if operation.custom else None)

    def _pack_once(
        self, tensor: torch.Tensor, operation: Operation, plan: Plan, mapping: Mapping | None,
        place: Hashable,
    ) -> Holding:  # fmt: skip
        """Pack a cast of an argument, unless it is of memory whose cast is kept already."""
        source = cast_source(tensor, plan.geometry, operation)
        if source is None:
            return self._encode(tensor, operation, plan, mapping)
        storage = source.untyped_storage()
        key = (tensor.dtype, range_key(source, describe(source), storage, place))
        holding = self._table.find(key, storage)
        if holding is None:
            holding = self._encode(tensor, operation, plan, mapping)
            self._table.add(key, storage, holding)
        else:
            nbytes = covered_bytes(tensor)
            self._stats.record(operation.name, "", nbytes, 0, shared_bytes=nbytes)
        assert isinstance(holding, Holding)
        return holding

    def _encode(
        self, tensor: torch.Tensor, operation: Operation, plan: Plan, mapping: Mapping | None
    ) -> Holding:
        device, form = tensor.get_device(), plan.format
        if device not in self._devices and form.rounding == "stochastic":
            self._devices.add(device)
            random.renew_on_replay(tensor.device)
        elements = tensor if type(tensor) in PLAIN else tensor.detach()
        elements = elements if elements.is_contiguous() else flat(elements, plan.geometry)
        beside_bytes = 0
        if plan.row:
            mapping = rows = scaled(elements, plan.row)
            beside_bytes = rows.nbytes
        payload = self._codec.encode(elements, form, mapping)
        self._stats.record(operation.name, "", plan.nbytes, payload.nbytes + beside_bytes)
        return Holding(payload, self._codec, form)
