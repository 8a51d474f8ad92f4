"""A part of a block that runs again in backward, from what is kept of its input already.

A checkpoint runs the part, and holds a norm's pack in the place of the part's input, and of a
residual, which a second run does not read, only its shape. So any part that is a function of a
norm's result keeps nothing: what mlp() is to plain weights, this is to weights with adapters and to
quantised ones. A call costs some hundred microseconds of host time. No state; any thread; nothing
waits for the device.

Memory, temporary, in backward: all that the part saves, for one block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from vramx.compression import enclosing
from vramx.compression.config import Compression
from vramx.compression.lifetime import outlive
from vramx.compression.saved import Reference
from vramx.nn import passes
from vramx.nn.keeping import NOTHING, Kept, place_of
from vramx.nn.linear import keep_tensor
from vramx.nn.norm import Normed
from vramx.nn.operators_norm import norm_output
from vramx.recompute import again
from vramx.recompute.surroundings import Surroundings

# Of an input, or a norm's result, and a residual, or None.
Part = Callable[[Tensor | Normed, Tensor | None], Tensor]


def recomputed(
    part: Part, source: Tensor | Normed, residual: Tensor | None, keep: Compression | None
) -> Tensor:
    """Return part(source, residual); in backward, run it again on what is kept of the source.

    It is run as it is, and keeps what it does, without grad mode, in a region of a checkpoint,
    which keeps nothing of it, and where a compiler or a transform of torch.func watches.

    Args:
        part: smooth in its input, which a second run gets as a tensor with the values that a norm's
            pack has; its result of the second run is not read. Where it draws random numbers it
            gets the same again.
        source: a norm's result, or a tensor, of which a pack is made here.
        residual: what the part adds to its result and does not save; None: nothing.
        keep: how a plain tensor is kept; None is int8.
    """
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or enclosing.in_checkpoint()
    ):
        return part(source, residual)
    y = source.y if isinstance(source, Normed) else source
    inputs = _Inputs(y, _kept_of(source, keep), residual)
    function = _InPasses(part)
    result: Tensor
    if again.serves((y, residual)):
        result = again.run(function, (y, residual), inputs)
    else:
        with saved_tensors_hooks(inputs.held, _open):
            result = checkpoint(function, y, residual, use_reentrant=False)
    return result


def _kept_of(source: Tensor | Normed, keep: Compression | None) -> Kept | None:
    if isinstance(source, Normed) and source.kept.spec.bits != NOTHING:
        return source.kept
    return keep_tensor(source.y if isinstance(source, Normed) else source, keep)


class _InPasses:
    """What a checkpoint calls: first for the part's result, then for what it saves alone."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._then: Surroundings | None = None

    def __call__(self, y: Tensor, residual: Tensor | None) -> Tensor:
        if self._then is not None:
            with self._then.restored() as part, passes.running(passes.SECOND):
                result: Tensor = part(y, residual)
                return result
        self._then = then = Surroundings(self._part, tree_leaves(getattr(self._part, "args", ())))
        with passes.running(passes.FIRST):
            result = self._part(y, residual)
        then.settle()
        return result


class Held(NamedTuple):
    """What stands for an input: what is kept of it, its shape and type."""

    kept: Kept
    shape: torch.Size
    dtype: torch.dtype

    def open(self) -> Tensor:
        """Return the input with the values that were kept."""
        kept = self.kept
        outlive(kept.buffer)  # the part may run on another stream than the norm did
        y: Tensor = norm_output(
            kept.buffer, kept.weight, kept.bias, list(self.shape), kept.dtype, self.dtype,
            list(kept.spec),
        )  # fmt: skip
        return y


class _Unread(NamedTuple):
    """What stands for a residual."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def open(self) -> Tensor:
        none = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        return none.expand(self.shape)


class _Inputs:
    """What is kept of the tensors among the arguments."""

    def __init__(self, y: Tensor, kept: Kept | None, residual: Tensor | None) -> None:
        self._held: dict[tuple[Any, ...], Held | _Unread] = {}
        if residual is not None:
            self._held[place_of(residual)] = _Unread(
                residual.shape, residual.dtype, residual.device
            )
        # The residual may be the input itself, which is read.
        self._held.pop(place_of(y), None)
        if kept is not None:
            self._held[place_of(y)] = Held(kept, y.shape, y.dtype)

    def held(self, tensor: Tensor) -> Reference | Held | _Unread:
        return self._held.get(place_of(tensor)) or Reference(tensor)


def _open(held: Reference | Held | _Unread) -> Tensor:
    return held.open()
