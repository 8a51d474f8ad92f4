"""Types of the compiled core, which csrc/bindings.cpp defines. Arrays are numpy's, copied."""

from collections.abc import Callable
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

class _DeviceFacts(TypedDict):
    name: str
    total_bytes: int
    granularity_bytes: int
    vmm_supported: bool
    posix_handles: bool
    fabric_handles: bool
    compute_capability: str

class _CudaFacts(TypedDict):
    error: str
    driver_version: int
    devices: list[_DeviceFacts]

class _CoreCost(TypedDict):
    ns_per_operation: float
    bytes_per_block: float

class _DriverCalls(TypedDict):
    create: int
    map: int
    set_access: int
    unmap: int
    release: int

class _TimedDriverCalls(_DriverCalls):
    total_us: float  # of the five together

class _Timeline(TypedDict):
    time_us: npt.NDArray[np.float64]
    live_bytes: npt.NDArray[np.uint64]
    reserved_bytes: npt.NDArray[np.uint64]

class _RunFigures(TypedDict):
    peak_reserved_bytes: int
    peak_allocated_bytes: int  # by blocks, which may be larger than their requests
    oom: bool
    oom_event: int  # -1 where memory did not run out
    ns_per_event: float
    driver_calls: _DriverCalls
    driver_us: float
    driver_us_second_half: float
    driver_calls_second_half: int  # halves of the trace's time, all five calls together
    retries: int
    mismatches: int  # words of blocks that had changed; counted with pattern_streams alone
    waits: int  # of one stream for another, made by the allocator
    peak_in_use_bytes: (
        int  # live, and freed by other streams and not over; with gpu_lag_us or samples
    )
    host_bytes: int  # of the core's own books at the end; 0 for the models
    timeline: _Timeline | None

class _Counter(TypedDict):
    current: int
    peak: int
    allocated: int
    freed: int

class _PoolCounters(TypedDict):
    all: _Counter
    small_pool: _Counter
    large_pool: _Counter

class _AllocatorStats(TypedDict):
    allocation: _PoolCounters
    allocated_bytes: _PoolCounters
    requested_bytes: _PoolCounters
    segment: _Counter
    reserved_bytes: _Counter
    inactive_split: _Counter
    inactive_split_bytes: _Counter
    num_alloc_retries: int
    num_ooms: int
    num_sync_all_streams: int
    num_device_alloc: int
    num_device_free: int
    alias_count: int
    alias_mappings: int
    alias_bytes: int
    num_alias_hits: int
    num_stitches: int
    num_growths: int
    num_cross_stream: int
    host_bytes: int

class _DefragmentReport(TypedDict):
    aliases_collected: int
    alias_address_bytes: int
    extents_before: int
    extents_after: int
    chunks_released: int
    released_bytes: int

class _Span(TypedDict):
    address: int
    size: int
    state: Literal["used", "free", "unmapped", "building", "border"]
    block: int  # the address that the owner holds; 0 where there is none

class Replay:
    def __init__(
        self,
        op: npt.NDArray[np.uint8],
        id: npt.NDArray[np.uint32],
        size: npt.NDArray[np.uint64],
        stream: npt.NDArray[np.uint8],
        time_us: npt.NDArray[np.uint32],
    ) -> None: ...
    @property
    def events(self) -> int: ...
    @property
    def peak_live_bytes(self) -> int: ...
    @property
    def peak_event(self) -> int: ...
    @property
    def trace_us(self) -> float: ...
    def run(
        self,
        policy: str,
        capacity_bytes: int = 0,
        driver: str = "sim",
        device: int = 0,
        samples: int = 0,
        progress: Callable[[int, int], None] | None = None,
        pattern_streams: int = 0,
        gpu_lag_us: int | None = None,
    ) -> _RunFigures: ...
    def min_capacity(
        self, policy: str, progress: Callable[[int, int], None] | None = None
    ) -> int: ...
    def layout(self, policy: str = "vramx", event: int = -1) -> list[dict[str, Any]]: ...

