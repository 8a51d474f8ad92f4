"""Operators that go through torch's dispatcher only where something watches it.

Compilers, export, dispatch modes and tensor subclasses see an operator of torch.library. A call of
one costs 30 to 95 us of host time, forward and backward each, most of it for watchers that eager
mode does not have. So an Operator has two routes over the same functions: the operator of
torch.library, and an autograd.Function that calls the implementation. Both run it below autograd
and save what setup_context saves, so that hooks, checkpoints and derivatives of derivatives see no
difference. What is differentiated is read in time: the graph may hold a copy only, so the memory of
arguments is kept until the stream has read it, in backward too, which reads on the same stream what
was an argument or was made. No state; any thread. The choice costs a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from vramx.compression.lifetime import outlive_all
from vramx.compression.parts import is_distributed
from vramx.errors import UnsupportedTensorError
from vramx.nn.batched import call_each, is_batched
from vramx.nn.keeping import PLAIN_TENSORS, Spec

# Anything else among arguments may mean more than it holds: subclasses, proxies, symbolic numbers.
_PLAIN = frozenset(
    (*PLAIN_TENSORS, type(None), bool, int, float, str, torch.dtype, list, tuple, torch.Size, Spec)
)
below_autograd = torch._C._AutoDispatchBelowAutograd
# Views that an implementation returns are no views to autograd, which would let nobody write into
# them.
_below_views: Any = torch._C._AutoDispatchBelowADInplaceOrView


class Operator:
    """A function of tensors that is an operator of torch.library, and can be called around it.

    `implementation` is the function itself. Where it or its fake returns None in a tuple, which a
    schema cannot say, the operator of torch.library returns an empty tensor like the first
    argument; and where results share memory, with arguments or with each other, which none may, it
    copies.

    Example:
        >>> @operator("vramx::example", schema="(Tensor x) -> Tensor")
        ... def example(x):
        ...     return x.exp()
        >>> example.register_fake(torch.empty_like)
        >>> example(torch.zeros(2)), torch.ops.vramx.example(torch.zeros(2))
        (tensor([1., 1.]), tensor([1., 1.]))
    """

    def __init__(self, name: str, schema: str, implementation: Callable[..., Any]) -> None:
        self.__doc__ = implementation.__doc__
        self._name = name
        self.implementation = implementation
        self._definition: Any = torch.library.custom_op(
            name, _for_torch(implementation), mutates_args=(), schema=schema
        )
        namespace, short = name.split("::")
        self._overload: Any = getattr(getattr(torch.ops, namespace), short).default
        arguments = self._overload._schema.arguments
        self._lists = tuple(i for i, each in enumerate(arguments) if _is_tensor_list(each.type))
        self._apply: Any = None

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Register what compilers call for the shapes of results."""
        self._definition.register_fake(_whole(fake))

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """Register derivatives, as torch.library.register_autograd() has them."""
        self._definition.register_autograd(backward, setup_context=setup_context)
        make = _function_of_lists if self._lists else _function_of
        short = self._name.split("::")[1]
        function = make(short, self.implementation, backward, setup_context)
        self._apply = _plain_apply(function)

    def __call__(self, *args: Any) -> Any:
        """Call the operator; the first argument is a tensor."""
        if torch.compiler.is_dynamo_compiling():  # an export that is not Dynamo's has a mode
            return self._overload(*args)
        if is_batched(args):
            return call_each(self, args)
        flat = _flattened(args, self._lists) if self._lists else args
        if self.is_watched(flat):
            refuse_distributed(flat)
            return self._overload(*args)
        if self._apply is None or not torch.is_grad_enabled():
            with _below_views():
                return self.implementation(*args)
        return self._apply(*flat, args, self._lists) if self._lists else self._apply(*flat)

    def is_watched(self, flat: Sequence[Any]) -> bool:
        """Tell whether a mode, a transform or an argument is to see the operator.

        Arguments are with the lists of tensors among them opened.
        """
        first = flat[0]
        return (
            _len_torch_dispatch_stack() > 0
            or _len_torch_function_stack() > 0
            or _are_functorch_transforms_active()
            or _get_tracing_state() is not None
            or not _PLAIN.issuperset(map(type, flat))
            or first.is_meta
            or first.is_neg()
            or is_functorch_wrapped_tensor(first)
        )


