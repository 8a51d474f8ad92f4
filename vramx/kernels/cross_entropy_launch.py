"""Launch the kernel of cross entropy: how rows are cut into pieces, and the memory for their mail.

As launch.py: the functions trust their arguments, enqueue on the current stream, never wait, can be
captured in a CUDA graph, and may be called from any thread. cross_entropy() allocates nothing:
new_mail() does, for calls that come one after another. Importing this does not import triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vramx.kernels.launch import Plan, multiprocessors
from vramx.kernels.start import start

_ACCESS_BYTES = 16
_WARP = 32
# Of a program, swept on an H200: 16 KiB of logits in 64 registers a thread leave room for eight
# programs in a multiprocessor, of which some read while others wait or write.
_MOST_WARPS = 4
_MOST_TILES = 8
_REGISTERS = 64
# Of a row, for each multiprocessor: a quarter of the room, for four kernels that run at once.
_MOST_PIECES = 2
_OLDEST_TRITON = (3, 3)  # tuples of tensors, as a program holds its tiles


class LossOptions(NamedTuple):
    """What one call of the loss does beside its tensors."""

    ignored: int
    smoothing: float
    cap: float | None


class LossRows(NamedTuple):
    """What belongs to each row of logits.

    targets: int64. losses: float32, written. mail: of new_mail(), for at least as many rows; zero,
    and left so. One call at a time uses it: calls one after another on a stream do.
    """

    targets: Tensor
    losses: Tensor
    mail: Tensor | None


class Cut(NamedTuple):
    """How a row is cut: programs, tiles of a program, warps of a tile."""

    pieces: int
    tiles: int
    warps: int
    shifted: bool  # whether rows begin or end elsewhere than at a multiple of an access


def cross_entropy(
    logits: Tensor, rows: LossRows, options: LossOptions, gradient: Tensor | bool
) -> None:
    """Write the loss of each row and, unless `gradient` is False, its gradient over the logits.

    Args:
        logits: (rows, classes), fits() holds.
        gradient: True, or fp32 factors of the rows' gradients.
    """
    if logits.numel():
        row_cut = cut(logits)
        how = options.cap is not None, options.smoothing != 0.0
        plan = loss_plan(how, _mode(gradient), row_cut, _width(logits))
        weights = gradient if isinstance(gradient, Tensor) else rows.losses
        numbers = (
            logits.stride(0), logits.shape[1],
            options.ignored, options.smoothing, options.cap or 1.0, 0,
        )  # fmt: skip
        tensors = (logits, rows.targets, rows.losses, weights, rows.mail)
        grid = (len(logits) * row_cut.pieces,)
        start(plan.kernel, grid, tensors, numbers, **plan.constants)


def fits(logits: Tensor) -> bool:
    """Tell whether the programs of a row run at once, as they must: 8192 16-bit logits each.

    A program waits for the others of its row, so there are no more than a device has room for, and
    than a program has threads: an H200 takes a million classes. The interpreter runs a program to
    its end, and so takes one. Triton must be 3.3 or later where it compiles.
    """
    pieces = cut(logits).pieces
    if logits.device.type != "cuda":
        return pieces == 1
    most = min(_MOST_PIECES * multiprocessors(logits.device), _WARP * _MOST_WARPS)
    return pieces <= most and _is_known_triton()


@lru_cache(maxsize=1)
def _is_known_triton() -> bool:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= _OLDEST_TRITON


def new_mail(logits: Tensor, options: LossOptions) -> Tensor | None:
    """Return memory through which the programs of each row tell each other what they found.

    Memory: 8 bytes for each two pieces of a row, under a hundredth of 128256 classes; none for rows
    of one piece.
    """
    pieces = cut(logits).pieces
    if pieces == 1:
        return None
    messages = 2 if options.smoothing else 1
    shape = (len(logits), messages, pieces, pieces)
    return torch.zeros(shape, dtype=torch.int64, device=logits.device)


def cut(logits: Tensor) -> Cut:
    """Return how rows of such logits are cut."""
    return _cut(logits.shape[1], logits.stride(0), _width(logits))


@lru_cache(maxsize=64)
def _cut(classes: int, row_stride: int, width: int) -> Cut:
    shifted = classes % width != 0 or row_stride % width != 0
    # A row may begin with the last logit of its first access.
    accesses = max(1, -(-(classes + (width - 1 if shifted else 0)) // width))
    warps = -(-accesses // (_WARP * _MOST_TILES))
    warps = min(1 << (warps - 1).bit_length(), _MOST_WARPS)
    of_row = -(-accesses // (_WARP * warps))
    tiles = -(-of_row // -(-of_row // _MOST_TILES))  # alike in all pieces
    return Cut(-(-of_row // tiles), tiles, warps, shifted)


def _width(logits: Tensor) -> int:
    return _ACCESS_BYTES // logits.element_size()


def _mode(gradient: Tensor | bool) -> str:
    if isinstance(gradient, Tensor):
        return "weighted"
    return "gradient" if gradient else "loss"


@lru_cache(maxsize=64)
def loss_plan(how: tuple[bool, bool], mode: str, row_cut: Cut, width: int) -> Plan:
    """Return how cross entropy is launched.

    Args:
        how: whether logits are capped, and targets smoothed.
        mode: "loss", "gradient" or "weighted".
        row_cut: what cut() returned.
        width: logits of an access.
    """
    from vramx.kernels.cross_entropy import cross_entropy_kernel

    capped, smoothed = how
    threads = _WARP * row_cut.warps
    constants = {
        "PIECES": row_cut.pieces, "TILES": row_cut.tiles, "THREADS": threads, "WIDTH": width,
        "SHIFTED": row_cut.shifted, "CAPPED": capped, "SMOOTHED": smoothed,
        "GRADIENT": mode != "loss", "WEIGHTED": mode == "weighted", "num_warps": row_cut.warps,
        "maxnreg": _REGISTERS,
    }  # fmt: skip
    return Plan(cross_entropy_kernel, row_cut.tiles * threads * width, constants)
