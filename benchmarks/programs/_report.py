"""What a program tells about its run: the time and loss of each step, and the memory it took.

A program makes one `Recorder`, calls `begin()` before it touches the GPU, wraps each step in
`step()`, and calls `finish()`, which prints one line of JSON, the last of the program's output.
Everything is asked of torch's public interface, so the same code serves every allocator. A step
costs two synchronisations and is timed between them. Not thread-safe; one for each process.

Read from the environment, beside what `_turn` reads:
    PROGRAM_SIZE        "tiny" for shapes that a processor runs in seconds, "quick" for fewer steps
                        and ways; "full" if not set
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from benchmarks.programs import _turn

Size = TypeVar("Size")
Way = TypeVar("Way")

SEED = 20_26


def is_tiny() -> bool:
    return os.environ.get("PROGRAM_SIZE") == "tiny"


def sized(full: Size, tiny: Size, quick: Size | None = None) -> Size:
    """Return what a run takes that is quoted, shows that the program works, or is in between."""
    if quick is not None and os.environ.get("PROGRAM_SIZE") == "quick":
        return quick
    return tiny if is_tiny() else full


class Recorder:
    """Seeds the program, caps its memory if asked to, and keeps what its steps did.

    Args:
        warmup: how many steps come before the timed ones.
        timed: how many are timed; `steps` is their sum.
        deterministic: insist on repeatable kernels; False where those would be another program.
    """

    def __init__(self, warmup: int = 4, timed: int = 12, *, deterministic: bool = True) -> None:
        self.warmup = warmup
        self.steps = sized(warmup + timed, 3, quick=warmup + 3)
        self.random = random.Random()
        self._seed()
        if deterministic:
            # cuBLAS, which reads it when its first handle is made, repeats with this one only.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            # Not warn_only: with it attention's backward keeps its atomic additions
            # (attention_backward.cu in torch), and the losses differ from run to run.
            torch.use_deterministic_algorithms(True)
            # Filling fresh tensors would hide the use of memory that another tensor left behind.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self._turn: _turn.Turn | None = None
        self._waited_s = 0.0
        self._step_ms: list[float] = []
        self._losses: list[str] = []
        self._device_calls: list[int] = []
        self._driver_calls: list[int] = []

    def begin(self) -> torch.device:
        """Wait for this program's turn on the GPU; return the device to use.

        What is done before, above all imports and building a model on the host, other programs do
        at the same time. Calls after the first return at once.
        """
        if self._turn is None:
            self._turn = _turn.wait()
            self._waited_s = self._turn.waited_s
            _cap_memory(self._turn.cap_bytes)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wait for this program's turn to take a step; time it and count the driver calls in it.

        Raises:
            RuntimeError: the program did not wait for its turn.
        """
        if self._turn is None:
            raise RuntimeError("step() comes before begin()")
        synchronize()
        self._waited_s += _wait_for_step()
        before = _counters()
        synchronize()
        start_s = time.perf_counter()
        yield
        synchronize()
        self._step_ms.append(1000 * (time.perf_counter() - start_s))
        after = _counters()
        self._device_calls.append(after[0] - before[0])
        if after[1] is not None and before[1] is not None:
            self._driver_calls.append(after[1] - before[1])

    def loss(self, value: torch.Tensor) -> None:
        """Keep a step's loss, every bit of it; called after the step, because it waits."""
        self._losses.append(float(value.detach().sum()).hex())

    def restart(self) -> None:
        """Forget the steps so far and seed again: the program begins anew.

        How much randomness was drawn before is up to the allocator, where it ran out of memory.
        """
        self._seed()
        for kept in (self._step_ms, self._losses, self._device_calls, self._driver_calls):
            kept.clear()

    def finish(self, **extra: Any) -> None:
        """Print the report. `extra` are figures that only this program has."""
        report = {
            "waited_s": self._waited_s,
            "warmup": min(self.warmup, len(self._step_ms) - 1),
            "step_ms": self._step_ms,
            "losses": self._losses,
            "device_calls": self._device_calls,
            "driver_calls": self._driver_calls or None,
            **_memory(),
            "allocator": allocator_name(),
            "extra": extra,
        }
        print(json.dumps(report), flush=True)

    def _seed(self) -> None:
        self.random.seed(SEED)
        torch.manual_seed(SEED)


def _wait_for_step() -> float:
    waited_s = _turn.wait_for_step()
    if waited_s and torch.cuda.is_available():
        # The GPU, which has served another process, comes back with this kernel, not in the step.
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
    return waited_s


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_ms(function: Callable[[], Any]) -> float:
    """Return the milliseconds of a call on the host's clock; the device has nothing else to do."""
    synchronize()
    start_s = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start_s)


def timed_ms(function: Callable[[], Any]) -> tuple[float, float]:
    """Return the milliseconds of a call on the device's clock, and until it returned."""
    if not torch.cuda.is_available():
        return (host_ms(function),) * 2
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    start_s = time.perf_counter()
    function()
    called_ms = 1000 * (time.perf_counter() - start_s)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)), called_ms


def in_turn(ways: Iterable[Way], times: int) -> Iterator[Way]:
    """Yield all ways so many times, every other time backwards.

    What slows the machine for a while slows all of them, and what a way does to the clocks of the
    GPU, or to where memory lies, reaches not always the same one.
    """
    order = list(ways)
    for _ in range(times):
        yield from order
        order.reverse()


def _cap_memory(cap_bytes: int | None) -> None:
    if cap_bytes is None or not torch.cuda.is_available():
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), 0)


def _counters() -> tuple[int, int | None]:
    """Return how often torch went to the driver for memory, and how often vramx did, if it runs."""
    if not torch.cuda.is_initialized():
        return 0, None
    stats = torch.cuda.memory_stats()
    device_calls = stats.get("num_device_alloc", 0) + stats.get("num_device_free", 0)
    return device_calls, _vramx_driver_calls()


def _vramx_driver_calls() -> int | None:
    vramx = _installed_vramx()
    if vramx is None:
        return None
    calls = vramx.allocator_stats().driver_calls
    return int(calls.create + calls.map + calls.set_access + calls.unmap + calls.release)


def _installed_vramx() -> Any:
    """Return the package if its allocator serves this process; the program need not know of it."""
    vramx = sys.modules.get("vramx")
    is_installed = getattr(vramx, "allocator_installed", None)
    return vramx if is_installed is not None and is_installed() else None


def _memory() -> dict[str, int]:
    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return {
        "peak_allocated_bytes": stats.get("allocated_bytes.all.peak", 0),
        "peak_reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
        "alloc_retries": stats.get("num_alloc_retries", 0),
        "ooms": stats.get("num_ooms", 0),
    }


def allocator_name() -> str:
    """Say who really serves the process, so that a run that fell back is not taken for another."""
    if _installed_vramx() is not None:
        return "vramx"
    if not torch.cuda.is_available():
        return "none"
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    return "expandable" if settings["expandable_segments"] else "native"


def report(case: str, metric: str, unit: str, values: list[float]) -> None:
    """Print the line of one figure."""
    tell(case=case, metric=metric, unit=unit, values=values)


def report_status(case: str, status: str) -> None:
    """Print the line that says why there is no figure."""
    tell(case=case, status=status)


def tell(**line: Any) -> None:
    """Print a line of what was measured, with who served the process."""
    print(json.dumps({**line, "allocator": allocator_name()}), flush=True)
