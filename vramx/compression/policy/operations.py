"""Which operation is saving a tensor.

A torch function mode notes the call that is running; a saved-tensor hook asks for it. Functions in
Python that torch.nn.functional builds from others are seen under their own, outermost name. What is
done with the answer is policy's. One mode belongs to one thread; about a microsecond a torch call,
and the arguments are looked at only when something is saved. A torch.compile'd callable is traced
through the mode, which is one branch on a constant: no graph break, nothing of ours in its graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import FrameType, FunctionType
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.nn.functional as functional
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from vramx.compression.codec.mapping import is_angle
from vramx.compression.compiler import caller, skip_frames
from vramx.compression.fakes import PLAIN
from vramx.compression.policy import third_party
from vramx.compression.policy.applied import function_called
from vramx.compression.policy.calls import STRIDED, UNKNOWN, Operation
from vramx.compression.policy.writes import may_write, note_call
from vramx.patch.torch_functions import called

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # classes without ways of their own


class OperationMode(TorchFunctionMode):
    """Note the torch function that is running on this thread; `current` gives it to a hook."""

    def __init__(self) -> None:
        super().__init__()
        self._call: tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]] | None = None
        # The call that is running, once it has saved something.
        self.operation: Operation | None = None
        # Is told what a call takes from one another.
        self.on_difference: Callable[[tuple[Any, ...]], None] | None = None
        self._made: WeakSet[torch.UntypedStorage] = WeakSet()
        # The last call of an autograd.Function that has no frame, by the number of its node.
        self._applied: tuple[int, Operation | None] = (-1, None)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a constant while a compiler traces this
            if func is torch.Tensor.unflatten:
                # Written in Python with a super() that cannot be traced; the method itself can.
                return args[0].unflatten(*args[1:], **kwargs)
            return func(*args, **kwargs)
        if type(func) is FunctionType:
            func = called(func, sys._getframe(1))
        special = _special(func)
        of_subclass = types and not _PLAIN.issuperset(types)
        of_subclass = of_subclass and torch._C._is_torch_function_enabled()
        if special == _COMPOSITE and not of_subclass:
            with self:
                return _opened(func)(*args, **kwargs)
        if _transforms_are_active():
            return self._call_transformed(func, args, kwargs)
        if of_subclass:
            return self._call_of_subclass(func, types, args, kwargs)
        if special:
            self._note_special(special, func, (*args, *kwargs.values()) if kwargs else args)
        outer = self._call
        self._call = (func, args, kwargs)
        try:
            result = func(*args, **kwargs)
            if self.operation is not None and self.operation.waiting is not None:
                with torch._C.DisableTorchFunction():
                    self.operation.waiting.end(self.operation)
        finally:
            self._call = outer
            self.operation = None
        if type(result) in PLAIN and not result.requires_grad:
            self._note_made(result, args)
        return result

    def __exit__(self, *error: Any) -> None:
        # What it was asked for is a tensor of the graph, which holds the mode through its hooks.
        self._applied = (-1, None)
        super().__exit__(*error)

    def _note_special(
        self, special: str, func: Callable[..., Any], values: tuple[Any, ...]
    ) -> None:
        if special != _DIFFERENCE:
            note_call(func, values)
        elif self.on_difference is not None and len(values) > 1 and is_angle(values[0]):
            with torch._C.DisableTorchFunction():
                self.on_difference(values)

    def _call_of_subclass(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Have what a subclass of tensors makes of a call seen by itself.

        It may compute the function in its own way, by other operations and Functions. What it gives
        to torch under its name comes here again, of no types.
        """
        with self:
            for cls in types:
                result = cls.__torch_function__(func, types, args, kwargs)
                if result is not NotImplemented:
                    return result
        return func(*args, **kwargs)  # torch says that there is none

    def _call_transformed(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call within a transform of torch.func, whose tensors stand for others and have no memory.

        What is saved there is kept, and nothing is asked of the arguments.
        """
        outer, operation = self._call, self.operation
        self._call, self.operation = (transformed, (), {}), None
        try:
            return func(*args, **kwargs)
        finally:
            self._call, self.operation = outer, operation

    def _note_made(self, result: torch.Tensor, args: tuple[Any, ...]) -> None:
        """Note memory that a call made, which is not the memory of what it was given.

        What a vmap gives out at its end may be either.
        """
        if not result.is_floating_point() or result.layout is not STRIDED or _is_batched(result):
            return
        storage = result.untyped_storage()
        for value in args:
            given = type(value) in PLAIN and value.layout is STRIDED
            if given and (_is_batched(value) or value.untyped_storage() is storage):
                return
        self._made.add(storage)

    def is_given(self, tensor: torch.Tensor, operation: Operation) -> bool:
        """Tell whether a tensor without a gradient is memory of the program's own.

        It is an argument of the operation, and no call made its memory since the mode was entered.
        """
        if tensor.requires_grad or tensor.grad_fn is not None or operation.match(tensor) is None:
            return False
        return tensor.untyped_storage() not in self._made

    def current(self, frame_depth: int) -> Operation:
        """Return the call that is saving its first tensor; `frame_depth` counts the frames up to
        the hook's.

        TorchScript, and functions in C++ that are no operators of torch, are one unknown operation.
        An autograd.Function is asked for with each of its tensors, and counts them.
        """
        if self._call is None:
            # A device's backward thread has no frame above a hook's.
            frame = caller(sys._getframe(frame_depth))
            unseen = _custom_function(frame)
            if unseen is None and _APPLY_CODE is None:
                unseen = self._applied_in(frame)
            return Operation(UNKNOWN, (), {}, UNKNOWN) if unseen is None else unseen
        func, args, kwargs = self._call
        name, library = _identity(func)
        self.operation = found = Operation(name, args, kwargs, library)
        return found

    def _applied_in(self, frame: FrameType | None) -> Operation | None:
        """Return the Function that a frame is calling, of whose arguments nothing is known."""
        number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if number == self._applied[0]:
            found = self._applied[1]
            if found is not None:
                found.position += 1
            return found
        function = None if frame is None else function_called(frame)
        found = None if function is None else _operation_of(function, (), {})
        self._applied = (number, found)
        return found


def transformed() -> None:
    """Stand for every operation within a transform of torch.func."""


# A tensor of the vmap in torch.autograd.functional, which stands for others and has no memory.
_is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
_transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
skip_frames(OperationMode.__torch_function__)


def _custom_function(frame: FrameType | None) -> Operation | None:
    """Return the autograd.Function whose `apply` is this frame; no mode sees those.

    A checkpoint saves its inputs itself in newer releases, and by a Function in older ones; any
    use may be made of them. Our own operators call a Function without a frame of its own.
    """
    if frame is None:
        return None
    module = str(frame.f_globals.get("__name__"))
    if module == "torch.utils.checkpoint":
        return Operation("checkpoint", (), {}, module)
    if module.startswith(_OURS):
        return Operation(frame.f_code.co_name, (), {}, third_party.OURS)
    if frame.f_code is not _APPLY_CODE:
        return None
    values = frame.f_locals
    known = values.get(_NOTE)
    if known is not None:
        known.position += 1
        return cast(Operation, known)
    # Its frame is the one object that lives as long as the call does.
    values[_NOTE] = found = _operation_of(values["cls"], values["args"], values["kwargs"])
    return found


def _operation_of(function: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operation:
    if function.__name__ == _CHECKPOINTS_FUNCTION:
        return Operation("checkpoint", (), {}, function.__module__)
    return Operation(function.__name__, args, kwargs, function.__module__.split(".")[0])


_NOTE = "_vramx_operation"
_CHECKPOINTS_FUNCTION = "_NoopSaveInputs"
_OURS = f"{third_party.OURS}."
# From torch 2.14 on it is written in C and has no frame: see applied.py.
_APPLY_CODE = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
# Functions that save nothing themselves, but call operations with policies of their own.
_COMPOSITES = frozenset({functional.multi_head_attention_forward})
_WRITES, _COMPOSITE, _DIFFERENCE = "writes", "composite", "difference"
# Not in place: that is an error of what has saved its result.
_DIFFERENCES = frozenset({"sub", "subtract", "rsub", "__sub__"})


@lru_cache(maxsize=2048)
def _special(func: Callable[..., Any]) -> str:
    """Return what is to be done for a call beside noting it; empty for almost all."""
    if func in _COMPOSITES:
        return _COMPOSITE
    if may_write(func):
        return _WRITES
    named = getattr(func, "__name__", "") in _DIFFERENCES
    return _DIFFERENCE if named and not _library(func) else ""


@lru_cache(maxsize=8)
def _opened(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a composite that does not offer itself to modes again.

    The check is a name in the function's module; the copy looks its names up in a copy of those.
    """
    assert isinstance(func, FunctionType)
    names = dict(func.__globals__)
    names["has_torch_function"] = lambda _: False
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


@lru_cache(maxsize=1024)
def _identity(func: Callable[..., Any]) -> tuple[str, str]:
    """Return the name of an operation, and whose it is: empty for torch's own."""
    return operation_name(func), _library(func)


def _library(func: Callable[..., Any]) -> str:
    """Return the namespace of an operator, and the package of a function in Python."""
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        name = func._qualified_op_name if isinstance(func, OpOverloadPacket) else func.name()
        library = name.split("::")[0]
        return "" if library in ("aten", "prims") else library
    # Methods of tensors and much of what is written in C++ say no module.
    package = str(getattr(func, "__module__", None) or "torch").split(".")[0]
    return "" if package == "torch" else package


def operation_name(func: Callable[..., Any]) -> str:
    """Return the name of an operation as a policy writes it: `mul` for `Tensor.__imul__` too."""
    name = getattr(func, "__name__", type(func).__name__).split(".")[0].strip("_")
    return _OPERATORS.get(name, name)


_OPERATORS = {
    f"{prefix}{name}": name
    for prefix in "ri"
    for name in ("mul", "add", "sub", "matmul", "div", "pow", "truediv")
    if (prefix, name) != ("r", "pow")  # 2 ** x is an exponential
}
