"""The peak of each step of a loop with accelerate, by a hook of its on the model."""

from __future__ import annotations

from typing import Any

from accelerate.hooks import ModelHook

from vramx.callbacks.steps import StepMemory


class AccelerateMemory(StepMemory, ModelHook):
    """Tracks from one call of the model to the next: forward, backward and the optimizer's step.

    `end_run()` ends the last one, as taking the hook off does. A loop that calls the model several
    times in a step has a region for each call.

    Example:
        >>> memory = vramx.callbacks.AccelerateMemory()                        # doctest: +SKIP
        >>> accelerate.hooks.add_hook_to_module(model, memory, append=True)    # doctest: +SKIP
        >>> accelerator.log(memory.figures())                                  # doctest: +SKIP
    """

    def init_hook(self, module: Any) -> Any:
        """Start the recording."""
        self.begin_run(module)
        return module

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin a step."""
        self.begin_step()
        return args, kwargs

    def detach_hook(self, module: Any) -> Any:
        """End the last step and write the recording."""
        self.end_run()
        return module
