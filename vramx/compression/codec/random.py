"""The seed and the numbering of the noise of stochastic rounding.

The noise itself is computed where it is used (reference.py, vramx/kernels) from three things: a key
and an epoch, which lie in one int64[2] tensor a device, and the number of a stream, one for each
packed tensor. They lie on the device so that neither a CUDA graph nor a compiler sees a Python int
that changes. torch's own generators are neither read nor advanced. Safe from any thread and after a
fork: the counters need no lock (a forked child goes on where its parent stood, as torch's generator
does). next_stream() takes a fraction of a microsecond; the first use of a device waits for it once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from vramx.errors import VramxError, refused

_MASK64 = (1 << 64) - 1
# The upper half of the numbers of streams belongs to Streams, so that no two tensors meet.
_HALF = 1 << 31


def _mix(value: int) -> int:
    """Return splitmix64's output for the state `value`: one to one on 64 bits.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _key(seed: int, rank: int) -> int:
    """Return the key of a seed and a rank, as a signed 64-bit number."""
    key = _mix(_mix(seed & _MASK64) ^ rank)
    return key - (1 << 64) if key >> 63 else key


class _Noise:
    """The process's seed, the state of each device, and the counter of streams."""

    def __init__(self) -> None:
        self._seed = 0
        self._rank = 0
        self.states: dict[torch.device, Tensor] = {}
        self.counter = itertools.count()

    def seed(self, seed: int, rank: int) -> None:
        self._seed, self._rank = seed, rank
        self.counter = itertools.count()
        for state in list(self.states.values()):
            # In place: a captured graph keeps the address.
            self._write(state)

    def state(self, device: torch.device) -> Tensor:
        state = self.states.get(device)
        return self._create(device) if state is None else state

    def restarted(self, count: int) -> int:
        """Return what a count stands for, and begin an epoch where they begin again."""
        if count and count % _HALF == 0:
            for device in list(self.states):
                self.advance_epoch(device)
        return count % _HALF

    def advance_epoch(self, device: torch.device) -> None:
        with torch.no_grad():
            self.state(device)[1].add_(1)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        count = next(self.counter)
        self.counter = itertools.count(count)
        try:
            yield
        finally:
            self.counter = itertools.count(count)

    def _create(self, device: torch.device) -> Tensor:
        on_cuda = device.type == "cuda"
        if device == torch.device("cuda"):
            return self.state(torch.device("cuda", torch.cuda.current_device()))
        if on_cuda and torch.cuda.is_current_stream_capturing():
            # Made now, it would lie in the graph's pool and every replay would set it back to the
            # same epoch: the same noise for ever, and nobody would notice.
            raise VramxError(
                f"the noise of {device} would be set up inside a CUDA graph capture; run one step "
                f"before the capture, or call vramx.compression.codec.random.state({str(device)!r})"
            )
        # Whatever mode is active (inference, fake tensors, the caller's own) must not shape a
        # tensor that outlives it.
        with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
            state = torch.empty(2, dtype=torch.int64, device=device)
            self._write(state)
        if on_cuda:
            # Once a device: from here on every stream may read it without asking.
            torch.cuda.current_stream(device).synchronize()
        return self.states.setdefault(device, state)  # atomic: the first thread's one stays

    def _write(self, state: Tensor) -> None:
        with torch.no_grad():
            # Two fills are two kernels: a copy from the host would wait for the device.
            state[0].fill_(_key(self._seed, self._rank))
            state[1].fill_(0)


_noise = _Noise()


def manual_seed(seed: int, *, rank: int = 0) -> None:
    """Start the noise of stochastic rounding anew; torch's generators are not touched.

    Args:
        seed: -2**63 to 2**64 - 1. A process that never calls this has seed 0.
        rank: mixed into the seed, so that ranks draw different noise. Without it all draw the same,
            for ranks that hold the same tensor must, as those of tensor and sequence parallelism
            do: else their copies of a replicated weight drift apart. Ranks with batches of their
            own may pass the data-parallel rank; it changes little, for their data differs.

    Raises:
        InvalidValueError: `seed` or `rank` is no integer in range.

    Sync: none; the new seed takes effect on the current stream of each device, graphs that were
    captured before included. Call it between steps.

    Example:
        >>> manual_seed(1234)
    """
    _check("seed", seed, -(1 << 63), _MASK64)
    _check("rank", rank, 0, (1 << 31) - 1)
    _noise.seed(seed, rank)


def state(device: torch.device | str) -> Tensor:
    """Return the key and the epoch of a device: int64[2] on it, one tensor for the whole process.

    Raises:
        VramxError: the first call for a device came inside a CUDA graph capture.

    Sync: the first call for a device waits for its current stream.

    Example:
        >>> state("cpu").shape
        torch.Size([2])
    """
    found = _noise.states.get(device)  # type: ignore[arg-type]
    if found is not None:
        return found
    return _noise.state(torch.device(device) if isinstance(device, str) else device)


def next_stream() -> int:
    """Return the number of a stream that no other packed tensor has in this epoch, below 2**31.

    When the numbers are used up they begin again and the epoch of every device advances.

    Example:
        >>> next_stream() != next_stream()
        True
    """
    count = next(_noise.counter)  # atomic
    return count if 0 < count < _HALF else _noise.restarted(count)


def restored_streams() -> contextlib.AbstractContextManager[None]:
    """Return a context after which streams are numbered as if none had been drawn in it.

    For what measures a program and must not change its noise; no other thread may draw meanwhile.

    Example:
        >>> with restored_streams():
        ...     first = next_stream()
        >>> next_stream() == first
        True
    """
    return _noise.restored()


def advance_epoch(device: torch.device | str) -> None:
    """Enqueue epoch += 1 on the device's current stream.

    Called while a CUDA graph is captured it becomes part of the graph: every replay then draws new
    noise for the streams whose numbers were captured.

    Example:
        >>> advance_epoch("cpu")
    """
    _noise.advance_epoch(torch.device(device) if isinstance(device, str) else device)


def renew_on_replay(device: torch.device) -> None:
    """Where a CUDA graph is being captured, have each of its replays draw new noise.

    The numbers of its streams are the same every time, so the epoch advances in the graph. To be
    called by what draws noise, once before its first tensor on a device.

    Example:
        >>> renew_on_replay(torch.device("cpu"))
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        advance_epoch(device)


_salts = itertools.count()


class Streams:
    """Numbers of streams that depend on a step and on the order of calls only.

    For code that must draw the same noise when a step is run again, whatever was packed in between.
    Objects made in the same order draw the same noise in another run of the program; two objects,
    or two steps, meet by chance only: with p = 1e-6 for two sequences of a thousand tensors. One
    object is for one thread.

    Example:
        >>> streams = Streams()
        >>> first = streams.next()
        >>> streams.restart(step=1)
        >>> streams.restart(step=0)
        >>> streams.next() == first
        True
    """

    __slots__ = ("_next", "_salt")

    def __init__(self) -> None:
        self._salt = next(_salts)
        self._next = 0
        self.restart()

    def next(self) -> int:
        """Return the number of the next stream: 2**31 to 2**32 - 1."""
        number = self._next
        self._next = (number + 1) % _HALF
        return _HALF | number

    def restart(self, step: int = 0) -> None:
        """Begin the sequence of `step`, an integer of at least 0, from its start."""
        _check("step", step, 0, _MASK64)
        self._next = _mix(_mix(self._salt) ^ step) % _HALF


def _check(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise refused(name, value, f"are {low} to {high}")
