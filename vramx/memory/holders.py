"""Who holds the memory that is live at an event: grouped, as totals, and as a tree of frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vramx.errors import InvalidValueError
from vramx.memory.snapshot import Ids, Snapshot
from vramx.memory.stacks import Frame, Stack, describe, shown_frames
from vramx.sizes import format_size

# Of allocations of which the file says nothing.
NO_CATEGORY = "(not recorded)"


@dataclass(frozen=True)
class Holder:
    """Live allocations that have something in common: the stack, the size, the stream, the pool."""

    name: str
    bytes: int
    tensors: int
    largest_bytes: int
    stack: Stack | None = None  # where they were grouped by it

    def to_dict(self) -> dict[str, Any]:
        """Return plain values under the keys of a JSON report."""
        report: dict[str, Any] = {
            "name": self.name,
            "bytes": self.bytes,
            "tensors": self.tensors,
            "largest_bytes": self.largest_bytes,
        }
        if self.stack is not None:
            report["stack"] = [frame._asdict() for frame in self.stack]
        return report


@dataclass(frozen=True)
class Totals:
    """The bytes of a moment; `live` is what was requested, and the others are beside it."""

    event: int
    live_bytes: int
    tensors: int
    rounding_bytes: int
    free_bytes: int  # held and in no block
    holes: int
    largest_hole_bytes: int
    reserved_bytes: int


@dataclass
class Node:
    """A line of code and what it called, in the tree of all stacks; or a category, a module."""

    frame: Frame | None
    bytes: int = 0
    tensors: int = 0
    children: dict[Frame, Node] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, the largest child first."""
        return {
            "frame": self.frame._asdict() if self.frame is not None else None,
            "bytes": self.bytes,
            "tensors": self.tensors,
            "children": [child.to_dict() for child in self.largest()],
        }

    def largest(self) -> list[Node]:
        """Return the children, the largest first."""
        return sorted(self.children.values(), key=lambda node: -node.bytes)


def totals(snapshot: Snapshot, event: int) -> Totals:
    """Return what was live, free and held after an event."""
    ids = snapshot.live_at(event)
    holes = snapshot.holes_at(event)
    live = int(snapshot.allocations.size[ids].sum())
    return Totals(
        event=event,
        live_bytes=live,
        tensors=len(ids),
        rounding_bytes=int(snapshot.block_bytes[ids].sum()) - live,
        free_bytes=sum(hole.size_bytes for hole in holes),
        holes=len(holes),
        largest_hole_bytes=holes[0].size_bytes if holes else 0,
        reserved_bytes=int(snapshot.reserved_bytes_at(event)),
    )


def holders(snapshot: Snapshot, event: int, by: str = "stack") -> list[Holder]:
    """Group what was live after an event, the largest group first.

    Args:
        by: "stack" of the allocation, "category" of what it is for, requested "size", "stream" or
            memory "pool".

    Raises:
        InvalidValueError: the event does not exist, or `by` is another.

    Example:
        >>> for each in holders(snapshot, snapshot.peak_event)[:3]:      # doctest: +SKIP
        ...     print(each.name, each.bytes, each.tensors)
    """
    if by not in GROUPINGS:
        raise InvalidValueError(f"grouping {by!r} is unknown; accepted are {', '.join(GROUPINGS)}")
    keys, name = GROUPINGS[by](snapshot)
    found = [
        Holder(
            name=name(key),
            bytes=int(sizes.sum()),
            tensors=len(sizes),
            largest_bytes=int(sizes.max()),
            stack=snapshot.stacks[key] if by == "stack" else None,
        )
        for key, sizes in _groups(snapshot, keys, snapshot.live_at(event))
    ]
    return sorted(found, key=lambda holder: (-holder.bytes, holder.name))


def frame_tree(snapshot: Snapshot, event: int) -> Node:
    """Return what was live after an event as a tree of frames, outermost first.

    Frames of libraries are left out but for the innermost, which says what was asked for.
    """
    root = Node(None)
    for key, sizes in _groups(snapshot, snapshot.allocations.stack, snapshot.live_at(event)):
        node = root
        for frame in (None, *reversed(shown_frames(snapshot.stacks[key]))):
            if frame is not None:
                node = node.children.setdefault(frame, Node(frame))
            node.bytes += int(sizes.sum())
            node.tensors += len(sizes)
    return root


def category_tree(snapshot: Snapshot, event: int) -> Node:
    """Return what was live after an event as a tree: categories, then modules and names by dots."""
    root = Node(None)
    allocations = snapshot.allocations
    keys = allocations.category * len(snapshot.labels) + allocations.label
    for key, sizes in _groups(snapshot, keys, snapshot.live_at(event)):
        category, label = divmod(key, len(snapshot.labels))
        text = snapshot.labels[label]
        names = text.split(".") if text and " " not in text else [text] if text else []
        node = root
        for name in (None, snapshot.categories[category] or NO_CATEGORY, *names):
            if name is not None:
                node = node.children.setdefault(Frame(name, "", 0), Node(Frame(name, "", 0)))
            node.bytes += int(sizes.sum())
            node.tensors += len(sizes)
    return root


def _groups(snapshot: Snapshot, keys: Any, ids: Ids) -> Iterator[tuple[int, Any]]:
    """Yield each key among the allocations with their sizes."""
    order = ids[np.argsort(keys[ids], kind="stable")]
    found, starts = np.unique(keys[order], return_index=True)
    sizes = np.split(snapshot.allocations.size[order], starts[1:])
    return zip(found.tolist(), sizes, strict=False)  # of nothing, split makes one empty group


Keys = tuple[Any, Callable[[int], str]]


def _by_stack(snapshot: Snapshot) -> Keys:
    """Stacks that differ within libraries alone are one."""
    first: dict[Stack, int] = {}
    same = [first.setdefault(shown_frames(stack), i) for i, stack in enumerate(snapshot.stacks)]
    keys = np.array(same, np.int64)[snapshot.allocations.stack]
    return keys, lambda key: describe(snapshot.stacks[key])


def _by_category(snapshot: Snapshot) -> Keys:
    return snapshot.allocations.category, lambda key: snapshot.categories[key] or NO_CATEGORY


def _by_size(snapshot: Snapshot) -> Keys:
    return snapshot.allocations.size, format_size


def _by_stream(snapshot: Snapshot) -> Keys:
    def name(key: int) -> str:
        return f"stream {snapshot.streams[key]:#x}" if snapshot.streams[key] else "default stream"

    return snapshot.allocations.stream, name


def _by_pool(snapshot: Snapshot) -> Keys:
    def name(key: int) -> str:
        pool = snapshot.allocations.pools[key]
        return f"pool {pool}" if any(pool) else "default pool"

    return snapshot.allocations.pool, name


GROUPINGS: dict[str, Callable[[Snapshot], Keys]] = {
    "stack": _by_stack,
    "size": _by_size,
    "stream": _by_stream,
    "pool": _by_pool,
    "category": _by_category,
}


def cut(found: Iterable[Holder], count: int) -> list[Holder]:
    """Return the first holders and, as one more, the rest together."""
    every = list(found)
    if len(every) <= count + 1:  # one more line says more than "1 more"
        return every
    rest = every[count:]
    return [
        *every[:count],
        Holder(
            name=f"({len(rest):,} more)",
            bytes=sum(holder.bytes for holder in rest),
            tensors=sum(holder.tensors for holder in rest),
            largest_bytes=max(holder.largest_bytes for holder in rest),
        ),
    ]
