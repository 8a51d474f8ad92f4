"""What is watched of torch's memory once CUDA is initialised, whoever serves it.

Failures leave a snapshot, the history is kept where it was asked for, and what was held at most is
written at exit for `explain --confirm`. All of it goes through torch's own functions, so that it is
the same under vramx and where torch's allocator stays.
"""

from __future__ import annotations

import functools
from types import ModuleType

from vramx import config
from vramx.allocator import cuda_init, limits, oom_snapshot, peaks
from vramx.allocator.options import limit_in_bytes, parse_limit
from vramx.config import Config

_HISTORY_EVENTS = 65_536


def start(torch: ModuleType, *, records: bool) -> None:
    """Watch from the initialisation of CUDA on.

    Args:
        records: keep torch's history of events, which a snapshot then has.
    """
    settings = config.config()
    if settings.oom_snapshot:
        cuda_init.run_after(functools.partial(oom_snapshot.attach, torch, settings))
    if records:
        cuda_init.run_after(functools.partial(_record_history, torch))
    if settings.peaks_dir is not None:
        cuda_init.run_after(functools.partial(peaks.write_at_exit, torch, settings.peaks_dir))
    if settings.allocator == "torch" and settings.limit is not None:
        cuda_init.run_after(functools.partial(_limit_torch, torch, settings))


def _record_history(torch: ModuleType) -> None:
    """Keep the last events with their lines of Python, unless the program does so itself."""
    if torch._C._cuda_isHistoryEnabled():
        return
    torch.cuda.memory._record_memory_history(
        context="alloc", stacks="python", max_entries=_HISTORY_EVENTS
    )


def _limit_torch(torch: ModuleType, settings: Config) -> None:
    # Device 0 last, as it is the current one before CUDA is initialised: up to torch 2.9 this makes
    # each device current, and leaves it so.
    for device, total_bytes in sorted(limits.device_sizes().items(), reverse=True):
        limit = min(limit_in_bytes(parse_limit(settings.limit), total_bytes), total_bytes)
        # torch.cuda's own function would wait for the lock of the initialisation, which is held.
        torch._C._cuda_setMemoryFraction(limit / total_bytes, device)
