"""The environment's settings: defaults, values, and what is not accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from vramx.config import Settings
from vramx.errors import InvalidValueError


def test_an_empty_environment_asks_for_nothing() -> None:
    settings = Settings.from_environment({})
    assert not settings.autoload
    assert settings.limit_bytes is None
    assert settings.cache_dir == Path.home() / ".cache" / "vramx"


@pytest.mark.parametrize(("value", "autoload"), [("", False), ("0", False), ("1", True)])
def test_vramx_switches_autoload(value: str, autoload: bool) -> None:
    assert Settings.from_environment({"VRAMX": value}).autoload is autoload


def test_a_limit_is_a_size() -> None:
    assert Settings.from_environment({"VRAMX_LIMIT": "1.5GiB"}).limit_bytes == 3 << 29


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CACHE_HOME": "/x"}, "/x/vramx"),
        ({"XDG_CACHE_HOME": "/x", "VRAMX_CACHE_DIR": "/y"}, "/y"),
    ],
)
def test_the_cache_folder_can_be_moved(variables: dict[str, str], folder: str) -> None:
    assert Settings.from_environment(variables).cache_dir == Path(folder)


@pytest.mark.parametrize(("name", "value"), [("VRAMX", "yes"), ("VRAMX_LIMIT", "24GB")])
def test_other_values_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidValueError, match=name):
        Settings.from_environment({name: value})


def test_the_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAMX", "1")
    assert Settings.from_environment().autoload
