"""GPU memory in the loops of others: a callback each for transformers, Lightning and accelerate.

    Trainer(..., callbacks=[vramx.callbacks.TransformersMemory()])              transformers
    lightning.Trainer(callbacks=[vramx.callbacks.LightningMemory()])            Lightning
    accelerate.hooks.add_hook_to_module(model, vramx.callbacks.AccelerateMemory(), append=True)

Each is a few lines over `vramx.track`: the exact peak of each step, in the loop's own log where it
has one. A library is imported when its class is first asked for, and not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vramx.errors import MissingDependencyError

if TYPE_CHECKING:
    from vramx.callbacks.accelerate import AccelerateMemory
    from vramx.callbacks.lightning import LightningMemory
    from vramx.callbacks.transformers import TransformersMemory

_LIBRARIES = {
    "AccelerateMemory": "accelerate",
    "LightningMemory": "lightning",
    "TransformersMemory": "transformers",
}

__all__ = ["AccelerateMemory", "LightningMemory", "TransformersMemory"]


# Hidden from type checkers, for which a module with __getattr__ has every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LIBRARIES:
            raise AttributeError(f"module 'vramx.callbacks' has no attribute {name!r}")
        library = _LIBRARIES[name]
        try:
            module = importlib.import_module(f"vramx.callbacks.{library}")
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"{name} needs {library} ({error}); install it with: pip install {library}"
            ) from None
        value = globals()[name] = getattr(module, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIBRARIES})
