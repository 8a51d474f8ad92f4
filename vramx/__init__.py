"""vramx: train a larger model on the GPU you have.

This file only names what is public. Each name is imported from its module on first use, so that
`import vramx` costs a millisecond, imports neither torch nor numpy, and never touches CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vramx.errors import VramxError

if TYPE_CHECKING:
    from vramx.memory.replay import replay
    from vramx.memory.trace import load_trace

__version__ = "0.1.0"

# Public name -> the module that holds it.
_LAZY = {
    "load_trace": "vramx.memory",
    "replay": "vramx.memory",
}

__all__ = ["VramxError", "__version__", "load_trace", "replay"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'vramx' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
