"""`vramx stats`: its groups, moments and tree, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from snapshot_writer import KEPT, LOSS, MIB, MODEL, Recording

from vramx.memory.snapshot import Snapshot


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    recording = Recording()
    kept = recording.alloc(30 * MIB, KEPT)
    recording.alloc(4 * MIB, LOSS)
    recording.alloc(12 * MIB, MODEL, stream=0x77)
    recording.free(kept)
    recording.oom(64 * MIB)
    recording.alloc(512, KEPT)
    return recording.save(tmp_path / "run.pickle")


def groups(run: Any, *arguments: Any) -> dict[str, int]:
    code, out, err = run("stats", *arguments, "--json")
    assert (code, err) == (0, "")
    return {group["name"]: group["bytes"] for group in json.loads(out)["groups"]}


@pytest.mark.parametrize(
    ("by", "at", "expected"),
    [
        ("size", "oom", {"12.00 MiB": 12 * MIB, "4.00 MiB": 4 * MIB}),
        ("stream", "end", {"stream 0x77": 12 * MIB, "default stream": 4 * MIB + 512}),
        ("pool", "1", {"default pool": 30 * MIB}),
        ("size", "0", {}),
    ],
)
def test_other_groups_and_moments(
    run: Any, recorded: Path, by: str, at: str, expected: dict[str, int]
) -> None:
    assert groups(run, recorded, "--by", by, "--at", at) == expected


def test_json_has_the_totals_of_the_moment(run: Any, recorded: Path) -> None:
    _, out, _ = run("stats", recorded, "--json", "--at", "end")
    report = json.loads(out)
    assert {key: report[key] for key in report if key != "groups"} == {
        "schema": 1,
        "snapshot": "run.pickle",
        "event": 10,
        "live_bytes": 16 * MIB + 512,
        "tensors": 3,
        "rounding_bytes": 0,
        "free_bytes": 30 * MIB + 16 * MIB + 2 * MIB - 512,
        "holes": 3,
        "largest_hole_bytes": 30 * MIB,
        "reserved_bytes": 64 * MIB,
        "outside_bytes": None,
        "by": "stack",
    }


def test_text_says_who_holds_how_much(run: Any, recorded: Path) -> None:
    code, out, _ = run("stats", recorded)
    assert code == 0
    assert out.startswith("run.pickle: 0.045 GiB live in 3 tensors after event 5 of 11, 0.061 GiB")
    assert "65.2%        1  30.00 MiB  train.py:52 keep < train.py:40 train\n" in out
    assert "free in the cache 16.00 MiB in 1 hole, the largest of 16.00 MiB." in out


def test_what_is_beyond_the_lines_asked_for_is_one_line(run: Any, snapshots: Path) -> None:
    _, out, _ = run("stats", snapshots / "oom.pickle", "-n", "3")
    assert out.count("%") == 4
    assert " more)\n" in out


def test_the_tree_has_the_programs_lines(run: Any, recorded: Path) -> None:
    code, out, _ = run("stats", recorded, "--by", "tree")
    lines = out.splitlines()
    assert code == 0
    caller = next(i for i, line in enumerate(lines) if "in 2  train.py:40 train" in line)
    assert "0.029 GiB in 1  train.py:52 keep" in lines[caller + 1]
    assert "module.py" not in out
    tree = json.loads(run("stats", recorded, "--by", "tree", "--json")[1])["tree"]
    assert [child["frame"]["line"] for child in tree["children"]] == [40, 44]


def test_a_name_that_looks_like_markup_is_printed_as_it_is(run: Any, tmp_path: Path) -> None:
    recording = Recording()
    frames = [{"name": "[bold]f[/]", "filename": "[red].py", "line": 3}]
    recording.alloc(512, frames)
    for by in ("stack", "tree"):
        _, out, _ = run("stats", recording.save(tmp_path / "run.pickle"), "--by", by)
        assert "[red].py:3 [bold]f[/]" in out


def test_a_name_cannot_command_the_terminal(run: Any, tmp_path: Path) -> None:
    recording = Recording()
    recording.alloc(512, [{"name": "\x1b[2J\nf\ud800", "filename": "a.py", "line": 3}])
    _, out, _ = run("stats", recording.save(tmp_path / "run.pickle"))
    assert "a.py:3 \\x1b[2J\\nf\\ud800" in out


def test_the_peak_of_a_real_snapshot_is_its_own(run: Any, snapshots: Path) -> None:
    _, out, _ = run("stats", snapshots / "oom.pickle", "--json")
    report = json.loads(out)
    snapshot = Snapshot.load(snapshots / "oom.pickle")
    assert report["live_bytes"] == max(map(snapshot.live_bytes_at, range(snapshot.event_count)))
