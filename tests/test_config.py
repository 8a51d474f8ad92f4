"""The environment is read whole, once, and a value that is not understood is named."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from vramx import config
from vramx.errors import InvalidValueError


def test_every_variable_is_read() -> None:
    read = config.parse(
        {
            "VRAMX": "1",
            "VRAMX_LIMIT": "24GiB",
            "VRAMX_CROSS_STREAM": "always",
            "VRAMX_STRICT": "0",
            "VRAMX_DEVICES": "2, 0",
            "VRAMX_RECORD": "1",
            "VRAMX_VERBOSE": "1",
            "VRAMX_CACHE_DIR": "/c",
            "VRAMX_STATS": "/s",
            "XDG_CACHE_HOME": "/x",
            "CXX": "clang++",
            "CUDA_HOME": "/cuda",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
    )
    assert read == config.Config(
        enabled=True,
        limit="24GiB",
        cross_stream="always",
        strict=False,
        devices=(0, 2),
        record=True,
        verbose=True,
        cache_dir=Path("/c"),
        stats_file=Path("/s"),
        xdg_cache_home=Path("/x"),
        compiler="clang++",
        cuda_home=Path("/cuda"),
        torch_autoload=False,
    )


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("VRAMX", "yes", "0 and 1"),
        ("VRAMX_STRICT", "2", "0 and 1"),
        ("VRAMX_RECORD", "on", "0 and 1"),
        ("VRAMX_CROSS_STREAM", "sometimes", "never, under_pressure, always"),
        ("VRAMX_DEVICES", "0;1", "0,2"),
        ("VRAMX_DEVICES", "-1", "0,2"),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(name: str, value: str, accepted: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        config.parse({name: value})
    text = str(caught.value)
    assert name in text
    assert repr(value) in text
    assert accepted in text


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("VRAMX_LIMITS", "VRAMX_LIMIT"),
        ("VRAMX_DEVICE", "VRAMX_DEVICES"),
        ("VRAMX_CROSSSTREAM", "VRAMX_CROSS_STREAM"),
        ("VRAMX_limit", "VRAMX_LIMIT"),
    ],
)
def test_nearly_the_name_of_a_variable_is_told_which_it_is(name: str, meant: str) -> None:
    with pytest.raises(InvalidValueError, match=rf"{name} is no variable.* {meant}\?"):
        config.parse({name: "1"})


@pytest.mark.parametrize("name", ["VRAMX_SRC", "VRAMX_JOBS", "VRAMX_LATER", "LIMITS"])
def test_other_names_are_let_be(name: str) -> None:
    assert config.parse({name: "?"}) == config.Config()


def test_the_names_that_are_known_are_those_that_are_read_and_described() -> None:
    read: set[str] = set()

    class Environment(dict[str, str]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return default

    config.parse(Environment())
    known = {f"VRAMX_{name}" for name in config._NAMES}
    assert {name for name in read if name.startswith("VRAMX_")} == known
    described = set(re.findall(r"VRAMX_[A-Z_]+", str(config.__doc__)))
    assert described == known - {"VRAMX_ROOT_PID"}


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5"])
def test_a_root_process_that_is_no_number_is_none(text: str) -> None:
    assert config.parse({"VRAMX_ROOT_PID": text}).root_pid is None


def test_a_program_gets_the_settings_and_keeps_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/own")
    monkeypatch.setenv("KEPT", "1")
    made = config.program_environment({"VRAMX_LIMIT": "1GiB"}, Path("/entry"))
    assert made["PYTHONPATH"] == "/entry:/own"
    assert (made["VRAMX"], made["VRAMX_LIMIT"], made["KEPT"]) == ("1", "1GiB", "1")
    assert config.parse(made).root_pid == os.getpid()


def test_no_empty_entry_comes_onto_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert config.program_environment({}, Path("/entry"))["PYTHONPATH"] == "/entry"
    assert "PYTHONPATH" not in config.program_environment({})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":4096:2:16:8", (4096 * 2 + 16 * 8) << 10),
        (":16:8", 128 << 10),
        (":0:0", 0),
        ("", None),
        (":4096", None),
        ("much", None),
    ],
)
def test_the_workspace_of_cublas_is_what_torch_takes_it_for(
    text: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", text)
    assert config.cublas_workspace_bytes() == expected


def test_a_rank_is_a_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "5")
    assert config.rank() == 5
    monkeypatch.setenv("RANK", "3")
    assert config.rank() == 3
    monkeypatch.setenv("RANK", "first")
    assert config.rank() == 5
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
    assert config.rank() is None


def test_the_snapshots_of_failures_can_be_moved_and_switched_off() -> None:
    moved = config.parse({"VRAMX_OOM_DIR": "~/dumps", "VRAMX_OOM_SNAPSHOT": "0"})
    assert moved.oom_dir == Path("~/dumps").expanduser()
    assert not moved.oom_snapshot
    assert config.parse({}).oom_snapshot
    with pytest.raises(InvalidValueError, match="VRAMX_OOM_SNAPSHOT='no'"):
        config.parse({"VRAMX_OOM_SNAPSHOT": "no"})
