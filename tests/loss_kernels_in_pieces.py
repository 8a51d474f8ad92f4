"""The kernel of cross entropy with rows in several pieces, where programs run one after another.

A program would wait forever for those after it. So all programs run once without waiting, and leave
their mail; then once more over the same logits, with all mail there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vramx.kernels import cross_entropy
from vramx.kernels.cross_entropy_launch import Cut, LossOptions, loss_plan
from vramx.kernels.cross_entropy_pieces import receive, send


@triton.jit
def _own_only(mail_ptr, piece, PIECES: tl.constexpr, THREADS: tl.constexpr, SMOOTHED: tl.constexpr):
    return 0.0, 1.0, 0.0


@triton.jit
def _mail_kernel(found_ptr, mail_ptr, PIECES: tl.constexpr, SMOOTHED: tl.constexpr):
    """Send what is at found_ptr, fp32 [PIECES, 3], from each; then write what each receives."""
    for piece in range(PIECES):
        base = found_ptr + piece * 3
        send(
            mail_ptr, piece, (tl.load(base), tl.load(base + 1), tl.load(base + 2)),
            PIECES, 32, SMOOTHED,
        )  # fmt: skip
    for piece in range(PIECES):
        found = receive(mail_ptr, piece, PIECES, 32, SMOOTHED)
        for i in tl.static_range(3):
            tl.store(found_ptr + piece * 3 + i, found[i])


def run(
    logits: Tensor, targets: Tensor, options: LossOptions, cut: Cut, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return losses and weighted gradients."""
    how = options.cap is not None, options.smoothing != 0.0
    plan = loss_plan(how, "weighted", cut, 16 // logits.element_size())
    rows, classes = logits.shape
    losses = torch.full((rows,), torch.nan)
    mail = torch.zeros(rows, 2 if how[1] else 1, cut.pieces, cut.pieces, dtype=torch.int64)
    numbers = options.ignored, options.smoothing, options.cap or 1.0, 0

    def launch() -> None:
        plan.kernel[(rows * cut.pieces,)](
            logits, targets, losses, weights, mail, logits.stride(0), classes, *numbers,
            **plan.constants,
        )  # fmt: skip

    original = logits.clone()
    right, cross_entropy.receive = cross_entropy.receive, _own_only
    try:
        launch()
    finally:
        cross_entropy.receive = right
    logits.copy_(original)
    losses.fill_(torch.nan)
    launch()
    return losses, logits


def exchange(found: Tensor, smoothed: bool) -> tuple[Tensor, Tensor]:
    """Return what each of len(found) pieces receives, and the mail that is left."""
    pieces = len(found)
    mail = torch.zeros(2 if smoothed else 1, pieces, pieces, dtype=torch.int64)
    received = found.clone()
    _mail_kernel[(1,)](received, mail, pieces, smoothed)
    return received, mail
