"""`vramx check`: fail where a run needs more memory than it did, or than it may."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramx.cli import common, snapshots
from vramx.errors import InvalidValueError
from vramx.sizes import format_gib, format_size, parse_size

if TYPE_CHECKING:
    from vramx.memory.check import Measured, Verdict

SCHEMA = 1
_PERCENT = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,6})?%", re.ASCII)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "check",
        help="fail where a run needs more memory than before, or than it may",
        description="Compare the peaks of a recorded run with a baseline, or with a limit. Exits 1 "
        "where they are above it, or where a request failed.",
    )
    snapshots.add_snapshot_arguments(parser)
    parser.add_argument(
        "--baseline", metavar="JSON", type=Path, help="the figures of an earlier run"
    )
    parser.add_argument(
        "--tolerance",
        metavar="PERCENT",
        type=common.argument(tolerance_argument),
        default="2%",
        help="how far a peak may be above the baseline's (default: %(default)s)",
    )
    parser.add_argument(
        "--update", action="store_true", help="write this run's figures as the baseline"
    )
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        type=common.argument(parse_size),
        help="the most that may be reserved, as in 18GiB",
    )
    common.add_report_arguments(parser)


def tolerance_argument(text: str) -> float:
    """Read a percentage as a share."""
    if not _PERCENT.fullmatch(text):
        raise InvalidValueError(f"{text!r} is no tolerance; a percentage as in 2% is accepted")
    return float(text[:-1]) / 100


def run(args: argparse.Namespace) -> int:
    """Check; return 1 if something is not accepted."""
    from vramx.memory import check

    if args.baseline is None and (args.limit is None or args.update):
        raise InvalidValueError(
            "--baseline JSON or --limit SIZE is needed; --update needs the first"
        )
    if args.update:
        common.check_output(args.baseline, force=True)
    before = None
    if not args.update and args.baseline is not None:
        with common.naming(args.baseline):
            before = check.read_baseline(args.baseline)
    measured = check.measure(snapshots.read_snapshot(args))
    verdicts = []
    if before is not None:
        verdicts += check.check_baseline(measured, before, args.tolerance)
    if args.limit is not None:
        verdicts += check.check_limit(measured, args.limit)
    failed = not all(verdict.ok for verdict in verdicts)
    grown = check.grown_most(measured, before) if failed and before is not None else None
    document = {
        "schema": SCHEMA,
        "snapshot": args.snapshot.name,
        "ok": not failed,
        "figures": [verdict.to_dict() for verdict in verdicts],
        "grown_most": None if grown is None else {"name": grown[0], "bytes": grown[1]},
    }
    lines = [_line(verdict) for verdict in verdicts]
    if grown is not None:
        lines.append(f"     grew most: {grown[0]}, +{format_size(grown[1])}")
    if args.update:
        _write(args.baseline, measured)
        lines.append(f"The figures of {args.snapshot.name} are in {args.baseline}.")
    snapshots.report(args, document, *lines)
    return 1 if failed else 0


def _write(path: Path, measured: Measured) -> None:
    text = json.dumps(measured.to_dict(), indent=2) + "\n"
    common.write_output(path, text.encode(errors="backslashreplace"), force=True)


def _line(verdict: Verdict) -> str:
    name = verdict.figure.removesuffix("_bytes").replace("_", " ")
    word = "ok  " if verdict.ok else "FAIL"
    shown: Any = format_gib if verdict.figure.endswith("_bytes") else str
    text = f"{word} {name:<15} {shown(verdict.value)}; {shown(verdict.accepted)} accepted"
    if verdict.expected and verdict.accepted != verdict.expected:
        text += f" ({verdict.value / verdict.expected - 1:+.1%} of {shown(verdict.expected)})"
    return text
