"""What a step of a program refers to, and a copy of it that a fake GPU can run.

A step is a function, a method, or an object that is called. It refers to what its closure, its
defaults, its object and the globals that its code names hold; functions among these that are of no
library are followed. found_in() lists it; Copied makes a copy in which every model, optimizer and
tensor is one without data, so that the program's own are never touched. What is of no known kind,
such as a data loader or a file, is shared with the copy.
"""

from __future__ import annotations

import copy
import functools
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from vramx.errors import InvalidValueError, brief
from vramx.optimizers.copies import unwrapped

Make = Callable[[Tensor], Tensor]
_LIBRARIES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"])
_CONTAINERS = (list, tuple, dict, set)
_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))
_ACCEPTED = "accepted are a function, a method, an object that is called, and a torch.nn.Module"


def found_in(*roots: Any) -> Found:
    """Return the models, optimizers and tensors that programs refer to."""
    found = Found()
    for root in roots:
        found.visit(root)
    return found


class Found:
    """Models, optimizers and what wraps these, tensors outside, and others with a state_dict()."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.wrappers: list[Optimizer] = []
        self.others: list[Any] = []
        self.tensors: list[Tensor] = []
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
            self.models.append(value)
            for parameter in value.parameters():
                self._visit_hooks(parameter)
        elif isinstance(value, Optimizer):
            self.optimizers.append(value)
        else:
            self._visit_within(value)

    def _visit_hooks(self, tensor: Tensor) -> None:
        for hooks in hooks_of(tensor):
            for hook in hooks.values():
                self.visit(hook)

    def _visit_within(self, value: Any) -> None:
        inner: Iterable[Any] = ()
        if is_followed(value):
            inner = [each for _, each in references(value)]
        elif isinstance(value, Mapping):
            inner = (*value.keys(), *value.values())
        elif isinstance(value, _CONTAINERS):
            inner = value
        elif _has_state(value):
            self.others.append(value)
            inner = [getattr(value, "optimizer", None)]  # of a scheduler
        elif _is_of_the_program(value):
            inner = vars(value).values()
        for each in inner:
            self.visit(each)


def hooks_of(tensor: Tensor) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Return what runs when a leaf's gradient comes, and when it is there."""
    when_there = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return (tensor._backward_hooks if tensor.is_leaf else None) or {}, when_there or {}


def is_followed(value: Any) -> bool:
    """Tell whether a value is a function that is of no library."""
    if isinstance(value, types.MethodType):
        return True
    if isinstance(value, functools.partial):
        return True
    return isinstance(value, types.FunctionType) and not _is_of_a_library(value.__module__)


