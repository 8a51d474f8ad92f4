"""`vramx replay`: what a recorded run would cost under each allocation policy.

Reads every trace before the first is replayed, and writes nothing unless all went well.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vramx.cli import common, snapshots
from vramx.progress import ProgressBar
from vramx.sizes import format_gib

if TYPE_CHECKING:
    from rich.table import Table

    from vramx.memory.replay import ReplayResult

SCHEMA = 1
_NAMES = {"native": "torch's allocator", "vramx": "vramx"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="what a recorded run would cost under each allocation policy",
        description="Replay recorded allocations under each policy: live (the lower bound), "
        "native and expandable (models of torch's allocators) and vramx.",
    )
    common.add_trace_argument(parser, "traces", nargs="+")
    common.add_policy_argument(parser)
    parser.add_argument(
        "--min-capacity",
        action="store_true",
        help="with --json, also find the smallest memory under which the run still fits; a table "
        "has it always",
    )
    common.add_capacity_argument(parser, "the device's memory, as in 24GiB (default: unlimited)")
    common.add_driver_arguments(parser)
    common.add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Replay, report, and return 1 if any replay found memory that changed under its owner."""
    common.check_report(args)
    reports = _replay_all(args)
    parts: list[Any] = []
    for results in [] if args.json else reports:
        parts += ["", table(results), summary(results)]
    snapshots.report(args, document(reports), *parts[1:])
    return report_mismatches("replay", reports)


def _replay_all(args: argparse.Namespace) -> list[list[ReplayResult]]:
    from vramx.memory import ReplayOptions, replay

    traces = [(path, common.read_trace(path, args.snapshot_device)) for path in args.traces]
    for path, trace in traces:
        if trace.failed:
            requests = "1 request" if len(trace.failed) == 1 else f"{len(trace.failed):,} requests"
            common.note(
                "replay", f"{path}: {requests} failed when recorded and must be served here"
            )
    reports = []
    with ProgressBar() as bar:
        for path, trace in traces:
            options = ReplayOptions(
                driver=args.driver, device=args.device, progress=bar.reporter(trace.name)
            )
            with common.naming(path):
                results = replay(
                    trace,
                    args.policy,
                    capacity=args.capacity,
                    min_capacity=args.min_capacity or not args.json,
                    options=options,
                )
            reports.append(results)
    return reports


def document(reports: Sequence[Sequence[ReplayResult]]) -> dict[str, Any]:
    """Return the JSON report: one entry a trace, in it one a policy."""
    return {
        "schema": SCHEMA,
        "traces": [
            {
                "trace": results[0].trace,
                "events": results[0].events,
                "peak_live_bytes": results[0].peak_live_bytes,
                "policies": {result.policy: result.to_dict() for result in results},
            }
            for results in reports
        ],
    }


def table(results: Sequence[ReplayResult]) -> Table:
    """Lay out one trace's results; sizes in GiB, and as a multiple of the live peak."""
    from rich.text import Text

    first = results[0]
    title = (
        f"{first.trace}: {first.events:,} events in {first.trace_us / 1e6:.1f} s, "
        f"{format_gib(first.peak_live_bytes)} live at the peak"
    )
    minimum = any(result.min_capacity_bytes is not None for result in results)
    sizes = [">peak\nreserved", ">\n/ live", ">smallest\nmemory", ">\n/ live"]
    costs = [">driver\ncalls", ">driver\ntime", ">ns per\nevent"]
    return common.table(
        ["\npolicy", *sizes[: 4 if minimum else 2], *costs, "\noutcome"],
        [_cells(result, minimum) for result in results],
        title=Text(title, style="bold"),
        title_justify="left",
    )


def summary(results: Sequence[ReplayResult]) -> str:
    """Say in words what a trace's table shows."""
    needs = [_need(result) for result in results if result.policy in _NAMES]
    live = f"Its tensors never take more than {format_gib(results[0].peak_live_bytes)}"
    return f"{'; '.join([live, *needs])}."


def _need(result: ReplayResult) -> str:
    name = _NAMES[result.policy]
    if result.min_capacity_bytes is None:
        return f"{name} needs more than any GPU has"
    least = f"needs a GPU with {format_gib(result.min_capacity_bytes)}"
    if result.oom:
        return f"{name} {least}"
    return f"{name} takes {format_gib(result.peak_reserved_bytes)} and {least}"


def _cells(result: ReplayResult, minimum: bool) -> list[str]:
    cells = [result.policy, *_size_cells(result.peak_reserved_bytes, result.peak_live_bytes)]
    if minimum:
        cells += _size_cells(result.min_capacity_bytes, result.peak_live_bytes)
    calls = sum(result.driver_calls.values())
    share = f" {result.driver_us / result.trace_us:.2%}" if result.trace_us else ""
    return [
        *cells,
        f"{calls:,}" if calls else "-",
        f"{result.driver_us / 1e3:.1f} ms{share}" if result.driver_us else "-",
        f"{result.ns_per_event:.0f}" if result.ns_per_event else "-",
        _outcome(result),
    ]


def _size_cells(size_bytes: int | None, live_bytes: int) -> list[str]:
    if size_bytes is None:
        return ["-", "-"]
    ratio = f"{size_bytes / live_bytes:.3f}x" if live_bytes else "-"
    return [format_gib(size_bytes), ratio]


def _outcome(result: ReplayResult) -> str:
    if result.mismatches:
        return f"{result.mismatches} blocks corrupted"
    if result.oom_as_recorded:
        return "out of memory, as when recorded"
    if result.oom:
        return f"out of memory, event {result.oom_event:,}"
    return f"ran, {result.retries:,} retries" if result.retries else "ran"


def report_mismatches(verb: str, reports: Sequence[Sequence[ReplayResult]]) -> int:
    """Return the exit code: 1, with a line on stderr, if a block's bytes were not its own."""
    damaged = [result for results in reports for result in results if result.mismatches]
    for result in damaged:
        common.note(
            verb,
            f"{result.trace}: {result.mismatches} blocks changed under their owner "
            f"with policy {result.policy}; this is a defect of vramx",
        )
    return 1 if damaged else 0
