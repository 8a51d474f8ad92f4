"""A request that fails leaves one snapshot, which its error names and `vramx explain` reads."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import pytest
import torch
from failing_program import GIB, Program, cuda, error_text, program, shim
from fake_cuda import fail_with
from samples import assert_one_line_refusal
from snapshot_writer import MIB

import vramx
from vramx import files
from vramx.allocator import oom_document, oom_snapshot

__all__ = ["cuda", "program", "shim"]


def test_the_error_ends_in_the_name_of_a_snapshot_with_the_request(program: Program) -> None:
    text = program.fail(GIB)
    (path,) = program.files
    assert text.splitlines()[-1] == str(path)
    assert f"-rank0-pid{os.getpid()}-1.pickle" in path.name
    assert path.stat().st_mode & 0o077 == 0
    failure = vramx.Snapshot.load(path).failures[-1]
    assert (failure.size_bytes, failure.device_free_bytes) == (GIB, 123 * MIB)
    assert [frame.name for frame in failure.stack[:2]] == ["observe", "fail"]
    assert failure.stack[2].filename == __file__
    assert vramx.Snapshot.load(path).live_bytes_at(-1) == 40 * MIB


def test_a_recorded_history_is_kept_and_its_failure_not_doubled(program: Program) -> None:
    program.history = True
    program.recording.oom(GIB, device_free=7)
    program.fail(GIB)
    snapshot = vramx.Snapshot.load(program.files[0])
    assert [each.device_free_bytes for each in snapshot.failures] == [7]
    assert snapshot.live_bytes_at(-1) == 0
    assert snapshot.live_bytes_at(snapshot.end_event) == 40 * MIB


def test_a_thousand_failures_of_one_line_leave_one_file(program: Program) -> None:
    texts = {program.fail(GIB) for _ in range(1000)}
    assert program.snapshots == len(program.files) == len(texts) == 1


def test_another_size_and_another_line_leave_their_own(program: Program) -> None:
    first = program.fail(GIB)
    second = program.fail(GIB)
    third = program.fail(2 * GIB)
    assert len({first, second, third}) == len(program.files) == 3


def test_a_search_of_a_thousand_sizes_leaves_a_few_and_errors_stay(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(oom_snapshot.time, "monotonic", lambda: now_s[0])
    texts = [program.fail(GIB + size * 16 * MIB) for size in range(1000)]
    assert program.snapshots == len(program.files) == 4
    assert [bool(text) for text in texts] == [True] * 4 + [False] * 996
    now_s[0] += 601  # the search is over, and the run goes on
    assert program.fail(100 * GIB).endswith(".pickle")
    assert not program.fail(101 * GIB)
    assert len(program.files) == 5


def test_the_folder_keeps_the_newest_and_nothing_else_is_removed(program: Program) -> None:
    program.folder.mkdir()
    others = [program.folder / name for name in ("oom.pickle", "train.pickle", "notes.txt")]
    old = [program.folder / f"oom-20260101T000000-rank{i}-pid1-1.pickle" for i in range(30)]
    for age, path in enumerate([*others, *old]):
        path.write_bytes(b"x")
        os.utime(path, (1000 + age, 1000 + age))
    text = program.fail(GIB)
    assert len(program.files) == 16
    assert text.endswith(str(program.files[0]))
    assert program.files[1:] == old[:-16:-1]
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("what", ["no space", "no folder", "torch", "large"])
def test_what_cannot_be_written_is_one_line_and_not_tried_again(
    program: Program, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "no space":
        full = OSError(28, "No space left on device")
        monkeypatch.setattr(files.os, "replace", lambda *_: fail_with(full))
    elif what == "no folder":
        program.folder.write_text("a file")
    elif what == "torch":
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: fail_with(RuntimeError("a\nb")))
    else:
        monkeypatch.setattr(oom_document, "MOST_BYTES", 100)
    texts = {program.fail(GIB) for _ in range(3)}
    (text,) = texts
    assert text.startswith("\nNo memory snapshot of this could be written: ")
    assert text.count("\n") == 1
    assert program.snapshots <= 1
    assert what == "no folder" or not list(program.folder.iterdir())


def test_many_events_are_cut_to_the_last_that_fit(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oom_document, "MOST_BYTES", 20_000)
    program.history = True
    for _ in range(2000):
        program.recording.free(program.recording.alloc(MIB))
    program.fail(GIB)
    (path,) = program.files
    assert path.stat().st_size <= 20_000
    events = pickle.loads(path.read_bytes())["device_traces"][0]
    assert len(events) > 20
    assert events[-1]["action"] == "oom"
    assert vramx.Snapshot.load(path).failures


def test_an_error_that_nobody_observed_is_as_it_was(program: Program) -> None:
    program.fail(GIB)
    assert error_text(3 * GIB) == ""
    assert str(torch.OutOfMemoryError("no size")) == "no size"
    assert torch.OutOfMemoryError(1, 2).args == (1, 2)
    assert str(torch.OutOfMemoryError()) == ""


def test_an_error_that_travels_keeps_its_text(program: Program) -> None:
    program.observe(GIB)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. ")
    assert str(error).endswith(".pickle")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_failures_of_two_threads_get_each_its_own(program: Program) -> None:
    texts: dict[int, str] = {}
    sizes = [GIB, 3 * GIB]
    for size in sizes:
        thread = threading.Thread(target=program.observe, args=(size,))
        thread.start()
        thread.join()
    for size in sizes:
        texts[size] = error_text(size)
    for size in sizes:
        path = texts[size].splitlines()[-1]
        assert vramx.Snapshot.load(path).failures[0].size_bytes == size


def test_a_failure_while_another_is_written_does_not_wait(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = torch.cuda.memory._snapshot

    def failing_meanwhile() -> dict[str, Any]:
        program.observe(5 * GIB)
        snapshot: dict[str, Any] = taken()
        return snapshot

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", failing_meanwhile)
    assert program.fail(GIB).endswith(".pickle")
    assert len(program.files) == 1


def test_explain_reads_the_newest_and_says_which(program: Program, run: Any) -> None:
    program.fail(GIB)
    program.fail(2 * GIB)
    newest = program.files[0]
    os.utime(program.files[1], (1, 1))
    code, out, err = run("explain")
    assert code == 1
    assert out.startswith(f"{newest.name}: out of memory at event 0 of 1")
    assert "asked     2.00 GiB at" in out
    assert "no history was recorded" in out
    assert err == f"vramx explain: reading the newest snapshot of a failure, {newest}\n"


def test_explain_without_any_snapshot_is_one_line(program: Program, run: Any) -> None:
    assert_one_line_refusal(*run("explain"), f"left a snapshot in {program.folder}")
