"""What a region that writes into its own weights and buffers is told of, once.

No state but what errors.py keeps of what was said.
"""

from __future__ import annotations

from torch import nn

from vramx.errors import warn_once


def tell_of_change() -> None:
    """Say once that what a recomputation reads was written into since the call."""
    warn_once(
        "parameters, or tensors that a function closes over, were written into between a call "
        "under vramx.checkpoint, or of a block at 'recompute_all', and its recomputation, as by a "
        "step of an optimizer ahead of backward: gradients of what is recomputed are those of the "
        "new values. Without recomputation torch raises an error there",
        stacklevel=7,
    )


def tell_of_update() -> None:
    """Say once that a parameter without a gradient was written into since the call."""
    warn_once(
        "parameters that need no gradient, as of a network that follows another, were written into "
        "between a call under vramx.checkpoint, or of a block at 'recompute_all', and its "
        "recomputation: what is recomputed reads the new values; write into them after backward",
        stacklevel=7,
    )


def tell_of_write(
    module: nn.Module,
    name: str,
    what: str = "which is no buffer",
    instead: str = "register a buffer",
) -> None:
    """Say once that a region writes into what it has no copy of from before."""
    warn_once(
        f"a region under vramx.checkpoint writes into {name} of {type(module).__name__}, {what}: "
        "this step is recomputed with what it wrote, and from the next one on with what was there "
        f"before; update it outside of the region, or {instead}",
        stacklevel=7,
    )
