"""Writes torch memory snapshots with the keys of each release, from what a program does.

A recording places blocks as torch's allocator does (best fit in the segments of a stream, a pool
and a class of sizes, else a new segment), so that its segments, blocks and events agree.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import samples

MINORS = (6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
MIB = 1 << 20
START_US = 1_795_207_576_168_327
DEFAULT_POOL = (0, 0)


def frame(text: str) -> dict[str, Any]:
    """Make a frame from "file.py:12 name"."""
    place, name = text.split(" ")
    filename, line = place.rsplit(":", 1)
    return {"name": name, "filename": filename, "line": int(line)}


def stack(*lines: str) -> list[dict[str, Any]]:
    return [frame(line) for line in lines]


MODEL = stack(
    "lib/python3.12/site-packages/torch/nn/modules/linear.py:134 forward",
    "lib/python3.12/site-packages/torch/nn/modules/module.py:1790 _call_impl",
    "model.py:12 forward",
    "train.py:40 train",
)
KEPT = stack("train.py:52 keep", "train.py:40 train")
LOSS = stack(
    "lib/python3.12/site-packages/torch/nn/functional.py:3504 cross_entropy", "train.py:44 train"
)


@dataclass
class Block:
    address: int
    size: int
    requested: int
    frames: list[dict[str, Any]]


@dataclass
class Segment:
    address: int
    size: int
    stream: int
    pool: tuple[int, int]
    blocks: list[Block] = field(default_factory=list)

    @property
    def is_small(self) -> bool:
        return self.size == 2 * MIB

    def holes(self) -> list[tuple[int, int]]:
        """Return (size, address) of what is free."""
        holes, position = [], self.address
        for block in sorted(self.blocks, key=lambda each: each.address):
            holes.append((block.address - position, position))
            position = block.address + block.size
        holes.append((self.address + self.size - position, position))
        return [hole for hole in holes if hole[0]]


class Recording:
    """A program's allocations, as torch 2.`minor` records them."""

    def __init__(self, minor: int = 13, *, expandable: bool = False, **settings: Any) -> None:
        self.minor = minor
        self.expandable = expandable
        self.settings = settings
        self.segments: list[Segment] = []
        self.events: list[dict[str, Any]] = []
        self._next = 0x7F00_0000_0000

    def alloc(
        self,
        size: int,
        frames: list[dict[str, Any]] = MODEL,
        stream: int = 0,
        pool: tuple[int, int] = DEFAULT_POOL,
    ) -> int:
        """Allocate and return the address."""
        rounded = -(-size // 512) * 512
        fitting = [
            (hole, segment)
            for segment in self.segments
            if (segment.stream, segment.pool) == (stream, pool)
            and segment.is_small == (rounded <= MIB)
            for hole in segment.holes()
            if hole[0] >= rounded
        ]
        if not fitting:
            segment = self._segment(rounded, frames, stream, pool)
            fitting = [((segment.size, segment.address), segment)]
        (_, address), segment = min(fitting, key=lambda each: each[0])
        segment.blocks.append(Block(address, rounded, size, frames))
        self._event("alloc", size, frames, stream, pool, addr=address)
        return address

    def free(self, address: int, *, completed: bool = True) -> None:
        segment, block = self._find(address)
        of = block.requested, [], segment.stream, segment.pool
        self._event("free_requested", *of, addr=address)
        if completed:
            self._event("free_completed", *of, addr=address)
            segment.blocks.remove(block)

    def empty_cache(self) -> None:
        for segment in [each for each in self.segments if not each.blocks]:
            self.segments.remove(segment)
            action = "segment_unmap" if self.expandable else "segment_free"
            of = segment.size, [], segment.stream, segment.pool
            self._event(action, *of, addr=segment.address)

    def oom(self, size: int, device_free: int = 0, frames: list[dict[str, Any]] = MODEL) -> None:
        self._event("oom", size, frames, 0, DEFAULT_POOL, device_free=device_free)

    def snapshot(self, last: int | None = None) -> dict[str, Any]:
        """Return what torch would; `last` is how many events its ring still has."""
        kept = self.events if last is None else self.events[len(self.events) - last :]
        snapshot: dict[str, Any] = {
            "segments": [self._segment_record(segment) for segment in self.segments],
            "device_traces": [list(kept)],
            "allocator_settings": self._settings(),
            "external_annotations": [],
        }
        if self.minor >= 14:
            snapshot |= {"host_segments": [], "host_traces": []}
        return snapshot

    def save(self, path: Path, last: int | None = None) -> Path:
        path.write_bytes(pickle.dumps(self.snapshot(last), protocol=4))
        return path

    def holes(self) -> list[int]:
        """Return the sizes of all holes, the largest first."""
        return sorted((hole[0] for each in self.segments for hole in each.holes()), reverse=True)

    def live_bytes(self) -> int:
        return sum(block.requested for each in self.segments for block in each.blocks)

    def reserved_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    def _find(self, address: int) -> tuple[Segment, Block]:
        return next(
            (segment, block)
            for segment in self.segments
            for block in segment.blocks
            if block.address == address
        )

    def _segment(
        self, rounded: int, frames: list[dict[str, Any]], stream: int, pool: tuple[int, int]
    ) -> Segment:
        size = 2 * MIB if rounded <= MIB else 20 * MIB
        if rounded >= 10 * MIB:
            size = -(-rounded // (2 * MIB)) * 2 * MIB
        segment = Segment(self._next, size, stream, pool)
        self._next += size + 64 * MIB
        self.segments.append(segment)
        action = "segment_map" if self.expandable else "segment_alloc"
        self._event(action, size, frames, stream, pool, addr=segment.address)
        return segment

    def _event(
        self,
        action: str,
        size: int,
        frames: list[dict[str, Any]],
        stream: int,
        pool: tuple[int, int],
        **more: Any,
    ) -> None:
        record = {"action": action, **more, "size": size, "stream": stream}
        record["time_us"] = START_US + 10 * len(self.events)
        if frames:  # the key is absent where no stack was recorded
            record["frames"] = frames
        if self.minor >= 8:
            record["compile_context"] = "N/A"
        if self.minor >= 10:
            record["user_metadata"] = ""
        if self.minor >= 11 and action == "alloc":
            record["forward_frames"] = ["model.py:12"]
        if self.minor >= 12:
            record["pool_id"] = pool
        if self.minor >= 15:
            record["internal_metadata"] = ""
        self.events.append(record)

    def _segment_record(self, segment: Segment) -> dict[str, Any]:
        blocks = [
            samples.block(each.address, each.size, each.requested) | {"frames": each.frames}
            for each in segment.blocks
        ]
        free = [
            samples.block(at, size, 0, "inactive") | {"frames": []} for size, at in segment.holes()
        ]
        live = sum(block.size for block in segment.blocks)
        return {
            "device": 0,
            "address": segment.address,
            "total_size": segment.size,
            "allocated_size": live,
            "active_size": live,
            "requested_size": sum(block.requested for block in segment.blocks),
            "stream": segment.stream,
            "segment_type": "small" if segment.is_small else "large",
            "segment_pool_id": segment.pool,
            "is_expandable": self.expandable,
            "frames": [],
            "blocks": sorted(blocks + free, key=lambda each: int(str(each["address"]))),
        }

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": self.expandable,
            "roundup_power2_divisions": {"1": 0, "2": 0},
        }
        if self.minor >= 9:
            settings["graph_capture_record_stream_reuse"] = False
        if self.minor >= 13:
            settings |= {"max_round_threshold": 0, "max_cached_size": 0}
        return settings | self.settings
