"""What the allocator has done and holds, as one frozen value.

Bytes and counts of one device: the core's own, and beside them what torch's native allocator holds
behind it for CUDA graphs, memory pools and tensors from before the installation. Figures that
torch.cuda.memory_stats has as well are the same there, summed over both. Reading takes the device's
lock for a microsecond; it neither initialises CUDA nor waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vramx.allocator.install import Installation, current, current_device
from vramx.allocator.options import CURRENT_DEVICE, device_index
from vramx.sizes import format_size


@dataclass(frozen=True)
class DriverCalls:
    """Calls of the driver's memory functions since the start, and the time inside them."""

    create: int = 0
    map: int = 0
    set_access: int = 0
    unmap: int = 0
    release: int = 0
    time_us: float = 0.0


@dataclass(frozen=True)
class AllocatorStats:
    """One device's memory as the allocator sees it. Peaks count from the last reset of torch's."""

    device: int
    allocated_bytes: int  # in live blocks
    allocated_peak_bytes: int
    requested_bytes: int  # of it, what was asked for before rounding
    reserved_bytes: int  # physical memory held
    reserved_peak_bytes: int
    free_bytes: int  # held, and in no block
    live_blocks: int
    alias_count: int  # second mappings kept
    alias_bytes: int  # addresses under them; they hold no memory of their own
    alias_hits: int  # blocks served from a kept mapping
    stitches: int  # blocks put together from free pieces
    growths: int  # times that memory was taken from the driver
    cross_stream: int  # blocks taken over from another stream
    retries: int  # requests for which caches were given back
    out_of_memory: int  # requests that failed
    native_allocated_bytes: int  # with torch's own allocator behind
    native_reserved_bytes: int
    host_bytes: int  # host memory that the bookkeeping takes
    driver_calls: DriverCalls

    @property
    def fragmentation(self) -> float:
        """Return the share of the held memory that is in no block, at the peaks of both."""
        if not self.reserved_peak_bytes:
            return 0.0
        return 1.0 - self.allocated_peak_bytes / self.reserved_peak_bytes

    def __str__(self) -> str:
        calls = self.driver_calls
        count = calls.create + calls.map + calls.set_access + calls.unmap + calls.release
        return "\n".join(
            [
                f"device {self.device}",
                f"  allocated   {_pair(self.allocated_bytes, self.allocated_peak_bytes)}, "
                f"{self.live_blocks:,} blocks",
                f"  reserved    {_pair(self.reserved_bytes, self.reserved_peak_bytes)}, "
                f"{self.fragmentation:.2%} beyond the peak of what was allocated",
                f"  free        {format_size(self.free_bytes)}",
                f"  aliases     {self.alias_count:,} kept, {self.alias_hits:,} hits, "
                f"{self.stitches:,} stitches",
                f"  growths     {self.growths:,}, {self.cross_stream:,} blocks across streams, "
                f"{self.retries:,} retries, {self.out_of_memory:,} out of memory",
                f"  driver      {count:,} calls, {calls.time_us / 1e3:.1f} ms",
                f"  native      {format_size(self.native_allocated_bytes)} allocated, "
                f"{format_size(self.native_reserved_bytes)} reserved",
                f"  host        {format_size(self.host_bytes)}",
            ]
        )


def _pair(now_bytes: int, peak_bytes: int) -> str:
    return f"{format_size(now_bytes)} now, {format_size(peak_bytes)} at the peak"


def allocator_stats(device: Any = None) -> AllocatorStats:
    """Return what the allocator holds and has done on one device.

    Args:
        device: None for torch's current device, else 1, "cuda:1" or a torch.device. One that has
            not allocated yet has zeros.

    Raises:
        InvalidValueError: it is no device.
        NotInstalledError: the allocator is not installed.

    Sync: none.

    Example:
        >>> print(vramx.allocator_stats())      # doctest: +SKIP
    """
    index = device_index(device)
    if index is None or index == CURRENT_DEVICE:
        index = current_device()
    return _stats_of(current(), index)


def _stats_of(installed: Installation, index: int) -> AllocatorStats:
    core = installed.devices.stats(index)
    allocated = core["allocated_bytes"]["all"]
    reserved = core["reserved_bytes"]
    native_allocated, native_reserved = _native(installed, index, core)
    return AllocatorStats(
        device=index,
        allocated_bytes=allocated["current"],
        allocated_peak_bytes=allocated["peak"],
        requested_bytes=core["requested_bytes"]["all"]["current"],
        reserved_bytes=reserved["current"],
        reserved_peak_bytes=reserved["peak"],
        free_bytes=reserved["current"] - allocated["current"],
        live_blocks=core["allocation"]["all"]["current"],
        alias_count=core["alias_count"],
        alias_bytes=core["alias_bytes"],
        alias_hits=core["num_alias_hits"],
        stitches=core["num_stitches"],
        growths=core["num_growths"],
        cross_stream=core["num_cross_stream"],
        retries=core["num_alloc_retries"],
        out_of_memory=core["num_ooms"],
        native_allocated_bytes=native_allocated,
        native_reserved_bytes=native_reserved,
        host_bytes=core["host_bytes"],
        driver_calls=_driver_calls(installed.devices.driver_calls(index)),
    )


def _driver_calls(calls: Mapping[str, Any]) -> DriverCalls:
    counts = {name: calls[name] for name in ("create", "map", "set_access", "unmap", "release")}
    return DriverCalls(**counts, time_us=calls["total_us"])


def _native(installed: Installation, device: int, core: Mapping[str, Any]) -> tuple[int, int]:
    """Return what torch's own allocator has allocated and reserved: torch's sums less the core's.

    The two are read one after the other, so a block that comes or goes between may be counted once
    too often; what is less than nothing is nothing.
    """
    cuda = installed.torch.cuda
    if installed.shim is None or not cuda.is_initialized():
        return 0, 0
    sums = cuda.memory_stats(device)
    allocated = sums["allocated_bytes.all.current"] - core["allocated_bytes"]["all"]["current"]
    reserved = sums["reserved_bytes.all.current"] - core["reserved_bytes"]["current"]
    return max(0, allocated), max(0, reserved)
