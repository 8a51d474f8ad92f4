"""`vramx stats`: who holds the memory at a moment of a recorded run."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from vramx.cli import common, snapshots
from vramx.errors import InvalidValueError
from vramx.sizes import format_gib, format_size

if TYPE_CHECKING:
    from vramx.memory.holders import Node, Totals
    from vramx.memory.snapshot import Snapshot

SCHEMA = 1
TREE, CATEGORY, MODULE = "tree", "category", "module"
_LEAST_SHARE = 0.01  # of the tree's total; smaller branches are counted, not shown


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "stats",
        help="who holds the memory at a moment of a recorded run",
        description="Say what is live at a moment of a recorded run and which lines allocated it.",
    )
    snapshots.add_snapshot_arguments(parser)
    parser.add_argument(
        "--by",
        choices=("stack", CATEGORY, MODULE, "size", "stream", "pool", TREE),
        default="stack",
        help="how to group; tree is the stacks as a tree of frames; category is what memory is "
        "for and module a tree of whose it is, in files of vramx.record (default: stack)",
    )
    parser.add_argument(
        "--at",
        metavar="peak|end|oom|EVENT",
        type=common.argument(moment_argument),
        default="peak",
        help="the moment: most is live, the end, the last request that failed, or after an event",
    )
    snapshots.add_count_argument(parser)
    common.add_report_arguments(parser)


def moment_argument(text: str) -> str | int:
    """Read a moment: a name, or the number of an event."""
    if text in ("peak", "end", "oom"):
        return text
    if text.isascii() and text.isdigit() and len(text) < 16:
        return int(text)
    raise InvalidValueError(f"{text!r} is no moment; accepted are peak, end, oom and 0, 1, ...")


def run(args: argparse.Namespace) -> int:
    from vramx.memory.holders import category_tree, cut, frame_tree, holders, totals

    snapshot = snapshots.read_snapshot(args)
    if args.by in (CATEGORY, MODULE) and not snapshot.has_categories:
        raise InvalidValueError(
            f"{snapshot.name} does not say what memory is for; a file of vramx.record does"
        )
    event = _event(snapshot, args.at)
    total = totals(snapshot, event)
    report = {"schema": SCHEMA, "snapshot": snapshot.name, **dataclasses.asdict(total)}
    report["outside_bytes"] = snapshot.outside_bytes
    if args.by in (TREE, MODULE):
        tree = (frame_tree if args.by == TREE else category_tree)(snapshot, event)
        document = {**report, "by": args.by, "tree": tree.to_dict()}
        body: Any = _tree(tree, args.count)
    else:
        found = holders(snapshot, event, args.by)
        document = {**report, "by": args.by, "groups": [each.to_dict() for each in found]}
        body = snapshots.holders_table(args.by, cut(found, args.count), total.live_bytes)
    footing = _footing(total, snapshot.outside_bytes)
    snapshots.report(args, document, _heading(snapshot, total), body, footing)
    return 0


def _event(snapshot: Snapshot, moment: str | int) -> int:
    if isinstance(moment, int):
        return snapshot.check_event(moment)
    if moment == "peak":
        return snapshot.peak_event
    if moment == "end":
        return snapshot.end_event
    if not snapshot.failures:
        raise InvalidValueError(f"no request failed in {snapshot.name}: --at oom has no moment")
    return snapshot.failures[-1].event


def _heading(snapshot: Snapshot, total: Totals) -> str:
    when = f"after event {total.event:,} of {snapshot.event_count:,}"
    if total.event < 0:
        when = f"before the first of {snapshot.event_count:,} events"
    return (
        f"{snapshot.name}: {format_gib(total.live_bytes)} live in {total.tensors:,} tensors "
        f"{when}, {format_gib(total.reserved_bytes)} reserved"
    )


def _footing(total: Totals, outside_bytes: int | None) -> str:
    outside = ""
    if outside_bytes is not None:
        outside = f" Outside of torch, at the end, the device held {format_size(outside_bytes)}."
    holes = "1 hole" if total.holes == 1 else f"{total.holes:,} holes"
    return (
        f"Beside them: rounding {format_size(total.rounding_bytes)}; free in the cache "
        f"{format_size(total.free_bytes)} in {holes}, the largest of "
        f"{format_size(total.largest_hole_bytes)}.{outside}"
    )


def _tree(node: Node, count: int) -> Any:
    from rich.tree import Tree

    tree = Tree(f"{format_gib(node.bytes)} in {node.tensors:,} tensors", highlight=False)
    _grow(tree, node, count, node.bytes * _LEAST_SHARE)
    return tree


def _grow(tree: Any, node: Node, count: int, least_bytes: float) -> None:
    from rich.text import Text

    children = node.largest()
    shown = [child for child in children[:count] if child.bytes >= least_bytes]
    for child in shown:
        text = f"{format_gib(child.bytes)} in {child.tensors:,}  {child.frame}"
        _grow(tree.add(Text(text)), child, count, least_bytes)
    if rest := children[len(shown) :]:
        size = format_gib(sum(child.bytes for child in rest))
        tree.add(Text(f"{size} in {sum(child.tensors for child in rest):,}  ({len(rest):,} more)"))
