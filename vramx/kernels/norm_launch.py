"""Launch the forward kernels of the norms: their tiles and grids, on the tensors' device.

As launch.py: the functions trust their arguments, enqueue on the device's current stream, allocate
nothing and never wait; any thread. All tensors are contiguous and (..., hidden), whose dimensions
but the last are rows; or vectors, of hidden or of the rows. None is what its kernel may do without.
What comes back is launched by norm_backward_launch.py, with the types and the tiles that are here.
Importing this module does not import triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from vramx.kernels import launch
from vramx.kernels.launch import dtypes_of

# A row is held in registers: a longer one would be spilled to memory.
LONGEST_ROW = 16384
# The block number of the noise's counter then fits a word, so a tile never carries into the next.
MOST_PACKED = 1 << 35
# Of a thread. Many share what is done once a row, until their registers leave too few warps: for
# rows of 4096, 32 reach 92 to 101 % of a copy on an H200, 16 reach 88 to 96 % and 8 reach 62 %;
# with a residual, 16 reach 94 to 100 %.
_ELEMENTS = {False: 32, True: 16}
_ELEMENTS_OF_OUTPUT = 16
_MOST_WARPS = 16
# Shorter rows share a tile, so that a thread's accesses are 16 bytes and rows share their waits.
_SMALLEST_TILE = 2048
_WIDEST_GROUP = 128  # where the format does not say


class Plan(NamedTuple):
    """The tile of a kernel for rows of one length."""

    rows: int
    elements: int  # what lies beyond a row included
    constants: dict[str, Any]

    def grid(self, rows: int) -> int:
        return -(-rows // self.rows)


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
    x, residual = sources
    y, total = outputs
    weight, bias = affine
    eps, centred, (state, stream) = how
    rows, hidden = rows_and_columns(x)
    if not rows:
        return
    buffer, rstd, group_size = (None, None, 0) if kept is None else kept
    of = (hidden, group_size, residual is not None, centred, state is not None)
    tensors = (x, residual, weight, bias, y, total, buffer, rstd, state)
    kind = (*dtypes_of(tensors), x.get_device())
    ready = launch.ready_for(_forward_launch, of, (rows,), kind)
    ready.start(tensors, rows, stream, eps)


def norm_output(kept: Kept, affine: Affine, y: Tensor) -> None:
    """Write the norm's output again."""
    rows, hidden = rows_and_columns(y)
    if rows:
        (buffer, _, group_size), (weight, bias) = kept, affine
        tensors = (buffer, weight, bias, y)
        kind = (*dtypes_of(tensors), y.get_device())
        ready = launch.ready_for(_output_launch, (hidden, group_size), (rows,), kind)
        ready.start(tensors, rows)


def rows_and_columns(x: Tensor) -> tuple[int, int]:
    """Return how many rows a tensor has, and how long they are."""
    hidden = x.shape[-1]
    return x.numel() // hidden, hidden


@lru_cache(maxsize=256)
def _forward_launch(
    hidden: int, group_size: int, has_residual: bool, centred: bool, stochastic: bool
) -> launch.Plan:
    from vramx.kernels.norm_forward import norm_forward_kernel

    plan = forward_plan(hidden, group_size, has_residual)
    options = {"CENTRED": centred, "PACKED": group_size > 0, "STOCHASTIC": stochastic}
    return launch.Plan(norm_forward_kernel, plan.rows, plan.constants | options)


@lru_cache(maxsize=256)
def _output_launch(hidden: int, group_size: int) -> launch.Plan:
    from vramx.kernels.norm_forward import norm_output_kernel

    plan = output_plan(hidden, group_size)
    options = {"PACKED": group_size > 0}
    return launch.Plan(norm_output_kernel, plan.rows, plan.constants | options)


def forward_plan(hidden: int, group_size: int, has_residual: bool) -> Plan:
    """Return the tile of rows of `hidden` elements; `group_size` 0: nothing is packed."""
    return tile_plan(hidden, group_size, _ELEMENTS[has_residual])


def output_plan(hidden: int, group_size: int) -> Plan:
    """Return the tile of the kernel that makes the output again."""
    return tile_plan(hidden, group_size, _ELEMENTS_OF_OUTPUT)


@lru_cache(maxsize=256)
def tile_plan(hidden: int, group_size: int, elements: int, smallest: int = _SMALLEST_TILE) -> Plan:
    """Return the tile of which a thread has `elements`, of so many in all if rows are short."""
    group = group_size or min(power_of_two(hidden), _WIDEST_GROUP)
    groups = power_of_two(-(-hidden // group))
    tile = group * groups
    rows = max(1, smallest // tile) if tile == hidden else 1
    warps = min(max(1, rows * tile // (32 * elements)), _MOST_WARPS)
    constants = {
        "HIDDEN": hidden, "GROUP": group, "GROUPS": groups, "ROWS": rows, "num_warps": warps,
    }  # fmt: skip
    return Plan(rows, rows * tile, constants)


def power_of_two(value: int) -> int:
    """Return the least one that is no less than a value."""
    return 1 << (value - 1).bit_length()
