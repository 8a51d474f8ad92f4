"""A copy of what a step of a program refers to, which a fake GPU can run.

Every model, optimizer and tensor of the copy is one without data, so that the program's own are
never touched. What is of no known kind, such as a data loader or a file, is shared with the copy.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from vramx.errors import InvalidValueError, summary
from vramx.optimizers.copies import HOLDER
from vramx.optimizers.rounds import Rounds
from vramx.optimizers.states import size_bytes
from vramx.patch.references import globals_of, is_filled
from vramx.planning.program import (
    Found,
    found_in,
    has_state,
    hooks_of,
    hooks_of_module,
    is_followed,
    is_leaf,
    is_of_the_program,
)

Make = Callable[[Tensor], Tensor]
_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


class Copied:
    """A copy of values in which tensors have no data.

    Args:
        make: makes the tensor without data that stands for one.
        make_here: the same, on the device of the one.
        make_on_host: the same, on the host.
        values: of the program: they refer to each other in the copy as they do there.

    Attributes:
        handles: of hooks on tensors of the copy, which live as long as these.
    """

    def __init__(self, make: Make, make_here: Make, make_on_host: Make, *values: Any) -> None:
        self._make = make
        self._make_here = make_here
        self._make_on_host = make_on_host
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
        for model in found.models:
            self._copy_hooks_of_modules(model)
            self._copy_functions_of_modules(model)
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
            rounds = vars(optimizer).get(HOLDER)
            # Asked for by its name, an offloaded optimizer's waits for copies.
            for state in vars(optimizer).get("state", {}).values():
                if rounds is not None:
                    self._stand_in_waiting(state, rounds.options.least_bytes)
                self._stand_in_beside(state)
        for tensor in found.tensors:
            self._stand_in(tensor)

    def _stand_in_beside(self, tree: Any) -> None:
        """Have numbers of an optimizer, such as the count of its steps, wait where they are."""
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor):
                self._stand_in(tensor, self._make if tensor.dim() else self._make_here)

    def _stand_in_waiting(self, tree: Any, least_bytes: int) -> None:
        """Have what of an optimizer's states waits on the host be there."""
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor) and tensor.dim() and size_bytes(tensor) >= least_bytes:
                self._stand_in(tensor, self._make_on_host)

    def let_go(self) -> None:
        """Leave the copies to the step alone, which may replace what it refers to."""
        self._memo, self._functions, self._kept = {}, {}, []
        self.values, self.found = (), Found()

    def take_states_over(self) -> None:
        """Have states that wait on the host leave for it, and steps be taken in backward."""
        for optimizer in self.found.optimizers:
            rounds = vars(optimizer).get(HOLDER)
            if rounds is not None:
                rounds.adopt(optimizer, is_anywhere=True)

    def _copy_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Copy optimizers with all of their attributes; their own way leaves out some."""
        for optimizer in optimizers:
            self._remember(optimizer, object.__new__(type(optimizer)))
        for optimizer in optimizers:
            attributes = {
                # A scheduler wraps the step of the original, by name.
                name: Rounds(value.options) if name == HOLDER else self._copied_attribute(value)
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
                    if getattr(hook, "__module__", None) != Rounds.__module__:  # which the copy has
                        self.handles.append(register(self._copy(hook)))

    def _copy_hooks_of_modules(self, model: nn.Module) -> None:
        """Have hooks of modules refer to what is copied: they are functions, which are shared."""
        # A module that copies itself may make its parts anew.
        pairs = [(each, self._memo.get(id(each))) for each in model.modules()]
        for module, made in pairs:
            if made is not None:
                for own, copied in zip(hooks_of_module(module), hooks_of_module(made), strict=True):
                    copied.update((key, self._copy(hook)) for key, hook in own.items())

    def _copy_functions_of_modules(self, model: nn.Module) -> None:
        """Have functions that modules hold, as over their own weights, refer to what is copied."""
        made = self._memo.get(id(model))
        for module in () if made is None else made.modules():
            for name, value in vars(module).items():
                if self._is_over_copied(value):
                    vars(module)[name] = self._copy_function(value)

    def _is_over_copied(self, value: Any) -> bool:
        """Tell whether a value is a function, of a library perhaps, that closes over a model."""
        if not isinstance(value, types.FunctionType):
            return False
        cells = filter(is_filled, value.__closure__ or ())
        return any(id(cell.cell_contents) in self._memo for cell in cells)

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
        if is_leaf(tensor) and tensor.grad is not None:
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
        if isinstance(value, known) or has_state(value) or is_of_the_program(value):
            return self._deep_copy(value)
        return self._memo.get(id(value), value)

    def _copied_key(self, key: Any) -> Any:
        return self._copy(key) if isinstance(key, (Tensor, nn.Module, Optimizer)) else key

    def _remember(self, value: Any, made: Any) -> Any:
        self._kept.append(value)
        return self._memo.setdefault(id(value), made)

    def _deep_copy(self, value: Any) -> Any:
        # Of one that fails halfway nothing must be taken for a copy.
        memo = dict(self._memo)
        try:
            made = copy.deepcopy(value, memo)
        except Exception as error:
            if isinstance(value, (nn.Module, Optimizer)):
                raise InvalidValueError(
                    f"a {type(value).__name__} of the step cannot be copied "
                    f"({summary(error)}); predict before DDP, FSDP or "
                    "others wrap the model"
                ) from error
            if is_of_the_program(value):
                return self._copy_attributes(value)
            return value  # a file, a lock: what has no tensor of the model is shared
        self._kept += memo.pop(id(memo), [])
        self._memo.update(memo)
        return made

    def _copy_attributes(self, value: Any) -> Any:
        """Copy an object, such as a trainer, that has what cannot be copied as an attribute."""
        try:
            made = object.__new__(type(value))
            own = vars(made)
        except TypeError:  # of a class that extends one of C's, or has slots
            return value
        self._remember(value, made)
        own.update((name, self._copy(each)) for name, each in vars(value).items())
        return made

    def _copy_function(self, function: Any) -> Any:
        if isinstance(function, types.MethodType):
            code: Any = self._copy_function(function.__func__)
            return types.MethodType(code, self._copy(function.__self__))
        if isinstance(function, functools.partial):
            keywords = {name: self._copy(x) for name, x in function.keywords.items()}
            return functools.partial(
                self._copy(function.func), *map(self._copy, function.args), **keywords
            )
        if not is_followed(function) and not self._is_over_copied(function):
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
            if is_filled(original):
                cell.cell_contents = self._copy(original.cell_contents)
        made.__globals__.update({name: self._copy(x) for name, x in globals_of(function).items()})
        return made
