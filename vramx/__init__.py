"""vramx: train a larger model on the GPU you have.

This file only names what is public. Each name is imported from its module on first use, so that
`import vramx` costs a millisecond, imports neither torch nor numpy, and never touches CUDA. Where
torch is imported already it has the initialisation of CUDA watched (see allocator/cuda_init); not
where torch is only being imported, which then is who imports this, and the program did not ask (see
_autoload).
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
    from vramx.compression.codec.random import manual_seed
    from vramx.compression.config import Compression
    from vramx.compression.decorator import compressed_activations, compression_stats
    from vramx.compression.graph import compressed_graphs
    from vramx.compression.hooks import compress
    from vramx.compression.offload.offload import offload_report
    from vramx.compression.stats import CompressionStats
    from vramx.memory.record import Recorder, record
    from vramx.memory.replay import replay
    from vramx.memory.snapshot import Snapshot
    from vramx.memory.trace import load_trace
    from vramx.memory.track import Tracked, track
    from vramx.nn.optimize import OptimizeReport, optimize
    from vramx.optimizers.offload import offload_optimizer
    from vramx.patch.report import Report, report, restore
    from vramx.planning.fit import BatchFit, fit_batch
    from vramx.planning.plan import plan
    from vramx.planning.planned import Plan
    from vramx.planning.predict import predict
    from vramx.planning.prediction import Prediction
    from vramx.recompute.call import checkpoint
    from vramx.recompute.modules import checkpoint_modules

__version__ = "0.1.0"

# Public name -> the module that holds it.
_LAZY = {
    "AllocatorStats": "vramx.allocator.stats",
    "BatchFit": "vramx.planning.fit",
    "Compression": "vramx.compression.config",
    "CompressionStats": "vramx.compression.stats",
    "DefragmentReport": "vramx.allocator.limits",
    "OptimizeReport": "vramx.nn.optimize",
    "Plan": "vramx.planning.planned",
    "Prediction": "vramx.planning.prediction",
    "Recorder": "vramx.memory.record",
    "Report": "vramx.patch.report",
    "Snapshot": "vramx.memory.snapshot",
    "Tracked": "vramx.memory.track",
    "allocator_installed": "vramx.allocator.install",
    "allocator_stats": "vramx.allocator.stats",
    "checkpoint": "vramx.recompute.call",
    "checkpoint_modules": "vramx.recompute.modules",
    "compress": "vramx.compression.hooks",
    "compressed_activations": "vramx.compression.decorator",
    "compressed_graphs": "vramx.compression.graph",
    "compression_stats": "vramx.compression.decorator",
    "defragment": "vramx.allocator.limits",
    "fit_batch": "vramx.planning.fit",
    "install_allocator": "vramx.allocator.install",
    "load_trace": "vramx.memory",
    "manual_seed": "vramx.compression.codec.random",
    "offload_optimizer": "vramx.optimizers.offload",
    "offload_report": "vramx.compression.offload.offload",
    "optimize": "vramx.nn.optimize",
    "plan": "vramx.planning.plan",
    "predict": "vramx.planning.predict",
    "record": "vramx.memory.record",
    "replay": "vramx.memory",
    "report": "vramx.patch.report",
    "restore": "vramx.patch.report",
    "set_limit": "vramx.allocator.limits",
    "track": "vramx.memory.track",
}

__all__ = [
    "AllocatorStats", "BatchFit", "Compression", "CompressionStats", "DefragmentReport",
    "OptimizeReport", "Plan", "Prediction", "Recorder", "Report", "Snapshot", "Tracked",
    "VramxError", "__version__", "allocator_installed", "allocator_stats", "checkpoint",
    "checkpoint_modules", "compress", "compressed_activations", "compressed_graphs",
    "compression_stats", "defragment", "fit_batch", "install_allocator", "load_trace",
    "manual_seed", "offload_optimizer", "offload_report", "optimize", "plan", "predict", "record",
    "replay", "report", "restore", "set_limit", "track",
]  # fmt: skip

# Whether it is torch's own import that imports this.
_IS_TORCHS = getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False)
if "torch" in sys.modules and not _IS_TORCHS:
    from vramx.allocator import cuda_init

    cuda_init.watch()


# Hidden from type checkers, for which a module with __getattr__ has every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "callbacks":  # a package, which importing puts here
            return importlib.import_module("vramx.callbacks")
        if name not in _LAZY:
            raise AttributeError(f"module 'vramx' has no attribute {name!r}{_near(name)}")
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value


def _near(name: str) -> str:
    """Return the public name that is spelt alike, in brackets; what probes for names of Python's
    own is told none."""
    if name.startswith("_"):
        return ""
    from difflib import get_close_matches

    close = get_close_matches(name, _LAZY, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "callbacks"})
