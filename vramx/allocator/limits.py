"""Bounding what the allocator holds, and having it give memory back.

A limit that is a fraction needs the size of a device, which only the driver knows, and asking the
driver would fix the visible devices and spoil a later fork. So until CUDA is initialised limits
with a fraction among them wait for that moment, and are then set in the order they were asked for.
Thread-safe; setting is one call into the shim, and a device that holds more than a lowered limit
gives back what it can at its next growth.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

from vramx.allocator import cuda_init
from vramx.allocator.install import Installation, current, current_device
from vramx.allocator.options import CURRENT_DEVICE, Limit, device_index, limit_in_bytes, parse_limit
from vramx.allocator.shim import ALL_DEVICES
from vramx.errors import InstallError
from vramx.sizes import format_size

_log = logging.getLogger("vramx")
_lock = threading.Lock()
_waiting: list[tuple[Limit | None, int | None]] = []


@dataclass(frozen=True)
class DefragmentReport:
    """What a defragmentation did, over the devices that it was asked for."""

    aliases_collected: int = 0
    alias_address_bytes: int = 0
    extents_before: int = 0
    extents_after: int = 0
    chunks_released: int = 0
    released_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"{format_size(self.released_bytes)} given back in {self.chunks_released} chunks; "
            f"free extents {self.extents_before} -> {self.extents_after}; "
            f"{self.aliases_collected} aliases collected"
        )


def set_limit(limit: int | float | str | None, device: Any = None) -> None:
    """Bound what vramx and torch's own allocator hold of a device together.

    torch.cuda.set_per_process_memory_fraction is a bound of its own; the lower one holds.

    Args:
        limit: bytes, a size ("24GiB"), a fraction of the device (0.9), or None to lift it.
        device: None for every device, else 1, "cuda:1" or a torch.device.

    Raises:
        InvalidValueError: the limit or the device is not accepted.
        NotInstalledError: the allocator is not installed.

    Sync: none.

    Example:
        >>> vramx.set_limit("20GiB")      # doctest: +SKIP
    """
    current()
    apply(parse_limit(limit), _chosen(device))


def defragment(device: Any = None) -> DefragmentReport:
    """Collect what is idle, join free memory and give whole free chunks back to the driver.

    Needed only to make room for another process, or for a library that allocates by itself: the
    allocator does all of it on its own before it runs out of memory. Moves nothing.

    Args:
        device: None for every device that has allocated, else 1, "cuda:1" or a torch.device.

    Raises:
        InvalidValueError: it is no device.
        NotInstalledError: the allocator is not installed.

    Sync: waits for the device.

    Example:
        >>> print(vramx.defragment())      # doctest: +SKIP
        1.50 GiB given back in 12 chunks; free extents 40 -> 7; 3 aliases collected
    """
    chosen = _chosen(device)
    report = current().devices.defragment(ALL_DEVICES if chosen is None else chosen)
    return DefragmentReport(**report)


def apply(limit: Limit | None, device: int | None) -> None:
    """Set a limit now, or when the sizes of the devices are known. `device` None is all of them."""
    with _lock:
        _waiting.append((limit, device))
        if any(isinstance(waiting, float) for waiting, _ in _waiting) and cuda_init.run_before(
            _set_waiting
        ):
            return
    _set_waiting()


def _set_waiting() -> None:
    installed = current()
    with _lock:
        for limit, device in _waiting:
            for index, limit_bytes in _resolve(installed, limit, device).items():
                _set(installed, index, limit_bytes)
        _waiting.clear()


def _resolve(installed: Installation, limit: Limit | None, device: int | None) -> dict[int, int]:
    """Return the limit in bytes for each device that it is for."""
    if not isinstance(limit, float):
        return {ALL_DEVICES if device is None else device: limit_in_bytes(limit, 0)}
    sizes = device_sizes()
    if device is not None and device not in sizes:
        raise InstallError(f"the size of device {device} is not known, so no fraction of it")
    chosen = sizes if device is None else {device: sizes[device]}
    served = installed.options.devices
    return {
        index: limit_in_bytes(limit, size)
        for index, size in chosen.items()
        if served is None or index in served
    }


def _set(installed: Installation, device: int, limit_bytes: int) -> None:
    if installed.shim is not None:
        installed.shim.set_limit(device, limit_bytes)
    else:
        installed.devices.set_limit(device, limit_bytes)
    _log.info("vramx: limit of device %s: %s", device, format_size(limit_bytes))


def device_sizes() -> dict[int, int]:
    """Return the bytes of each device, from the driver."""
    from vramx import _core

    devices = _core.probe_cuda()["devices"]
    return {index: device["total_bytes"] for index, device in enumerate(devices)}


def _chosen(device: Any) -> int | None:
    index = device_index(device)
    return current_device() if index == CURRENT_DEVICE else index
