"""What the compression kernels reach of the GPU's copy speed, by kernel and size of tensor.

A kernel and two copies of the same number of bytes, read and written, take turns in one process:
torch's copy_, for which the driver takes a path a third slower for some sizes, and an elementwise
kernel, torch.neg. What counts is the ratio to the faster of the two, turn by turn; the row of a
share says which it was. Each runs over several tensors in a row, too many for any one to be still
in the L2 cache when its turn comes again, and all calls are one CUDA graph, so that launches are
not in the figure. Tensors are bfloat16 and normal; the formats are the defaults at 8 and 4 bits.
Kernels that pack a function of what they read round to nearest; a norm's has statistics of rows.
The fused kernels of vramx.nn are measured up to 1 GiB a tensor. Needs a GPU with 40 GiB; takes
under two minutes. The goals: 90 % for rounding to nearest and for decoding, 85 % for stochastic
rounding and for the fused kernels, 80 % at 4 bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness import Measurement, Options, UnavailableError
from vramx.kernels.layout import Layout
from vramx.sizes import GIB, MIB

if TYPE_CHECKING:
    import torch

    from benchmarks.programs._fused_kernels import Maker
    from vramx.kernels.launch import Function

DESCRIPTION = "bandwidth of the compression kernels, as a share of a device copy (GPU)"

SIZES = {"64MiB": 64 * MIB, "256MiB": 256 * MIB, "1GiB": GIB, "4GiB": 4 * GIB}
# Several times the L2 cache of an H200, which has 50 MiB: what a tensor left there is gone.
_TURNOVER_BYTES = 512 * MIB
_MOST_FUSED_BYTES = GIB
_ROW = 4096
_LAUNCHES_BYTES = 4 * GIB  # in one graph: a millisecond, beside which starting it is nothing


class Subject(NamedTuple):
    """One kernel at one size: calls that do the same on different memory."""

    calls: Sequence[Callable[[], object]]
    bytes_moved: int  # by one call, read and written


def cases(options: Options) -> list[str]:
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("it needs a CUDA GPU")
    return list(SIZES)[:1] if options.quick else list(SIZES)


def measure(case: str, options: Options) -> list[Measurement]:
    import torch

    torch.cuda.set_device(options.device)
    torch.manual_seed(0)
    repeats = 5 if options.quick else 25
    measurements = []
    for name, make in subjects(case).items():
        subject = make(SIZES[case])
        baselines = copies(subject)
        ours_ms, *theirs_ms = in_turn([subject, *baselines.values()], repeats)
        moved = subject.bytes_moved * launches(subject)
        measurements += rows(name, moved, ours_ms, dict(zip(baselines, theirs_ms, strict=True)))
        del subject, baselines
        torch.cuda.empty_cache()
    return measurements


def rows(
    name: str, moved: int, ours_ms: list[float], theirs_ms: dict[str, list[float]]
) -> list[Measurement]:
    """Return the bandwidths, and the share of the baseline with the shorter median."""
    bandwidths = {name: ours_ms} | {f"{name} {other}": ms for other, ms in theirs_ms.items()}
    fastest = min(theirs_ms, key=lambda other: statistics.median(theirs_ms[other]))
    shares = [b / a for a, b in zip(ours_ms, theirs_ms[fastest], strict=True)]
    return [
        *(
            Measurement(key, "GB/s", [moved / t / 1e6 for t in ms])
            for key, ms in bandwidths.items()
        ),
        Measurement(f"{name} share of {fastest}", "1", shares),
    ]


def subjects(case: str) -> dict[str, Callable[[int], Subject]]:
    """Return what makes each subject of a case for a tensor of so many bytes."""
    return codec_subjects() | (fused_subjects() if SIZES[case] <= _MOST_FUSED_BYTES else {})


def codec_subjects() -> dict[str, Callable[[int], Subject]]:
    found: dict[str, Callable[[int], Subject]] = {}
    for bits in (8, 4):
        for rounding in ("nearest", "stochastic"):
            found[f"quantize{bits}_{rounding}"] = partial(coding, bits=bits, rounding=rounding)
        found[f"dequantize{bits}"] = partial(coding, bits=bits, decodes=True)
    for decodes in (False, True):
        found["unpack_mask" if decodes else "pack_mask"] = partial(masking, decodes=decodes)
    for kind in ("normal", "scaled", "root", "ends of tanh"):
        name = kind.rpartition(" ")[2]
        found[f"quantize8_{name}"] = partial(coding, kind=kind)
        found[f"dequantize8_{name}"] = partial(coding, kind=kind, decodes=True)
    return found | {"quantize8_within": partial(coding, kind="within 6")}


def function_of(kind: str, layout: Layout) -> Function:
    """Return a function of the kernels, a norm's with the statistics of rows of _ROW elements."""
    import torch

    from vramx.kernels.launch import Function

    if kind not in ("normal", "scaled"):
        return Function(kind)
    mean = torch.zeros(layout.numel // _ROW, device="cuda")
    given = mean if kind == "normal" else None
    return Function(kind, given, torch.ones_like(mean), _ROW, mean.numel())


def coding(
    size: int,
    bits: int = 8,
    rounding: str = "nearest",
    kind: str | None = None,
    *,
    decodes: bool = False,
) -> Subject:
    """Return the packing of numbers, or of a function of them of this kind, or the way back."""
    import torch

    from vramx.kernels import launch

    layout = default_layout(size, bits)
    noise = torch.zeros(2, dtype=torch.int64, device="cuda") if rounding == "stochastic" else None

    def make() -> Callable[[], object]:
        draw = torch.randn if kind is None else torch.rand  # within the functions' domains
        x = draw(layout.numel, dtype=torch.bfloat16, device="cuda")
        buffer = torch.empty(layout.buffer_bytes, dtype=torch.uint8, device="cuda")
        if kind is None:
            encode = partial(launch.quantize, x, buffer, layout, noise=noise, stream=1)
            decode = partial(launch.dequantize, buffer, x, layout)
        else:
            function = function_of(kind, layout)
            encode = partial(
                launch.quantize_map, x, buffer, layout, function, noise=noise, stream=1
            )
            decode = partial(launch.dequantize_map, buffer, x, layout, function)
        if not decodes:
            return encode
        encode()
        return decode

    return rotated(make, size + layout.buffer_bytes)


def masking(size: int, *, decodes: bool) -> Subject:
    """Return the packing of so many flags, or the way back."""
    import torch

    from vramx.kernels import launch

    def make() -> Callable[[], object]:
        flags = torch.randint(0, 2, (size,), dtype=torch.uint8, device="cuda").view(torch.bool)
        buffer = torch.randint(0, 256, (size // 8,), dtype=torch.uint8, device="cuda")
        if decodes:
            return partial(launch.unpack_mask, buffer, flags)
        return partial(launch.pack_mask, flags, buffer)

    return rotated(make, size + size // 8)


def fused_subjects() -> dict[str, Callable[[int], Subject]]:
    from benchmarks.programs._fused_kernels import MAKERS

    return {name: partial(fused, maker) for name, maker in MAKERS.items()}


def fused(maker: Maker, size: int) -> Subject:
    """Return a subject whose bytes are those of the tensors that a launch reads and writes."""
    return rotated(lambda: maker(size, "cuda").call, maker(size, "meta").bytes_moved)


def copies(subject: Subject) -> dict[str, Subject]:
    """Return, by name, what moves as many bytes as the subject's calls, in memory of its own."""
    import torch

    words = subject.bytes_moved // 2 // 8  # of int64, which every kernel moves 16 bytes at a time

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.randint(-(2**62), 2**62, (words,), device="cuda")
        return source, torch.empty_like(source)

    pairs = [make() for _ in subject.calls]
    copy = [partial(target.copy_, source) for source, target in pairs]
    neg = [partial(torch.neg, source, out=target) for source, target in pairs]
    return {"copy_": Subject(copy, subject.bytes_moved), "neg": Subject(neg, subject.bytes_moved)}


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


def in_turn(subjects: Sequence[Subject], repeats: int) -> list[list[float]]:
    """Return the milliseconds of each subject's graph; the graphs are replayed by turns."""
    graphs = [captured(subject) for subject in subjects]
    times: list[list[float]] = [[] for _ in graphs]
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
