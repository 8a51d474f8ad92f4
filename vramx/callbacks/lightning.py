"""The peak of each batch among the metrics of Lightning's Trainer."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from vramx.callbacks.steps import StepMemory

# One library under two names, whose classes are not each other's; the program's own is there.
_NAMES = ("lightning.pytorch", "pytorch_lightning")
_library = next((name for name in _NAMES if name in sys.modules), _NAMES[0])
_Callback: Any = importlib.import_module(_library).Callback


class LightningMemory(StepMemory, _Callback):
    """Logs the peak of each training batch, its step of the optimizer included.

    Example:
        >>> memory = vramx.callbacks.LightningMemory()                # doctest: +SKIP
        >>> lightning.Trainer(callbacks=[memory]).fit(module)         # doctest: +SKIP
        >>> memory.highest.peak_bytes                                 # doctest: +SKIP
        7849051648
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the recording."""
        self.begin_run(pl_module, list(trainer.optimizers) or None)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step."""
        self.begin_step()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End it and log it."""
        self.end_step()
        if figures := self.figures():
            pl_module.log_dict(figures)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the recording."""
        self.end_run()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write the recording of a run that fails."""
        self.end_run(exception)
