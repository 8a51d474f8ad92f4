"""The peak of each optimizer step in the log of transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from vramx.callbacks.steps import StepMemory


class TransformersMemory(StepMemory, TrainerCallback):
    """Adds the peak of the last step to each entry of `trainer.state.log_history`.

    Reporters that were added before it have their entry by then. A step is one of the optimizer,
    with all batches that it accumulates.

    Example:
        >>> memory = vramx.callbacks.TransformersMemory()             # doctest: +SKIP
        >>> Trainer(model, args, callbacks=[memory]).train()          # doctest: +SKIP
        >>> print(memory.highest)                                     # doctest: +SKIP
        step: peak 7.31 GiB, live 5.20 GiB (+0.00 B), reserved 7.59 GiB
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the recording."""
        self.begin_run(kwargs.get("model"), kwargs.get("optimizer"))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step."""
        self.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End it."""
        self.end_step()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the figures to the entry that was made just before."""
        figures = self.figures()
        if state.log_history:
            state.log_history[-1].update(figures)
        if isinstance(kwargs.get("logs"), dict):
            kwargs["logs"].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the recording."""
        self.end_run()
