"""Gradients of gradients: noticed, told once, and not taken through packed tensors from then on.

Where a gradient is itself a result (forces, gradient penalties), the error of a packed factor is an
error of that result, and not one more in a sum over a batch. Of a layer with a weight only the
weight's own gradient reads the packed input, so that these are packed all the same. What was kept
exactly tells as well: a later step may take a way through the program whose tensors are packed.
Thread-safe: a flag that is only ever set. A look at the grad mode for each unpacked tensor.
"""

from __future__ import annotations

import torch

from vramx.compression.attention import Result
from vramx.compression.compiler import run_uncompiled
from vramx.compression.parts import Joined
from vramx.compression.saved import Pending, Reference, Restored
from vramx.errors import warn_once


class Derivatives:
    """What has been seen of the backward passes of one context.

    `higher`: one of them made a graph of its own, which is to be differentiated again. A context
    that `packs` nothing has no use for it.
    """

    def __init__(self, *, packs: bool) -> None:
        self.packs = packs
        self.higher = False


class Unpacking:
    """The unpack hook of one entry into a context, which sees whether backward makes a graph."""

    __slots__ = ("_name", "_seen")

    def __init__(self, seen: Derivatives, module: torch.nn.Module | None) -> None:
        self._seen = seen
        self._name = "this vramx.compress()" if module is None else type(module).__name__

    @run_uncompiled
    def unpack(self, saved: Reference | Restored | Pending | Result | Joined) -> torch.Tensor:
        """Give back what was taken; called by torch in backward, any number of times."""
        if torch.is_grad_enabled() and not self._seen.higher and _in_backward():
            self._note()
        return saved.open()

    def _note(self) -> None:
        if not self._seen.packs or _is_in_a_function():
            return
        self._seen.higher = True
        warn_once(
            f"create_graph=True differentiates gradients of {self._name}: those of this step may "
            "be far off where activations are packed. From the next forward on only inputs of its "
            "linear layers and convolutions are packed; to pack nothing, give level='keep'",
        )


def _is_in_a_function() -> bool:
    """Tell whether an autograd.Function of the program reads what it saved.

    Its backward may compute with gradients for itself, as one that recomputes does.
    """
    node = torch._C._current_autograd_node()
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _in_backward() -> bool:
    """Tell whether autograd runs a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
