"""Results of tanh and sigmoid that are taken from one another, as those of a bin's two ends.

Each was packed when its call saved it. The chance of what lies between divides slopes that are
nearly equal, and the gradient is what is left of both: packed, it had a cosine of 0.04 with the
exact one. A subtraction is given both results, which are as they were: from then on the graph has
them as they are, and what was packed of them goes. A result that is gone, as of a sum with one, or
of a subtraction outside the context, stays packed.

Any thread; a subtraction costs a microsecond, another call nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vramx.compression.codec.geometry import describe, flat
from vramx.compression.codec.mapping import is_angle
from vramx.compression.policy.policy import POLICY
from vramx.compression.saved import Copy, Holding
from vramx.compression.sharing import Table, range_key
from vramx.compression.stats import CompressionStats

_PLACE = "angle"


def note(tensor: Tensor, holding: Holding, table: Table) -> None:
    """Note what stands for a result that was packed as angles."""
    storage = tensor.untyped_storage()
    table.add(range_key(tensor, describe(tensor), storage, _PLACE), storage, holding)


def keep(table: Table, stats: CompressionStats, values: tuple[Any, ...]) -> None:
    """Have the graph keep results as they are of which a call takes one from another."""
    if not all(map(is_angle, values[:2])):
        return
    results = [each if each._base is None else each._base for each in values[:2]]
    for result in results:
        storage, geometry = result.untyped_storage(), describe(result)
        holding = table.find(range_key(result, geometry, storage, _PLACE), storage)
        if holding is not None and not isinstance(holding.payload, Copy):
            stats.record("sub", POLICY, 0, result.nbytes - holding.payload.nbytes)
            holding.keep(flat(result, geometry))
