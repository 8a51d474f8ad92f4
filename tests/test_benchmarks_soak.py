"""The long run keeps its promises when it is short, and notices what a long one has to notice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vramx._core", reason="the compiled core is not built")

from child_processes import python

from benchmarks import soak
from benchmarks.harness import Options

ROOT = Path(__file__).resolve().parent.parent
QUICK = Options(quick=True)
# In a process of its own: the size of pytest's process is no measure of the allocator's.
PROGRAM = """
import dataclasses, json, sys
from benchmarks import soak
from benchmarks.harness import Options
devices, load, streams = soak.open_case(sys.argv[1], Options(quick=True))
load = dataclasses.replace(load, leaked_per_round=int(sys.argv[2]))
run = soak.soak(devices, load, streams)
print(json.dumps({"violations": soak.violations(run), "run": dataclasses.asdict(run)}))
"""


def soaked(case: str, leaked_per_round: int = 0) -> dict[str, Any]:
    done = python("-c", PROGRAM, case, str(leaked_per_round), cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("case", soak.cases(QUICK))
def test_a_short_run_keeps_every_promise(case: str) -> None:
    keeps_every_promise(case)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_short_run_on_the_gpu_keeps_every_promise() -> None:
    keeps_every_promise("cuda")


def keeps_every_promise(case: str) -> None:
    # It is no walk in the park: memory runs out, and blocks are stitched and found again. Whether
    # one thread meets what another freed is chance, so that a short run may be repeated for it.
    met = dict.fromkeys(("ooms", "num_stitches", "num_alias_hits", "num_cross_stream"), 0)
    for _ in range(3):
        found = soaked(case)
        assert found["violations"] == []
        run = found["run"]
        assert run["progress"]["calls"] >= run["load"]["calls"]
        for name in met:
            met[name] += {**run["stats"], **run["progress"]}[name]
        if all(met.values()):
            return
    assert all(met.values()), met


def test_a_leak_of_host_memory_is_noticed() -> None:
    # A page at least is lost each round, and a round has a few thousand calls at most.
    found = soaked("accounting", leaked_per_round=1 << 16)
    assert [text for text in found["violations"] if "the process grew" in text]


def sample(**changes: int) -> soak.Sample:
    figures = {"calls": 0, "rss_bytes": 10 << 20, "held_bytes": 0, "host_bytes": 1 << 20}
    return soak.Sample(**{**figures, "aliases": 1, "alias_mappings": 8, **changes})


def live_bytes(current: int) -> dict[str, Any]:
    return {"allocated_bytes": {"all": {"current": current}}}


def clean_run() -> soak.Run:
    marks = [sample(calls=calls) for calls in (100_000, 500_000, 1_000_000)]
    return soak.Run(
        load=soak.Load(1_000_000, 1 << 30),
        samples=list(marks),
        marks=marks,
        seconds=2.0,
        progress={
            **dict.fromkeys(soak.COUNTS, 0),
            "calls": 1_000_000,
            "undisturbed_live_bytes": 1 << 29,
            "undisturbed_reserved_bytes": 1 << 30,
        },
        stats=live_bytes(0),
        check="",
        held_bytes_at_end=0,
        most_alias_mappings=8,
    )


def changed(run: soak.Run, **progress: int) -> soak.Run:
    return dataclasses.replace(run, progress={**run.progress, **progress})


@pytest.mark.parametrize(
    ("spoiled", "text"),
    [
        (changed(clean_run(), broken=2), "2 answers were wrong"),
        (dataclasses.replace(clean_run(), check="span 4: ..."), "check: span 4"),
        (dataclasses.replace(clean_run(), stats=live_bytes(512)), "512 bytes are live"),
        (dataclasses.replace(clean_run(), held_bytes_at_end=1), "1 bytes are held"),
        (changed(clean_run(), undisturbed_reserved_bytes=(1 << 30) + 1), "were reserved"),
        (dataclasses.replace(clean_run(), most_alias_mappings=7), "aliases took 8 mappings of 7"),
    ],
    ids=["answers", "check", "live", "held", "reserved", "aliases"],
)
def test_each_violation_is_named(spoiled: soak.Run, text: str) -> None:
    found = soak.violations(spoiled)
    assert len(found) == 1
    assert text in found[0]


def test_the_process_may_grow_with_the_bookkeeping_and_no_more() -> None:
    run = clean_run()
    growth = 8 << 20
    allowed = growth + soak.rss_growth_bound_bytes(run)
    end = sample(calls=1_000_000, host_bytes=(1 << 20) + growth, rss_bytes=(10 << 20) + allowed)
    grown = dataclasses.replace(run, marks=[*run.marks[:2], end])
    assert soak.violations(grown) == []
    above = dataclasses.replace(end, rss_bytes=end.rss_bytes + 1)
    grown = dataclasses.replace(run, marks=[*run.marks[:2], above])
    assert len(soak.violations(grown)) == 1


def test_a_run_at_its_bounds_has_no_violation_and_its_figures() -> None:
    assert soak.violations(clean_run()) == []
    figures = {item.metric: item.values[0] for item in soak.measurements(clean_run())}
    assert figures["calls_per_second"] == 500_000
    assert figures["peak_reserved_ratio"] == 2.0
    assert figures["rss_at_50%"] == 10 << 20
    assert figures["alias_mappings_max"] == 8
