"""What the verbs share: argument types, writing a file whole or not at all, tables.

rich is imported on use, so that `vramx --help` stays quick.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

from vramx.errors import InvalidValueError, OutputError, TraceError, VramxError
from vramx.files import written_whole

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from vramx.memory.trace import Trace

Value = TypeVar("Value")

_PLAIN_WIDTH = 120  # columns of a table that is not on a terminal
_KINDS = {">": {"justify": "right"}, "~": {"overflow": "fold"}, "!": {"no_wrap": True}}


class OneLineParser(argparse.ArgumentParser):
    """Reports wrong usage as one line; argparse would print the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def add_parser_of(subparsers: Any, kind: type[OneLineParser], name: str, **options: Any) -> Any:
    """Add a verb whose parser is of a class of its own; a subparser's is its maker's to choose."""
    usual, subparsers._parser_class = subparsers._parser_class, kind
    try:
        return subparsers.add_parser(name, **options)
    finally:
        subparsers._parser_class = usual


def argument(check: Callable[[str], Value]) -> Callable[[str], Value]:
    """Turn a check that raises InvalidValueError into an argparse type with the same text."""

    def convert(text: str) -> Value:
        try:
            return check(text)
        except InvalidValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def policies_argument(text: str) -> list[str]:
    """Read a comma-separated list of policies."""
    from vramx.memory.replay import check_policies

    return check_policies([name.strip() for name in text.split(",")])


def count_argument(what: str, least: int = 1) -> Callable[[str], int]:
    """Return an argparse type: a whole number of at least 0 or 1 and at most nine digits."""

    def check(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < least:
            raise InvalidValueError(
                f"{text!r} is no {what}; accepted are {least}, {least + 1}, ..."
            )
        return int(text)

    return argument(check)


index_argument = count_argument("device number", least=0)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have errors of a file name it."""
    try:
        yield
    except VramxError as error:
        kind = TraceError if isinstance(error, TraceError) else VramxError
        raise kind(f"{path}: {error}") from None


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json, -o and -f."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_output_arguments(parser, "write to FILE instead of stdout")


def add_output_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Add -o and -f."""
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help=what)
    parser.add_argument("-f", "--force", action="store_true", help="overwrite FILE if it exists")


def add_policy_argument(parser: argparse.ArgumentParser) -> None:
    """Add --policy."""
    parser.add_argument(
        "--policy",
        metavar="NAME[,NAME...]",
        type=argument(policies_argument),
        default="live,native,expandable,vramx",
        help="which policies (default: %(default)s)",
    )


def add_trace_argument(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    """Add the file or files that are read."""
    what = "a trace (.npz) or a torch memory snapshot (.pickle, .json, .gz)"
    parser.add_argument(name, metavar="TRACE", type=Path, help=what, **options)


def add_capacity_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --capacity, of at least one chunk."""

    def check(text: str) -> int:
        from vramx.memory.replay import check_capacity

        return check_capacity(text)

    parser.add_argument("--capacity", metavar="SIZE", type=argument(check), help=what)


def add_driver_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --driver, --device and --snapshot-device."""
    parser.add_argument(
        "--driver",
        choices=("sim", "cuda"),
        default="sim",
        help="where the policy vramx runs: on a simulated device, or on the GPU (default: sim)",
    )
    parser.add_argument(
        "--device",
        metavar="N",
        type=index_argument,
        default=0,
        help="the GPU of --driver cuda (default: 0)",
    )
    add_snapshot_device_argument(parser)


def add_snapshot_device_argument(parser: argparse.ArgumentParser) -> None:
    """Add --snapshot-device."""
    parser.add_argument(
        "--snapshot-device",
        metavar="N",
        type=index_argument,
        help="of a snapshot of several devices, the one that is meant (default: the one that ran "
        "out of memory, else the busiest)",
    )


def read_trace(path: Path, device: int | None = None) -> Trace:
    """Load a trace; an error names the file."""
    from vramx.memory.trace import load_trace

    with naming(path):
        return load_trace(path, device=device)


def check_report(args: argparse.Namespace) -> None:
    """Refuse an output that could not be written, before the work begins."""
    if args.output is not None:
        check_output(args.output, args.force)


def check_output(path: Path, force: bool) -> None:
    """Refuse a path that could not be written in the end, before the work begins.

    Raises:
        OutputError: it exists and `force` is not set, is no regular file, or its folder is
            missing or not writable.
    """
    exists = os.path.lexists(path)
    if exists and not path.is_file():
        raise OutputError(f"{path}: it is not a regular file, and is left alone")
    if exists and not force:
        raise OutputError(f"{path}: it exists; -f overwrites it")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: the folder {path.parent} is not writable")


def write_output(path: Path, data: bytes, force: bool) -> None:
    """Write a file whole or not at all."""
    check_output(path, force)
    try:
        with written_whole(path) as file:
            file.write(data)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from None


def table(columns: Iterable[str], rows: Iterable[Sequence[str]], **options: Any) -> Table:
    """Lay out rows in the one style of the command line.

    Args:
        columns: the headings; before one of numbers stands >, ~ where a cell that is too long is
            folded, and ! where it is cut.
        **options: of rich's Table.
    """
    from rich import box
    from rich.table import Table

    laid_out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), **options)
    for heading in columns:
        kind: Any = _KINDS.get(heading[:1], {})
        laid_out.add_column(heading[bool(kind) :], **kind)
    for row in rows:
        laid_out.add_row(*row)
    return laid_out


def render_text(*parts: RenderableType, file: IO[str]) -> str:
    """Lay out tables and lines as they look on `file`: coloured on a terminal, plain elsewhere."""
    from rich.console import Console

    on_terminal = file.isatty()
    width = None if on_terminal else _PLAIN_WIDTH
    # A file's name may hold what rich would take for markup.
    console = Console(file=file, width=width, force_terminal=on_terminal, emoji=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, markup=False, highlight=False)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def print_parts(*parts: RenderableType) -> None:
    """Lay out tables and lines on stdout."""
    if sys.stdout is not None:
        print_text(render_text(*parts, file=sys.stdout))


def put_out(args: argparse.Namespace, text: str) -> None:
    """Write text to stdout, or to the file that was asked for."""
    if args.output is None:
        print_text(text)
    else:
        write_output(args.output, text.encode(errors="backslashreplace"), args.force)


def print_text(text: str) -> None:
    """Write to stdout; what goes wrong there is main()'s to report."""
    if sys.stdout is None:
        return
    # A file name may hold what stdout cannot encode; it is shown escaped, as stderr would.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def note(verb: str, text: str) -> None:
    """Tell the user something that is not a result."""
    print(f"vramx {verb}: {text}", file=sys.stderr)
