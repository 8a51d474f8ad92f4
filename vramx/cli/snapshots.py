"""What the verbs that read a snapshot share: arguments, loading, tables, reports."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramx.cli import common
from vramx.errors import TraceError
from vramx.sizes import format_gib, format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from vramx.memory.holders import Holder
    from vramx.memory.snapshot import Snapshot


def add_snapshot_arguments(parser: argparse.ArgumentParser, *, newest: bool = False) -> None:
    """Add the snapshot and its device.

    Args:
        newest: whether the snapshot may be left out, for that of the last request that failed.
    """
    what = "a torch memory snapshot (.pickle, .json, .gz)"
    if newest:
        what += "; by default that of the last request that failed (see VRAMX_OOM_DIR)"
    parser.add_argument(
        "snapshot", metavar="FILE", type=Path, help=what, nargs="?" if newest else None
    )
    common.add_snapshot_device_argument(parser)


def add_count_argument(parser: argparse.ArgumentParser) -> None:
    """Add -n."""
    parser.add_argument(
        "-n",
        "--count",
        metavar="N",
        type=common.count_argument("number of lines"),
        default=10,
        help="how many lines to print (default: 10); JSON has all of them",
    )


def read_snapshot(args: argparse.Namespace) -> Snapshot:
    """Load the snapshot of the arguments, once the output can be written."""
    common.check_report(args)
    return load_snapshot(args.snapshot, args.snapshot_device)


def newest_failure() -> Path:
    """Return the snapshot that the last request which failed left behind.

    Raises:
        TraceError: there is none; the text has the folders that were looked in.
    """
    from vramx.allocator import oom_snapshot
    from vramx.config import config

    found = oom_snapshot.newest(config())
    if found is None:
        folders = " or ".join(map(str, oom_snapshot.folders(config())))
        raise TraceError(
            f"no FILE is given, and no request that failed has left a snapshot in {folders}"
        )
    return found


def load_snapshot(path: Path, device: int | None) -> Snapshot:
    """Load a snapshot; an error names the file."""
    from vramx.memory.snapshot import Snapshot

    with common.naming(path):
        return Snapshot.load(path, device=device)


def report(args: argparse.Namespace, document: dict[str, Any], *parts: RenderableType) -> None:
    """Put out a report, as JSON or as text, on stdout or in the file that was asked for."""
    if args.json:
        text = json.dumps(document, indent=2) + "\n"
    else:
        file = sys.stdout if args.output is None and sys.stdout is not None else io.StringIO()
        text = common.render_text(*parts, file=file)
    common.put_out(args, text)


def holders_table(by: str, found: Iterable[Holder], total_bytes: int) -> Any:
    """Lay out who holds how much, as a share of all that is live."""
    rows = [
        [
            format_gib(each.bytes),
            f"{each.bytes / total_bytes:.1%}" if total_bytes else "-",
            f"{each.tensors:,}",
            format_size(each.largest_bytes),
            each.name,
        ]
        for each in found
    ]
    return common.table((">bytes", ">share", ">tensors", ">largest", f"~{by}"), rows)
