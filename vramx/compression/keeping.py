"""What is kept as it is: by reference, or as a copy of a view where the rest can be freed.

Counts what is kept, and finds what a graph keeps already. A Keeper is a Session's own.
"""

from __future__ import annotations

import torch

from vramx.compression import attention, parts
from vramx.compression.codec.geometry import Geometry, can_spread, covered_bytes, describe, flat
from vramx.compression.fakes import PLAIN, is_labelled
from vramx.compression.lifetime import current_stream, outlive
from vramx.compression.policy import policy
from vramx.compression.policy.calls import STRIDED, Operation
from vramx.compression.policy.plans import Planner
from vramx.compression.policy.policy import SavePolicy
from vramx.compression.saved import Copy, Holding, Reference, Restored
from vramx.compression.sharing import Table, range_key
from vramx.compression.stats import CompressionStats

# A view that covers less of its storage than this is kept as a copy: the rest can be freed.
_MOST = 0.75


class Keeper:
    """Keeps tensors for the reasons that a policy gives."""

    def __init__(
        self, stats: CompressionStats, rules: SavePolicy, planner: Planner, table: Table
    ) -> None:
        self._stats = stats
        self._rules = rules
        self._planner = planner
        self._table = table

    def keep(self, tensor: torch.Tensor, operation: Operation, reason: str) -> Reference | Restored:
        known = type(tensor) in PLAIN or (not operation.custom and is_labelled(type(tensor)))
        if known and tensor.layout is STRIDED and not tensor.is_nested:
            nbytes = tensor.nbytes if tensor.is_contiguous() else covered_bytes(tensor)
            if reason in policy.EXAMINED and nbytes:
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self._rules.min_bytes:
                    return self._keep_large(tensor, storage, operation, reason)
        else:
            part = parts.part_of(tensor)
            nbytes = part.numel() * part.element_size()
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
        # A compiled graph saves at its end, while all its memory is there: copies come on top.
        is_fixed = operation.custom and (reason == policy.UNKNOWN or not can_spread(tensor))
        if is_fixed or range_bytes + beside_bytes >= _MOST * storage.nbytes():
            packed = self._packed(tensor, geometry, storage)
            reference = Reference(tensor)
            self._table.add(id(storage), storage, reference)
            kept_bytes = nbytes + beside_bytes
            seen_bytes = 0 if packed else kept_bytes
            for holding in packed if geometry.whole else ():  # of others it would be a copy
                if holding.format is not None:
                    kept_bytes -= holding.payload.nbytes
                    holding.keep(flat(tensor, geometry))
            self._stats.record(name, reason, seen_bytes, kept_bytes)
            return reference
        key = range_key(tensor, geometry, storage, outlive(tensor))
        holding = self._table.find(key, storage)
        if holding is None:
            copy = Copy(flat(tensor, geometry), compact=not geometry.whole)
            holding = Holding(copy, None)
            self._table.add(key, storage, holding)
            self._stats.record(name, reason, range_bytes, range_bytes)
        else:
            self._stats.record(name, reason, 0, 0, shared_bytes=nbytes)
        return Restored(holding, geometry, tensor.stride() if operation.custom else None)

    def _kept_beside(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, operation: Operation
    ) -> int:
        """Return the bytes of a storage that an attention's other arguments keep of it.

        It saves all three. Of one projection, they would be copied one after the other, and be as
        large as the storage together.
        """
        if operation.name != attention.NAME or operation.custom:
            return 0
        match = operation.match(tensor)
        if match is None:
            return 0
        if operation.beside is None or operation.beside[0] is not storage:
            operation.beside = storage, self._kept_by(storage, operation)
        start = match.tensor.storage_offset()
        return sum([n for offset, n in operation.beside[1].items() if offset != start])

    def _kept_by(self, storage: torch.UntypedStorage, operation: Operation) -> dict[int, int]:
        """Return the bytes that an attention's arguments keep of a storage, by where they begin."""
        found: dict[int, int] = {}
        for each in attention.inputs(operation):
            if type(each) not in PLAIN or each.untyped_storage() is not storage:
                continue
            plan = self._planner.plan(each, operation)
            if plan is not None and not plan.bits:
                found.setdefault(int(each.storage_offset()), covered_bytes(each))
        return found

    def _packed(
        self, tensor: torch.Tensor, geometry: Geometry, storage: torch.UntypedStorage
    ) -> list[Holding]:
        """Return what was packed of the same data, which torch would have held once.

        The state of a scan is: a product of the step packs it, and the next step keeps it.
        """
        stream = current_stream(tensor)
        keys = [
            range_key(tensor, geometry, storage, (number, stream))
            for number in self._planner.numbers
        ]
        found = [self._table.find(key, storage) for key in keys]
        return [each for each in found if each is not None]
