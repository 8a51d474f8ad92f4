"""Types of the compiled core, which csrc/bindings.cpp defines. Arrays are numpy's, copied."""

from collections.abc import Callable
from typing import Any, TypedDict

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
    ) -> dict[str, Any]: ...
    def min_capacity(
        self, policy: str, progress: Callable[[int, int], None] | None = None
    ) -> int: ...
    def layout(self, policy: str = "vramx", event: int = -1) -> list[dict[str, Any]]: ...

def probe_cuda() -> _CudaFacts: ...
def benchmark_core(
    live_blocks: int,
    operations: int,
    size_bytes_low: int,
    size_bytes_high: int,
    threads: int,
) -> _CoreCost: ...
