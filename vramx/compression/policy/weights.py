"""Whether a tensor that is saved is a weight: a parameter, a view or cast of one, or used as one.

Weights are never packed: their memory lives in any case. Pure functions; a walk of a few nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter

from vramx.compression.codec.geometry import shape_of
from vramx.compression.fakes import PLAIN, is_labelled
from vramx.compression.policy.calls import GRAPH, STRIDED, Operation

# Arguments that are weights by what the operation does with them, and so never data: also where
# they are computed from parameters (weight norm, an adapter merged into its base).
_WEIGHTS: dict[str, frozenset[int]] = {
    "linear": frozenset({1, 2}),
    "bilinear": frozenset({2, 3}),
    "embedding": frozenset({0, 1}),
    "layer_norm": frozenset({2, 3}),
    "rms_norm": frozenset({2}),
    "group_norm": frozenset({2, 3}),
    "batch_norm": frozenset({1, 2, 3, 4}),
    "instance_norm": frozenset({1, 2, 3, 4}),
    "prelu": frozenset({1}),
    **{
        f"conv{transposed}{dims}d": frozenset({1, 2})
        for transposed in ("", "_transpose")
        for dims in (1, 2, 3)
    },
}
# Layers: products of data with a weight, whose gradient alone reads the data.
_LAYERS = frozenset(
    {"linear", "matmul", "mm", "addmm"} | {name for name in _WEIGHTS if name.startswith("conv")}
)
_WEIGHT_NAMES = frozenset({"weight", "bias", "running_mean", "running_var"})
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
# Views and casts through which a weight is still that weight.
_DERIVED = frozenset(
    f"{name}Backward{version}"
    for name in (
        "View", "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "ToCopy", "Expand",
        "Slice", "Select", "Split", "SplitWithSizes", "Unbind", "Unsqueeze", "Squeeze", "Alias",
        "AsStrided", "Clone", "Narrow", "Unflatten", "Flatten",
    )
    for version in range(3)
)  # fmt: skip
# Of a tensor that was overwritten as a whole, as a recurrent network's weights are under autocast.
_COPY = "CopyBackwards"
# Of a leaf that a gradient is asked of.
_LEAF = "AccumulateGrad"
_WALK = 16
# Of nodes that a tensor may have which derives_from_parameter().
MAY_DERIVE = _DERIVED | {_COPY, _LEAF}


def is_parameter(tensor: torch.Tensor) -> bool:
    """isinstance(tensor, Parameter), without what its metaclass takes for a plain tensor."""
    return type(tensor) is not torch.Tensor and isinstance(tensor, Parameter)


def derives_from_parameter(tensor: torch.Tensor) -> bool:
    """Walk up through views and casts; a chain that ends in a Parameter's gradient is a weight."""
    node: Any = tensor.grad_fn
    for _ in range(_WALK):
        # The type's name, not name(), which demangles some of them each time.
        name = type(node).__name__
        if name in _DERIVED:
            node = node.next_functions[0][0]
        elif name == _COPY:  # what is copied comes last, behind what it overwrites
            node = node.next_functions[-1][0]
        else:
            return name == _LEAF and is_parameter(node.variable)
    return False


def is_weight(tensor: torch.Tensor, operation: Operation) -> bool:
    """Whether the operation uses the tensor as a weight, itself or through a view or a cast."""
    match = operation.match(tensor)
    if match is not None:
        positions = _WEIGHTS.get(operation.name)
        return is_parameter(match.tensor) or (
            positions is not None
            and (match.position in positions or match.keyword in _WEIGHT_NAMES)
        )
    if tensor.grad_fn is not None or tensor.requires_grad:
        return False
    parameters = [t for t in operation.tensors if is_parameter(t)]
    # Of what a graph computed within it keeps no history either, of trained weights neither.
    untold = [p for p in parameters if operation.name == GRAPH or not p.requires_grad]
    return _is_untold_cast(tensor, untold) or _is_flat_weights(tensor, operation, parameters)


def _is_untold_cast(tensor: torch.Tensor, parameters: Sequence[torch.Tensor]) -> bool:
    """Autocast's copy of a frozen weight has no history: only its shape and dtype tell it.

    The input's copy cannot be taken for it: it is saved only for the gradient of this weight, and
    a frozen weight has none.
    """
    shape = shape_of(tensor)
    return any(
        p.dtype != tensor.dtype and shape in (shape_of(p), shape_of(p)[::-1]) for p in parameters
    )


def _is_flat_weights(
    tensor: torch.Tensor, operation: Operation, parameters: Sequence[torch.Tensor]
) -> bool:
    """cuDNN saves the weights of a recurrent network as one flat buffer."""
    if operation.name not in _RECURRENT or tensor.dim() != 1:
        return False
    return tensor.numel() >= sum(p.numel() for p in parameters) > 0


def is_read_for_a_weight(tensor: torch.Tensor, operation: Operation) -> bool:
    """Whether only the gradient of a weight reads the tensor: it is the data of a layer."""
    if operation.custom or operation.name not in _LAYERS:
        return False
    match = operation.match(tensor)
    if match is None:
        return False
    others = [t for t in operation.tensors if t is not match.tensor]
    return any(is_parameter(t) or derives_from_parameter(t) for t in others if t.dim() > 1)


def is_any_weight(tensor: torch.Tensor, operation: Operation | None) -> bool:
    """Whether a plain tensor is a view or a cast of a parameter, or used as a weight."""
    base = tensor._base
    if base is not None and is_parameter(base):
        return True
    if type(tensor.grad_fn).__name__ in MAY_DERIVE and derives_from_parameter(tensor):
        return True
    return operation is not None and is_weight(tensor, operation)


def storages_of(module: torch.nn.Module) -> frozenset[int]:
    """Return the storages of the plain parameters and buffers, by their addresses in C++.

    Sparse ones have none: a mask or a matrix of neighbours among the buffers.
    """
    tensors = [t for t in _tensors_of(module) if t.layout is STRIDED]
    return frozenset([t.untyped_storage()._cdata for t in tensors])


def _tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the plain parameters and buffers; module.parameters() also makes all their names."""
    found: list[torch.Tensor] = []
    seen = {module}
    waiting = [module]
    while waiting:
        one = waiting.pop()
        for tensors in (one._parameters, one._buffers):
            found += [
                t
                for t in tensors.values()
                if t is not None and (type(t) in PLAIN or is_labelled(type(t)))
            ]
        below = [m for m in one._modules.values() if m is not None and m not in seen]
        seen.update(below)
        waiting += below
    return found
