"""`vramx explain`: why a run was out of memory, and what would have fitted."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from vramx.cli import common, confirm, snapshots
from vramx.progress import ProgressBar
from vramx.sizes import format_gib, format_size

if TYPE_CHECKING:
    from vramx.memory.explain import Capacity, Explanation, Remedy

SCHEMA = 1
_NAMES = {"native": "torch's allocator", "expandable": "expandable_segments", "vramx": "vramx"}
_LINES = {
    "native": "(the default)",
    "expandable": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "vramx": "vramx run SCRIPT, or vramx.install_allocator() at the start",
}
_NO_HISTORY = (
    "How far to believe it: no history was recorded, so the remedies are tried on what was live at "
    "the end alone, put into empty memory; they may need more. `vramx run --record` keeps one."
)


class _ExplainParser(common.OneLineParser):
    """Stops at `--`: what follows is the command to confirm with."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(args or ())
        place = words.index("--") if "--" in words else len(words)
        parsed, extra = super().parse_known_args(words[:place], namespace)
        parsed.command = words[place + 1 :]
        if parsed.confirm != bool(parsed.command):
            self.error("--confirm and -- COMMAND need each other")
        return parsed, extra


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = common.add_parser_of(
        subparsers,
        _ExplainParser,
        "explain",
        help="why a run was out of memory, and what would have fitted",
        usage="vramx explain [options] [FILE] [--confirm -- COMMAND ...]",
        description="Say of the last request that failed who held the memory, whether "
        "fragmentation mattered, and which remedies, each of them replayed, would have served it. "
        "Of a run in which none failed the same is said of its peak. Exits 1 where a request did; "
        "with --confirm, where a remedy does not hold what was said.",
    )
    snapshots.add_snapshot_arguments(parser, newest=True)
    common.add_capacity_argument(
        parser,
        "what the allocator could hold, where it is known, as in 24GiB (default: as recorded)",
    )
    parser.add_argument(
        "--confirm",
        action="store_true",
        help="run COMMAND once with each remedy that is advised, and compare what it held at most "
        "with what is said of it",
    )
    snapshots.add_count_argument(parser)
    common.add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Explain; return 1 if there was a failure to explain."""
    from vramx.memory.explain import explain

    common.check_report(args)
    if args.snapshot is None:
        args.snapshot = snapshots.newest_failure()
        common.note("explain", f"reading the newest snapshot of a failure, {args.snapshot}")
    snapshot = snapshots.load_snapshot(args.snapshot, args.snapshot_device)
    with ProgressBar() as bar, common.naming(args.snapshot):
        why = explain(snapshot, capacity=args.capacity, progress=bar.reporter(snapshot.trace.name))
    document = {"schema": SCHEMA, **why.to_dict()}
    parts = _parts(why, snapshot.event_count, args.count)
    if not args.confirm:
        snapshots.report(args, document, *parts)
        return 0 if why.request is None else 1
    found = confirm.confirm(why, args.command)
    document["confirmed"] = [each.to_dict() for each in found]
    tried = confirm.table(found, _NAMES) if found else "No remedy is advised, so none was tried."
    snapshots.report(args, document, *parts, "", tried)
    return 0 if found and all(each.ok for each in found) else 1


def _parts(why: Explanation, events: int, count: int) -> list[Any]:
    from vramx.memory.holders import cut

    is_for = []
    if why.categories:
        is_for = [snapshots.holders_table("is for", why.categories, why.at.live_bytes)]
    return [
        _heading(why, events),
        *_facts(why),
        *is_for,
        snapshots.holders_table("held by", cut(why.holders, count), why.at.live_bytes),
        _remedies(why),
        _fidelity(why) if events > why.failures else _NO_HISTORY,
    ]


def _heading(why: Explanation, events: int) -> str:
    if why.request is None:
        # What was there before the history began may be the most.
        when = f"after event {why.at.event:,}" if why.at.event >= 0 else "before the first event"
        return f"{why.snapshot}: no request failed; this is the peak, {when}"
    earlier = f"; {why.failures - 1:,} failed before it" if why.failures > 1 else ""
    return f"{why.snapshot}: out of memory at event {why.at.event:,} of {events:,}{earlier}"


def _facts(why: Explanation) -> list[str]:
    from vramx.memory.stacks import describe

    at = why.at
    free = (
        f"{format_size(at.free_bytes)} in {at.holes:,} holes of the cache, the largest of "
        f"{format_size(at.largest_hole_bytes)}"
    )
    facts = {
        "live": f"{format_gib(at.live_bytes)} in {at.tensors:,} tensors",
        "reserved": format_gib(at.reserved_bytes),
        "free": free,
    }
    if why.request is not None:
        asked = f"{format_size(why.request.size_bytes)} at {describe(why.request.stack)}"
        facts = {"asked": asked, **facts}
    if why.capacity is not None:
        facts["limit"] = _limit(why, why.capacity)
    facts["why"] = _why(why)
    return [f" {name:<9} {text}" for name, text in facts.items()]


def _limit(why: Explanation, capacity: Capacity) -> str:
    low = format_gib(capacity.low_bytes)
    if capacity.source == "given":
        return f"{low}, as given"
    if capacity.source == "device":
        return f"{low}: what was held and what the device had free"
    free = why.request.device_free_bytes if why.request is not None else None
    device = f"; the device had {format_gib(free)} free" if free is not None else ""
    return (
        f"between {low} and {format_gib(capacity.high_bytes)}: one of torch's own, whose value is "
        f"not recorded{device}"
    )


def _why(why: Explanation) -> str:
    if why.request is None:
        wasted = why.at.reserved_bytes - why.at.live_bytes
        if wasted < 0:
            return "not known: the snapshot lacks segments"
        return f"fragmentation and rounding cost {format_gib(wasted)} at the peak"
    enough = format_gib(why.enough_from_bytes)
    own = format_size(why.fitting_hole_bytes)
    return {
        "fitting_block": f"not fragmentation: a free block of {own} would have held it",
        "elsewhere": "what is free and large enough is of another stream or pool, or for requests "
        f"of other sizes; the largest hole for this one has {own}",
        "fragmentation": "fragmentation: enough was free, in pieces too small "
        f"(without them {enough} would do)",
        "size": f"size, not fragmentation: even in one piece it takes {enough}",
        "fragmentation_or_size": f"fragmentation, if the limit was {enough} or more; else size",
    }.get(why.cause or "", "unknown")


def _remedies(why: Explanation) -> Any:
    rows = []
    for remedy in why.remedies:
        is_recorded = remedy.policy == why.recorded_policy
        verdict = [_verdict(remedy)] if why.capacity is not None else []
        name = _NAMES[remedy.policy] + (", as it was" if is_recorded else "")
        line = "" if is_recorded else _LINES[remedy.policy]
        rows.append([name, *verdict, _needs(remedy), line])
        if is_recorded and why.capacity is not None and not remedy.fits and remedy.needs_bytes:
            more = format_size(max(remedy.needs_bytes - why.capacity.low_bytes, 0))
            rows.append(["a bigger card", "yes", _needs(remedy), f"{more} more"])
    asked = ["would it?"] if why.capacity is not None else []
    return common.table(["what would have fitted", *asked, ">needs", "~to try it"], rows)


def _needs(remedy: Remedy) -> str:
    if remedy.needs_bytes is None:
        return "more than any GPU has"
    return format_gib(remedy.needs_bytes)


def _verdict(remedy: Remedy) -> str:
    if remedy.fits is None:
        return f"from {_needs(remedy)} on"
    return "yes" if remedy.fits else "no"


def _fidelity(why: Explanation) -> str:
    fidelity = why.fidelity
    text = (
        f"How far to believe it: the replay of {_NAMES[fidelity.policy]} reproduces "
        f"{fidelity.reproduced:,} of {fidelity.recorded:,} recorded segment events"
    )
    if fidelity.peak_error is not None:
        text += f", its reserved peak off by {fidelity.peak_error:.1%}"
    if fidelity.fails_too is not None:
        text += f", and {'fails' if fidelity.fails_too else 'does not fail'} at the same request"
    if fidelity.unmodelled:
        text += f". Not replayed: {', '.join(fidelity.unmodelled)}"
    return f"{text}."
