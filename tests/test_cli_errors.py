"""The command line with wrong arguments, bad files and a hostile shell: one line, exit 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
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


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--capacity", "1MiB"], "capacity 1.00 MiB is less than one chunk; 2 MiB or more"),
        (["--capacity", "0"], "less than one chunk"),
        (["--capacity", "24Gi"], "KiB, MiB, GiB or TiB"),
        (["--capacity", "-1GiB"], "--capacity"),
        (["--policy", "jemalloc"], "accepted are 'live', 'native', 'expandable' and 'vramx'"),
        (["--policy", ""], "accepted are 'live', 'native', 'expandable' and 'vramx'"),
        (["--driver", "vulkan"], "'sim', 'cuda'"),
        (["--driver", "cuda", "--policy", "vramx"], "no CUDA device"),
        (["--device", "-1"], "--device"),
        (["--device", "x"], "'x' is no device number"),
        (["--colour"], "unrecognized arguments: --colour"),
        (["absent.npz"], "absent.npz: cannot be read: No such file or directory"),
        (["."], ".: it is a directory"),
    ],
)
def test_wrong_arguments_are_refused(
    run: Any, traces: Path, arguments: list[str], what: str
) -> None:
    code, out, err = run("replay", traces / SMALL, *arguments)
    assert_one_line_refusal(code, out, err, what)


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


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(vramx.__file__).parent.parent
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
    )


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
    assert python("-c", code).stdout == "[]\n"


def test_python_m_vramx_is_the_command() -> None:
    result = python("-m", "vramx", "--version")
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
