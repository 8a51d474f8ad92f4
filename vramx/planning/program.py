"""What a step of a program refers to.

A step is a function, a method, or an object that is called. It refers to what its closure, its
defaults, its object and the globals that its code names hold; functions among these that are of no
library are followed. found_in() lists it; program_copy.py makes a copy of it.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vramx.errors import InvalidValueError, brief, refused
from vramx.optimizers.copies import unwrapped
from vramx.patch.references import globals_of, parts_of
from vramx.recompute.generators import is_generator

_LIBRARIES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"])
_CONTAINERS = (list, tuple, dict, set)
_ACCEPTED = "accepted are a function, a method, an object that is called, and a torch.nn.Module"


def found_in(*roots: Any) -> Found:
    """Return the models, optimizers, tensors and generators that programs refer to."""
    found = Found()
    for root in roots:
        found.visit(root)
    return found


class Found:
    """Models, optimizers and what wraps these, tensors outside, and others with a state_dict().

    And generators of random numbers, but for those of the process.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.wrappers: list[Optimizer] = []
        self.others: list[Any] = []
        self.tensors: list[Tensor] = []
        self.generators: list[Any] = []
        self._seen: dict[int, Any] = {}

    def visit(self, value: Any) -> None:
        """Add what a value is or refers to."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Optimizer):
            if unwrapped(value) is not value:
                self.wrappers.append(value)
            value = unwrapped(value)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            self._visit_hooks(value)
        elif isinstance(value, nn.Module):
            self._visit_model(value)
        elif isinstance(value, Optimizer):
            self.optimizers.append(value)
        elif is_generator(value):
            self.generators.append(value)
        else:
            self._visit_within(value)

    def _visit_model(self, model: nn.Module) -> None:
        self.models.append(model)
        for parameter in model.parameters():
            self._visit_hooks(parameter)
        for module in model.modules():
            self.generators += filter(is_generator, vars(module).values())
            for hook in chain.from_iterable(hooks.values() for hooks in hooks_of_module(module)):
                self.visit(hook)

    def _visit_hooks(self, tensor: Tensor) -> None:
        for hooks in hooks_of(tensor):
            for hook in hooks.values():
                self.visit(hook)

    def _visit_within(self, value: Any) -> None:
        inner: Iterable[Any] = ()
        if is_followed(value):
            inner = (*parts_of(value), *globals_of(value).values())
        elif isinstance(value, Mapping):
            inner = (*value.keys(), *value.values())
        elif isinstance(value, _CONTAINERS):
            inner = value
        elif has_state(value):
            self.others.append(value)
            inner = [getattr(value, "optimizer", None)]  # of a scheduler
        elif is_of_the_program(value):
            inner = vars(value).values()
        for each in inner:
            self.visit(each)


def hooks_of(tensor: Tensor) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Return what runs when a leaf's gradient comes, and when it is there."""
    when_there = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return (tensor._backward_hooks if is_leaf(tensor) else None) or {}, when_there or {}


def hooks_of_module(module: nn.Module) -> list[dict[int, Any]]:
    """Return what runs around the calls of a module itself."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [getattr(module, name) for name in names]


def is_leaf(tensor: Tensor) -> bool:
    """Tell whether a tensor has a gradient of its own.

    Of one of several views of a parameter that has been stepped since torch does not say.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def is_followed(value: Any) -> bool:
    """Tell whether a value is a function that is of no library."""
    if isinstance(value, types.MethodType):
        return True
    if isinstance(value, functools.partial):
        return True
    return isinstance(value, types.FunctionType) and not _is_of_a_library(value.__module__)


def has_state(value: Any) -> bool:
    """Tell whether a value is an object like a scheduler or a scaler."""
    names = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(callable(getattr(value, n, None)) for n in names)


def is_of_the_program(value: Any) -> bool:
    """Tell whether a value is an object, and its class is of no library."""
    if isinstance(value, (type, types.ModuleType)) or not hasattr(value, "__dict__"):
        return False
    return not _is_of_a_library(type(value).__module__)


@functools.lru_cache(maxsize=1024)
def _is_of_a_library(name: str | None) -> bool:
    if name is None or name.partition(".")[0] in ("torch", "vramx", "builtins"):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    # A test or a script may lie below either: what is installed lies in them.
    return file is not None and file.startswith(_LIBRARIES)


def check_step(step: Any) -> None:
    """Raise unless a step can be called."""
    if not callable(step) or isinstance(step, type):
        raise InvalidValueError(f"step {brief(step)} is not accepted; {_ACCEPTED}")


def check_ran(result: Any) -> None:
    """Raise where calling a step has run nothing of it: it is a generator's function, or async."""
    if isinstance(result, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        if isinstance(result, types.CoroutineType):
            result.close()  # else Python warns that nobody has awaited it
        raise InvalidValueError(
            f"calling the step gives a {type(result).__name__}, of which nothing has run; accepted "
            "is a function that takes the step"
        )


def check_has_memory(models: Iterable[nn.Module]) -> None:
    """Raise where a model that is to be run has no memory."""
    for model in models:
        name = next((n for n, p in model.named_parameters() if p.is_meta), None)
        if name is not None:
            raise InvalidValueError(
                f"{name} is on the meta device, and steps are run here: give the model memory, as "
                "by model.to_empty(device=...), or ask vramx.predict, which needs none"
            )


def is_on_the_host(found: Found) -> bool:
    """Tell whether all that a program refers to is on the CPU or on no device."""
    devices = {p.device.type for model in found.models for p in model.parameters()}
    devices |= {tensor.device.type for tensor in found.tensors}
    return bool(devices) and "cuda" not in devices


def device_type_of(device: str | torch.device) -> str:
    """Return "cuda" or "cpu"; raise for another."""
    kind = str(device).partition(":")[0]
    if kind not in ("cuda", "cpu"):
        raise refused("device", device, ("cuda", "cpu"))
    return kind
