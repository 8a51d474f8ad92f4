"""Packed tensors that leave the device between forward and backward, and what that costs.

    codec, OffloadCodec   pack and unpack of codec.py, with a stash in between
    put, put_exact        the same for one tensor, packed or as it is
    offload_report        what was moved, how fast the link is, how much of it compute hid

The stashes of a process are made here, one for a device and a share; stash.py has the mechanism. On
a device without a link, the CPU, nothing moves. Thread-safe. Nothing here waits for the device.
"""

from __future__ import annotations

import atexit
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from vramx.compression.codec import codec as plain_codec
from vramx.compression.codec import random
from vramx.compression.codec.codec import Packed
from vramx.compression.codec.geometry import Geometry
from vramx.compression.codec.mapping import Mapping
from vramx.compression.config import Compression, Format
from vramx.compression.offload import forecast
from vramx.compression.offload.budget import Share
from vramx.compression.offload.host_memory import bytes_of_a_rank
from vramx.compression.offload.pinned import HostPool
from vramx.compression.offload.stash import Stash, Ticket
from vramx.compression.offload.transport import CudaTransport, Lane
from vramx.sizes import format_size


class Moved:
    """A packed tensor whose buffer a stash has; what a graph holds in place of a Packed."""

    __slots__ = ("__weakref__", "_like", "_ticket")

    def __init__(self, packed: Packed, stash: Stash) -> None:
        self._like = packed.numel, packed.dtype, packed.format, packed.mapping
        self._ticket = stash.put(packed.buffer)

    @property
    def nbytes(self) -> int:
        """The bytes of the buffer, wherever it is."""
        return self._ticket.nbytes

    def get(self) -> Packed:
        """Return the packed tensor, on the device, safe to read on the current stream.

        Raises:
            OffloadError: it is on the host, and the current stream is being captured.
        """
        return Packed(self._ticket.get(), *self._like)


class MovedExactly:
    """A flat tensor, not packed, whose bytes a stash has."""

    __slots__ = ("__weakref__", "_dtype", "_ticket")

    def __init__(self, elements: Tensor, stash: Stash) -> None:
        self._dtype = elements.dtype
        self._ticket: Ticket = stash.put(elements.view(torch.uint8))

    def get(self) -> Tensor:
        """Return the tensor, on the device, safe to read on the current stream.

        Raises:
            OffloadError: it is on the host, and the current stream is being captured.
            ModifiedInPlaceError: it was changed in place before it had been copied.
        """
        return self._ticket.get().view(self._dtype)


class OffloadCodec:
    """Packs as codec.py does, and lets the buffers leave as the share says.

    Args:
        share: "cpu" or a fraction.
        streams: of the noise; None: the process-wide ones.
    """

    def __init__(self, share: Share, streams: random.Streams | None = None) -> None:
        self._share = share
        self._streams = streams

    def encode(
        self, elements: Tensor, format: Format, mapping: Mapping | None = None
    ) -> Packed | Moved:
        return put(plain_codec.packed(elements, format, self._streams, mapping), self._share)

    def decode(self, payload: Packed | Moved, geometry: Geometry | None = None) -> Tensor:
        packed = payload.get() if isinstance(payload, Moved) else payload
        return plain_codec.unpack(packed, None if geometry is None else geometry.dense)


def codec(options: Compression, streams: random.Streams | None = None) -> OffloadCodec:
    """Return the codec of options with an `offload`."""
    assert options.offload is not None
    return OffloadCodec(options.offload, streams)


def put(packed: Packed, share: Share) -> Packed | Moved:
    """Let a packed tensor leave its device as `share` says.

    Returns:
        What has it now; the packed tensor itself on a device without a link.

    Memory: the buffer stays on the device until its copy is done, at most a window of them; then
        the same bytes of pinned host memory.
    Sync: none.
    """
    stash = stash_of(packed.buffer.device, share)
    return packed if stash is None else Moved(packed, stash)


def put_exact(elements: Tensor, share: Share) -> MovedExactly | None:
    """Let a contiguous 1-D tensor leave its device as it is; None on a device without a link."""
    stash = stash_of(elements.device, share)
    return None if stash is None else MovedExactly(elements, stash)


