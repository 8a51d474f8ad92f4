"""What holds for every verb that reads a snapshot: refusals, output files, no torch, speed."""

from __future__ import annotations

import copy
import json
import pickle
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import SMALL, assert_one_line_refusal, block, event
from snapshot_writer import KEPT, MIB, MINORS, MODEL, Recording

pytest.importorskip("vramx._core", reason="the compiled core is not built")

ROOT = Path(__file__).resolve().parent.parent
VERBS = ("stats", "explain", "diff", "check")
TIMED = ("replay",)  # says how long it took, which is never the same
EVENTS = 300_000
# CPU seconds: twice of what is promised, for a host that is slow or shared. diff reads two files.
MOST_SECONDS = {"stats": 10, "diff": 10, "check": 10, "explain": 30, "plot": 30}
NONSENSE = (None, True, -1, 1.5, 1 << 63, 1 << 70, "x", [], {}, [[1]], {"a": 1}, float("nan"))


def command(verb: str, path: Path) -> list[Any]:
    return {
        "replay": ["replay", path],
        "stats": ["stats", path],
        "explain": ["explain", path],
        "diff": ["diff", path, path],
        "check": ["check", path, "--limit", "1GiB"],
    }[verb]


@pytest.mark.parametrize("verb", [*VERBS, *TIMED])
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04", "damaged or cut short|a torch memory snapshot is needed"),
        (b"once upon a time", "neither a pickle nor JSON"),
        (b"\x80\x04", "no complete pickle"),
        (pickle.dumps(print), "asks for code to be run"),
        (pickle.dumps({"weights": [1.0]}), "no torch memory snapshot"),
        (b'{"segments": [', "no complete JSON"),
        (b'{"segments": []}', "holds no events"),
    ],
)
def test_other_files_are_refused_and_nothing_is_written(
    run: Any, tmp_path: Path, verb: str, content: bytes, what: str
) -> None:
    path = tmp_path / "input.pickle"
    path.write_bytes(content)
    result = run(*command(verb, path), "-o", tmp_path / "report", "--json")
    assert_one_line_refusal(*result, f"vramx {verb}: {path}: ")
    assert re.search(what, result[2])
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("verb", VERBS)
def test_a_trace_is_refused(run: Any, traces: Path, verb: str) -> None:
    assert_one_line_refusal(
        *run(*command(verb, traces / SMALL)), "a torch memory snapshot is needed"
    )


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container in plain data with each of its keys."""
    keys: Any = range(len(value)) if isinstance(value, list) else value
    if isinstance(value, (dict, list)):
        for key in keys:
            yield value, key
            yield from places(value[key])


@pytest.mark.parametrize("verb", VERBS)
def test_nonsense_anywhere_is_read_or_refused(run: Any, tmp_path: Path, verb: str) -> None:
    recording = Recording(15)
    for _ in range(3):
        recording.free(recording.alloc(3 * MIB))
        recording.alloc(5 * MIB, KEPT)
    recording.oom(40 * MIB)
    rng = random.Random(3)
    path = tmp_path / "input.pickle"
    codes = set()
    for _ in range(150):
        snapshot = copy.deepcopy(recording.snapshot())
        container, key = rng.choice(list(places(snapshot)))
        container[key] = rng.choice(NONSENSE)
        path.write_bytes(pickle.dumps(snapshot))
        code, out, err = run(*command(verb, path))
        codes.add(code)
        if code == 2:
            assert_one_line_refusal(code, out, err, str(path))
    assert 2 in codes
    assert codes & {0, 1}


@pytest.mark.parametrize("verb", [*VERBS, *TIMED])
@pytest.mark.parametrize("form", [["--json"], []])
def test_output_goes_to_the_file_instead(
    run: Any, snapshots: Path, tmp_path: Path, verb: str, form: list[str]
) -> None:
    arguments = [*command(verb, snapshots / "train.pickle"), *form]
    output = tmp_path / "report"
    code, shown, _ = run(*arguments)
    assert run(*arguments, "-o", output) == (code, "", "")
    assert verb in TIMED or output.read_text() == shown
    output.write_text("precious")
    again = run(*arguments, "-o", output)
    assert_one_line_refusal(*again, f"{output}: it exists; -f overwrites it")
    assert output.read_text() == "precious"
    assert run(*arguments, "-o", output, "-f")[0] == code
    assert verb in TIMED or output.read_text() == shown
    assert not form or json.loads(output.read_text())["schema"] == 1


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("verb", VERBS)
def test_the_snapshots_of_each_release_say_the_same(
    run: Any, tmp_path: Path, verb: str, minor: int
) -> None:
    reports = []
    for release in (minor, 13):
        recording = Recording(release)
        for _ in range(4):
            recording.free(recording.alloc(30 * MIB))
            recording.alloc(5 * MIB, KEPT, stream=7)
        recording.oom(40 * MIB, device_free=MIB)
        reports.append(run(*command(verb, recording.save(tmp_path / "run.pickle"))))
    assert reports[0] == reports[1]
    assert reports[0][0] == (1 if verb in ("explain", "check") else 0)


@pytest.mark.parametrize("verb", VERBS)
def test_text_fits_the_width_of_a_page(run: Any, snapshots: Path, verb: str) -> None:
    out = run(*command(verb, snapshots / "oom.pickle"))[1]
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("verb", VERBS)
def test_torch_is_not_needed(snapshots: Path, verb: str) -> None:
    arguments = [str(word) for word in command(verb, snapshots / "train.pickle")]
    code = (
        f"import sys; from vramx.cli.main import main; code = main({arguments});"
        "sys.exit(code == 2 or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def large(path: Path, events: int) -> Path:
    """Write a snapshot of so many events; not through a Recording, which would take a minute."""
    rng = random.Random(1)
    frames = [[{**frame, "line": line} for frame in MODEL] for line in range(200)]
    records: list[dict[str, Any]] = []
    live: list[tuple[int, int]] = []
    address = 0x7F00_0000_0000

    def add(action: str, at: int, size: int) -> None:
        record = event(action, at, size, len(records))
        record |= {"compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}
        record["frames"] = rng.choice(frames) * 6  # a list of its own, of frames that are shared
        records.append(record)

    while len(records) < events:
        if len(live) < 500 or rng.random() < 0.5:
            live.append((address, rng.choice([512, 4096, MIB, 3 * MIB])))
            add("alloc", *live[-1])
            address += 4 * MIB
        else:
            freed = live.pop(rng.randrange(len(live)))
            add("free_requested", *freed)
            add("free_completed", *freed)
    segments = [
        {"device": 0, "stream": 0, "address": at, "blocks": [block(at, size, size)]}
        for at, size in sorted(live)
    ]
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [records]}, protocol=4))
    return path


@pytest.fixture(scope="module")
def large_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large(tmp_path_factory.mktemp("large") / "snapshot.pickle", EVENTS)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_large_snapshot_is_read_in_time(run: Any, large_one: Path, verb: str) -> None:
    start_s = time.process_time()
    code, _, err = run(*command(verb, large_one), "--json")
    assert time.process_time() - start_s < MOST_SECONDS[verb]
    assert code in (0, 1)
    assert err == ""


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "library"), [("html", "plotly"), ("png", "matplotlib")])
def test_a_large_snapshot_is_plotted_in_time(
    run: Any, large_one: Path, tmp_path: Path, suffix: str, library: str
) -> None:
    pytest.importorskip(library)
    start_s = time.process_time()
    code, _, err = run("plot", large_one, "-o", tmp_path / f"picture.{suffix}")
    assert (code, err) == (0, "")
    assert time.process_time() - start_s < MOST_SECONDS["plot"]