def refuse_distributed(values: Sequence[Any]) -> None:
    """Raise where an argument is split over processes: only what is here could be computed with.

    Raises:
        UnsupportedTensorError: one of the values is a DTensor.
    """
    if any(is_distributed(type(value)) for value in values):
        raise UnsupportedTensorError(
            "functions and modules of vramx.nn take no DTensors, as parallelize_module makes of "
            "weights; split torch.nn's own modules, whose data vramx.compress() packs"
        )


def apply_of(function: Any, first: Tensor) -> Callable[..., Any]:
    """Return what applies an autograd.Function to tensors, of which one is given."""
    if (
        torch.compiler.is_compiling()
        or _are_functorch_transforms_active()
        or is_functorch_wrapped_tensor(first)
    ):
        apply: Callable[..., Any] = function.apply
        return apply
    return _plain_apply(function)


@lru_cache(maxsize=64)
def _plain_apply(function: Any) -> Callable[..., Any]:
    # Of the base class: Function's own looks after transforms, which are watchers here.
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply
    return apply


def operator(name: str, *, schema: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make an Operator of the function that follows, which changes none of its arguments."""
    return lambda implementation: Operator(name, schema, implementation)


def _for_torch(implementation: Callable[..., Any]) -> Callable[..., Any]:
    whole = _whole(implementation)

    @wraps(implementation)
    def in_time(*args: Any) -> Any:
        outlive_all(args)
        with _below_views():
            return _apart(whole(*args), args)

    return in_time


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gives an empty tensor in the place of each None in a tuple."""

    @wraps(function)
    def whole(*args: Any) -> Any:
        results = function(*args)
        if type(results) is not tuple:
            return results
        return tuple(args[0].new_empty(0) if each is None else each for each in results)

    return whole


def _apart(results: Any, args: Sequence[Any]) -> Any:
    """Return results of which none shares memory with arguments or with another."""
    kind = type(results)
    several = list(results) if kind in (tuple, list) else [results]
    taken = {_memory_of(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
    for i, each in enumerate(several):
        if _memory_of(each) in taken:
            several[i] = each.clone()
        taken.add(_memory_of(several[i]))
    return kind(several) if kind in (tuple, list) else several[0]


def _memory_of(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _is_tensor_list(kind: Any) -> bool:
    return isinstance(kind, torch.ListType) and isinstance(kind.getElementType(), torch.TensorType)


def _function_of(
    name: str,
    implementation: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
) -> Any:
    def forward(ctx: Any, *args: Any) -> Any:
        outlive_all(args)
        with _below_views():
            output = implementation(*args)
        with below_autograd():
            setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


# -- Lists of tensors, which an autograd.Function does not look into -------------------------------


def _function_of_lists(
    name: str,
    implementation: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
) -> Any:
    """Return a Function of flattened arguments, then of these as they were, and of their lists."""

    def forward(ctx: Any, *args: Any) -> Any:
        inputs, lists = args[-2:]
        ctx.lists = [(i, len(inputs[i])) for i in lists]
        outlive_all(inputs)
        with _below_views():
            output = implementation(*inputs)
        with below_autograd():
            setup_context(ctx, inputs, output)
        ctx.gives_list = isinstance(output, list)
        return tuple(output) if ctx.gives_list else output

    def flat_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        flat_needs = ctx.needs_input_grad
        ctx.needs_input_grad = _grouped(flat_needs[:-2], ctx.lists)
        try:
            found = backward(ctx, *([list(gradients)] if ctx.gives_list else gradients))
        finally:
            ctx.needs_input_grad = flat_needs
        return *_flattened(found, [i for i, _ in ctx.lists]), None, None

    methods = {"forward": staticmethod(forward), "backward": staticmethod(flat_backward)}
    return type(name, (torch.autograd.Function,), methods)


def _flattened(args: Sequence[Any], lists: Sequence[int]) -> list[Any]:
    """Return arguments with the lists among them, at these places, opened."""
    flat = list(args)
    for i in reversed(lists):
        flat[i : i + 1] = args[i]
    return flat


def _grouped(flat: Sequence[Any], lists: Sequence[tuple[int, int]]) -> list[Any]:
    """Return what _flattened() was given, of places and lengths of lists."""
    grouped = list(flat)
    for i, count in lists:
        grouped[i : i + count] = [grouped[i : i + count]]
    return grouped
