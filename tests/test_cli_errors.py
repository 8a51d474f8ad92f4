"""The command line with wrong arguments, bad files and a hostile shell: one line, exit 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from child_processes import python
from samples import SMALL, assert_one_line_refusal, small_trace

import vramx


def changed_first(name: str, value: int) -> dict[str, Any]:
    array = small_trace()[name]
    array[0] = value
    return {name: array}


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(
    "changes",
    [
        changed_first("op", 3),
        changed_first("op", 2),
        changed_first("size", 1 << 63),
        changed_first("id", 1),
        {"op": np.array([0, 0, 2, 2], np.uint8)},
        {"id": np.array([0, 1, 7, 7], np.uint32)},
    ],
    ids=["op 3", "free first", "size 2^63", "id reused", "freed twice", "unknown id"],
)
def test_events_that_contradict_each_other_are_refused(
    run: Any, write_trace: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = write_trace(**changes)
    output = tmp_path / "report.json"
    code, out, err = run("replay", path, "--json", "-o", output)
    assert_one_line_refusal(code, out, err, f"vramx replay: {path}: ")
    assert "event" in err
    assert not output.exists()


# Without a file of its own, each is given a recorded program, or a snapshot of one.
REFUSED = [
    ("replay --capacity 1MiB", "capacity 1.00 MiB is less than one chunk; 2 MiB or more"),
    ("replay --capacity 0", "less than one chunk"),
    ("replay --capacity 24Gi", "KiB, MiB, GiB or TiB"),
    ("replay --capacity -1GiB", "--capacity"),
    ("replay --policy jemalloc", "accepted are 'live', 'native', 'expandable' and 'vramx'"),
    ("replay --policy=", "accepted are 'live', 'native', 'expandable' and 'vramx'"),
    ("replay --driver vulkan", "'sim', 'cuda'"),
    ("replay --driver cuda --policy vramx", "no CUDA device"),
    ("replay --device -1", "--device"),
    ("replay --device x", "'x' is no device number"),
    ("replay --colour", "unrecognized arguments: --colour"),
    ("replay absent.npz", "absent.npz: cannot be read: No such file or directory"),
    ("replay .", ".: it is a directory"),
    ("plot", "-o FILE.png"),
    ("plot -o x.svg", "x.svg: the name ends in"),
    ("explain --capacity 1MiB", "is less than one chunk"),
    ("check", "--baseline JSON or --limit SIZE is needed"),
    ("check --limit 1GiB --update", "--update needs the first"),
    ("check --limit much", "size 'much' is not understood"),
    ("check --limit 1GiB --tolerance 4", "'4' is no tolerance; a percentage as in 2%"),
    ("check --baseline absent/mem.json --update", "the folder absent does not exist"),
    ("diff", "one snapshot cannot be compared"),
    ("diff absent.pickle", "absent.pickle: cannot be read"),
    ("diff --steps 0", "'0' is no number of steps"),
    ("stats --at noon", "'noon' is no moment; accepted are peak, end, oom and 0, 1, ..."),
    ("stats --at 99999", "event 99999 is not in train.pickle; accepted are -1 to"),
    ("stats --at oom", "no request failed in train.pickle"),
    ("stats --by colour", "invalid choice: 'colour'"),
    ("stats -n 0", "'0' is no number of lines"),
    ("stats --snapshot-device 3", "holds no events of device 3"),
]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("words", "what"), REFUSED)
def test_wrong_arguments_are_refused(
    run: Any, traces: Path, snapshots: Path, words: str, what: str
) -> None:
    verb, *arguments = words.split()
    path = traces / SMALL if verb in ("replay", "plot") else snapshots / "train.pickle"
    assert_one_line_refusal(*run(verb, path, *arguments), what)


def test_a_verb_is_needed_that_exists(run: Any) -> None:
    code, out, err = run("reply")
    assert_one_line_refusal(code, out, err, "invalid choice: 'reply'")


def test_a_missing_core_is_said_in_one_line(
    run: Any, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vramx._core", None)
    monkeypatch.delattr(vramx, "_core", raising=False)
    code, out, err = run("replay", traces / SMALL)
    assert_one_line_refusal(code, out, err, "the compiled core cannot be loaded")


def test_a_verb_that_cannot_be_imported_leaves_the_others_alone(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vramx.cli.plot", None)
    code, out, err = run("plot", "x.npz")
    assert_one_line_refusal(code, out, err, "vramx plot: not available in this installation")
    code, out, _ = run("--help")
    assert code == 0
    assert "replay" in out


def test_an_interrupt_exits_130(
    run: Any, traces: Path, stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stand_in.Replay, "run", interrupt)
    assert run("replay", traces / SMALL) == (130, "", "vramx replay: interrupted\n")


ROOT = Path(vramx.__file__).parent.parent


@pytest.mark.parametrize(
    "modules",
    [
        "vramx",
        "vramx.callbacks; dir(vramx.callbacks)",
        "vramx.compression.config",
        "vramx.testing.plugin, vramx.testing.hooks",
    ],
)
def test_importing_imports_nothing_large(modules: str) -> None:
    large = {"torch", "triton", "numpy", "rich", "transformers", "lightning", "accelerate"}
    code = f"import sys, {modules}; print(sorted({large} & set(sys.modules)))"
    assert python("-c", code, cwd=ROOT).stdout == "[]\n"


def test_python_m_vramx_is_the_command() -> None:
    result = python("-m", "vramx", "--version", cwd=ROOT)
    assert (result.returncode, result.stdout) == (0, f"vramx {vramx.__version__}\n")


def shell(script: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which $VRAMX is the command on the stand-in for the core."""
    tests = Path(__file__).parent
    launcher = (
        f"import sys; sys.path[:0] = [{str(tests)!r}, {str(tests.parent)!r}];"
        "import core_stand_in, vramx; vramx._core = core_stand_in;"
        "sys.modules['vramx._core'] = core_stand_in;"
        "from vramx.cli.main import main; sys.exit(main())"
    )
    return subprocess.run(
        ["bash", "-c", f'vramx() {{ "{sys.executable}" -c "{launcher}" "$@"; }}; {script}'],
        check=False,
        cwd=tests / "traces",
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        ("--json | true; exit ${PIPESTATUS[0]}", 141, ""),  # the reader has gone away
        ("> /dev/full", 2, "vramx replay: cannot write the output: No space left on device\n"),
        (">&-", 0, ""),
    ],
)
def test_an_output_that_takes_nothing_is_met_in_a_line_or_in_silence(
    where: str, code: int, said: str
) -> None:
    result = shell(f"vramx replay {SMALL} {where}")
    assert (result.returncode, result.stderr) == (code, said)
