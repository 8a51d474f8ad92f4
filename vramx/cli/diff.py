"""`vramx diff`: what grew between snapshots of one program, and what leaks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramx.cli import common, snapshots
from vramx.errors import InvalidValueError
from vramx.sizes import format_gib, format_size

if TYPE_CHECKING:
    from vramx.memory.diff import Growth

SCHEMA = 1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "diff",
        help="what grew between snapshots of a run, and what leaks",
        description="Compare what was live when snapshots of one run were taken, by the stack of "
        "its allocation. Exits 1 where something grows steadily: a leak. Take the snapshots at the "
        "same place of a step; three tell more than two.",
    )
    parser.add_argument(
        "snapshots",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="torch memory snapshots (.pickle, .json, .gz), in order of time; two or more",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=common.count_argument("number of steps"),
        help="how many steps lie between the first and the last: growth is said for one step, and "
        "a leak keeps at least one tensor a step",
    )
    common.add_snapshot_device_argument(parser)
    snapshots.add_count_argument(parser)
    common.add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compare; return 1 if something leaks."""
    from vramx.memory.diff import diff

    if len(args.snapshots) < 2:
        raise InvalidValueError("one snapshot cannot be compared; two or more are needed")
    common.check_report(args)
    files = [snapshots.load_snapshot(path, args.snapshot_device) for path in args.snapshots]
    names = [snapshot.name for snapshot in files]
    live = [snapshot.live_bytes_at(snapshot.end_event) for snapshot in files]
    found = diff(files, steps=args.steps)
    leaks = [growth for growth in found if growth.is_leak]
    document = {
        "schema": SCHEMA,
        "snapshots": names,
        "live_bytes": live,
        "steps": args.steps,
        "growth": [growth.to_dict() for growth in found],
        "leaks": len(leaks),
    }
    heading = (
        f"{' -> '.join(names)}: live {' -> '.join(map(format_gib, live))}, "
        f"{_signed(live[-1] - live[0])}"
    )
    parts: list[Any] = [heading]
    if found:
        parts.append(_table(found[: args.count]))
    if len(found) > args.count:
        parts.append(f"{len(found) - args.count:,} more; -n shows them.")
    snapshots.report(args, document, *parts, _verdict(found, leaks, args.steps))
    return 1 if leaks else 0


def _table(found: Sequence[Growth]) -> Any:
    rows = [
        [
            _signed(growth.grown_bytes),
            " -> ".join(f"{count:,}" for count in growth.tensors),
            format_size(growth.largest_bytes),
            "leak" if growth.is_leak else "",
            growth.name,
        ]
        for growth in found
    ]
    return common.table((">growth", ">tensors", ">largest", "", "~allocated at"), rows)


def _verdict(found: Sequence[Growth], leaks: Sequence[Growth], steps: int | None) -> str:
    if leaks:
        total = sum(growth.grown_bytes for growth in leaks)
        rate = f", {format_size(total / steps)} a step" if steps else ""
        places = "1 place keeps" if len(leaks) == 1 else f"{len(leaks):,} places keep"
        return f"Leak: {places} more and more, {format_size(total)} so far{rate}."
    if any(growth.grown_bytes > 0 for growth in found):
        return "No steady leak; what grew did so once, or there are too few snapshots to tell."
    return "No leak: nothing grew."


def _signed(size_bytes: int) -> str:
    return f"{'-' if size_bytes < 0 else '+'}{format_size(abs(size_bytes))}"
