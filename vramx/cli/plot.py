"""`vramx plot`: a picture of a recorded run, as PNG or as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vramx.cli import common, snapshots
from vramx.errors import InvalidValueError
from vramx.progress import ProgressBar

if TYPE_CHECKING:
    from vramx.memory.snapshot import Snapshot
    from vramx.memory.trace import Trace


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plot",
        help="draw memory over time and a map of the arena at its peak",
        description="Draw live and reserved memory over time under each policy, with failures, the "
        "capacity and pauses; what it was for, where that is recorded; how much of it is unused; "
        "and a map of the arena when the most is live.",
    )
    common.add_trace_argument(parser, "trace")
    common.add_policy_argument(parser)
    common.add_capacity_argument(
        parser, "the capacity to draw, as in 24GiB (default: as recorded, where a request failed)"
    )
    common.add_driver_arguments(parser)
    common.add_output_arguments(parser, "the picture: .png or .html")


def run(args: argparse.Namespace) -> int:
    from vramx.memory.plot import render, take_picture
    from vramx.memory.replay import ReplayOptions
    from vramx.memory.snapshot import Snapshot

    if args.output is None:
        raise InvalidValueError("-o FILE.png or -o FILE.html is needed")
    format_name = picture_format(args.output)
    common.check_output(args.output, args.force)
    source = _read(args.trace, args.snapshot_device)
    trace = source.trace if isinstance(source, Snapshot) else source
    with ProgressBar() as bar:
        options = ReplayOptions(
            driver=args.driver, device=args.device, progress=bar.reporter(trace.name)
        )
        with common.naming(args.trace):
            picture = take_picture(source, args.policy, options, capacity=args.capacity)
    common.write_output(args.output, render(picture, format_name), args.force)
    return 0


def _read(path: Path, device: int | None) -> Snapshot | Trace:
    """Read a snapshot as one, because it says more than its trace."""
    from vramx.memory.trace import is_trace_file

    with common.naming(path):
        is_trace = is_trace_file(path)
    if is_trace:
        return common.read_trace(path, device)
    return snapshots.load_snapshot(path, device)


def picture_format(path: Path) -> str:
    """Return the format that a file's name asks for.

    Raises:
        InvalidValueError: the name ends in neither .png nor .html.
    """
    from vramx.memory.plot import FORMATS

    format_name = path.suffix[1:].lower()
    if format_name not in FORMATS:
        raise InvalidValueError(f"{path}: the name ends in neither .png nor .html, which are drawn")
    return format_name
