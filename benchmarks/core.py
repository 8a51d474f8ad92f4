"""What one allocate or free costs in the core, on a simulated device that only counts.

Three questions, one group of cases each: how the cost grows with the number of live blocks (a list
that is searched shows here), how it depends on the sizes asked for, and what threads that share one
allocator do to each other. One operation is an allocate or a free; sizes are drawn log-uniformly.
The figure to reach is 100 ns, warm, on one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness import Measurement, Options
from vramx.memory.replay import load_core
from vramx.sizes import KIB, MIB

DESCRIPTION = "cost of one call of the allocator's core, by live blocks, sizes and threads"

SMALL = (512, 64 * KIB)
MIXED = (512, 4 * MIB)
SIZES = {
    "512B-64KiB": SMALL,
    "64KiB-1MiB": (64 * KIB, MIB),
    "1MiB-64MiB": (MIB, 64 * MIB),
    "512B-4MiB": MIXED,
}
LIVE_BLOCKS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
THREADS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Load:
    """The arguments of one run of the core's own benchmark loop."""

    live_blocks: int
    size_bytes: tuple[int, int]  # lowest and highest
    threads: int = 1


def loads(quick: bool) -> dict[str, Load]:
    """Return every load by the name of its case."""
    curve = (1_000, 10_000) if quick else LIVE_BLOCKS
    threads = (1, 2) if quick else THREADS
    return {
        **{f"live={n}": Load(n, SMALL) for n in curve},
        **{f"sizes={name}": Load(1_000, sizes) for name, sizes in SIZES.items()},
        **{f"threads={n}": Load(10_000, MIXED, n) for n in threads},
    }


def cases(options: Options) -> list[str]:
    load_core()
    return list(loads(options.quick))


def measure(case: str, options: Options) -> list[Measurement]:
    load = loads(options.quick)[case]
    # At least a few operations for each live block, so that the population turns over.
    operations = max(100_000 if options.quick else 2_000_000, 4 * load.live_blocks)
    runs = [_run(load, operations) for _ in range(3 if options.quick else 7)]
    return [
        Measurement("ns_per_operation", "ns", [run["ns_per_operation"] for run in runs]),
        Measurement("bytes_per_block", "B", [run["bytes_per_block"] for run in runs]),
    ]


def _run(load: Load, operations: int) -> dict[str, float]:
    figures: dict[str, float] = load_core().benchmark_core(
        live_blocks=load.live_blocks,
        operations=operations,
        size_bytes_low=load.size_bytes[0],
        size_bytes_high=load.size_bytes[1],
        threads=load.threads,
    )
    return figures
