"""Which torch operation is saving a tensor, and which of its arguments the tensor is.

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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from vramx.compression import exactness
from vramx.compression.compiler import caller, skip_frames

# Views and copies that autograd records: what they give is the same data.
_ORDER_KEPT = frozenset(
    f"{name}Backward{version}"
    for name in ("View", "UnsafeView", "_ReshapeAlias", "ReshapeAlias", "T", "Transpose", "Permute")
    for version in (0,)
) | frozenset(f"{name}Backward{v}" for name in ("Unsqueeze", "Squeeze") for v in range(3))
_COPIES = frozenset({"ToCopyBackward0"})
_REARRANGED = frozenset(
    {"CloneBackward0", "ConstantPadNdBackward0", "ExpandBackward0", "AliasBackward0"}
)
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
STRIDED = torch.strided
# Enough for every chain that torch builds inside one operation; a bound, so that a walk is cheap.
_WALK = 8
_UNKNOWN = "unknown"
# The position of an argument that is usually given by name.
_KEYWORDS: dict[str, tuple[str, ...]] = {
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask"),
    "cross_entropy": ("input", "target", "weight"),
}
_COMMON_KEYWORDS = ("input", "weight", "bias")


# A tensor among the arguments as an Argument says it, in a form that is faster to make.
_Given = tuple[int | None, str | None, torch.Tensor]
_NO_TENSORS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


class Argument(NamedTuple):
    """A tensor that was given to the operation: its position, None where only a name is known."""

    position: int | None
    keyword: str | None
    tensor: torch.Tensor


class Match(NamedTuple):
    """The argument whose data a saved tensor holds.

    `memory`: it is the same memory. `cast`: it is a copy in another dtype with the elements in the
    same order, so that equal arguments give equal copies.
    """

    argument: Argument
    memory: bool
    cast: bool


class Operation:
    """One call of a torch function, or of one that torch does not know (`custom`).

    The latter are autograd.Functions and operators that other libraries register.
    """

    __slots__ = ("_answer", "_args", "_asked", "_found", "_kwargs", "custom", "name")

    def __init__(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], custom: bool = False
    ) -> None:
        self.name = name
        self.custom = custom
        self._args = args
        self._kwargs = kwargs
        self._found: list[_Given] | None = None
        self._asked: torch.Tensor | None = None
        self._answer: Match | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [tensor for _, _, tensor in self._given()]

    def _given(self) -> list[_Given]:
        """Return the tensors with their places; those in a list have the place of the list."""
        if self._found is None:
            found: list[_Given] = []
            for position, value in enumerate(self._args):
                if type(value) in PLAIN:
                    found.append((position, None, value))
                elif type(value) not in _NO_TENSORS:  # isinstance asks torch, which takes longer
                    _add_tensors(found, value, position, None)
            keywords = _KEYWORDS.get(self.name, _COMMON_KEYWORDS) if self._kwargs else ()
            for keyword, value in self._kwargs.items():
                place = keywords.index(keyword) if keyword in keywords else None
                _add_tensors(found, value, place, keyword)
            self._found = found
        return self._found

    @property
    def needs_exact(self) -> bool:
        """Whether backward needs exact values of what the operation saves."""
        return not self.custom and exactness.needs_exact(self.name, self._args, self._kwargs)

    def match(self, tensor: torch.Tensor) -> Match | None:
        """Return the argument that a saved tensor is, views and casts of it; None for all else."""
        # The rules ask for one tensor several times; what is asked for is alive while they do.
        if self._asked is not tensor:
            self._answer = self._find(tensor)
            self._asked = tensor
        return self._answer

    def _find(self, tensor: torch.Tensor) -> Match | None:
        for position, value in enumerate(self._args):
            if value is tensor:
                return Match(Argument(position, None, tensor), True, False)
        given = self._given()
        for place in given:
            if place[2] is tensor:
                return Match(Argument(*place), True, False)
        numel, dtype = tensor.numel(), tensor.dtype
        for place in given:
            other = place[2]
            if other.numel() == numel and other.dtype == dtype and _same_memory(other, tensor):
                return Match(Argument(*place), True, False)
        return None if tensor.grad_fn is None else self._match_copy(tensor)

    def _match_copy(self, tensor: torch.Tensor) -> Match | None:
        node: Any = tensor.grad_fn
        output: Any = tensor.output_nr
        cast = True
        copied = False
        for _ in range(_WALK):
            if copied:
                argument = self._made_by(node, output)
                if argument is not None:
                    return Match(argument, memory=False, cast=cast)
            name = "" if node is None else node.name()
            if name not in _ORDER_KEPT and name not in _COPIES and name not in _REARRANGED:
                return None
            cast = cast and name not in _REARRANGED
            copied = copied or name not in _ORDER_KEPT
            node, output = node.next_functions[0]
        return None

    def _made_by(self, node: Any, output: int) -> Argument | None:
        for place in self._given():
            tensor = place[2]
            if tensor.grad_fn is None:
                if tensor.requires_grad and getattr(node, "variable", None) is tensor:
                    return Argument(*place)
            elif tensor.grad_fn is node and tensor.output_nr == output:
                return Argument(*place)
        return None


def _add_tensors(
    found: list[_Given], value: Any, position: int | None, keyword: str | None
) -> None:
    if isinstance(value, torch.Tensor):
        found.append((position, keyword, value))
    elif isinstance(value, (list, tuple)):
        found += [(position, keyword, item) for item in value if isinstance(item, torch.Tensor)]


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of as many elements and one dtype are the same ones, in whatever shape."""
    # Both live now, so that equal addresses are the same memory.
    return type(one) in PLAIN and one.layout is STRIDED and one.data_ptr() == other.data_ptr()


