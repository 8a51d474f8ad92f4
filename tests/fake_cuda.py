"""A CUDA that is not there: what torch, the core and the shim see in tests without a GPU.

The shim is a real one, compiled and loaded, of twenty lines instead of torch's interface. The core
is a record of what was asked of it. torch is the installed one, with the few functions of torch._C
replaced that are called; initialising CUDA goes through torch's own torch.cuda._lazy_init.

They answer as the real ones do in each state, before the initialisation, under its lock and with
each of torch's allocators. What would end the process or have it wait for ever fails the test, also
where the program catches what is raised here in its stead.
"""

from __future__ import annotations

import ctypes
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_shim import build_shim, toolbox

from vramx import config
from vramx.allocator import (
    cuda_init,
    install,
    limits,
    oom_snapshot,
    preconditions,
    profiler_start,
    shim_build,
)
from vramx.config import Config

GIB = 1 << 30


def _library() -> ctypes.CDLL:
    shim = install.current().shim
    assert shim is not None
    return shim._library


def counters(allocated: int, reserved: int) -> dict[str, Any]:
    """Statistics as the core gives them, with a figure of its own for each."""
    counter = {"current": allocated, "peak": allocated + 1, "allocated": 0, "freed": 0}
    names = ("allocation", "allocated_bytes", "requested_bytes")
    pools: dict[str, Any] = {name: {"all": counter} for name in names}
    plain = {
        "num_alloc_retries": 2, "num_ooms": 3, "alias_count": 4, "alias_bytes": 5,
        "num_alias_hits": 6, "num_stitches": 7, "num_growths": 8, "num_cross_stream": 9,
        "host_bytes": 10,
    }  # fmt: skip
    return {**pools, **plain, "reserved_bytes": {"current": reserved, "peak": reserved + 4}}


class FakeDevices:
    """The core's devices: remembers what it was opened with and asked."""

    handle_address = 0x1000

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.defragmented: list[int] = []

    def started(self) -> list[int]:
        return [0, 1]

    def stats(self, device: int) -> dict[str, Any]:
        return counters(allocated=100 * (device + 1), reserved=1000 * (device + 1))

    def driver_calls(self, device: int = -1) -> dict[str, Any]:
        return {"create": 1, "map": 2, "set_access": 3, "unmap": 4, "release": 5, "total_us": 6.5}

    def defragment(self, device: int = -1) -> dict[str, int]:
        self.defragmented.append(device)
        return {
            "aliases_collected": 1, "alias_address_bytes": 2, "extents_before": 3,
            "extents_after": 4, "chunks_released": 5, "released_bytes": 6,
        }  # fmt: skip


class InitializationLock:
    """torch's: who has it and asks for it again waits for ever."""

    def __init__(self, end: Callable[[str], None]) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._end = end

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            self._end("torch would wait for the lock of its initialisation, which is held")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._owner = None
        self._lock.release()


