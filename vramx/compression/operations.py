"""Which torch operation is saving a tensor, and which of its arguments the tensor is.

A torch function mode notes the call that is running; a saved-tensor hook asks for it. Functions in
Python that torch.nn.functional builds from others are seen under their own, outermost name. What is
done with the answer is policy's. One mode belongs to one thread; about a microsecond a torch call,
and the arguments are looked at only when something is saved. A torch.compile'd callable is traced
through the mode, which is one branch on a constant: no graph break, nothing of ours in its graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.nn.functional as functional
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from vramx.compression import exactness
from vramx.compression.compiler import skip_frames

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


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor that was given to the operation: its position, None where only a name is known."""

    position: int | None
    keyword: str | None
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Match:
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

    __slots__ = ("_answer", "_args", "_arguments", "_asked", "_kwargs", "custom", "name")

    def __init__(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], custom: bool = False
    ) -> None:
        self.name = name
        self.custom = custom
        self._args = args
        self._kwargs = kwargs
        self._arguments: list[Argument] | None = None
        self._asked: torch.Tensor | None = None
        self._answer: Match | None = None

    @property
    def arguments(self) -> list[Argument]:
        """The tensors among the arguments; those in a list have the position of the list."""
        if self._arguments is None:
            self._arguments = list(self._tensors())
        return self._arguments

    def _tensors(self) -> Iterator[Argument]:
        for position, value in enumerate(self._args):
            for tensor in _tensors_in(value):
                yield Argument(position, None, tensor)
        keywords = _KEYWORDS.get(self.name, _COMMON_KEYWORDS)
        for keyword, value in self._kwargs.items():
            place = keywords.index(keyword) if keyword in keywords else None
            for tensor in _tensors_in(value):
                yield Argument(place, keyword, tensor)

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
        arguments = self.arguments
        for argument in arguments:
            if argument.tensor is tensor:
                return Match(argument, memory=True, cast=False)
        for argument in arguments:
            if _same_memory(argument.tensor, tensor):
                return Match(argument, memory=True, cast=False)
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
        for argument in self.arguments:
            tensor = argument.tensor
            if tensor.grad_fn is None:
                if tensor.requires_grad and getattr(node, "variable", None) is tensor:
                    return argument
            elif tensor.grad_fn is node and tensor.output_nr == output:
                return argument
        return None


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same elements of one storage, in whatever shape."""
    if one.numel() != other.numel() or one.dtype != other.dtype:
        return False
    # Both live now, so that equal addresses are the same memory.
    return type(one) in PLAIN and one.layout == STRIDED and one.data_ptr() == other.data_ptr()


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
        kwargs = {} if kwargs is None else kwargs
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
            unseen = _custom_function(sys._getframe(frame_depth).f_back)
            return Operation(_UNKNOWN, (), {}) if unseen is None else unseen
        if self._operation is None:
            func, args, kwargs = self._call
            self._operation = Operation(_name(func), args, kwargs, custom=_is_foreign(func))
        return self._operation


skip_frames(OperationMode.__torch_function__)


def _custom_function(frame: FrameType | None) -> Operation | None:
    """Return the autograd.Function whose `apply` is this frame; no mode sees those.

    A checkpoint saves its inputs itself in newer releases; any use may be made of them.
    """
    if frame is None:
        return None
    if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
        return Operation("checkpoint", (), {}, custom=True)
    if frame.f_code is not _APPLY_CODE:
        return None
    values = frame.f_locals
    return Operation(values["cls"].__name__, values["args"], values["kwargs"], custom=True)


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
def _is_foreign(func: Callable[..., Any]) -> bool:
    """Whether another library registered the operator."""
    if not isinstance(func, (OpOverload, OpOverloadPacket)):
        return False
    name = func._qualified_op_name if isinstance(func, OpOverloadPacket) else func.name()
    return name.split("::")[0] not in ("aten", "prims")


@lru_cache(maxsize=1024)
def _name(func: Callable[..., Any]) -> str:
    """Return the name of an operation as a policy writes it: `mul` for `Tensor.__imul__` too."""
    name = getattr(func, "__name__", type(func).__name__).split(".")[0].strip("_")
    return _OPERATORS.get(name, name)


_OPERATORS = {
    f"{prefix}{name}": name
    for prefix in "ri"
    for name in ("mul", "add", "sub", "matmul", "div", "pow", "truediv")
    if (prefix, name) != ("r", "pow")  # 2 ** x is an exponential
}