class OperationMode(TorchFunctionMode):
    """Note the torch function that is running on this thread; `current` gives it to a hook."""

    def __init__(self) -> None:
        super().__init__()
        self._call: tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]] | None = None
        self._operation: Operation | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if torch.compiler.is_compiling():  # a constant while a compiler traces this
            if func is torch.Tensor.unflatten:
                # Written in Python with a super() that cannot be traced; the method itself can.
                return args[0].unflatten(*args[1:], **kwargs)
            return func(*args, **kwargs)
        if func in _COMPOSITES:
            with self:
                return _opened(func)(*args, **kwargs)
        outer = self._call
        self._call = (func, args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self._call = outer
            self._operation = None

    def current(self, frame_depth: int) -> Operation:
        """Return the call that is saving; `frame_depth` counts the frames up to the hook's.

        TorchScript, and functions in C++ that are no operators of torch, are one unknown operation.
        """
        if self._call is None:
            # A device's backward thread has no frame above a hook's.
            unseen = _custom_function(caller(sys._getframe(frame_depth)))
            return Operation(_UNKNOWN, (), {}) if unseen is None else unseen
        if self._operation is None:
            func, args, kwargs = self._call
            name, foreign = _identity(func)
            self._operation = Operation(name, args, kwargs, foreign)
        return self._operation


skip_frames(OperationMode.__torch_function__)


def _custom_function(frame: FrameType | None) -> Operation | None:
    """Return the autograd.Function whose `apply` is this frame; no mode sees those.

    A checkpoint of torch is no smooth operation: what it recomputes may compare its inputs.
    """
    if frame is None:
        return None
    if frame.f_globals.get("__name__") == _CHECKPOINT:
        return Operation("checkpoint", (), {})
    if frame.f_code is not _APPLY_CODE:
        return None
    values = frame.f_locals
    if values["cls"].__module__ == _CHECKPOINT:
        return Operation("checkpoint", values["args"], values["kwargs"])
    return Operation(values["cls"].__name__, values["args"], values["kwargs"], custom=True)


_CHECKPOINT = "torch.utils.checkpoint"
_APPLY_CODE = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
# Functions that save nothing themselves, but call operations with policies of their own.
_COMPOSITES = frozenset({functional.multi_head_attention_forward})


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
def _identity(func: Callable[..., Any]) -> tuple[str, bool]:
    """Return the name of an operation, and whether it is a custom one."""
    return operation_name(func), _is_foreign(func)


def _is_foreign(func: Callable[..., Any]) -> bool:
    """Whether another library registered the operator."""
    if not isinstance(func, (OpOverload, OpOverloadPacket)):
        return False
    name = func._qualified_op_name if isinstance(func, OpOverloadPacket) else func.name()
    return name.split("::")[0] not in ("aten", "prims")


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
