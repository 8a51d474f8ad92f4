"""What the environment says, read in this file and in no other.

The answer is an immutable value; whoever needs it asks once and keeps it with what it shaped.
Nothing here imports torch or numpy: the autoload hook calls it in every process that imports
torch, so a call costs one dictionary lookup for each setting.

    VRAMX=1            install the allocator when torch is imported (`vramx run` sets it)
    VRAMX_LIMIT=24GiB  the most that the allocator may take from a device
    VRAMX_CACHE_DIR    where compiled parts are kept; $XDG_CACHE_HOME/vramx or ~/.cache/vramx
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vramx.errors import InvalidValueError
from vramx.sizes import parse_size

_SWITCH = {"": False, "0": False, "1": True}


@dataclass(frozen=True)
class Settings:
    """The environment's settings, checked."""

    autoload: bool
    limit_bytes: int | None
    cache_dir: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings, from os.environ unless another mapping is given.

        Raises:
            InvalidValueError: a variable has a value that is not accepted; the text names both.

        Example:
            >>> Settings.from_environment({"VRAMX_LIMIT": "1GiB"}).limit_bytes
            1073741824
        """
        variables = os.environ if environment is None else environment
        return cls(
            autoload=_switch(variables, "VRAMX"),
            limit_bytes=_size(variables, "VRAMX_LIMIT"),
            cache_dir=_cache_dir(variables),
        )


def _switch(variables: Mapping[str, str], name: str) -> bool:
    value = variables.get(name, "")
    if value not in _SWITCH:
        raise InvalidValueError(f"{name}={value!r} is not understood; accepted are 0 and 1")
    return _SWITCH[value]


def _size(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(name, "")
    if not value:
        return None
    try:
        return parse_size(value)
    except InvalidValueError as error:
        raise InvalidValueError(f"{name}: {error}") from None


def _cache_dir(variables: Mapping[str, str]) -> Path:
    if chosen := variables.get("VRAMX_CACHE_DIR"):
        return Path(chosen)
    base = variables.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vramx"
