"""Memory pools in a replay: what is allocated in one is served by torch's allocator, always.

vramx leaves pools and graphs to it, and what a pool holds nobody else gets. So a replay of another
policy is one of what lies outside of pools, beside what torch's allocator holds for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vramx.memory.replay import replay
from vramx.memory.segments import DEFAULT_POOL
from vramx.memory.snapshot import Ids, Snapshot
from vramx.memory.trace import Trace


@dataclass(frozen=True)
class Parts:
    """A recording, parted by pools."""

    outside: Trace
    pools: tuple[Trace, ...]

    def pool_bytes(self, policy: str) -> int:
        """Return what pools hold at most, beside each other, under a policy for the rest."""
        served_by = "expandable" if policy == "expandable" else "native"
        held = (replay(each, served_by)[0].peak_reserved_bytes for each in self.pools)
        return sum(held)


def parted(snapshot: Snapshot, rows: Ids) -> Parts:
    """Part some rows of a recording, which end with a failed request if there was one.

    The request counts as one outside of pools: for one within, torch asks the driver.
    """
    trace, allocations = snapshot.trace, snapshot.allocations
    default = allocations.pools.index(DEFAULT_POOL)
    pool = allocations.pool[trace.id[rows]]
    pool[np.isin(trace.id[rows], trace.failed)] = default
    others = [number for number in np.unique(pool).tolist() if number != default]
    # Where all is in pools there is nothing to replay without them.
    if not others or not (pool == default).any():
        return Parts(trace.part(rows), ())
    return Parts(
        trace.part(rows[pool == default]),
        tuple(trace.part(rows[pool == number]) for number in others),
    )
