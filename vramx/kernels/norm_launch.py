"""Launch the kernels of the norms: their tiles and grids, on the tensors' device.

As launch.py: the functions trust their arguments, enqueue on the device's current stream, and never
wait; any thread. All tensors are contiguous and [rows, hidden], but for vectors of [hidden] and of
[rows]; None is what its kernel may do without. norm_backward() allocates the programs' shares of
the sums, `programs * hidden` floats each; nothing else allocates. Importing this module does not
import triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vramx.kernels.launch import multiprocessors
from vramx.kernels.start import start

# A row is held in registers: a longer one would be spilled to memory.
LONGEST_ROW = 16384
# The block number of the noise's counter then fits a word, so a tile never carries into the next.
MOST_PACKED = 1 << 35
# Of a thread. Many share what is done once a row, until their registers leave too few warps: for
# rows of 4096, 32 reach 92 to 101 % of a copy on an H200, 16 reach 88 to 96 % and 8 reach 62 %;
# with a residual, 16 reach 94 to 100 %.
_ELEMENTS = {False: 32, True: 16}
_ELEMENTS_OF_OUTPUT = 16
# Backward a thread holds a sum for each of them as well, with a bias two.
_ELEMENTS_SUMMED = 16
_MOST_WARPS = 16
_LONGEST_SUMMED = 8192
# Shorter rows share a tile, so that a thread's accesses are 16 bytes and rows share their waits;
# fewer do backward, where adding up two rows' together costs more than that.
_SMALLEST_TILE, _SMALLEST_TILE_BACKWARD = 2048, 1024
# The programs of the backward kernel go on to further tiles, some of which are on their way to
# shared memory: with a residual fewer, for a tile is then more bytes, and of long rows more, for
# there are fewer programs. A multiprocessor works on so many elements, more where means are not
# subtracted. With a bias but no residual its warps wait for each other rather than for memory, so
# every lane adds up the row, which is one wait in place of two, and rows of a few warps are given
# more, of fewer elements each. Where means are not subtracted, long rows gain from a residual's
# gradient that is loaded late and not held. All swept on an H200.
_ELEMENTS_OF_MULTIPROCESSOR, _MOST_PROGRAMS = {False: 10240, True: 8192}, 16
_ELEMENTS_CENTRED, _ROW_OF_WARPS, _LONG_ROW = 8, 1024, 4096
_STAGES, _STAGES_WITH_RESIDUAL, _STAGES_OF_LONG_ROWS = 4, 3, 5
_STAGED_BYTES = 96 << 10  # of a program: GPUs of capability 8.6 have 99 KiB
_REGISTERS = 1 << 16  # of a multiprocessor
_WIDEST_GROUP = 128  # where the format does not say
_SUM_PROGRAMS = 4  # of a multiprocessor, of sums that are made apart
_SUM_ROWS, _SUM_WARPS = 64, 8  # of a step of a program that adds up shares
_FEW_COLUMNS = 4096


class Plan(NamedTuple):
    """The tile of a kernel for rows of one length."""

    rows: int
    constants: dict[str, Any]

    @property
    def sums_apart(self) -> bool:
        """Whether the sums over rows would not fit the registers of the backward kernel."""
        return int(self.constants["GROUP"] * self.constants["GROUPS"]) > _LONGEST_SUMMED

    def grid(self, rows: int) -> int:
        return -(-rows // self.rows)


class Reads(NamedTuple):
    """What the backward kernel reads, and whether it subtracts means."""

    centred: bool
    has_residual: bool
    element_bytes: int  # of the gradients and of what was kept
    is_narrow: bool = True  # dy and dx are of 16 bits: more warps have the registers for no more


class Kept(NamedTuple):
    """What is kept of the rows: their normalised form and its factor."""

    buffer: Tensor  # packed if group_size, else [rows, hidden] of the type of x
    rstd: Tensor | None
    group_size: int


class Noise(NamedTuple):
    """Where stochastic rounding gets its noise: seed and epoch (None: nearest), and the stream."""

    state: Tensor | None
    stream: int


class Affine(NamedTuple):
    """What is multiplied and added after normalising."""

    weight: Tensor | None
    bias: Tensor | None


class Shares(NamedTuple):
    """Where the gradients of weight and bias go, each None if it is not asked for."""

    dweight: Tensor | None
    dbias: Tensor | None


def packs(hidden: int, numel: int, group_size: int) -> bool:
    """Tell whether norm_forward() can pack: groups must not straddle rows."""
    return hidden % group_size == 0 and numel <= MOST_PACKED


def norm_forward(
    sources: tuple[Tensor, Tensor | None],
    affine: Affine,
    outputs: tuple[Tensor, Tensor | None],
    kept: Kept | None,
    how: tuple[float, bool, Noise],
) -> None:
    """Write y, the sum and what is kept.

    Args:
        sources: x and the residual, of one type.
        outputs: y, of any type, and x + residual where there is one.
        how: eps, whether the mean is subtracted, and the noise of packing.
    """
    from vramx.kernels.norm_forward import norm_forward_kernel

    x, residual = sources
    y, total = outputs
    eps, centred, noise = how
    rows, hidden = x.shape
    if not rows:
        return
    group_size = kept.group_size if kept else 0
    plan = forward_plan(hidden, group_size, residual is not None)
    buffer, rstd = (None, None) if kept is None else (kept.buffer, kept.rstd)
    start(
        norm_forward_kernel, (plan.grid(rows),),
        (x, residual, *affine, y, total, buffer, rstd, noise.state), (rows, noise.stream, eps),
        CENTRED=centred, PACKED=group_size > 0, STOCHASTIC=noise.state is not None,
        **plan.constants,
    )  # fmt: skip


def norm_output(kept: Kept, affine: Affine, y: Tensor) -> None:
    """Write the norm's output again."""
    from vramx.kernels.norm_forward import norm_output_kernel

    rows, hidden = y.shape
    if rows:
        plan = output_plan(hidden, kept.group_size)
        start(
            norm_output_kernel, (plan.grid(rows),), (kept.buffer, *affine, y), (rows,),
            PACKED=kept.group_size > 0, **plan.constants,
        )  # fmt: skip


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
    from vramx.kernels.norm_backward import norm_backward_kernel

    wanted, centred = shares
    rows, hidden = dx.shape
    if not rows:
        for vector in wanted:
            if vector is not None:
                vector.zero_()
        return
    packed = kept.group_size > 0
    of_gradients = sum(each.element_size() for each in gradients if each is not None)
    reads = Reads(
        centred, gradients[1] is not None, of_gradients + (1 if packed else dx.element_size()),
        max(gradients[0].element_size(), dx.element_size()) == 2,
    )  # fmt: skip
    plan, of_multiprocessor = backward_plan(hidden, kept.group_size, reads)
    programs = min(plan.grid(rows), _programs(dx.device, of_multiprocessor))
    partial = _partial(Shares(None, None) if plan.sums_apart else wanted, programs, hidden)
    start(
        norm_backward_kernel, (programs,),
        (*gradients, weight, kept.buffer, kept.rstd, dx, *partial), (rows,),
        CENTRED=centred, PACKED=packed, **plan.constants,
    )  # fmt: skip
    if plan.sums_apart:
        partial = _sums_apart(gradients[0], kept, wanted)
    _column_sums(partial, wanted)


