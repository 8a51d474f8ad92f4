"""The benchmark of single calls: its events, its turns, its goals, and that its C++ compiles."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program_stand_ins import ROOT, rows

from benchmarks import torch_calls
from benchmarks.harness import RowWriter
from benchmarks.programs._launch import Outcome
from vramx.errors import VramxError
from vramx.memory.trace import Trace


def test_a_trace_becomes_what_an_allocator_sees() -> None:
    pytest.importorskip("torch")
    from benchmarks.programs._calls import EVENT, events_of

    trace = Trace(
        name="t",
        op=np.array([0, 0, 0, 1, 2, 2], np.uint8),
        id=np.array([0, 1, 2, 0, 0, 1], np.uint32),
        size=np.array([512, 0, 1024, 512, 512, 0], np.uint64),
        stream=np.array([0, 0, 3, 0, 0, 0], np.uint8),
        time_us=np.zeros(6, np.uint32),
    )
    assert events_of(trace).tolist() == [(512, 0, 0), (1024, 2, 3), (0, 0, 0)]
    assert EVENT.itemsize == 16


OURS = torch_calls.KINDS[2]


def call_report(case: str, ns: list[float], name: str) -> dict[str, Any]:
    return {"case": case, "ns": ns, "allocator": name}


def test_calls_are_measured_in_turn_and_compared_with_native(
    writer: RowWriter, tmp_path: Path
) -> None:
    launched: list[list[str]] = []
    speeds = {"native": 400.0, "expandable": 250.0, "vramx": 100.0, "control": 80.0}

    def run(kind: torch_calls.Kind) -> Outcome:
        speed, name = speeds[kind.name], kind.allocator.name
        reports = (
            call_report("llama raw", [2 * speed, speed, 3 * speed], name),
            call_report("llama raw", [speed, speed + 1, speed], name),
            call_report("llama raw", [speed + 1, speed, speed + 1], name),
            call_report("llama raw after a graph", [2 * speed], name),
            call_report("torch.empty 512 B", [9 * speed], name),
        )
        return Outcome("ok", reports, 1.0)

    def launch(kinds: Sequence[torch_calls.Kind]) -> list[Outcome]:
        launched.append([kind.name for kind in kinds])
        return [run(kind) for kind in kinds]

    times, has_failed = torch_calls.measure_in_turn(2, launch, writer)
    order = ["native", "expandable", "vramx", "control"]
    assert launched == [order, order[::-1]]
    assert not has_failed
    assert list(torch_calls.goals(times)) == [
        ("llama raw", 100.0, 0.25, None, True),
        ("llama raw after a graph", 200.0, 0.25, 1.25, False),
        ("torch.empty 512 B", 900.0, 0.25, None, None),
    ]
    torch_calls.write_ratios(times, writer)
    found = rows(tmp_path)
    assert found[0]["case"] == "llama raw native 1"
    assert found[0]["samples"] == "400 401 400"
    ratios = [(row["metric"], row["median"]) for row in found if row["metric"].startswith("ratio")]
    assert ratios == [("ratio_to_native", "0.25")] * 2 + [
        ("ratio_to_control", "1.25"),
        ("ratio_to_native", "0.25"),
    ]


@pytest.mark.parametrize(
    ("case", "ours", "is_met"),
    [
        ("t raw", 25.0, True),
        ("t raw", 26.0, False),
        ("t tensor", 35.0, True),
        ("t tensor", 36.0, False),
        ("t tensor on 3 streams", 60.0, True),
        ("t raw on 3 streams", 61.0, False),
        ("t raw beside streams", 61.0, False),
        ("t raw beside a pool", 10.0, False),  # there is no control
        ("torch.empty 1 MiB", 200.0, None),
    ],
)
def test_each_kind_of_call_has_its_goal(case: str, ours: float, is_met: bool | None) -> None:
    times = {(case, "vramx"): [ours], (case, "native"): [100.0]}
    assert [verdict.is_met for verdict in torch_calls.goals(times)] == [is_met]


@pytest.mark.parametrize("reported", ["vramx", "native"])
def test_a_process_that_fails_keeps_what_it_measured_but_of_another_allocator(
    writer: RowWriter, tmp_path: Path, reported: str
) -> None:
    failed = Outcome("failed", (call_report("first raw", [50.0], reported),), 1.0)
    times, has_failed = torch_calls.measure_in_turn(1, lambda _: [failed], writer, [OURS])
    assert has_failed
    is_ours = reported == "vramx"
    assert times == ({("first raw", "vramx"): [50.0]} if is_ours else {})
    kept = ["first raw vramx 1"] if is_ours else []
    assert [row["case"] for row in rows(tmp_path)] == ["all vramx 1", *kept]


@pytest.mark.slow
def test_the_replay_compiles_against_the_installed_torch() -> None:
    pytest.importorskip("torch")
    from vramx.allocator import toolchain
    from vramx.allocator.torch_facts import find_torch
    from vramx.config import Config

    torch = find_torch()
    try:
        compiler = toolchain.find_compiler(Config())
        headers = toolchain.find_cuda_headers(torch, Config())
    except VramxError as error:
        pytest.skip(str(error))
    flags = toolchain.compile_flags(torch, ROOT / "csrc", headers)
    warnings = ["-fsyntax-only", "-Wextra", "-Werror", "-Wshadow", "-Wundef"]
    command = [*compiler.command, *flags, *warnings, str(torch_calls.SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
