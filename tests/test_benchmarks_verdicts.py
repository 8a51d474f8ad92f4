"""Each goal of a program is met, missed, or left open for a reason that is told."""

from __future__ import annotations

from typing import Any

import pytest
from program_stand_ins import FAKE, VRAMX, outcome

from benchmarks.programs import _verdicts
from benchmarks.programs._launch import OUT_OF_MEMORY
from benchmarks.programs._verdicts import Program, Run, judge
from vramx.sizes import GIB, MIB

TOY = Program("toy", has_fixed_shapes=True)


def runs_of(program: Program, *, capped: bool = True, **vramx: Any) -> list[Run]:
    """Two runs under each allocator and one with a cap; those of vramx with changes."""
    found = []
    for allocator in FAKE:
        changes = vramx if allocator is VRAMX else {}
        for is_capped in (False, False, *([True] if capped else [])):
            result = outcome(allocator.name, **changes)
            found.append(Run(program, allocator.name, is_capped, result))
    return found


def verdict(metric: str, program: Program, runs: list[Run]) -> _verdicts.Verdict:
    return next(found for found in judge(program, runs) if found.metric == metric)


def test_a_program_that_meets_every_goal_is_good() -> None:
    runs = runs_of(TOY)
    assert [(found.value, found.is_met) for found in judge(TOY, runs)] == [
        (0, True),
        (1.0, True),
        (1.0, True),
        (0, True),
        (1.0, True),
    ]
    assert _verdicts.is_good(TOY, runs)


@pytest.mark.parametrize(
    ("metric", "changes", "value"),
    [
        ("loss_mismatches", {"losses": ["0x1p+0", "0x1p-1", "0x1.000002p-2"]}, 3),
        ("loss_mismatches", {"losses": ["0x1p+0", "0x1p-1"]}, 3),
        ("peak_reserved_ratio", {"peak_reserved_bytes": int(10.2 * GIB)}, 1.02),
        ("step_ratio", {"step_ms": [5.0, 11.2, 11.2]}, 11.2 / 11),
        ("driver_calls_per_step", {"driver_calls": [9, 0, 3]}, 1.5),
    ],
)
def test_each_goal_can_be_missed(metric: str, changes: dict[str, Any], value: float) -> None:
    runs = runs_of(TOY, **changes)
    found = verdict(metric, TOY, runs)
    assert (found.value, found.is_met) == (pytest.approx(value), False)
    assert "MISSED" in str(found)
    assert not _verdicts.is_good(TOY, runs)


def test_a_small_program_may_round_up() -> None:
    small = {"peak_allocated_bytes": 64 * MIB, "peak_reserved_bytes": 96 * MIB}
    assert verdict("peak_reserved_ratio", TOY, runs_of(TOY, **small)).is_met
    small["peak_reserved_bytes"] = 98 * MIB
    assert verdict("peak_reserved_ratio", TOY, runs_of(TOY, **small)).is_met is False


def test_driver_calls_are_no_goal_where_shapes_vary() -> None:
    varying = Program("varying")
    found = verdict("driver_calls_per_step", varying, runs_of(varying, driver_calls=[9, 1, 1]))
    assert (found.value, found.is_met, str(found)) == (1.0, None, "1")


def test_losses_are_not_compared_where_native_differs_from_itself() -> None:
    runs = runs_of(TOY)
    runs[1] = Run(TOY, "native", False, outcome("native", losses=["0x1p+0"] * 3))
    found = verdict("loss_mismatches", TOY, runs)
    assert (found.value, found.is_met, str(found)) == (None, None, "native differs too")


def test_one_run_of_native_shows_that_losses_are_the_same_but_not_that_they_are_wrong() -> None:
    runs = [run for run in runs_of(TOY) if run.allocator == "vramx"]
    same = Run(TOY, "native", False, outcome("native"))
    found = verdict("loss_mismatches", TOY, [same, *runs])
    assert (found.value, found.is_met) == (0, True)
    other = Run(TOY, "native", False, outcome("native", losses=["0x1p+0"] * 3))
    assert str(verdict("loss_mismatches", TOY, [other, *runs])) == "differ; native ran once"
    assert str(verdict("loss_mismatches", TOY, runs)) == "not compared"


def test_the_step_is_compared_with_the_faster_of_torchs_allocators() -> None:
    runs = runs_of(TOY)
    slow = [Run(TOY, "native", False, outcome("native", step_ms=[9.0, 99.0, 99.0]))] * 2
    assert verdict("step_ratio", TOY, [*slow, *runs[3:]]).value == 1.0


def test_steps_are_compared_within_their_rounds() -> None:
    """A machine that was faster in one round says nothing of the allocator that ran in it."""
    fast = {"step_ms": [1.0, 5.0, 5.0]}
    runs = [Run(TOY, name, False, outcome(name), 0) for name in ("native", "expandable", "vramx")]
    runs += [Run(TOY, "vramx", capped, outcome("vramx", **fast), 1) for capped in (False, True)]
    assert verdict("step_ratio", TOY, runs).value == 1.0
    assert verdict("capped_step_ratio", TOY, runs).value == 1.0


def test_running_out_of_memory_under_the_cap_is_a_miss_for_vramx_alone() -> None:
    failed = outcome(status=OUT_OF_MEMORY)
    free = runs_of(TOY, capped=False)
    peers = [*free, Run(TOY, "native", True, failed), Run(TOY, "vramx", True, outcome())]
    assert _verdicts.is_good(TOY, peers)
    assert _verdicts.peer_under_cap(peers, "native") == "OOM"
    ours = [*free, Run(TOY, "vramx", True, failed)]
    assert not _verdicts.is_good(TOY, ours)
    assert str(verdict("capped_step_ratio", TOY, ours)) == "OOM"


def test_a_slower_peer_under_the_cap_is_told() -> None:
    slow = outcome("expandable", step_ms=[9.0, 22.0, 22.0], alloc_retries=4)
    runs = [*runs_of(TOY, capped=False), Run(TOY, "expandable", True, slow)]
    assert _verdicts.peer_under_cap(runs, "expandable") == "2.00x, 4 retries"
    assert _verdicts.peer_reserved(runs, "expandable") == "1.000"
