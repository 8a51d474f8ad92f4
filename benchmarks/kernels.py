"""What the compression kernels reach of the GPU's copy speed, by kernel and size of tensor.

A kernel and a copy of the same number of bytes, read and written, take turns in one process; what
counts is their ratio, pair by pair. Each runs over several tensors in a row, too many for any one
to be still in the L2 cache when its turn comes again, and all calls are one CUDA graph, so
that launches are not in the figure. Tensors are bfloat16 and normal; the formats are the defaults
at 8 and 4 bits. Needs a GPU with 20 GiB; takes under a minute. The goals: 90 % for rounding to
nearest and for decoding, 85 % for stochastic rounding, 80 % at 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness import Measurement, Options, UnavailableError
from vramx.kernels.layout import Layout
from vramx.sizes import GIB, MIB

if TYPE_CHECKING:
    import torch

DESCRIPTION = "bandwidth of the compression kernels, as a share of a device copy (GPU)"

SIZES = {"64MiB": 64 * MIB, "256MiB": 256 * MIB, "1GiB": GIB, "4GiB": 4 * GIB}
# Several times the L2 cache of an H200, which has 50 MiB: what a tensor left there is gone.
_TURNOVER_BYTES = 512 * MIB
_LAUNCHES_BYTES = 4 * GIB  # in one graph: a millisecond, beside which starting it is nothing


class Subject(NamedTuple):
    """One kernel at one size: calls that do the same on different memory."""

    calls: list[Callable[[], object]]
    bytes_moved: int  # by one call, read and written


def cases(options: Options) -> list[str]:
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("it needs a CUDA GPU")
    return list(SIZES)[:2] if options.quick else list(SIZES)


def measure(case: str, options: Options) -> list[Measurement]:
    import torch

    torch.cuda.set_device(options.device)
    torch.manual_seed(0)
    repeats = 5 if options.quick else 25
    measurements = []
    for name, make in subjects().items():
        subject = make(SIZES[case])
        ours_ms, copy_ms = in_turn(subject, copies(subject), repeats)
        moved = subject.bytes_moved * launches(subject)
        measurements += [
            Measurement(name, "GB/s", [moved / ms / 1e6 for ms in ours_ms]),
            Measurement(f"{name} copy", "GB/s", [moved / ms / 1e6 for ms in copy_ms]),
            Measurement(
                f"{name} share", "1", [b / a for a, b in zip(ours_ms, copy_ms, strict=True)]
            ),
        ]
        del subject
        torch.cuda.empty_cache()
    return measurements


def subjects() -> dict[str, Callable[[int], Subject]]:
    """Return what makes each subject for a tensor of so many bytes."""
    return {
        "quantize8_nearest": lambda size: quantizing(size, bits=8, rounding="nearest"),
        "quantize8_stochastic": lambda size: quantizing(size, bits=8, rounding="stochastic"),
        "dequantize8": lambda size: dequantizing(size, bits=8),
        "quantize4_nearest": lambda size: quantizing(size, bits=4, rounding="nearest"),
        "quantize4_stochastic": lambda size: quantizing(size, bits=4, rounding="stochastic"),
        "dequantize4": lambda size: dequantizing(size, bits=4),
        "pack_mask": packing_masks,
        "unpack_mask": unpacking_masks,
    }


def quantizing(size: int, bits: int, rounding: str) -> Subject:
    import torch

    from vramx.kernels import launch

    layout = default_layout(size, bits)
    noise = torch.zeros(2, dtype=torch.int64, device="cuda") if rounding == "stochastic" else None

    def make() -> Callable[[], object]:
        x = torch.randn(layout.numel, dtype=torch.bfloat16, device="cuda")
        buffer = torch.empty(layout.buffer_bytes, dtype=torch.uint8, device="cuda")
        return lambda: launch.quantize(x, buffer, layout, noise=noise, stream=1)

    return rotated(make, size + layout.buffer_bytes)


def dequantizing(size: int, bits: int) -> Subject:
    import torch

    from vramx.kernels import launch

    layout = default_layout(size, bits)

    def make() -> Callable[[], object]:
        out = torch.randn(layout.numel, dtype=torch.bfloat16, device="cuda")
        buffer = torch.empty(layout.buffer_bytes, dtype=torch.uint8, device="cuda")
        launch.quantize(out, buffer, layout, noise=None, stream=0)
        return lambda: launch.dequantize(buffer, out, layout)

    return rotated(make, size + layout.buffer_bytes)


def packing_masks(size: int) -> Subject:
    import torch

    from vramx.kernels import launch

    def make() -> Callable[[], object]:
        flags = torch.randint(0, 2, (size,), dtype=torch.uint8, device="cuda").view(torch.bool)
        buffer = torch.empty(size // 8, dtype=torch.uint8, device="cuda")
        return lambda: launch.pack_mask(flags, buffer)

    return rotated(make, size + size // 8)


def unpacking_masks(size: int) -> Subject:
    import torch

    from vramx.kernels import launch

    def make() -> Callable[[], object]:
        flags = torch.empty(size, dtype=torch.bool, device="cuda")
        buffer = torch.randint(0, 256, (size // 8,), dtype=torch.uint8, device="cuda")
        return lambda: launch.unpack_mask(buffer, flags)

    return rotated(make, size + size // 8)


def copies(subject: Subject) -> Subject:
    """Return copies that move as many bytes as the subject's calls, over as much memory."""
    import torch

    def make() -> Callable[[], object]:
        source = torch.randint(
            0, 256, (subject.bytes_moved // 2,), dtype=torch.uint8, device="cuda"
        )
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return rotated(make, subject.bytes_moved)


def default_layout(size: int, bits: int) -> Layout:
    """Return the layout of `size` bytes of bfloat16 in the default format of a width."""
    return Layout(size // 2, bits, *((128, True) if bits == 8 else (64, False)))


def rotated(make: Callable[[], Callable[[], object]], bytes_moved: int) -> Subject:
    """Return a subject of so many calls that the caches have turned over after all of them."""
    return Subject([make() for _ in range(-(-_TURNOVER_BYTES // bytes_moved))], bytes_moved)


def launches(subject: Subject) -> int:
    """Return how often one graph calls the subject: each of its calls equally often."""
    rounds = -(-_LAUNCHES_BYTES // (subject.bytes_moved * len(subject.calls)))
    return rounds * len(subject.calls)


def in_turn(first: Subject, second: Subject, repeats: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of two graphs that are replayed by turns."""
    graphs = [captured(first), captured(second)]
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 2):
        for graph, found in zip(graphs, times, strict=True):
            ms = replay_ms(graph)
            if repeat >= 2:  # clocks and caches settle before
                found.append(ms)
    return times


def captured(subject: Subject) -> torch.cuda.CUDAGraph:
    import torch

    for call in subject.calls:  # compiles what has to be compiled
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches(subject)):
            subject.calls[i % len(subject.calls)]()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
