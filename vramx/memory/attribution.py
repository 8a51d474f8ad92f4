"""Puts categories into a snapshot's data, and reads them from it.

`category` stands where torch's own viewer looks for it, on the events: on the `alloc` event of an
allocation, on its first event where it was made before the recording, and on blocks. Whose the
memory is (modules, names) is in a key of its own, `vramx`, which other readers pass over:

    schema           1
    labels           every different label; "" is that of an allocation without one
    devices          for each device: `events`, the number of a label for each of its events, and
                     `blocks`, the address of each live block with the number of its label
    outside_bytes    for each device: in use, and held by no allocator of the process
    clock_error_us   by how much events and what was seen of the program may be out of step

A sidecar would keep the pickle as torch writes it, but torch's viewer colours by the category only
where it is in the file, and a file that is moved alone would lose it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vramx.memory.categories import UNKNOWN, Allocation, Found, Log, categorize
from vramx.memory.stacks import printable

SCHEMA = 1
KEY = "vramx"
_LIVE_STATES = ("active_allocated", "active_pending_free", "active_awaiting_free")


@dataclass
class _Life:
    """An allocation in the data: the event that has its category, and the block, if there are."""

    device: int
    address: int
    size_bytes: int
    born: float = -math.inf
    died: float = math.inf
    event: int | None = None
    block: dict[str, Any] | None = None

    def allocation(self) -> Allocation:
        return Allocation(self.address, self.size_bytes, self.born, self.died)


def add_categories(
    snapshot: dict[str, Any],
    log: Log,
    *,
    workspace_sizes: Iterable[int] = (),
    outside_bytes: Iterable[int] = (),
) -> None:
    """Add the category of every allocation to a snapshot's data, which torch has just made.

    Args:
        snapshot: is changed.
        log: of the program, in the snapshot's time (us).
        workspace_sizes: see categorize().
        outside_bytes: for the file, as they are.
    """
    lives = _lives(snapshot)
    found = categorize([life.allocation() for life in lives], log, workspace_sizes)
    numbers: dict[str, int] = {"": 0}
    traces = snapshot["device_traces"]
    count = max([len(traces), *(life.device + 1 for life in lives)])
    events = [[0] * len(traces[i]) if i < len(traces) else [] for i in range(count)]
    blocks: list[list[list[int]]] = [[] for _ in range(count)]
    for life, (category, label) in zip(lives, found, strict=True):
        number = numbers.setdefault(label, len(numbers))
        if life.event is not None:
            traces[life.device][life.event]["category"] = category
            events[life.device][life.event] = number
        if life.block is not None:
            life.block["category"] = category
            blocks[life.device].append([life.address, number])
    _have_one_unknown(lives, found, traces)
    snapshot[KEY] = {
        "schema": SCHEMA,
        "labels": list(numbers),
        "devices": [{"events": e, "blocks": b} for e, b in zip(events, blocks, strict=True)],
        "outside_bytes": list(outside_bytes),
        "clock_error_us": log.clock_error,
    }


def _have_one_unknown(lives: list[_Life], found: list[Found], traces: list[Any]) -> None:
    """torch's viewer stops at a file with categories of which none is "unknown"."""
    if any(
        each.category == UNKNOWN and life.event is not None
        for life, each in zip(lives, found, strict=True)
    ):
        return
    for trace in traces:
        for entry in trace:
            if "category" not in entry:  # of no allocation: a free or a segment
                entry["category"] = UNKNOWN
                return


def _lives(snapshot: dict[str, Any]) -> list[_Life]:
    """Return every allocation that the data has, with the times of its birth and death."""
    lives: list[_Life] = []
    for device, trace in enumerate(snapshot["device_traces"]):
        live: dict[int, _Life] = {}
        for position, entry in enumerate(trace):
            _follow(entry, position, device, live, lives)
        _meet_blocks(snapshot["segments"], device, live, lives)
    return lives


def _follow(
    entry: dict[str, Any], position: int, device: int, live: dict[int, _Life], lives: list[_Life]
) -> None:
    action = entry["action"]
    if action == "alloc":
        life = _Life(device, entry["addr"], entry["size"], entry["time_us"], event=position)
        live[life.address] = life
        lives.append(life)
    elif action in ("free_requested", "free_completed"):
        address = entry["addr"]
        if address not in live:
            live[address] = _Life(device, address, entry["size"], event=position)
            lives.append(live[address])
        life = live[address]
        # The tensor is gone with the request; torch may wait for a stream before it is completed.
        life.died = min(life.died, entry["time_us"])
        if action == "free_completed":
            del live[address]


def _meet_blocks(
    segments: Iterable[dict[str, Any]], device: int, live: dict[int, _Life], lives: list[_Life]
) -> None:
    for segment in segments:
        if segment.get("device", 0) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)
            if block["state"] in _LIVE_STATES:
                if address not in live:
                    size = block.get("requested_size", block["size"])
                    live[address] = _Life(device, address, size)
                    lives.append(live[address])
                live[address].block = block
            address += block["size"]


@dataclass
class Attribution:
    """What a file says of whose memory is whose; of a file that says nothing, nothing.

    `categories` and `labels` are the names by their numbers; 0 is "".
    """

    categories: list[str] = field(default_factory=lambda: [""])
    labels: list[str] = field(default_factory=lambda: [""])
    outside_bytes: int | None = None
    _events: list[Any] = field(default_factory=list)
    _blocks: dict[int, int] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=lambda: {"": 0})

    @classmethod
    def read(cls, snapshot: dict[str, Any], device: int) -> Attribution:
        """Read the key `vramx`, of a source that is not trusted: what is odd is passed over."""
        made = cls()
        own = snapshot.get(KEY)
        if not isinstance(own, dict) or own.get("schema") != SCHEMA:
            return made
        labels = own.get("labels")
        if not isinstance(labels, list) or not labels:
            return made
        made.labels = [printable(label) for label in labels]
        made.outside_bytes = _number_at(own.get("outside_bytes"), device)
        devices = own.get("devices")
        of_device = devices[device] if isinstance(devices, list) and device < len(devices) else {}
        if not isinstance(of_device, dict):
            return made
        events, blocks = of_device.get("events"), of_device.get("blocks")
        made._events = events if isinstance(events, list) else []
        for pair in blocks if isinstance(blocks, list) else ():
            if isinstance(pair, (list, tuple)) and len(pair) == 2 and type(pair[0]) is int:
                made._blocks[pair[0]] = made._label(pair[1])
        return made

    def of_event(self, record: dict[str, Any], position: int) -> tuple[int, int]:
        """Return the numbers of an event's category and of its label."""
        label = self._events[position] if position < len(self._events) else 0
        return self._category(record.get("category")), self._label(label)

    def of_block(self, category: Any, address: int) -> tuple[int, int]:
        """Return those of a block, from its category and its address."""
        return self._category(category), self._blocks.get(address, 0)

    def _category(self, name: Any) -> int:
        if not isinstance(name, str):
            return 0
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.categories)
            self.categories.append(printable(name))
        return number

    def _label(self, number: Any) -> int:
        return number if type(number) is int and 0 <= number < len(self.labels) else 0


def _number_at(values: Any, place: int) -> int | None:
    value = values[place] if isinstance(values, list) and place < len(values) else None
    return value if type(value) is int and value >= 0 else None