@dataclass(frozen=True)
class OffloadReport:
    """What one stash did. Bytes and counts are sums since it was made.

    Of the last step whose times are known: `waited_ms`, that the device waited for copies;
    `hidden_measured`, the part of the time of the copies that it did not; `hidden_predicted`, what
    that step's compute and the link's bandwidth make of it for the steps to come (forecast.py).
    None: not known yet.
    """

    device: torch.device
    share: Share
    moved_bytes: int
    returned_bytes: int
    kept_bytes: int
    kept_under_capture: int
    kept_for_want_of_host_memory: int
    pinned_bytes: int
    steps: int
    step_bytes: int
    to_host_bytes_per_s: float | None
    to_device_bytes_per_s: float | None
    waited_ms: float
    hidden_predicted: float | None
    hidden_measured: float | None

    def __str__(self) -> str:
        def rate(value: float | None) -> str:
            return "?" if value is None else f"{format_size(value)}/s"

        def part(value: float | None) -> str:
            return "?" if value is None else f"{100 * value:.0f} %"

        return (
            f"{self.device}, offload={self.share!r}: {format_size(self.moved_bytes)} moved, "
            f"{format_size(self.kept_bytes)} kept on the device; link "
            f"{rate(self.to_host_bytes_per_s)} out, {rate(self.to_device_bytes_per_s)} back; "
            f"hidden {part(self.hidden_measured)} (predicted {part(self.hidden_predicted)})"
        )


def offload_report() -> tuple[OffloadReport, ...]:
    """Return what has been offloaded in this process, one report for each device and share.

    Sync: none; times are of steps that the device had finished when the next one began. Takes some
    milliseconds of the host, in which it foretells the next steps.

    Example:
        >>> import vramx
        >>> for report in vramx.offload_report():
        ...     print(report)
    """
    with _registry_lock:
        stashes = list(_stashes.items())
    return tuple(report_of(torch.device("cuda", index), stash) for (index, _), stash in stashes)


def report_of(device: torch.device, stash: Stash) -> OffloadReport:
    """Return the report of one stash."""
    stash.collect()
    budget, measured = stash.budget, stash.budget.measured
    rates = {lane: 1e3 * rate for lane, rate in measured.bytes_per_ms.items()}
    return OffloadReport(
        device=device,
        share=stash.share,
        moved_bytes=stash.moved_bytes,
        returned_bytes=stash.returned_bytes,
        kept_bytes=stash.kept_bytes,
        kept_under_capture=stash.captured,
        kept_for_want_of_host_memory=stash.refused,
        pinned_bytes=stash.host_bytes,
        steps=budget.step,
        step_bytes=budget.largest_step_bytes(),
        to_host_bytes_per_s=rates.get(Lane.TO_HOST),
        to_device_bytes_per_s=rates.get(Lane.TO_DEVICE),
        waited_ms=measured.waited_ms,
        hidden_predicted=forecast.hidden_part(measured, stash.share, budget.window_bytes()),
        hidden_measured=measured.hidden_part(),
    )


# -- The stashes of this process ------------------------------------------------------------------


class Link:
    """What all that is offloaded from one device shares; the lock is the pool's."""

    def __init__(self, device: torch.device) -> None:
        self.transport = CudaTransport(device)
        self.pool = HostPool(self.transport.pin, bytes_of_a_rank() // 2, _pools)
        _pools.append(self.pool)
        self.lock = threading.Lock()


_links: dict[int, Link] = {}
_pools: list[HostPool] = []  # together up to half of what this process has of the host
_stashes: dict[tuple[int, Share], Stash] = {}
_registry_lock = threading.Lock()


def link_of(device: torch.device) -> Link | None:
    """Return the link of a device to the host; None where it has none."""
    if device.type != "cuda":
        return None
    with _registry_lock:
        return _link_of(_index_of(device))


def stash_of(device: torch.device, share: Share) -> Stash | None:
    """Return the stash for a device and a share; None on a device without a link to a host."""
    if device.type != "cuda":
        return None
    index = _index_of(device)
    found = _stashes.get((index, share))
    if found is not None:
        return found
    with _registry_lock:
        link = _link_of(index)
        made = Stash(share, link.transport, link.pool, link.lock)
        return _stashes.setdefault((index, share), made)


def collect() -> None:
    """Free what steps that never came to an end have left on its way between device and host."""
    for stash in list(_stashes.values()):
        if stash.dropped:
            stash.collect()


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _link_of(index: int) -> Link:
    if not _links:
        atexit.register(_close)
    if index not in _links:
        _links[index] = Link(torch.device("cuda", index))
    return _links[index]


def _close() -> None:
    """Let go of the pinned memory while the driver is still there to take it."""
    for link in _links.values():
        link.pool.close()
