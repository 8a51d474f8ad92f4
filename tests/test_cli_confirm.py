"""`vramx explain --confirm`: each advised remedy is run, and what it held beside what was said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from samples import assert_one_line_refusal
from snapshot_writer import KEPT, MIB, Recording

from vramx.cli import confirm

pytestmark = pytest.mark.usefixtures("compiled")

# A program that holds what a file says, and writes it as a process under the allocator does.
PROGRAM = """
import json, os, sys
from pathlib import Path
policy = os.environ["VRAMX_ALLOCATOR"]
if policy == "torch":
    conf = os.environ["PYTORCH_CUDA_ALLOC_CONF"]
    name = "expandable" if "expandable_segments:True" in conf else "native"
else:
    name = "vramx"
held = json.loads(Path(sys.argv[1]).read_text())[name]
print("the program's own output")
assert os.environ["VRAMX"] == "1"
for rank, size in enumerate(held["bytes"]):
    text = json.dumps({"allocator": held.get("allocator", policy), "bytes": {"0": size}})
    (Path(os.environ["VRAMX_PEAKS"]) / f"{rank}.json").write_text(text)
sys.exit(held.get("code", 0))
"""


@pytest.fixture
def compiled() -> None:
    pytest.importorskip("vramx._core", reason="the compiled core is not built")


@pytest.fixture
def oom(tmp_path: Path) -> Path:
    """A failure of torch's allocator by fragmentation: 30 MiB are free in pieces."""
    recording = Recording()
    addresses = [recording.alloc(12 * MIB, KEPT) for _ in range(6)]
    for address in addresses[::2]:
        recording.free(address)
    recording.oom(30 * MIB, device_free=0)
    return recording.save(tmp_path / "oom.pickle")


def said(run: Any, path: Path) -> dict[str, int]:
    """Return what each policy is said to hold."""
    report = json.loads(run("explain", path, "--json")[1])
    return {each["policy"]: each["expected_reserved_bytes"] for each in report["remedies"]}


@pytest.fixture
def expected(run: Any, oom: Path) -> dict[str, int]:
    return said(run, oom)


@pytest.fixture
def confirmed(run: Any, oom: Path, tmp_path: Path) -> Any:
    script, plan = tmp_path / "program.py", tmp_path / "held.json"
    script.write_text(PROGRAM)

    def confirm_with(held: dict[str, Any], *options: Any, of: Path = oom) -> tuple[int, str, str]:
        plan.write_text(json.dumps(held))
        command = ("--", sys.executable, script, plan)
        result: tuple[int, str, str] = run("explain", of, "--confirm", *options, *command)
        return result

    return confirm_with


def test_what_holds_as_said_is_confirmed(confirmed: Any, expected: dict[str, int]) -> None:
    held = {policy: {"bytes": [size // 2, size]} for policy, size in expected.items()}
    code, out, err = confirmed(held, "--json")
    found = json.loads(out)["confirmed"]
    assert code == 0
    assert [each["policy"] for each in found] == ["vramx"]
    assert found[0]["measured_bytes"] == found[0]["expected_bytes"] == expected["vramx"]
    assert found[0]["ok"]
    assert "running" in err


def test_text_has_both_figures_and_the_difference(confirmed: Any, expected: dict[str, int]) -> None:
    held = {"vramx": {"bytes": [int(expected["vramx"] * 1.03)]}}
    code, out, _ = confirmed(held)
    assert code == 1
    line = next(each for each in out.splitlines() if "off by more than 2%" in each)
    assert "+3.0%" in line
    assert f"{expected['vramx'] / (1 << 30):.3f} GiB" in line
    assert "the program's own output" not in out


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"bytes": [1], "code": 3}, "it failed: exit code 3"),
        ({"bytes": []}, "no process of it used CUDA and came to its end"),
        ({"bytes": [1], "allocator": "torch"}, "it ran under another allocator"),
    ],
)
def test_a_run_that_shows_nothing_confirms_nothing(
    confirmed: Any, held: dict[str, Any], says: str
) -> None:
    code, out, _ = confirmed({"vramx": held})
    assert code == 1
    assert says in out


def test_each_policy_of_a_run_without_a_failure_is_tried(
    run: Any, confirmed: Any, snapshots: Path
) -> None:
    sizes = said(run, snapshots / "train.pickle")
    held = {name: {"bytes": [size]} for name, size in sizes.items()}
    code, out, _ = confirmed(held, of=snapshots / "train.pickle")
    assert code == 0
    assert out.count("as said") == 2
    assert out.count("+0.0%") == 2


def test_the_given_capacity_bounds_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:False")
    found = confirm.environment_of("expandable", tmp_path, 123 * MIB, sys.executable)
    assert found["VRAMX_LIMIT"] == str(123 * MIB)
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64,expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in found
    assert found["VRAMX_ALLOCATOR"] == "torch"


def test_a_command_that_is_none_is_one_line(run: Any, oom: Path) -> None:
    code, out, err = run("explain", oom, "--confirm", "--", "/nowhere/program")
    assert (code, out) == (2, "")
    assert "/nowhere/program cannot be run: No such file" in err


def test_confirm_needs_a_command_and_a_command_needs_confirm(run: Any, oom: Path) -> None:
    for words in (("--confirm",), ("--", "python", "train.py"), ("--confirm", "--")):
        assert_one_line_refusal(*run("explain", oom, *words), "--confirm and -- COMMAND")