def references(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function refers to, by name where it has one."""
    if isinstance(function, types.MethodType):
        yield "", function.__self__
        yield "", function.__func__
        return
    if isinstance(function, functools.partial):
        yield from (("", x) for x in (function.func, *function.args, *function.keywords.values()))
        return
    for cell in function.__closure__ or ():
        if _filled(cell):
            yield "", cell.cell_contents
    yield from (
        ("", x) for x in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    )
    yield from globals_of(function)


def globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that the code of a function, and of those within it, names."""
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    for name in sorted(names & function.__globals__.keys()):
        yield name, function.__globals__[name]


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a name that was not assigned yet
        return False


def _has_state(value: Any) -> bool:
    """Tell whether a value is an object like a scheduler or a scaler."""
    names = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(callable(getattr(value, n, None)) for n in names)


def _is_of_the_program(value: Any) -> bool:
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


class Copied:
    """A copy of values in which tensors have no data.

    Args:
        make: makes the tensor without data that stands for one.
        make_here: the same, on the device of the one.
        values: of the program: they refer to each other in the copy as they do there.

    Attributes:
        handles: of hooks on tensors of the copy, which live as long as these.
    """

    def __init__(self, make: Make, make_here: Make, *values: Any) -> None:
        self._make = make
        self._make_here = make_here
        self._memo: dict[int, Any] = {}
        self._functions: dict[int, Any] = {}
        self._kept: list[Any] = []  # whose ids are keys
        self.handles: list[Any] = []
        found = found_in(*values)
        self._prepare(found)
        self._copy_optimizers([*found.optimizers, *found.wrappers])
        for tensor in list(self._kept):
            if isinstance(tensor, Tensor):
                self._copy_hooks(tensor, self._memo[id(tensor)])
        self.values = tuple(self._copy(value) for value in values)
        self.found = found_in(*self.values)

    def _prepare(self, found: Found) -> None:
        """Decide what stands for each tensor, so that copying meets none with data."""
        for model in found.models:
            for module in model.modules():
                for tensor in tree_leaves(list(vars(module).values())):
                    self._stand_in(tensor)
        for optimizer in found.optimizers:
            for group in optimizer.param_groups:
                for tensor in tree_leaves(group["params"]):
                    self._stand_in(tensor)
                self._stand_in_beside(group)
            for state in optimizer.state.values():
                self._stand_in_beside(state)
        for tensor in found.tensors:
            self._stand_in(tensor)

    def _stand_in_beside(self, tree: Any) -> None:
        """Have numbers of an optimizer, such as the count of its steps, wait where they are."""
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor):
                self._stand_in(tensor, self._make if tensor.dim() else self._make_here)

    def _copy_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Copy optimizers with all of their attributes; their own way leaves out some."""
        for optimizer in optimizers:
            self._remember(optimizer, object.__new__(type(optimizer)))
        for optimizer in optimizers:
            attributes = {
                # A scheduler wraps the step of the original, by name.
                name: self._copied_attribute(value)
                for name, value in vars(optimizer).items()
                if name != "step"
            }
            self._memo[id(optimizer)].__dict__.update(attributes)

    def _copy_hooks(self, tensor: Tensor, made: Tensor) -> None:
        """Have hooks of the program, as of an optimizer that steps in backward, run on the copy."""
        if tensor.requires_grad:
            for hooks, register in zip(
                hooks_of(tensor),
                (made.register_hook, made.register_post_accumulate_grad_hook),
                strict=True,
            ):
                for hook in hooks.values():
                    self.handles.append(register(self._copy(hook)))

    def _copied_attribute(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value, self._memo)
        except Exception:  # what cannot be copied has no parameter
            return value

    def _stand_in(self, tensor: Any, make: Make | None = None) -> None:
        if not isinstance(tensor, Tensor) or id(tensor) in self._memo:
            return
        made = (make or self._make)(tensor)
        self._kept.append(tensor)
        self._memo[id(tensor)] = made
        if tensor.is_leaf and tensor.grad is not None:
            made.grad = self._make(tensor.grad)

    def _copy(self, value: Any) -> Any:
        if is_followed(value):
            return self._copy_function(value)
        if isinstance(value, dict) and type(value) is dict:
            copied = {self._copied_key(key): self._copy(each) for key, each in value.items()}
            return self._remember(value, copied)
        if type(value) in (list, tuple):
            return self._remember(value, type(value)(map(self._copy, value)))
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, _ITERATORS):
            return self._remember(value, copy.copy(value))  # the program's own is not advanced
        known = (Tensor, nn.Module, Optimizer)
        if isinstance(value, known) or _has_state(value) or _is_of_the_program(value):
            return self._deep_copy(value)
        return self._memo.get(id(value), value)

    def _copied_key(self, key: Any) -> Any:
        return self._copy(key) if isinstance(key, (Tensor, nn.Module, Optimizer)) else key

    def _remember(self, value: Any, made: Any) -> Any:
        self._kept.append(value)
        return self._memo.setdefault(id(value), made)

    def _deep_copy(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:
            if isinstance(value, (nn.Module, Optimizer)):
                raise InvalidValueError(
                    f"a {type(value).__name__} of the step cannot be copied "
                    f"({type(error).__name__}: {brief(str(error))}); predict before DDP, FSDP or "
                    "others wrap the model"
                ) from error
            return value  # a file, a lock: what has no tensor of the model is shared

    def _copy_function(self, function: Any) -> Any:
        if isinstance(function, types.MethodType):
            code: Any = self._copy_function(function.__func__)
            return types.MethodType(code, self._copy(function.__self__))
        if isinstance(function, functools.partial):
            keywords = {name: self._copy(x) for name, x in function.keywords.items()}
            return functools.partial(
                self._copy(function.func), *map(self._copy, function.args), **keywords
            )
        if not is_followed(function):
            return function
        if id(function) in self._functions:
            return self._functions[id(function)]
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        made = types.FunctionType(
            function.__code__, dict(function.__globals__), function.__name__, None, cells
        )
        self._functions[id(function)] = made  # before what it refers to, which may be itself
        made.__kwdefaults__ = {k: self._copy(x) for k, x in (function.__kwdefaults__ or {}).items()}
        made.__defaults__ = tuple(map(self._copy, function.__defaults__ or ())) or None
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            if _filled(original):
                cell.cell_contents = self._copy(original.cell_contents)
        made.__globals__.update({name: self._copy(x) for name, x in globals_of(function)})
        return made


def check_step(step: Any) -> None:
    """Raise unless a step can be called."""
    if not callable(step) or isinstance(step, type):
        raise InvalidValueError(f"step {brief(step)} is not accepted; {_ACCEPTED}")


def is_on_the_host(found: Found) -> bool:
    """Tell whether all that a program refers to is on the CPU or on no device."""
    devices = {p.device.type for model in found.models for p in model.parameters()}
    devices |= {tensor.device.type for tensor in found.tensors}
    return bool(devices) and "cuda" not in devices


def device_type_of(device: str | torch.device) -> str:
    """Return "cuda" or "cpu"; raise for another."""
    kind = str(device).partition(":")[0]
    if kind not in ("cuda", "cpu"):
        raise InvalidValueError(
            f"device {brief(device)} is not accepted; accepted are 'cuda' and 'cpu'"
        )
    return kind
