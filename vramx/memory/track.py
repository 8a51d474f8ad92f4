"""The exact peak of a region of a program, from the allocator's own counters.

Nothing samples: torch's allocator, and vramx behind it, counts its peak itself. Such a counter can
only be set back, so regions that overlap share it here: whoever sets it back first gives what it
says to every region that is open on the device. The GPU is not waited for, no cache is emptied and
CUDA is not initialised; reading takes some 50 us. Safe from any thread.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from vramx.errors import InvalidValueError, VramxError, brief
from vramx.sizes import format_size

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class Tracked:
    """What a region did to one device's memory; complete once the region is left.

    device: its number, None where CUDA was not used.
    start_bytes, live_bytes: allocated when the region was entered and when it was left.
    peak_bytes, peak_reserved_bytes: the most that was allocated, and that was held, in between.
    reserved_bytes: held when it was left.
    retries, ooms: how often caches were given back to serve a request, and requests that failed.
    """

    tag: str
    device: int | None = None
    start_bytes: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    peak_reserved_bytes: int = 0
    retries: int = 0
    ooms: int = 0

    @property
    def delta_bytes(self) -> int:
        """What the region left allocated beyond what there was; below 0 where it freed more."""
        return self.live_bytes - self.start_bytes

    def __str__(self) -> str:
        if self.device is None:
            return f"{self.tag}: no CUDA memory was used"
        sign = "-" if self.delta_bytes < 0 else "+"
        text = (
            f"{self.tag}: peak {format_size(self.peak_bytes)}, live {format_size(self.live_bytes)} "
            f"({sign}{format_size(abs(self.delta_bytes))}), "
            f"reserved {format_size(self.reserved_bytes)}"
        )
        for count, name in ((self.retries, "retries"), (self.ooms, "out of memory")):
            text += f", {count:,} {name}" if count else ""
        return text


@dataclass(frozen=True)
class _Counters:
    """One reading of the allocator's counters; all zero before CUDA is initialised."""

    allocated: int = 0
    peak: int = 0
    reserved: int = 0
    peak_reserved: int = 0
    retries: int = 0
    ooms: int = 0


class Track:
    """A region to be tracked: a context manager that gives a Tracked, and a decorator.

    A decorated function has the Tracked of its last call as `tracked`.
    """

    def __init__(self, tag: str, device: int | None, synchronize: bool) -> None:
        self._tag = tag
        self._device = device
        self._synchronize = synchronize
        self._open: tuple[Tracked, _Counters] | None = None

    def __enter__(self) -> Tracked:
        if self._open is not None:
            raise VramxError(f"the region {self._tag!r} is open already; vramx.track makes another")
        self._wait()
        tracked = Tracked(self._tag, self._device)
        with _lock:
            device, before = _read(self._device)
            _set_back(device)
            _regions.append(tracked)
        tracked.device = device
        tracked.start_bytes = tracked.live_bytes = tracked.peak_bytes = before.allocated
        tracked.reserved_bytes = tracked.peak_reserved_bytes = before.reserved
        self._open = tracked, before
        return tracked

    def __exit__(self, *error: object) -> None:
        assert self._open is not None
        (tracked, before), self._open = self._open, None
        self._wait()
        with _lock:
            try:
                _, now = _read(self._device if tracked.device is None else tracked.device)
            finally:
                _regions[:] = [other for other in _regions if other is not tracked]
        tracked.live_bytes, tracked.reserved_bytes = now.allocated, now.reserved
        tracked.retries = now.retries - before.retries
        tracked.ooms = now.ooms - before.ooms

    def __call__(self, function: Function) -> Function:
        """Track each call of a function."""
        kinds = (
            inspect.isgeneratorfunction,
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
        )
        if (
            not callable(function)
            or isinstance(function, type)
            or any(is_(function) for is_ in kinds)
        ):
            raise InvalidValueError(
                f"{brief(function)} cannot be tracked; a function is accepted that is no generator "
                "and no coroutine: open the region with `with` inside those"
            )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with Track(self._tag, self._device, self._synchronize) as tracked:
                try:
                    return function(*args, **kwargs)
                finally:
                    call.tracked = tracked  # type: ignore[attr-defined]

        call.tracked = None  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    def _wait(self) -> None:
        if self._synchronize and _cuda() is not None:
            _cuda().synchronize(self._device)


def track(
    tag: str = "region", *, device: int | str | None = None, synchronize: bool = False
) -> Track:
    """Track a region's memory: `with vramx.track("forward") as memory:`, or as a decorator.

    Regions nest and overlap, in one thread and in several. torch's own peak counters
    (`max_memory_allocated`) are set back on entry; a region in which the program sets them back
    itself has the peak since then.

    Args:
        tag: the region's name, for what is printed.
        device: 1, "cuda:1" or a torch.device; by default the current one on entry.
        synchronize: wait for the GPU on entry and exit. Counters are of the host, so that they are
            exact without it; only what `record_stream` delays is freed earlier with it.

    Returns:
        A context manager that gives a Tracked, whose figures are complete once it is left, also by
        an exception. As a decorator it puts the last one at `function.tracked`.

    Raises:
        InvalidValueError: the device is none of CUDA's, or what is decorated is no plain function.
        VramxError: on entry, where the allocator behind torch keeps no statistics.

    Sync: none, unless asked for.

    Example:
        >>> with vramx.track("forward") as memory:                # doctest: +SKIP
        ...     loss = model(batch).sum()
        >>> print(memory)                                         # doctest: +SKIP
        forward: peak 7.31 GiB, live 5.20 GiB (+3.10 GiB), reserved 7.59 GiB
    """
    return Track(tag, _device_number(device), synchronize)


_lock = threading.Lock()
_regions: list[Tracked] = []  # those that are open, on whatever device


def _device_number(device: Any) -> int | None:
    text = str(device)
    number = text.removeprefix("cuda:")
    if device is None or text == "cuda":
        return None
    if isinstance(device, bool) or not (number.isascii() and number.isdigit() and len(number) < 5):
        raise InvalidValueError(
            f"device {brief(device)} is not accepted; 1 or 'cuda:1' is, or None"
        )
    return int(number)


def _cuda() -> Any:
    """Return torch.cuda once it is initialised, else None: tracking never initialises it."""
    import torch

    return torch.cuda if torch.cuda.is_initialized() else None


def _read(device: int | None) -> tuple[int | None, _Counters]:
    """Read a device's counters and give its peaks to the regions that are open on it."""
    cuda = _cuda()
    if cuda is None:
        return device, _Counters()
    device = cuda.current_device() if device is None else device
    try:
        stats = cuda.memory_stats_as_nested_dict(device)
    except RuntimeError as error:
        raise VramxError(f"the allocator behind torch keeps no statistics: {error}") from None
    allocated, reserved = (stats[name]["all"] for name in ("allocated_bytes", "reserved_bytes"))
    now = _Counters(
        allocated["current"],
        allocated["peak"],
        reserved["current"],
        reserved["peak"],
        stats["num_alloc_retries"],
        stats["num_ooms"],
    )
    for region in _regions:
        if region.device is None:  # entered before CUDA was initialised
            region.device = device
        if region.device == device:
            region.peak_bytes = max(region.peak_bytes, now.peak)
            region.peak_reserved_bytes = max(region.peak_reserved_bytes, now.peak_reserved)
    return device, now


def _set_back(device: int | None) -> None:
    if _cuda() is not None:
        _cuda().reset_peak_memory_stats(device)
