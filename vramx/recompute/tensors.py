"""What a region asks of a tensor: its version, its memory, and whether it has a graph.

No state; tenths of a microsecond.
"""

from __future__ import annotations

import torch
from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; 0 of one of inference mode, which does not tell.

    Example:
        >>> version_of(torch.zeros(2).add_(1))
        1
    """
    return 0 if tensor.is_inference() else tensor._version


def storage_of(tensor: Tensor) -> int:
    """Return a number for the memory of a strided tensor, unseen by modes that watch a region.

    Example:
        >>> x = torch.zeros(2, 3)
        >>> storage_of(x) == storage_of(x.t())
        True
    """
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def has_graph(tensor: Tensor) -> bool:
    """Tell whether an operation that has a gradient made a tensor.

    torch refuses to tell of a view from a time without gradients whose memory was written to since.

    Example:
        >>> x = torch.zeros(2)
        >>> with torch.no_grad():
        ...     view = x[:1]
        >>> made = x.mul_(torch.ones(2, requires_grad=True))
        >>> has_graph(made), has_graph(view)
        (True, False)
    """
    try:
        return tensor.grad_fn is not None
    except RuntimeError:
        return False


def without_graph(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory that requires a gradient too, and has no graph.

    Itself if it has none, or is of a class of its own.

    Example:
        >>> x = torch.ones(2, requires_grad=True) * 2
        >>> y = without_graph(x)
        >>> y.is_leaf, y.requires_grad, y.data_ptr() == x.data_ptr()
        (True, True, True)
    """
    if type(tensor) is not Tensor or not has_graph(tensor):
        return tensor
    return tensor.detach().requires_grad_()
