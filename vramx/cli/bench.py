"""`vramx bench`: run a benchmark of the repository, show its figures and keep the raw rows.

The benchmarks are not part of the installed package: they are the folder `benchmarks/` of a
checkout, and the verb works in a checkout's root only. Exit code 1 when a case failed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramx.cli import common
from vramx.errors import OutputError, VramxError

if TYPE_CHECKING:
    from rich.table import Table

ALL = "all"
Report = Callable[[Any], None]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="run a benchmark of the repository",
        description="Run a benchmark from the root of a checkout of vramx; without a NAME, list "
        "them. Rows are appended to benchmarks/results/NAME.csv. After all of them, figures that "
        "the documentation shows are laid beside those that were measured.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help=f"a benchmark, or {ALL}")
    parser.add_argument(
        "--quick", action="store_true", help="fewer cases and repeats: not to be quoted"
    )
    parser.add_argument(
        "--traces", metavar="DIR", type=Path, help="a folder of traces to replay instead"
    )
    parser.add_argument("--driver", choices=("sim", "cuda"), default="sim", help="default: sim")
    parser.add_argument("--device", metavar="N", type=common.index_argument, default=0)
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="append the rows to FILE instead"
    )
    _add_process_arguments(parser)


def _add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the benchmarks take that compare whole processes on GPUs."""
    group = parser.add_argument_group(
        "for torch_programs, torch_calls, streams, activations, fused, plan, language_model, "
        "real_weights, train_3b, loss_parity and seeing"
    )
    count = common.count_argument("number")
    group.add_argument("--only", metavar="NAME[,NAME...]", help="these programs, cases or groups")
    group.add_argument("--repeats", metavar="N", type=count, help="under each allocator")
    group.add_argument(
        "--jobs", metavar="N", type=count, default=1, help="GPUs to use (default: 1)"
    )
    group.add_argument(
        "--limit-s", metavar="S", type=count, help="seconds that one process may take"
    )


def run(args: argparse.Namespace) -> int:
    harness = load_harness()
    if args.name is None:
        lines = [f"{name:14} {harness.load(name).DESCRIPTION}" for name in harness.names()]
        common.print_text("\n".join(lines) + "\n")
        return 0
    if args.name not in (accepted := [*harness.names(), ALL]):
        raise VramxError(f"benchmark {args.name!r} is unknown; accepted are {', '.join(accepted)}")
    if args.name != ALL:
        return _run_one(harness, args.name, args, _report)
    return _run_all(harness, args)


def _run_all(harness: Any, args: argparse.Namespace) -> int:
    """Run every benchmark, and lay what was measured beside what the pages say."""
    claims = importlib.import_module("benchmarks.documents.claims")
    # Read first: rows of this run may take the place of those that the pages show.
    claimed = claims.claims(harness.names(), harness.describe_machine(harness.ROOT).gpu)
    rows: list[Any] = []

    def report(row: Any) -> None:
        rows.append(row)
        _report(row)

    def run_one(name: str) -> int:
        start_s = time.monotonic()
        code = _run_one(harness, name, args, report)
        common.note("bench", f"{name} took {time.monotonic() - start_s:.0f} s")
        return code

    codes: list[int] = []
    for together, at_once in harness.rounds(args.quick):
        if at_once == 1:  # on this thread, which Ctrl-C ends
            codes += map(run_one, together)
            continue
        with ThreadPoolExecutor(at_once) as pool:
            codes += pool.map(run_one, together)
    common.print_parts(comparison(rows, claimed))
    return max(codes)


def load_harness() -> Any:
    """Import the harness of the checkout whose root is the working directory.

    Raises:
        VramxError: the working directory is no such root.
    """
    root = Path.cwd()
    if not (root / "benchmarks" / "harness.py").is_file():
        raise VramxError(
            "there is no benchmarks/harness.py here; run this from the root of a checkout of vramx"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.harness")


def _run_one(harness: Any, name: str, args: argparse.Namespace, report: Report) -> int:
    path = args.output or harness.RESULTS / f"{name}.csv"
    try:
        if hasattr(harness.load(name), "run_all"):
            return _run_processes(harness, name, args, path, report)
        rows = harness.run(name, _options(harness, args), command_line(name, args), report)
        harness.append_csv(path, rows)
    except harness.UnavailableError as error:
        common.note("bench", f"{name} is left out: {error}")
        return 0
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: {error}") from error
    common.print_parts(table(name, rows), f"{len(rows)} rows appended to {path.name}")
    return int(any(row.status != "ok" for row in rows))


def _options(harness: Any, args: argparse.Namespace) -> Any:
    return harness.Options(
        quick=args.quick,
        driver=args.driver,
        device=args.device,
        traces=str(args.traces.resolve()) if args.traces else None,
    )


def _run_processes(
    harness: Any, name: str, args: argparse.Namespace, path: Path, report: Report
) -> int:
    """Run a benchmark that starts its own processes and writes each row when it is known."""
    writer = harness.RowWriter(name, command_line(name, args), path, report)
    request = harness.Request(
        only=tuple(args.only.split(",")) if args.only else (),
        repeats=args.repeats,
        jobs=args.jobs,
        limit_s=args.limit_s,
    )
    parts, is_good = harness.load(name).run_all(_options(harness, args), request, writer)
    common.print_parts(*parts, f"{writer.count} rows appended to {path.name}")
    return int(not is_good)


def command_line(name: str, args: argparse.Namespace) -> str:
    """Return what was asked for, with a folder's name in place of its path."""
    words = ["vramx", "bench", name]
    words += ["--quick"] if args.quick else []
    words += ["--traces", args.traces.resolve().name] if args.traces else []
    words += ["--driver", args.driver] if args.driver != "sim" else []
    words += ["--device", str(args.device)] if args.device else []
    words += ["--only", args.only] if args.only else []
    words += ["--repeats", str(args.repeats)] if args.repeats else []
    words += ["--jobs", str(args.jobs)] if args.jobs != 1 else []
    words += ["--limit-s", str(args.limit_s)] if args.limit_s else []
    return " ".join(words)


def _report(row: Any) -> None:
    if row.status != "ok":
        common.note("bench", f"{row.case}: {row.status}")
    elif sys.stderr is not None and sys.stderr.isatty():
        common.note("bench", f"{row.case}: {row.metric} {figure(row.median)} {row.unit}")


def table(name: str, rows: Sequence[Any]) -> Table:
    """Lay the rows out, one line a measurement."""
    cells = [
        [
            *(row.case, row.metric, row.status),
            *(figure(row.median), figure(row.p10), figure(row.p90), str(row.repeats)),
            "" if row.unit == "1" else row.unit,
        ]
        for row in rows
    ]
    headings = ("case", "metric", "status", ">median", ">p10", ">p90", ">repeats", "unit")
    return common.table(headings, cells, title=f"benchmark {name}")


def comparison(rows: Sequence[Any], claimed: Mapping[tuple[str, str, str], Any]) -> Table:
    """Lay figures that the pages show beside those of these rows."""
    cells = []
    for row in rows:
        claim = claimed.get((row.benchmark, row.case, row.metric))
        if claim is None or row.median is None:
            continue
        ratio = f"{row.median / claim.value:.3f}" if claim.value else ""
        figures = (figure(claim.value), figure(row.median), ratio)
        cells.append((row.benchmark, row.case, row.metric, *figures, claim.machine))
    headings = ("benchmark", "case", "metric", ">documented", ">here", ">ratio", "documented on")
    return common.table(headings, cells, title="what the documentation says")


def figure(value: float | None) -> str:
    """Write a figure with five significant digits."""
    return "" if value is None else f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