def _partial(wanted: Shares, programs: int, hidden: int) -> Shares:
    """Return where the programs' shares go: [programs, hidden] each, one after the other."""
    given = [vector for vector in wanted if vector is not None]
    if not given:
        return Shares(None, None)
    shares = given[0].new_empty((len(given), programs, hidden), dtype=torch.float32)
    return Shares(
        None if wanted.dweight is None else shares[0],
        None if wanted.dbias is None else shares[-1],
    )


def _sums_apart(dy: Tensor, kept: Kept, wanted: Shares) -> Shares:
    """Return the shares of the sums, made by a second pass over dy and what was kept."""
    from vramx.kernels.norm_sums import norm_sums_kernel

    rows, hidden = dy.shape
    constants = sums_apart_constants(hidden, kept.group_size)
    columns = -(-hidden // constants["GROUP"])
    most = -(-_programs(dy.device, _SUM_PROGRAMS) // columns)
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
    from vramx.kernels.norm_sums import column_sums_kernel

    given = [share for share in partial if share is not None]
    if not given:
        return
    programs, hidden = given[0].shape
    constants = sums_constants(programs, hidden * len(given))
    start(
        column_sums_kernel, (-(-hidden // constants["COLUMNS"]), len(given)),
        (given[0], *wanted), (programs,), HIDDEN=hidden, **constants,
    )  # fmt: skip


def sums_apart_constants(hidden: int, group_size: int) -> dict[str, Any]:
    """Return the tile of the kernel that makes the shares apart."""
    group = output_plan(hidden, group_size).constants["GROUP"]
    rows = max(1, _SMALLEST_TILE // group)
    return {"HIDDEN": hidden, "GROUP": group, "ROWS": rows, "num_warps": 4}


def sums_constants(programs: int, columns: int) -> dict[str, Any]:
    """Return the tile of the kernel that adds up so many programs' shares of so many columns."""
    steps = _power_of_two(-(-programs // _SUM_ROWS))  # few kernels for all numbers of programs
    wide = columns >= _FEW_COLUMNS  # a multiprocessor has work either way
    return {
        "ROWS": _SUM_ROWS,
        "STEPS": steps,
        "COLUMNS": 32 if wide else 16,
        "num_warps": _SUM_WARPS,
    }


def forward_plan(hidden: int, group_size: int, has_residual: bool) -> Plan:
    """Return the tile of rows of `hidden` elements; `group_size` 0: nothing is packed."""
    return _tile_plan(hidden, group_size, _ELEMENTS[has_residual])


def output_plan(hidden: int, group_size: int) -> Plan:
    """Return the tile of the kernel that makes the output again."""
    return _tile_plan(hidden, group_size, _ELEMENTS_OF_OUTPUT)


@lru_cache(maxsize=256)
def backward_plan(hidden: int, group_size: int, reads: Reads) -> tuple[Plan, int]:
    """Return the tile of the backward kernel, and how many programs a multiprocessor is given."""
    waits = _waits(hidden, reads)
    elements = _ELEMENTS_CENTRED if waits and hidden < _LONG_ROW else _ELEMENTS_SUMMED
    plan = _tile_plan(hidden, group_size, elements, _SMALLEST_TILE_BACKWARD)
    known = plan.constants
    tile = known["ROWS"] * known["GROUPS"] * known["GROUP"]
    programs = max(1, min(_ELEMENTS_OF_MULTIPROCESSOR[reads.centred] // tile, _MOST_PROGRAMS))
    stages = min(_stages(hidden, reads), 1 + _STAGED_BYTES // (tile * reads.element_bytes))
    constants = {
        "STAGES": stages,
        "DSUM_LAST": plan.sums_apart or (hidden >= _LONG_ROW and not reads.centred),
        "LANES": _lanes(hidden, known["num_warps"]) if waits else 0,
        "maxnreg": _REGISTERS // (32 * known["num_warps"] * programs) // 8 * 8,
    }
    return Plan(plan.rows, known | constants), programs


def _waits(hidden: int, reads: Reads) -> bool:
    """Tell whether a row's warps wait for each other rather than for memory."""
    long = _ROW_OF_WARPS <= _power_of_two(hidden) <= _LONGEST_SUMMED
    return long and reads.centred and not reads.has_residual and reads.is_narrow


def _lanes(hidden: int, warps: int) -> int:
    """Return how many add up a row, none where they lack runs of 8 or Triton cannot compile it."""
    from vramx.kernels.norm_totals import can_gather

    return 32 * warps if hidden % 8 == 0 and can_gather() else 0


def _stages(hidden: int, reads: Reads) -> int:
    if reads.has_residual:
        return _STAGES_WITH_RESIDUAL
    return _STAGES if reads.centred or hidden < _LONG_ROW else _STAGES_OF_LONG_ROWS


@lru_cache(maxsize=256)
def _tile_plan(hidden: int, group_size: int, elements: int, smallest: int = _SMALLEST_TILE) -> Plan:
    group = group_size or min(_power_of_two(hidden), _WIDEST_GROUP)
    groups = _power_of_two(-(-hidden // group))
    tile = group * groups
    rows = max(1, smallest // tile) if tile == hidden else 1
    warps = min(max(1, rows * tile // (32 * elements)), _MOST_WARPS)
    constants = {
        "HIDDEN": hidden,
        "GROUP": group,
        "GROUPS": groups,
        "ROWS": rows,
        "num_warps": warps,
    }
    return Plan(rows, constants)


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _programs(device: torch.device, of_multiprocessor: int) -> int:
    """Return how many programs a device is given; in the interpreter so few that each has tiles."""
    if device.type != "cuda":
        return 2
    return multiprocessors(device) * of_multiprocessor
