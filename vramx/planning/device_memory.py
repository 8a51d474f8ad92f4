"""A device's memory as a trial of fit_batch sees it, and what says that there is none left.

Reads torch's allocator; settle() waits for the device. Not thread-safe.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from vramx.errors import InvalidValueError
from vramx.planning.meters import CudaMeter

# What libraries say that ask torch for memory through an interface without its error.
_WORDS_OF_LIBRARIES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "out of memory")


class Memory(Protocol):
    """A device's memory, as a trial sees it."""

    def limit_bytes(self) -> int:
        """Return the most that the process can have allocated."""

    def allocated_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...
    def reset_peak(self) -> None: ...
    def settle(self) -> None: ...
    def release(self) -> None:
        """Give cached memory back."""


class CudaMemory(CudaMeter):
    """Of one GPU, within the limits that are set for the process."""

    def limit_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        within = free + torch.cuda.memory_reserved(self._device)
        # Up to torch 2.9 to ask makes the device current, and leaves it so.
        with torch.cuda.device(self._device):
            fraction = torch.cuda.get_per_process_memory_fraction(self._device)
        return min(within, int(total * fraction))

    def release(self) -> None:
        torch.cuda.empty_cache()


def cuda_memory(device: Any) -> Memory:
    """Return the memory of a CUDA device, the current one by default; raise where there is none."""
    if not torch.cuda.is_available():
        raise InvalidValueError("fit_batch runs steps on a GPU, and there is none; see predict()")
    current = torch.device("cuda", torch.cuda.current_device())
    return CudaMemory(current if device is None else torch.device(device))


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that a GPU has no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(w in str(error) for w in _WORDS_OF_LIBRARIES)
