"""Whether a swapped module computes what its original does: both are run on the call's inputs.

Run once for a module, where the caller asked for it: two forward and backward passes with dropout
off and everything kept exactly, so that only rounding may differ. Changes no gradient, no random
state and no input. Not thread-safe; waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from vramx.compression.config import Compression
from vramx.nn.families.swap import Fusing
from vramx.patch.module import find, original_class
from vramx.recompute.copies import is_cache
from vramx.recompute.objects import Before, tensors_in

# A block rounds some twenty times in a row; errors of one sign would add up to 64 halves of a step
# of the type with a margin of three. Wrong formulas are off by more than a tenth.
_ROUNDINGS = 64
_LARGEST = 0.1
# A gradient that is zero but for rounding, as that of a key's bias, is compared with the others.
_FLOOR = 0.1
EXACT = Compression(level="keep")
# Results, and gradients for inputs and parameters.
Run = tuple[list[Tensor], list[Any]]


def difference(module: Any, call: dict[str, Any]) -> str | None:
    """Return how the results or the gradients differ, with figures; None: by rounding only."""
    fusing = find(module, Fusing)
    assert fusing is not None
    settings = fusing.settings
    original = original_class(module).forward
    # An enclosing checkpoint or compression must not see what is saved here.
    as_it_is = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with _dropout_off(module), torch.enable_grad(), as_it_is:
        expected = run(partial(original, module), module, call)
        fusing.settings = replace(settings, keep=EXACT)
        try:
            found = run(partial(_fused, module), module, call)
        finally:
            fusing.settings = settings
    return difference_of(found, expected)


def difference_of(found: Run, expected: Run) -> str | None:
    """Return how two runs differ; None: by rounding only."""
    bound = _bound(expected[0])
    for i, what in enumerate(("result", "gradient")):
        error = _error(found[i], expected[i])
        if not error <= bound:
            return f"its {what} differs by {error:.2g} of its size; accepted is {bound:.2g}"
    return None


def _fused(module: Any, **call: Any) -> Any:
    return module.vramx_fused(call.pop(module.ARGUMENTS[0]), **call)


def run(function: Callable[..., Any], module: nn.Module, call: dict[str, Any]) -> Run:
    """Return the results, and the gradients of a fixed weighting of them."""
    inputs: list[Tensor] = []
    caches: list[Any] = []

    def fresh(leaf: Any) -> Any:
        if is_cache(leaf):  # each run fills its own
            caches.append(Before(leaf).again())
            return caches[-1]
        # The call's own inputs stay out of it: a copy learns in their place.
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf = leaf.detach().requires_grad_()
            inputs.append(leaf)
        return leaf

    result = function(**pytree.tree_map(fresh, call, is_leaf=is_cache))
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
    outputs += tensors_in(caches)
    learning = [t for t in outputs if t.requires_grad]
    inputs += [p for p in module.parameters() if p.requires_grad]
    if not learning or not inputs:
        return outputs, []
    weights = [_weights(t) for t in learning]
    gradients = torch.autograd.grad(learning, inputs, weights, allow_unused=True)
    return [t.detach() for t in outputs], list(gradients)


def _weights(like: Tensor) -> Tensor:
    """Return fixed numbers without a pattern, drawn from no generator."""
    count = torch.arange(like.numel(), device=like.device, dtype=torch.float32)
    return torch.sin(count * 12.9898).view(like.shape).to(like.dtype)


def _bound(outputs: list[Tensor]) -> float:
    dtypes = [tensor.dtype for tensor in outputs if tensor.is_floating_point()]
    device = outputs[0].device.type
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    step = max(torch.finfo(dtype).eps for dtype in dtypes)
    return min(_ROUNDINGS * step, _LARGEST)


def _error(found: list[Any], expected: list[Any]) -> float:
    """Return the largest error of a tensor relative to its norm; infinity if one is missing."""
    if [t is None for t in found] != [t is None for t in expected]:
        return float("inf")
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return float("inf")
    sizes = [float(b.float().norm()) for _, b in pairs]
    errors = [float((a.float() - b.float()).norm()) for a, b in pairs]
    largest = max(sizes, default=0.0)
    if largest == 0:
        return max(errors, default=0.0)
    ratios = [e / (size + _FLOOR * largest) for e, size in zip(errors, sizes, strict=True)]
    return float("nan") if any(r != r for r in ratios) else max(ratios)


@contextmanager
def _dropout_off(module: nn.Module) -> Iterator[None]:
    states = [(child, child.training) for child in module.modules()]
    for child, _ in states:
        child.training = False
    try:
        yield
    finally:
        for child, training in states:
            child.training = training
