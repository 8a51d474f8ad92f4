"""What can be chosen about the allocator, checked before anything is done.

Arguments come from a call and, where the call leaves a choice at its default, from the environment:
`vramx run --limit 24GiB train.py` holds for a program that calls install_allocator() by itself. The
result is one frozen value that two installations can be compared by. Pure functions; neither torch
nor a GPU is asked, so a fraction stays one until the device is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vramx.config import CROSS_STREAM, Config
from vramx.errors import InvalidValueError, brief, refused
from vramx.sizes import MIB, format_size, parse_size

DEFAULT_CROSS_STREAM = "under_pressure"
# What the core takes for "no limit".
NO_LIMIT = (1 << 64) - 1
CURRENT_DEVICE = -2  # what "cuda" without a number means
_MIN_LIMIT_BYTES = 2 * MIB  # one chunk: below it nothing can be allocated at all
_FRACTION = re.compile(r"\s*(?:0?\.\d+|1\.0*)\s*")
_DEVICE = re.compile(r"(?:cuda:)?(\d{1,4})|cuda")
_LIMIT_ACCEPTED = (
    "accepted are None, bytes, a size in KiB, MiB, GiB or TiB as in '24GiB', or a fraction of each "
    "device as in 0.9"
)

# Bytes (int) or a fraction of a device (float above 0, up to 1).
Limit = int | float


@dataclass(frozen=True)
class Options:
    """How the allocator of this process behaves, from its installation on."""

    limit: Limit | None = None
    devices: tuple[int, ...] | None = None
    cross_stream: str = DEFAULT_CROSS_STREAM
    record: bool = False

    def __str__(self) -> str:
        devices = "all" if self.devices is None else ",".join(map(str, self.devices))
        return (
            f"limit={format_limit(self.limit)}, devices={devices}, "
            f"cross_stream={self.cross_stream}, record={self.record}"
        )


def choose(
    limit: int | float | str | None,
    devices: Iterable[int] | None,
    cross_stream: str,
    record: bool,
    config: Config,
) -> Options:
    """Check what a call asks for, and fill in from the environment what it leaves open.

    Raises:
        InvalidValueError: a value is not accepted.
    """
    return Options(
        limit=environment_limit(config) if limit is None else parse_limit(limit),
        devices=config.devices if devices is None else _parse_devices(devices),
        cross_stream=_parse_cross_stream(cross_stream, config),
        record=switch("record", record) or config.record,
    )


def switch(name: str, value: object) -> bool:
    """Return what is True or False.

    Raises:
        InvalidValueError: it is neither. "no" and "0" are true to Python.
    """
    if not isinstance(value, bool):
        raise refused(name, value, "are True and False")
    return value


def environment_limit(config: Config) -> Limit | None:
    """Read the limit that the environment asks for.

    Raises:
        InvalidValueError: VRAMX_LIMIT holds what is no limit; the text names it.
    """
    try:
        return parse_limit(config.limit)
    except InvalidValueError as error:
        raise InvalidValueError(f"VRAMX_LIMIT: {error}") from None


def parse_limit(limit: int | float | str | None) -> Limit | None:
    """Read a limit: None, bytes, a size in words, or a fraction of a device.

    Raises:
        InvalidValueError: it is none of them, or less than one chunk of 2 MiB.

    Example:
        >>> parse_limit("24GiB"), parse_limit("0.5")
        (25769803776, 0.5)
    """
    if limit is None:
        return None
    if isinstance(limit, float) or (isinstance(limit, str) and _FRACTION.fullmatch(limit)):
        fraction = float(limit)
        if not 0.0 < fraction <= 1.0:
            raise InvalidValueError(f"limit {limit!r} is out of range; {_LIMIT_ACCEPTED}")
        return fraction
    if isinstance(limit, bool) or not isinstance(limit, (int, str)):
        raise InvalidValueError(
            f"limit {limit!r} is of type {type(limit).__name__}; {_LIMIT_ACCEPTED}"
        )
    try:
        limit_bytes = parse_size(limit)
    except InvalidValueError:
        raise InvalidValueError(
            f"limit {brief(limit)} is not understood; {_LIMIT_ACCEPTED}"
        ) from None
    if limit_bytes < _MIN_LIMIT_BYTES:
        raise InvalidValueError(
            f"limit {limit!r} is {format_size(limit_bytes)}, less than one chunk of 2 MiB; "
            f"{_LIMIT_ACCEPTED}"
        )
    return limit_bytes


def limit_in_bytes(limit: Limit | None, device_bytes: int) -> int:
    """Return what the core takes for a limit on a device of `device_bytes`."""
    if limit is None:
        return NO_LIMIT
    # A fraction of the whole rounds down, so that 1.0 never asks for more than there is.
    return int(device_bytes * limit) if isinstance(limit, float) else limit


def format_limit(limit: Limit | None) -> str:
    """Write a limit as people do."""
    if limit is None:
        return "none"
    return f"{limit:.4g} of each device" if isinstance(limit, float) else format_size(limit)


def _parse_devices(devices: Any) -> tuple[int, ...]:
    accepted = "accepted is a list of device numbers, as in [0, 2]"
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise InvalidValueError(f"devices {devices!r} is no list; {accepted}")
    numbers = tuple(devices)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise InvalidValueError(f"devices holds {number!r}; {accepted}")
    if not numbers:
        raise InvalidValueError(f"devices is empty; {accepted}, or None for all")
    return tuple(sorted(set(numbers)))


def _parse_cross_stream(cross_stream: str, config: Config) -> str:
    if cross_stream not in CROSS_STREAM:
        raise refused("cross_stream", cross_stream, CROSS_STREAM)
    if cross_stream == DEFAULT_CROSS_STREAM and config.cross_stream is not None:
        return config.cross_stream
    return cross_stream


def device_index(device: Any) -> int | None:
    """Return the number of a device: of 1, "cuda:1" or torch.device("cuda", 1).

    None stays None, and what names CUDA without a number ("cuda") is CURRENT_DEVICE.

    Raises:
        InvalidValueError: it names no CUDA device.
    """
    if device is None:
        return None
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    # A torch.device writes itself as "cuda:1"; torch need not be imported to read that.
    if (match := _DEVICE.fullmatch(str(device))) and not isinstance(device, (bool, int)):
        return int(match[1]) if match[1] else CURRENT_DEVICE
    raise InvalidValueError(
        f"device {device!r} is no CUDA device; accepted are None, 1, 'cuda:1' and torch.device"
    )
