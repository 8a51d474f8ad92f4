"""A LightningModule as the model of a plan: its training_step is the step, without a trainer.

Lightning sets gradients to None between a step's forward and its backward, so that they are there
while activations grow. Optimizers are those that configure_optimizers() makes. What needs a trainer
is an error that says what to give instead. Lightning is not imported: a module of it knows its own
class. Not thread-safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from vramx.errors import InvalidValueError, cause

_LIBRARIES = ("lightning", "pytorch_lightning")
_LOGS = ("log", "log_dict")
_INSTEAD = "give the sample as a function of the model that returns the loss"


def is_lightning(model: Any) -> bool:
    """Tell whether a model is a LightningModule.

    Example:
        >>> is_lightning(nn.Linear(2, 2))
        False
    """
    return any(
        base.__name__ == "LightningModule" and base.__module__.split(".")[0] in _LIBRARIES
        for base in type(model).__mro__
    )


def check_lightning(model: Any) -> None:
    """Raise for a module that steps its optimizers itself."""
    if not model.automatic_optimization:
        raise InvalidValueError(
            f"{type(model).__name__} optimises by hand: its training_step is more than a loss; "
            f"{_INSTEAD}"
        )


def training_step(model: Any, batch: Any) -> Any:
    """Return what a module's training_step makes of a batch, as the first of an epoch.

    Raises:
        InvalidValueError: it needs a trainer.
    """
    check_lightning(model)
    with _without_logs(model):
        try:
            return model.training_step(batch, 0)
        except RuntimeError as error:
            if "is not attached to a `Trainer`" not in str(error):
                raise
            raise InvalidValueError(
                f"training_step of {type(model).__name__} needs a trainer; {_INSTEAD}"
            ) from error


def optimizers_of(model: Any) -> tuple[list[Optimizer], str]:
    """Return the optimizers that a module makes, and why there are none, for its user."""
    try:
        made = model.configure_optimizers()
    except Exception as error:  # of a user's method, which may want a trainer
        reason = cause(error)
        return [], f"no optimizer was counted: configure_optimizers() did not run ({reason})"
    return list(_optimizers_in(made)), ""


def _optimizers_in(made: Any) -> Iterator[Optimizer]:
    """Yield the optimizers among what the method may return; schedulers lie beside them."""
    if isinstance(made, Optimizer):
        yield made
    elif isinstance(made, Mapping):
        yield from _optimizers_in(made.get("optimizer"))
    elif isinstance(made, (list, tuple)):
        for each in made:
            yield from _optimizers_in(each)


@contextlib.contextmanager
def _without_logs(model: nn.Module) -> Iterator[None]:
    """Have nothing logged meanwhile: a trainer keeps what it is given, and none is an error."""
    before = {name: vars(model)[name] for name in _LOGS if name in vars(model)}
    for name in _LOGS:
        vars(model)[name] = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        for name in _LOGS:
            del vars(model)[name]
        vars(model).update(before)
