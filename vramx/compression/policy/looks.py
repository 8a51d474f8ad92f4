"""What a policy can know of a saved tensor and its call, as a key: equal keys, one decision.

A program saves the same few kinds of tensors in every layer and every step. A key holds all that
policy.py asks about, elements apart, for which it never asks; what only a walk over the graph tells
is asked for anew and is part of the key. What a key cannot hold has none, and is decided each time:
types, layouts and arguments that are not known. Without the compiled half of vramx nothing has one.

Pure functions, thread-safe; half a microsecond for a call, and as much for a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from vramx.compression.codec.roots import (
    MAYBE_POWERS,
    SLOPES,
    SUMMED,
    graph_of_factor,
    is_of_decades,
    is_of_products,
    is_power,
)
from vramx.compression.codec.rows import CONVOLUTIONS, is_of_pixels, reads_columns
from vramx.compression.policy.calls import MAY_BE_COPY, Operation
from vramx.compression.policy.columns import LAYERS, undoes_columns
from vramx.compression.policy.exactness import FACTORS
from vramx.compression.policy.weights import MAY_DERIVE, derives_from_parameter

# Arguments that are keys as they are.
_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})

_call_key: Callable[..., Any] | None
_tensor_key: Callable[..., Any]
try:
    from vramx import _core
except ImportError:
    _call_key = None
else:
    _core.set_kinds(Tensor, torch.nn.Parameter, _VALUES)
    _call_key, _tensor_key = _core.call_key, _core.tensor_key


def of_call(operation: Operation) -> Hashable | None:
    """Return what a call is, but for what its tensors are like; None: it has no key.

    Those only what is compared with them depends on: a tensor that the call made, and factors.

    Example:
        >>> x = torch.ones(2, 3)
        >>> one, other = (of_call(Operation("tanh", (each,), {})) for each in (x, x + 1))
        >>> one == other
        True
    """
    if _call_key is None or operation.custom:
        return None
    key: Hashable = _call_key(operation.name, operation.args, operation.kwargs)
    if key is None or operation.name not in MAYBE_POWERS:
        return key
    return key, is_power(operation)


def of_tensor(
    tensor: Tensor, operation: Operation
) -> tuple[Hashable, torch.UntypedStorage | None] | None:
    """Return what a tensor is that a call with a key saves, and its storage; None: no key.

    No storage is given of memory that an operation made and nothing wrote to: it is no module's.
    """
    found: tuple[Any, torch.UntypedStorage | None] | None
    found = _tensor_key(tensor, operation.args, operation.kwargs, operation.name in FACTORS)
    if found is None:
        return None
    key, storage = found
    node, place, base, *others = key
    is_view = base is not None and base is not True
    if _is_walked[node] is None or (is_view and _is_walked[base] is None):
        # Plans outlive the classes that a program, or torch.compile, makes as it runs.
        key = weakref.ref(node), place, weakref.ref(base) if is_view else base, *others
    if _is_walked[node]:
        # What is an argument's memory is no copy of one; a view is a weight if its base is one.
        copied = operation.match(tensor) if place < 0 else None
        where = None if copied is None else (copied.position, copied.keyword, copied.cast)
        is_open = base is None or (is_view and _is_walked[base])
        key = key, is_open and derives_from_parameter(tensor), where
    if operation.name in MAYBE_POWERS or operation.name in SUMMED:
        key = key, graph_of_factor(tensor, operation)
    if operation.name in SUMMED:
        key = key, is_of_products(tensor, operation)
    if operation.name in SLOPES:
        key = key, is_of_decades(operation)
    if operation.name in LAYERS:
        key = key, undoes_columns(operation)
    if operation.name in CONVOLUTIONS:
        key = key, is_of_pixels(operation), reads_columns(tensor, operation)
    return key, storage


class _Walked(dict[type, bool]):
    """Whether what has a node of a type may be a weight, or a copy of an argument.

    None of an autograd.Function's, which is neither: it is not kept.
    """

    def __missing__(self, node: type) -> bool | None:
        if issubclass(node, BackwardCFunction):
            return None
        name = node.__name__
        found = self[node] = name in MAY_DERIVE or name in MAY_BE_COPY
        return found


_is_walked = _Walked()
