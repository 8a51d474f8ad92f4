"""Launch the backward kernels of the norms: which they are, their tiles and how many programs.

As norm_launch.py, whose types and tiles these are. A backward pass is one kernel for the rows and
one that adds up the programs' shares of the sums. norm_backward() allocates the shares,
`programs * hidden` elements each; nothing else allocates. Importing this module does not import
triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vramx.kernels.launch import dtypes_of, multiprocessors
from vramx.kernels.norm_launch import (
    Kept,
    Plan,
    output_plan,
    power_of_two,
    rows_and_columns,
    tile_plan,
)
from vramx.kernels.start import Ready, start

# A thread holds a sum for each of its elements, with a bias two.
_ELEMENTS = 16
_LONGEST_SUMMED = 8192
# Shorter rows share a tile; fewer than forward, for adding up two rows' together costs more than
# they gain by sharing their waits.
_SMALLEST_TILE = 1024
# The programs go on to further tiles, two of which are on their way to shared memory: with each one
# more an H200's memory is slower, by up to 8 % at 4096 columns. A multiprocessor works on so many
# elements: with more, threads have too few registers. Where means are not subtracted, long rows
# gain from a residual's gradient that is loaded late and not held.
_ELEMENTS_OF_MULTIPROCESSOR, _MOST_PROGRAMS = 8192, 16
_LONG_ROW = 4096
_STAGES = 3
_STAGED_BYTES = 96 << 10  # of a program: GPUs of capability 8.6 have 99 KiB
_REGISTERS = 1 << 16  # of a multiprocessor
# Of sums that are made apart: programs of a multiprocessor, and elements of a tile.
_APART_PROGRAMS, _APART_TILE = 4, 2048
# Of a program that adds up shares; few rows, for all of it is a few microseconds of waiting, unless
# there are so many shares that it would have too many steps.
_SUM_COLUMNS, _FEW_SHARES = 16, 512


class Reads(NamedTuple):
    """What the backward kernel reads, and whether it subtracts means."""

    centred: bool
    has_residual: bool
    element_bytes: int  # of the gradients and of what was kept


class Shares(NamedTuple):
    """Where the gradients of weight and bias go, each None if it is not asked for."""

    dweight: Tensor | None
    dbias: Tensor | None


class BackwardPlan(NamedTuple):
    """The tile of a backward kernel, and how its sums are made."""

    tile: Plan
    programs: int  # of a multiprocessor
    sums_apart: bool  # they would not fit the registers


def norm_backward(
    gradients: tuple[Tensor, Tensor | None],
    weight: Tensor | None,
    kept: Kept,
    dx: Tensor,
    shares: tuple[Shares, bool],
) -> None:
    """Write dx, and the gradients of weight and bias, of their own types.

    Args:
        gradients: of y, and of the sum.
        shares: where the sums go, and whether the mean was subtracted. Their rounding errors do
            not change from run to run on one kind of device.
    """
    wanted, centred = shares
    rows, hidden = rows_and_columns(dx)
    if not rows:
        for vector in wanted:
            if vector is not None:
                vector.zero_()
        return
    (dy, dsum), (buffer, rstd, group_size) = gradients, kept
    kind = dtypes_of((dy, dsum, weight, buffer, dx, *wanted))
    ready, programs, sums_apart = _of_rows((rows, hidden), group_size, centred, kind, dx.device)
    partial = _partial(Shares(None, None) if sums_apart else wanted, programs, hidden)
    ready.start((dy, dsum, weight, buffer, rstd, dx, *partial), rows)
    if sums_apart:
        partial = _sums_apart(dy, kept, wanted)
    _column_sums(partial, wanted)


@lru_cache(maxsize=1024)
def _of_rows(
    shape: tuple[int, int], group_size: int, centred: bool, kind: tuple[Any, ...],
    device: torch.device,
) -> tuple[Ready, int, bool]:  # fmt: skip
    """Return what launches the kernel of the rows, its programs, and whether sums are made apart.

    The kind: the types of dy, dsum, the weight, the buffer, dx, and of what is wanted.
    """
    from vramx.kernels.norm_backward import norm_backward_kernel

    dy, dsum, _, _, dx, *_ = kind
    of_gradients = dy.itemsize + (0 if dsum is None else dsum.itemsize)
    reads = Reads(centred, dsum is not None, of_gradients + (1 if group_size else dx.itemsize))
    plan = backward_plan(shape[1], group_size, reads)
    programs = min(plan.tile.grid(shape[0]), _programs(device, plan.programs))
    index = -1 if device.index is None else device.index
    ready = Ready(plan.tile.constants, norm_backward_kernel, (programs,), index)
    return ready, programs, plan.sums_apart


def _partial(wanted: Shares, programs: int, hidden: int) -> Shares:
    """Return where the programs' shares go: [programs, hidden] each, one after the other.

    They are rounded to bfloat16 where the sums will be: half the bytes. A share of k terms whose
    signs are random is about sqrt(k) of one, so that rounding the shares adds what rounding each
    term would; of terms of one sign it adds less.
    """
    given = [vector for vector in wanted if vector is not None]
    if not given:
        return Shares(None, None)
    narrow = given[0].dtype == given[-1].dtype == torch.bfloat16
    dtype = torch.bfloat16 if narrow else torch.float32
    shares = given[0].new_empty((len(given), programs, hidden), dtype=dtype)
    return Shares(
        None if wanted.dweight is None else shares[0], None if wanted.dbias is None else shares[-1]
    )


def _sums_apart(dy: Tensor, kept: Kept, wanted: Shares) -> Shares:
    """Return the shares of the sums, made by a second pass over dy and what was kept."""
    from vramx.kernels.norm_sums import norm_sums_kernel

    rows, hidden = rows_and_columns(dy)
    constants = sums_apart_constants(hidden, kept.group_size)
    columns = -(-hidden // constants["GROUP"])
    most = -(-_programs(dy.device, _APART_PROGRAMS) // columns)
    programs = min(-(-rows // constants["ROWS"]), most)
    partial = _partial(wanted, programs, hidden)
    if any(share is not None for share in partial):
        start(
            norm_sums_kernel, (columns, programs), (dy, kept.buffer, *partial), (rows,),
            PACKED=kept.group_size > 0, **constants,
        )  # fmt: skip
    return partial


def _column_sums(partial: Shares, wanted: Shares) -> None:
    """Add up the shares, which lie as _partial() made them."""
    first = partial.dbias if partial.dweight is None else partial.dweight
    if first is None:
        return
    tensors = (first, *wanted)
    kind = (*dtypes_of(tensors), first.get_device())
    _of_sums(first.shape, kind).start(tensors, first.shape[0])


@lru_cache(maxsize=1024)
def _of_sums(shape: tuple[int, int], kind: tuple[Any, ...]) -> Ready:
    """Return what adds up shares; the kind: the types of these and of the sums, and the device."""
    from vramx.kernels.norm_sums import column_sums_kernel

    programs, hidden = shape
    of_sums = sum(each is not None for each in kind[1:-1])
    grid = (-(-hidden // _SUM_COLUMNS), of_sums)
    return Ready(_sums_constants(programs, hidden), column_sums_kernel, grid, kind[-1])


@lru_cache(maxsize=256)
def _sums_constants(programs: int, hidden: int) -> dict[str, int]:
    return {"HIDDEN": hidden, **sums_constants(programs)}


def sums_constants(programs: int) -> dict[str, int]:
    """Return the tile of the kernel that adds up so many programs' shares."""
    are_few = programs <= _FEW_SHARES
    rows, warps = (32, 4) if are_few else (64, 8)
    steps = -(-programs // rows)
    steps = steps if are_few else power_of_two(steps)  # few kernels for all numbers of programs
    return {"ROWS": rows, "STEPS": steps, "COLUMNS": _SUM_COLUMNS, "num_warps": warps}


def sums_apart_constants(hidden: int, group_size: int) -> dict[str, Any]:
    """Return the tile of the kernel that makes the shares apart."""
    group = output_plan(hidden, group_size).constants["GROUP"]
    rows = max(1, _APART_TILE // group)
    return {"HIDDEN": hidden, "GROUP": group, "ROWS": rows, "num_warps": 4}


@lru_cache(maxsize=256)
def backward_plan(hidden: int, group_size: int, reads: Reads) -> BackwardPlan:
    """Return what is launched for rows of `hidden` elements; `group_size` 0: nothing is packed."""
    tile = tile_plan(hidden, group_size, _ELEMENTS, _SMALLEST_TILE)
    sums_apart = tile.elements // tile.rows > _LONGEST_SUMMED
    most = _ELEMENTS_OF_MULTIPROCESSOR // tile.elements
    programs = max(1, min(most, _MOST_PROGRAMS))
    constants = {
        "CENTRED": reads.centred, "PACKED": group_size > 0,
        "STAGES": min(_STAGES, 1 + _STAGED_BYTES // (tile.elements * reads.element_bytes)),
        "DSUM_LAST": sums_apart or (hidden >= _LONG_ROW and not reads.centred),
        "maxnreg": _REGISTERS // (32 * tile.constants["num_warps"] * programs) // 8 * 8,
    }  # fmt: skip
    tile = Plan(tile.rows, tile.elements, tile.constants | constants)
    return BackwardPlan(tile, programs, sums_apart)


def _programs(device: torch.device, of_multiprocessor: int) -> int:
    """Return how many programs a device is given; in the interpreter so few that each has tiles."""
    if device.type != "cuda":
        return 2
    return multiprocessors(device) * of_multiprocessor
