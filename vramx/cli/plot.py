"""`vramx plot`: a picture of a recorded run, as PNG or as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from vramx.cli import common
from vramx.errors import InvalidValueError, VramxError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb's arguments."""
    parser = subparsers.add_parser(
        "plot",
        help="draw memory over time and a map of the arena at its peak",
        description="Draw live and reserved memory over time under each policy, and a map of the "
        "arena when the most is live.",
    )
    parser.add_argument(
        "trace",
        metavar="TRACE",
        type=Path,
        help="a trace (.npz) or a torch memory snapshot (.pickle, .json, .gz)",
    )
    common.add_policy_argument(parser)
    common.add_driver_arguments(parser)
    common.add_output_arguments(parser, "the picture: .png or .html")


def run(args: argparse.Namespace) -> int:
    """Replay, draw, write."""
    from vramx.memory.plot import render, take_picture
    from vramx.memory.replay import ReplayOptions

    if args.output is None:
        raise InvalidValueError("-o FILE.png or -o FILE.html is needed")
    format_name = picture_format(args.output)
    common.check_output(args.output, args.force)
    trace = common.read_trace(args.trace, args.snapshot_device)
    with common.ProgressBar() as bar:
        options = ReplayOptions(
            driver=args.driver, device=args.device, progress=bar.reporter(trace.name)
        )
        try:
            picture = take_picture(trace, args.policy, options)
        except VramxError as error:
            raise VramxError(f"{args.trace}: {error}") from None
    common.write_output(args.output, render(picture, format_name), args.force)
    return 0


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
