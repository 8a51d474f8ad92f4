"""What each placement rule of the core gains: recorded programs replayed without it.

A rule is left out of a copy of the sources, under build/ablations, by one edit of its text, and the
copy is compiled: the core has no switches for this. An edit whose text is not there, once, fails
and names it. One case for each rule and program, and those of the core as it is; a rule is compiled
with its first program, in half a minute. All figures are of the simulated device and exact.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ROOT, Measurement, Options
from benchmarks.traces import few_of, trace_files
from vramx.memory import load_trace
from vramx.memory.replay import load_core, open_replay

DESCRIPTION = "recorded programs without each placement rule of the core in turn"
SHARES = "everything"

BUILDS = ROOT / "build" / "ablations"
AS_IT_IS, WITHOUT = "as it is", "without "
# Another program's streams are that far behind when their memory is freed.
LATE_US = 10_000


@dataclass(frozen=True)
class Edit:
    """Text of a file of csrc/core that makes a rule, and what stands there without it."""

    file: str
    text: str
    without: str


RULES = {
    "recurrence": Edit("config.h", "repeats_placements = true;", "repeats_placements = false;"),
    "a question where the counterpart waits": Edit(
        "quick_placement.h",
        "is_kept_waiting(size, stream) && may_ask()) {",
        "!size) {",
    ),
    "lifetimes and the place beside kin": Edit(
        "lifetimes.h", "kSmallest{std::uint64_t{1} << 20};", "kSmallest{std::uint64_t{1} << 62};"
    ),
    "a cut where the rest touches a bound": Edit(
        "arena.cpp", "if (after_low != after_high) return", "if (!size) return"
    ),
    "a smallest piece of 64 KiB": Edit(
        "planner.cpp", "kSmallestPiece{64 << 10};", "kSmallestPiece{512};"
    ),
    "small blocks keep their chunks": Edit(
        "planner.cpp",
        "const bool is_kept = may_grow &&",
        "const bool is_kept = false && may_grow &&",
    ),
    "a block begins in the hole where there are many": Edit(
        "planner.cpp", "rest < alone || zone == Zone::kSmall || !has_few_holes();", "rest < alone;"
    ),
    "an alias that exists in place of a stitch": Edit(
        "planner.cpp",
        "if (pieces.missing * kNearly <= request.size) {",
        "if (pieces.missing * kNearly > request.size && !request.size) {",
    ),
    "chunks of 6 MiB at least": Edit(
        "chunk_policy.cpp", "kSmallestUnits = 3;", "kSmallestUnits = 1;"
    ),
    "chunks of 24 MiB at most": Edit(
        "chunk_policy.cpp", "kLargestUnits = 12;", "kLargestUnits = 1 << 20;"
    ),
    "chunks as a share of memory": Edit(
        "chunk_policy.cpp", "kChunksOfMemory = 512;", "kChunksOfMemory = 1ull << 62;"
    ),
    "chunks as a share of the request": Edit(
        "chunk_policy.cpp", "kChunksOfRequest = 48;", "kChunksOfRequest = 1ull << 62;"
    ),
    "larger chunks the more often they were stitched": Edit(
        "chunk_policy.cpp", "kMostTimesAsLarge = 8;", "kMostTimesAsLarge = 1;"
    ),
    "finer chunks near the limit": Edit(
        "chunk_policy.cpp", "kChunksOfRoom = 3072;", "kChunksOfRoom = 1;"
    ),
}


def cases(options: Options) -> list[str]:
    load_core()
    rules = list(RULES)[:1] if options.quick else RULES
    variants = [AS_IT_IS, *(f"{WITHOUT}{rule}" for rule in rules)]
    programs = few_of(trace_files(options)) if options.quick else trace_files(options)
    return [f"{program}: {variant}" for variant in variants for program in programs]


def measure(case: str, options: Options) -> list[Measurement]:
    program, variant = case.split(": ", 1)
    copy = built(variant)
    # The copy's core and the copy's package; this module alone is of the checkout.
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ablations", str(trace_files(options)[program])],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    figures: dict[str, list[float | str]] = json.loads(done.stdout)
    return [Measurement(name, str(unit), [float(value)]) for name, (unit, value) in figures.items()]


def built(variant: str) -> Path:
    """Return a copy of the package, compiled without a rule or as it is.

    Raises:
        RuntimeError: the rule's text is not in its file, once, or the copy does not compile.
    """
    folder = BUILDS / variant.replace(" ", "-").replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "csrc", "vramx"):
        _copy_changed(ROOT / name, folder / name)
    if variant != AS_IT_IS:
        rule = variant.removeprefix(WITHOUT)
        _write_if_changed(folder / "csrc" / "core" / RULES[rule].file, text_without(rule))
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{variant} the core does not compile: {done.stderr[-500:]}")
    return folder


def text_without(rule: str) -> str:
    """Return the file that has the rule, edited so that it does not."""
    edit = RULES[rule]
    text = (ROOT / "csrc" / "core" / edit.file).read_text()
    if (count := text.count(edit.text)) != 1:
        raise RuntimeError(f"{edit.file} has {edit.text!r} {count} times, not once: {rule}")
    return text.replace(edit.text, edit.without)


def _copy_changed(source: Path, copy: Path) -> None:
    """Copy what changed, and no compiled file: ninja goes by the times."""
    if source.is_dir():
        copy.mkdir(exist_ok=True)
        for name in {path.name for path in copy.iterdir() if path.suffix != ".so"}:
            if not (source / name).exists():
                _remove(copy / name)
        for path in source.iterdir():
            if path.suffix != ".so" and path.name != "__pycache__":
                _copy_changed(path, copy / path.name)
    elif not copy.exists() or copy.stat().st_mtime < source.stat().st_mtime:
        shutil.copy2(source, copy)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_if_changed(path: Path, text: str) -> None:
    if path.read_text() != text:
        path.write_text(text)


def figures_of(path: Path) -> dict[str, tuple[str, float]]:
    """Replay a trace with the core that is imported; return unit and value of each figure."""
    replay = open_replay(load_trace(path))
    run, late = replay.run("vramx"), replay.run("vramx", gpu_lag_us=LATE_US)
    live_bytes = replay.peak_live_bytes
    return {
        "reserved_over_live": ("1", run["peak_reserved_bytes"] / live_bytes),
        "late_reserved_over_in_use": ("1", late["peak_reserved_bytes"] / late["peak_in_use_bytes"]),
        "capacity_over_live": ("1", replay.min_capacity("vramx") / live_bytes),
        "driver_share": ("%", 100 * run["driver_us"] / replay.trace_us),
        "driver_calls_second_half": ("1", float(run["driver_calls_second_half"])),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(figures_of(Path(sys.argv[1]))))