class FakeCuda:
    """torch with a CUDA of two devices of 80 GiB that is not initialised yet."""

    def __init__(self, patch: pytest.MonkeyPatch, tmp_path: Path, shim: Path) -> None:
        self.patch = patch
        self.opened: list[FakeDevices] = []
        self.observers: list[Callable[..., None]] = []  # of requests that fail
        self.histories: list[dict[str, Any]] = []
        self.fractions: list[tuple[float, int]] = []
        self.backend = "native"  # torch's allocator
        self.current = 1  # device
        self.initialised = 0
        self.ends: list[str] = []  # what the real one would not have come back from
        self.settings = toolbox(tmp_path)
        self._fake_state()
        self._fake_torch()
        self._fake_machine(tmp_path, shim)

    def configure(self, **changes: Any) -> None:
        """Change what the environment says."""
        self.settings = Config(**{**vars(self.settings), **changes})

    def initialise(self) -> None:
        """Have torch initialise CUDA, as its first use would."""
        torch.cuda.init()

    def limit_of(self, device: int) -> int:
        """Return the limit that the shim was given last; device -1 is all of them."""
        kept = (ctypes.c_ulonglong * 8).in_dll(_library(), "vramx_test_limit")
        return int(kept[device + 1])

    def profilers(self) -> int:
        """Return how many profilers were announced to the shim since it was installed."""
        return ctypes.c_int.in_dll(_library(), "vramx_test_profilers").value

    def _fake_state(self) -> None:
        self.patch.setattr(cuda_init, "_hook", cuda_init._Hook())
        self.patch.setattr(install, "_state", install._State())
        self.patch.setattr(limits, "_waiting", [])
        self.patch.setattr(oom_snapshot, "_attached", [])
        self.patch.setattr(config, "config", lambda: self.settings)

    def _fake_torch(self) -> None:
        native, patch = torch._C, self.patch
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(native, "_cuda_getAllocator", lambda: "the current allocator", raising=False)
        patch.setattr(native, "_cuda_init", self._count, raising=False)
        patch.setattr(native, "_cuda_getDeviceCount", lambda: 2, raising=False)
        for name, function in {
            "_cuda_attach_out_of_memory_observer": self._observe,
            "_cuda_isHistoryEnabled": self._keeps_history,
            "_cuda_record_memory_history": self._record,
            "_cuda_setMemoryFraction": self._set_fraction,
            "_cuda_memoryStats": self._stats,
            "_cuda_resetPeakMemoryStats": self._stats,
            "_cuda_getAllocatorBackend": lambda: self.backend,
        }.items():
            patch.setattr(native, name, function, raising=False)
        patch.setattr(torch.OutOfMemoryError, "__init__", torch.OutOfMemoryError.__init__)
        patch.setattr(torch.cuda, "_cudart", object())
        # Nor a fork that is bad because an earlier test asked for the number of devices.
        patch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
        patch.setattr(torch.cuda, "_initialized", False)
        patch.setattr(torch.cuda, "_initialization_lock", InitializationLock(self._end))
        patch.setattr(torch.cuda, "_queued_calls", [])  # the real ones ask the driver
        # Nor a seed that an earlier test of this process asked for.
        patch.setattr(torch.cuda, "_lazy_seed_tracker", torch.cuda._LazySeedTracker())
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "current_device", self._current_device)
        # As they are: what the installation puts around them goes with the test.
        for module, name, start in profiler_start.found():
            patch.setattr(module, name, start)

    def _fake_machine(self, tmp_path: Path, shim: Path) -> None:
        # A copy, because a library that is loaded twice from one file has one state.
        copy = shutil.copy(shim, tmp_path / "shim.so")
        self.patch.setattr(shim_build, "ensure_shim", lambda settings: Path(copy))
        self.patch.setattr(preconditions, "_check_driver", lambda: None)
        core = SimpleNamespace(open_gpus=self._open, __file__="/nowhere/_core.so")
        self.patch.setattr(install, "_import_core", lambda: core)
        self.patch.setattr(limits, "device_sizes", lambda: {0: 80 * GIB, 1: 80 * GIB})

    def _end(self, how: str) -> None:
        self.ends.append(how)
        raise AssertionError(how)

    def _current_device(self) -> int:
        torch.cuda._lazy_init()
        return self.current

    def _keeps_history(self) -> bool:
        self._refuse_but("native", "vramx")
        if self.backend == "native" and not self.initialised:
            self._end("torch's own allocator reads the first of no devices, and crashes")
        return bool(self.histories)

    def _record(self, enabled: Any, context: Any, stacks: str, max_entries: int, *_: Any) -> None:
        self._initialise_in_cpp()
        self._refuse_but("native", "vramx")
        self.histories.append({"context": context, "stacks": stacks, "max_entries": max_entries})

    def _observe(self, observer: Callable[..., None]) -> None:
        self._initialise_in_cpp()
        self._refuse_but("native", "vramx")
        self.observers.append(observer)

    def _set_fraction(self, fraction: float, device: int) -> None:
        if not self.initialised:
            raise RuntimeError(f"Allocator not initialized for device {device}")
        self.fractions.append((fraction, device))
        if self.backend == "native":
            self.current = device  # up to torch 2.9

    def _stats(self, device: int) -> dict[str, Any]:
        self._refuse_but("native", "vramx", "cudaMallocAsync")
        if not self.initialised:
            raise RuntimeError(f"Invalid device argument {device}: did you call init?")
        return {}

    def _refuse_but(self, *backends: str) -> None:
        if self.backend not in backends:
            raise RuntimeError(f"{self.backend} does not yet support this. If you need it, please")

    def _initialise_in_cpp(self) -> None:
        """Behind torch.cuda's back, as those functions do that do not need it."""
        self.initialised = self.initialised or 1

    def _count(self) -> None:
        self.initialised += 1

    def _open(self, **options: Any) -> FakeDevices:
        self.opened.append(FakeDevices(**options))
        return self.opened[-1]


# Fixtures, for a module that imports them both.


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shim: Path) -> Iterator[FakeCuda]:
    fake = FakeCuda(monkeypatch, tmp_path, shim)
    yield fake
    assert not fake.ends


def fail_to_build(patch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make the shim unavailable."""
    patch.setattr(shim_build, "ensure_shim", lambda _: fail_with(error))


def fail_with(error: Exception) -> None:
    raise error
