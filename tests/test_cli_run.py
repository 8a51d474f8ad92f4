"""`vramx run` becomes the program, with the allocator on its way and nothing else changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from child_processes import python
from samples import assert_one_line_refusal

import vramx
from vramx import config
from vramx.allocator import shim_build
from vramx.cli import entry_folder
from vramx.cli import run as run_verb
from vramx.config import Config
from vramx.errors import ShimError

BUILD = run_verb._build_shim


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], Any]]:
    """What would have been started, in place of starting it: commands with their environments."""
    found: list[tuple[list[str], Any]] = []
    settings = Config(cache_dir=tmp_path / "cache")
    monkeypatch.setattr(config, "config", lambda: settings)
    monkeypatch.setattr(run_verb, "_build_shim", lambda: None)
    monkeypatch.setattr(run_verb, "_unserved", lambda program: "")
    monkeypatch.setattr(run_verb.entry_folder, "finds_entry_point", lambda python: True)
    monkeypatch.setattr(
        run_verb.os, "execvpe", lambda file, words, variables: found.append((words, variables))
    )
    return found


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["train.py", "--limit", "3"], [sys.executable, "train.py", "--limit", "3"]),
        (["-m", "package.train", "-m", "x"], [sys.executable, "-m", "package.train", "-m", "x"]),
        (["--", "env", "--", "-x"], ["env", "--", "-x"]),
        (["--limit", "4GiB", "--record", "a.py"], [sys.executable, "a.py"]),
        (["--limit=4GiB", "--", "env", "a.py", "-h"], ["env", "a.py", "-h"]),
    ],
)
def test_what_follows_the_program_is_the_programs(
    run: Any, started: list[Any], arguments: list[str], command: list[str]
) -> None:
    run("run", *arguments)
    words, _ = started[0]
    assert [os.path.basename(words[0]), *words[1:]] == [os.path.basename(command[0]), *command[1:]]


def test_options_become_variables_that_are_read_back(
    run: Any, started: list[Any], tmp_path: Path
) -> None:
    stats = tmp_path / "stats.json"
    run(
        "run", "--limit", "0.9", "--cross-stream", "always", "--devices", "1,0", "--record",
        "--stats", stats, "train.py",
    )  # fmt: skip
    read = config.parse(started[0][1])
    assert read.enabled
    assert (read.limit, read.cross_stream, read.devices) == ("0.9", "always", (0, 1))
    assert (read.record, read.stats_file, read.root_pid) == (True, stats, os.getpid())


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "what to run is missing"),
        (["-m"], "what to run is missing"),
        (["--"], "what to run is missing"),
        (["--limit", "24Gi", "a.py"], "KiB, MiB, GiB or TiB"),
        (["--limit", "1.5", "a.py"], "--limit"),
        (["--cross-stream", "now", "a.py"], "'never', 'under_pressure', 'always'"),
        (["--devices", "a", "a.py"], "no list of device numbers"),
        (["--colour", "a.py"], "unrecognized arguments: --colour; accepted are --help, --limit,"),
        (["-u", "a.py"], "options of Python go with it, as in vramx run -- python -u ..."),
        (["env", "a.py", "x y"], "env is a command and no script; write: vramx run -- env a.py"),
        (["--stats", "/no/folder/s.json", "a.py"], "the folder /no/folder does not exist"),
        (["--", "no-such-command-here"], "no-such-command-here: no such command"),
    ],
)
def test_wrong_usage_is_one_line(
    run: Any, started: list[Any], arguments: list[str], what: str
) -> None:
    code, out, err = run("run", *arguments)
    assert_one_line_refusal(code, out, err, what)
    assert not started


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [("VRAMX_STRICT", "maybe", "VRAMX_STRICT='maybe'"), ("VRAMX_LIMIT", "much", "VRAMX_LIMIT: ")],
)
def test_a_bad_variable_is_refused_before_the_start(
    run: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch, name: str, text: str, what: str
) -> None:
    monkeypatch.setattr(config, "config", lambda: config.parse({name: text}))
    code, out, err = run("run", "train.py")
    assert_one_line_refusal(code, out, err, what)
    assert not started


def test_a_shim_that_cannot_be_built_is_said_and_the_program_runs(
    run: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(settings: Config) -> Path:
        raise ShimError("no C++ compiler\nmore")

    monkeypatch.setattr(run_verb, "_build_shim", BUILD)
    monkeypatch.setattr(run_verb, "find_torch", _Torch)
    monkeypatch.setattr(run_verb, "_no_gpu", lambda: "")
    monkeypatch.setattr(shim_build, "ensure_shim", fail)
    monkeypatch.setattr(shim_build, "shim_status", lambda c: shim_build.ShimStatus("2", None, "x"))
    _, _, err = run("run", "train.py")
    assert err == "vramx run: the allocator will not be installed: no C++ compiler\n"
    assert started


class _Torch:
    version, cuda = "2.11.0+cu130", "13.0"


class _HostTorch:
    version, cuda = "2.11.0+cpu", None


@pytest.mark.parametrize(
    ("torch", "devices", "what"),
    [
        (_HostTorch, [{}], "torch 2.11.0+cpu is built without CUDA"),
        (_Torch, [], "there is no GPU here (no driver)"),
        (_Torch, [{}], ""),
    ],
)
def test_why_nothing_is_served_is_said_before_the_start(
    monkeypatch: pytest.MonkeyPatch, torch: Any, devices: list[Any], what: str
) -> None:
    core = pytest.importorskip("vramx._core", reason="the compiled core is not built")
    monkeypatch.setattr(run_verb, "find_torch", torch)
    monkeypatch.setattr(core, "probe_cuda", lambda: {"devices": devices, "error": "no driver"})
    assert run_verb._unserved(Path(sys.executable)) == what


def test_where_nothing_is_served_nothing_is_compiled(
    run: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    monkeypatch.setattr(run_verb, "_build_shim", lambda: built.append(1))
    for reason in ("there is no GPU here", ""):
        monkeypatch.setattr(run_verb, "_unserved", lambda _, reason=reason: reason)
        run("run", "train.py")
        assert len(built) == (not reason)
    assert len(started) == 2


def test_a_compiled_program_on_libtorch_is_told_apart(run: Any, tmp_path: Path) -> None:
    program = tmp_path / "trainer"
    program.write_bytes(b"\x7fELF" + bytes(100) + b"libtorch_cuda.so\0libc.so.6\0")
    assert "trainer is a compiled program on LibTorch" in run_verb._unserved(program)
    for other in (b"\x7fELF\0libc.so.6\0", b"#!/bin/sh\nls libtorch.so\n", b""):
        program.write_bytes(other)
        assert not run_verb._is_of_libtorch(program)


def test_torch_is_told_to_look_where_it_was_told_not_to(
    run: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "config", lambda: Config(torch_autoload=False))
    _, _, err = run("run", "train.py")
    assert started[0][1][config.TORCH_AUTOLOAD] == "1"
    assert config.TORCH_AUTOLOAD in err


# --- the folder with the entry point --------------------------------------------------------------


def test_the_folder_comes_onto_the_path_only_where_it_is_needed(
    run: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    run("run", "train.py")
    assert "PYTHONPATH" not in started[0][1]
    monkeypatch.setattr(entry_folder, "finds_entry_point", lambda python: False)
    run("run", "train.py")
    folder = Path(started[1][1]["PYTHONPATH"])
    assert folder.parent == tmp_path / "cache" / "entry"
    found = {path.name for path in folder.iterdir()}
    assert found == {"vramx", f"vramx-{vramx.__version__}.dist-info"}


def test_a_python_finds_vramx_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "empty"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_autoload.py").write_text("def _autoload(): pass\n")
    monkeypatch.setattr(entry_folder, "_PACKAGE", package)
    folder = entry_folder.make(Config(cache_dir=tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    assert entry_folder.finds_entry_point(sys.executable)


def test_the_folder_is_made_once(tmp_path: Path) -> None:
    settings = Config(cache_dir=tmp_path)
    folder = entry_folder.make(settings)
    before = folder.stat().st_ino
    assert entry_folder.make(settings) == folder
    assert folder.stat().st_ino == before
    assert len(list(folder.parent.iterdir())) == 1


def test_the_python_of_a_command_is_that_of_its_first_line(tmp_path: Path) -> None:
    script = tmp_path / "torchrun"
    for first, expected in [
        ("#!/opt/env/bin/python3.12", "/opt/env/bin/python3.12"),
        ("#!/usr/bin/env python3", "python3"),
        ("#!/bin/sh", sys.executable),
        ("\x7fELF", sys.executable),
    ]:
        script.write_text(f"{first}\n")
        assert entry_folder.python_of(str(script)) == expected
    assert entry_folder.python_of("/usr/bin/python3") == "/usr/bin/python3"
    assert entry_folder.python_of(str(tmp_path / "absent")) == sys.executable


# --- real processes -------------------------------------------------------------------------------


def vramx_run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(vramx.__file__).parent.parent)
    environment = {**os.environ, "VRAMX_CACHE_DIR": str(folder / "cache"), **variables}
    environment["ROOT"] = root
    launcher = f"import sys; sys.path[0] = {root!r}; from vramx.cli.main import main; main()"
    return python("-c", launcher, "run", *arguments, cwd=folder, env=environment, timeout=120)


def test_a_program_runs_unchanged_with_the_hook_in_place(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "assert 'vramx._autoload' in sys.modules\n"
        "print(sys.argv, __name__, torch.ones(3).sum().item())\n"
        "sys.exit(7)\n"
    )
    done = vramx_run(tmp_path, "train.py", "--lr", "3", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout == "['train.py', '--lr', '3'] __main__ 3.0\n", done.stderr
    assert done.returncode == 7
    # The variable that was turned; and what is compiled, or why nothing is.
    said = done.stderr.splitlines()
    assert all(line.startswith("vramx run: ") for line in said)
    assert len(said) <= 2


def test_settings_reach_the_program_and_signals_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import os, signal; print(os.environ['VRAMX'], os.environ['VRAMX_LIMIT'], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = vramx_run(tmp_path, "--limit", "2GiB", "a.py")
    assert (done.stdout, done.returncode) == ("1 2GiB\n", -signal.SIGTERM)
