"""Plain mode: the core behind torch's own pluggable allocator, where the shim cannot be had.

torch ships an allocator that calls functions by address. vramx._core exports such functions, so
this needs no compiler and no headers, and serves every torch. It also lacks what torch's class
lacks; the warning that comes with it lists that (see MISSING). Safe all the same: the cache can be
emptied, a CUDA graph is refused rather than corrupted, and Tensor.record_stream() reaches the core.
Without that last hook torch would ignore record_stream, and memory that another stream still reads
would be given to the next tensor; so a torch that lacks it is refused. What the hook does not tell
is the stream's device and whose stream it is: one of another GPU than the tensor's is not waited
for, as it is with the shim.
"""

from __future__ import annotations

import ctypes
import importlib
from types import ModuleType
from typing import Any

from vramx.errors import InstallError

MISSING = (
    "torch.cuda memory statistics and snapshots, CUDA graphs, memory pools, cudnn.benchmark, "
    "CUDA tensors shared between processes, and torch.OutOfMemoryError (it is a RuntimeError)"
)
_MALLOC, _FREE = "vramx_plain_malloc", "vramx_plain_free"
# torch's setter -> the function that vramx._core exports for it.
_SETTERS = {
    "set_record_stream_fn": "vramx_plain_record_stream",
    "set_reset_fn": "vramx_plain_empty_cache",
    "set_memory_fraction_fn": "vramx_plain_memory_fraction",
    "set_begin_allocate_to_pool": "vramx_plain_begin_pool",
}


def install(torch: ModuleType) -> Any:
    """Put the core behind torch through torch's pluggable allocator, and return that.

    The functions serve from the devices that the core opened last.

    Raises:
        InstallError: the core lacks the functions, or torch refuses them.
    """
    core = importlib.import_module("vramx._core")
    path = str(core.__file__)
    try:
        addresses = _addresses(path, [*_SETTERS.values()])
        allocator = torch.cuda.memory.CUDAPluggableAllocator(path, _MALLOC, _FREE)
        inner = allocator.allocator()
        for setter, name in _SETTERS.items():
            getattr(inner, setter)(addresses[name])
        torch.cuda.memory.change_current_allocator(allocator)
    except (AttributeError, OSError, RuntimeError) as error:
        raise InstallError(f"plain mode cannot be installed: {error}") from None
    return allocator


def _addresses(path: str, names: list[str]) -> dict[str, int]:
    library = ctypes.CDLL(path)
    found = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names}
    return {name: address for name, address in found.items() if address}
