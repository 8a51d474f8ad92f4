"""Turns the plain data of a torch memory snapshot into a Snapshot.

A snapshot names memory by address and holds only the last events, so four things are put right:
addresses, which are reused, become allocation ids; memory that was allocated before the recording
began (freed later without an allocation, or still alive at the end without one) is allocated at
the start; streams, which are raw pointers, become 0, 1, ... in order of appearance; a request that
failed (`oom`) is an allocation that is freed at once, so that whoever replays it has to serve it.
Memory counts as reusable from `free_completed`.

The reader is tolerant, because the format gains fields with every torch: unknown keys and unknown
actions are passed over, and the actions are noted. About 1 s for 100 000 events, half of it the
unpickling.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

from vramx.memory.attribution import Attribution
from vramx.memory.snapshot import Snapshot
from vramx.memory.snapshot_builder import Builder
from vramx.memory.snapshot_file import events_of_device, read_snapshot_file


def read_snapshot(path: Path, device: int | None = None) -> Snapshot:
    """Read a snapshot file: a pickle or JSON, either of them also gzipped.

    Args:
        device: the ordinal whose events are wanted; by default that which ran out of memory,
            else that with the most events.

    Raises:
        TraceError: the file is neither, is damaged, asks for code, or holds no events.
    """
    with _collector_paused():
        snapshot = read_snapshot_file(path)
        chosen, records = events_of_device(snapshot, device)
        builder = Builder(Attribution.read(snapshot, chosen))
        for position, record in enumerate(records):
            builder.add(record, position)
        builder.add_segments(snapshot["segments"], chosen)
        settings = snapshot.get("allocator_settings")
        return builder.finish(path.name, chosen, settings if isinstance(settings, dict) else {})


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from walking millions of new objects, none of them garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
