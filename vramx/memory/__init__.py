"""Seeing memory: recorded allocations, what they cost under an allocator, and pictures of it.

Imports numpy, never torch: a trace is replayed on a laptop. `replay` here is the function; its
module is reached as `from vramx.memory.replay import ...`.
"""

from __future__ import annotations

from vramx.memory.replay import POLICIES, ReplayOptions, ReplayResult, replay
from vramx.memory.snapshot import Snapshot
from vramx.memory.trace import Trace, load_trace

__all__ = ["POLICIES", "ReplayOptions", "ReplayResult", "Snapshot", "Trace", "load_trace", "replay"]