class SimulatedDevice:
    """The allocator on a simulated device. Streams are numbers; 0 is the default stream."""

    def __init__(
        self,
        capacity_bytes: int,
        granularity_bytes: int = 2 << 20,
        has_bytes: bool = True,
        limit_bytes: int = 0,  # 0: none but the capacity
        cross_stream: str = "under_pressure",
        trace_events: int = 0,
    ) -> None: ...
    def allocate(self, size_bytes: int, stream: int = 0) -> int: ...
    def free(self, address: int, /) -> None: ...
    def record_stream(self, address: int, stream: int, /) -> None: ...
    def fill(self, address: int, size_bytes: int, pattern: int, /) -> None: ...
    def count_mismatches(self, address: int, size_bytes: int, pattern: int, /) -> int: ...
    def trim(self) -> _DefragmentReport: ...
    def defragment(self) -> _DefragmentReport: ...
    def set_limit(self, limit_bytes: int, /) -> None: ...
    def add_relief(self, callback: Callable[[], object], /) -> None: ...
    def owns(self, address: int, /) -> bool: ...
    def stats(self) -> _AllocatorStats: ...
    def reset_peak_stats(self) -> None: ...
    def reset_accumulated_stats(self) -> None: ...
    def layout(self) -> list[_Span]: ...
    def events(self) -> list[tuple[str, int, int, int]]: ...  # kind, address, size, stream
    def check(self) -> str: ...  # the first broken invariant, or empty
    def driver_calls(self) -> int: ...
    def waits(self) -> int: ...
    def submit(self, stream: int, /) -> None: ...
    def advance(self, stream: int, items: int, /) -> None: ...
    def advance_all(self) -> None: ...
    def fail_nth_call(self, nth: int, /) -> None: ...

class Devices:
    """The device allocators of a process. `device` is a number, or -1 for all that were started.

    Those of open_gpus stay for the life of the process; those of open_simulated go with this
    object, so keep it for as long as its handle or a block is in use.
    """

    @property
    def handle_address(self) -> int: ...  # of an AllocatorsHandle in csrc/process/allocators.h
    # A CoreCode, and the address where that is 0.
    def allocate(self, device: int, size_bytes: int, stream: int = 0) -> tuple[int, int]: ...
    def free(self, address: int) -> int: ...  # a CoreCode
    # Of this thread's last failure.
    def out_of_memory_text(self) -> str: ...
    def failure_text(self) -> str: ...
    def started(self) -> list[int]: ...
    def stats(self, device: int) -> _AllocatorStats: ...  # zeros before the device's start
    def driver_calls(self, device: int = -1) -> _TimedDriverCalls: ...
    def trim(self, device: int = -1) -> None: ...
    def defragment(self, device: int = -1) -> _DefragmentReport: ...
    def set_limit(self, device: int, limit_bytes: int) -> None: ...  # 2**64 - 1 for none
    def check(self, device: int = -1) -> str: ...  # the first broken invariant, or empty
    def held(self, device: int = -1) -> int: ...
    def allocated(self, device: int = -1) -> int: ...
    # Both raise ValueError before the device's start.
    def layout(self, device: int) -> list[_Span]: ...
    def events(self, device: int) -> list[tuple[str, int, int, int]]: ...

# A limit of 0 is none.
def open_gpus(
    limit_bytes: int = 0,
    cross_stream: str = "under_pressure",
    trace_events: int = 0,
    devices: list[int] | None = None,  # all that CUDA shows
) -> Devices: ...
def open_simulated(
    count: int,
    capacity_bytes: int,
    granularity_bytes: int = 2 << 20,
    has_bytes: bool = True,
    limit_bytes: int = 0,
    cross_stream: str = "under_pressure",
    trace_events: int = 0,
) -> Devices: ...
def set_kinds(tensor: type, parameter: type, values: frozenset[type], /) -> None: ...
def call_key(name: str, args: tuple[Any, ...], kwargs: Any, /) -> tuple[Any, ...] | None: ...
def tensor_key(
    tensor: Any, args: tuple[Any, ...], kwargs: Any, compares: bool, /
) -> tuple[tuple[Any, ...], Any] | None: ...  # no storage where it is fresh
def probe_cuda() -> _CudaFacts: ...
def benchmark_core(
    live_blocks: int, operations: int, size_bytes_low: int, size_bytes_high: int, threads: int
) -> _CoreCost: ...
