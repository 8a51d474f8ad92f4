"""vramx: train a larger model on the GPU you have.

This file only names what is public. Each name is imported from its module on first use, so that
`import vramx` costs a millisecond, imports neither torch nor numpy, and never touches CUDA. Where
torch is imported already it has the initialisation of CUDA watched (see allocator/cuda_init).
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from vramx.errors import VramxError

if TYPE_CHECKING:
    from vramx.allocator.install import allocator_installed, install_allocator
    from vramx.allocator.limits import DefragmentReport, defragment, set_limit
    from vramx.allocator.stats import AllocatorStats, allocator_stats
    from vramx.memory.replay import replay
    from vramx.memory.trace import load_trace

__version__ = "0.1.0"

# Public name -> the module that holds it.
_LAZY = {
    "AllocatorStats": "vramx.allocator.stats",
    "DefragmentReport": "vramx.allocator.limits",
    "allocator_installed": "vramx.allocator.install",
    "allocator_stats": "vramx.allocator.stats",
    "defragment": "vramx.allocator.limits",
    "install_allocator": "vramx.allocator.install",
    "load_trace": "vramx.memory",
    "replay": "vramx.memory",
    "set_limit": "vramx.allocator.limits",
}

__all__ = [
    "AllocatorStats",
    "DefragmentReport",
    "VramxError",
    "__version__",
    "allocator_installed",
    "allocator_stats",
    "defragment",
    "install_allocator",
    "load_trace",
    "replay",
    "set_limit",
]

if "torch" in sys.modules:
    from vramx.allocator import cuda_init

    cuda_init.watch()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'vramx' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
