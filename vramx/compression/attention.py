"""The result of fused attention, which backward computes again from the values that it has.

Backward takes rowsum(dy y) from dy v^T. Where attention is sharp next to nothing is left, and where
keys have a bias what is left is multiplied by it: y must be that of the very v that backward has. A
packed y is not, and neither is the exact one where v is packed. So where v is packed nothing is
kept of y: it is computed from v, the query and the key, by torch's own function, when backward asks
for it. Dropout cannot be repeated, nor can a call that is not torch's function: their v is kept.

Pure but for what an Operation holds while it runs; one attention more in backward.
"""

from __future__ import annotations

from typing import Any

import torch

from vramx.compression.policy.calls import Operation
from vramx.compression.saved import Pending, Reference, Restored
from vramx.patch.torch_functions import attention as torchs_attention

NAME = "scaled_dot_product_attention"
_QUERY, _KEY, _VALUE, _MASK, _DROPOUT = range(5)  # positions of its arguments
_FUSED_DIMS = 4  # samples, heads, tokens and what a head has of one
_FUSED = "ScaledDotProduct"  # in the name of the node of each fused kernel, whose result has it


class Result:
    """Stands for a result: the arguments as backward has them, and how it was computed."""

    __slots__ = ("__weakref__", "_arguments", "_causal", "_mask", "_scale")

    def __init__(
        self, arguments: list[Reference | Restored], mask: Reference | None, node: Any
    ) -> None:
        self._arguments = arguments
        self._mask = mask
        self._causal: bool = node._saved_is_causal
        self._scale: float | None = node._saved_scale

    @torch.no_grad()
    def open(self) -> torch.Tensor:
        q, k, v = (each.open() for each in self._arguments)
        mask = None if self._mask is None else self._mask.open()
        return torchs_attention(
            q, k, v, mask, is_causal=self._causal, scale=self._scale,
            enable_gqa=q.shape[-3] != k.shape[-3],
        )  # fmt: skip


def may_pack_value(operation: Operation) -> bool:
    """Tell whether the result of an attention could be computed again.

    Example:
        >>> may_pack_value(Operation("scaled_dot_product_attention", (), {"dropout_p": 0.1}))
        False
    """
    return operation.name == NAME and not operation.option(_DROPOUT, "dropout_p", 0.0)


def is_value(tensor: torch.Tensor, operation: Operation) -> bool:
    """Tell whether a saved tensor is the value of an attention."""
    match = operation.match(tensor)
    return match is not None and match.position == _VALUE


def token_length(tensor: torch.Tensor, operation: Operation) -> int | None:
    """Return how many elements a token has in an attention's value; 0: its heads lie apart.

    None of anything else. A group with parts of two tokens would have them of two samples where
    these lie side by side, as in torch.nn.MultiheadAttention: beside 300 times larger ones nothing
    would be left of a sample.

    Example:
        >>> x = torch.zeros(2, 5, 4, 16).transpose(1, 2)
        >>> token_length(x, Operation("scaled_dot_product_attention", (x[:1], x[:1], x), {}))
        64
    """
    if operation.name != NAME or operation.custom or tensor.dim() != _FUSED_DIMS:
        return None
    if not is_value(tensor, operation):
        return None
    _, heads, _, size = tensor.shape
    lie_together = tensor.stride(3) == 1 and (heads == 1 or tensor.stride(1) == size)
    return heads * size if lie_together else 0


def inputs(operation: Operation) -> list[torch.Tensor]:
    """Return the query, the key and the value of an attention, without those that are not told."""
    found = [operation.argument(position) for position in (_QUERY, _KEY, _VALUE)]
    return [tensor for tensor in found if tensor is not None]


def note(tensor: torch.Tensor, operation: Operation, saved: Reference | Restored | Pending) -> None:
    """Note what is kept of an argument of attention, for its result, which is saved last."""
    if operation.name == NAME and not operation.custom:
        match = operation.match(tensor)
        if match is not None and match.position is not None:
            operation.kept = {**operation.kept, match.position: saved}


def result_of(tensor: torch.Tensor, operation: Operation) -> Result | None:
    """Return what stands for a saved tensor, if it is the result that goes with a packed value."""
    value = operation.kept.get(_VALUE)
    node = tensor.grad_fn
    if not isinstance(value, Restored) or not value.is_approximate or node is None:
        return None
    if _FUSED not in node.name() or operation.match(tensor) is not None:
        return None
    arguments = [operation.kept.get(i) or _reference(operation, i) for i in (_QUERY, _KEY)]
    mask = operation.argument(_MASK)
    # A user of its own: what is decoded for one of the two is there for the other.
    value = Restored(value.holding, value.geometry, value.stride)
    return Result([*arguments, value], None if mask is None else Reference(mask), node)


def _reference(operation: Operation, position: int) -> Reference:
    argument = operation.argument(position)
    assert argument is not None, "attention without a query or a key"
    return Reference(argument)
