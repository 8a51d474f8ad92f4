"""Launch the kernels of normalisation by channel: how channels are found, tiles and grids.

As elementwise_launch.py: the functions trust their arguments (tensors dense in one order of their
elements, tables contiguous), enqueue on the current stream, allocate nothing, never wait; any
thread. Only for shapes of which positions() knows how channels are found. A kernel is compiled for
each number of channels if these are innermost and no multiple of the codec's groups, and for each
size of a channel's run below a tile.
Importing this module does not import triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vramx.kernels.elementwise_launch import Noise
from vramx.kernels.launch import Plan, dtypes_of, ready_for
from vramx.kernels.layout import Layout
from vramx.kernels.start import Ready

_WARPS = 4
_PACKING_REGISTERS = 128  # of a thread
_ELEMENTS = 16  # of a thread: one access of 16 bytes of codes
TILE = 32 * _WARPS * _ELEMENTS
_WIDEST_GROUP = 128  # where the format does not say
_SUMMED_AT_ONCE = 16  # the last row is cut between two of these
_PROGRAMS_OF_MULTIPROCESSOR = 6  # of the sums, whose programs go on to further rows


class Channels(NamedTuple):
    """Where channels lie: `inner` elements of one follow each other, then the next of `number`."""

    inner: int
    number: int


class Activation(NamedTuple):
    """What follows the norm: "none", a kind of activation.py, or "leaky_relu", with its leak."""

    kind: str
    leak: float


class Kept(NamedTuple):
    """What is kept: n, packed as the layout says, else as it is; and bits. Each may be None."""

    buffer: Tensor | None
    bits: Tensor | None
    layout: Layout | None


def positions(channels: Channels) -> str | None:
    """Return how the kernels find an element's channel; None: they do not.

    Example:
        >>> positions(Channels(1, 64)), positions(Channels(3136, 64)), positions(Channels(49, 3))
        ('rows', 'long', None)
    """
    if channels.inner == 1:
        return "rows"
    if channels.inner >= TILE:
        return "long"
    return "short" if TILE // channels.inner + 2 <= channels.number else None


def forward(
    sources: tuple[Tensor, Tensor | None],
    tables: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    outputs: tuple[Tensor, Kept | None],
    how: tuple[Channels, Activation],
    noise: Noise | None,
) -> None:
    """Write y and what is kept.

    Args:
        sources: x and the residual.
        tables: mean, rstd, weight and bias.
        outputs: y, and what is kept, None: nothing.
    """
    x, residual = sources
    y, kept = outputs
    channels, activation = how
    if x.numel():
        buffer, bits = (None, None) if kept is None else kept[:2]
        state, (stream,) = noise or (None, (0,))
        of = (channels, buffer is not None, _form(kept), activation.kind, noise is not None)
        tensors = (x, residual, *tables, y, buffer, bits, state)
        kind = (*dtypes_of(tensors), x.get_device())
        ready = ready_for(_forward_launch, of, (x.numel(),), kind)
        ready.start(tensors, x.numel(), stream, *channels, activation.leak)


def output(
    kept: Kept,
    tables: tuple[Tensor | None, Tensor | None],
    y: Tensor,
    how: tuple[Channels, Activation],
) -> None:
    """Write y again; `tables` are weight and bias."""
    if y.numel():
        _start("channel_norm_output", (kept.buffer, kept.bits, *tables, y), y.numel(), kept, how)


def gradient(
    dy: Tensor,
    kept: Kept,
    tables: tuple[Tensor | None, Tensor | None],
    outputs: tuple[Tensor | None, Tensor | None],
    how: tuple[Channels, Activation],
) -> None:
    """Write g and n, each unless it is None; `tables` are weight and bias."""
    if dy.numel():
        tensors = (dy, kept.buffer, kept.bits, *tables, *outputs)
        _start("channel_norm_gradient", tensors, dy.numel(), kept, how)


def input_gradient(
    dy: Tensor,
    kept: Kept,
    tables: tuple[Tensor | None, ...],
    outputs: tuple[Tensor | None, Tensor | None],
    how: tuple[Channels, Activation],
) -> None:
    """Write g and dx, each unless it is None; dx may be dy.

    Args:
        tables: weight, bias, slope, offset and along.
    """
    if dy.numel():
        tensors = (dy, kept.buffer, kept.bits, *tables, *outputs)
        _start("channel_norm_input", tensors, dy.numel(), kept, how)


def _start(
    name: str,
    tensors: tuple[Tensor | None, ...],
    numel: int,
    kept: Kept,
    how: tuple[Channels, Activation],
) -> None:
    """Launch a kernel that reads what was kept."""
    channels, activation = how
    first: Any = tensors[0]
    kind = (*dtypes_of(tensors), first.get_device())
    of = (name, channels, kept.buffer is not None, _form(kept), activation.kind)
    ready = ready_for(_launch, of, (numel,), kind)
    ready.start(tensors, numel, *channels, activation.leak)


def sums_fit(channels: Channels, kept: Kept) -> bool:
    """Tell whether shares_of_sums() serves: channels innermost, and of one size with groups.

    Example:
        >>> kept = Kept(torch.empty(0), None, None)
        >>> sums_fit(Channels(1, 64), kept), sums_fit(Channels(1, 96), kept)
        (True, False)
    """
    group, _ = _form(kept) or (_WIDEST_GROUP, True)
    fits = channels.number % group == 0 or group % channels.number == 0
    return channels.inner == 1 and channels.number % _SUMMED_AT_ONCE == 0 and fits


def shares_of_sums(
    dy: Tensor,
    kept: Kept,
    tables: tuple[Tensor | None, Tensor | None],
    how: tuple[Channels, Activation],
) -> Tensor:
    """Return fp32 [2, rows, channels], to be added up: the sums of g and of g n.

    `tables` are weight and bias. Allocates its result: 8 bytes a channel, or a group of the codec,
    for each program that shares the rows. The number of these does not change from run to run on
    one kind of device.
    """
    (_, number), activation = how
    read, numel = (dy, kept.buffer, kept.bits, *tables), dy.numel()
    of = (number, _form(kept), activation.kind)
    ready, programs, width = _sums_of_shape(of, numel, dtypes_of(read), dy.device)
    shares = dy.new_empty((2, programs, width), dtype=torch.float32)
    ready.start((*read, shares), numel, width, activation.leak)
    return shares.view(2, -1, number) if width > number else shares


@lru_cache(maxsize=1024)
def _sums_of_shape(
    of: tuple[int, tuple[int, bool] | None, str], numel: int, _dtypes: Any, device: torch.device
) -> tuple[Ready, int, int]:
    """Return what launches the sums of tensors of a size, the programs that share, and a row."""
    channels, form, kind = of
    plan = _sums_launch(channels, form, kind)
    group = plan.constants["GROUP"]
    width = max(channels, group)
    blocks, tiles = width // group, -(-numel // (plan.tile * width))
    programs = max(1, min(tiles, -(-_programs(device) // blocks)))
    index = -1 if device.index is None else device.index
    return Ready(plan.constants, plan.kernel, (blocks, programs), index), programs, width


@lru_cache(maxsize=256)
def _sums_launch(channels: int, form: tuple[int, bool] | None, kind: str) -> Plan:
    kernel, rows, constants = sums_plan(channels, form)
    return Plan(kernel, rows, constants | {"KIND": kind})


@lru_cache(maxsize=256)
def sums_plan(channels: int, form: tuple[int, bool] | None) -> Plan:
    """Return how shares_of_sums() is launched; a tile is counted in rows."""
    from vramx.kernels.channel_norm_backward import channel_norm_sums_kernel

    group, symmetric = form or (_WIDEST_GROUP, True)
    rows = TILE // group
    constants: dict[str, Any] = {
        "BITS": 0 if form is None else 8, "CHANNELS": channels if channels < group else 0,
        "GROUP": group, "ROWS": rows, "SYMMETRIC": symmetric, "num_warps": _WARPS,
    }  # fmt: skip
    return Plan(channel_norm_sums_kernel, rows, constants)


@lru_cache(maxsize=64)
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return int(multiprocessors) * _PROGRAMS_OF_MULTIPROCESSOR


@lru_cache(maxsize=1024)
def _forward_launch(
    channels: Channels, keeps: bool, form: tuple[int, bool] | None, kind: str, stochastic: bool
) -> Plan:
    kernel, tile, constants = plan_of("channel_norm", channels, keeps, form)
    return Plan(kernel, tile, constants | {"KIND": kind, "STOCHASTIC": stochastic})


@lru_cache(maxsize=1024)
def _launch(
    name: str, channels: Channels, keeps: bool, form: tuple[int, bool] | None, kind: str
) -> Plan:
    kernel, tile, constants = plan_of(name, channels, keeps, form)
    return Plan(kernel, tile, constants | {"KIND": kind})


@lru_cache(maxsize=1024)
def plan_of(name: str, channels: Channels, keeps: bool, form: tuple[int, bool] | None) -> Plan:
    """Return how a kernel is launched; `form` is group size and symmetry of what is packed."""
    packs = (0, _WIDEST_GROUP, True) if form is None else (8, *form)
    how = positions(channels)
    if how == "rows" and channels.number % packs[1] == 0:
        how = "blocks"
    divides = (channels.inner if how == "short" else 0, channels.number if how == "rows" else 0)
    return _plan(name, how, divides, packs if keeps else (-1, *packs[1:]))


@lru_cache(maxsize=512)
def _plan(
    name: str, how: str | None, divides: tuple[int, int], packs: tuple[int, int, bool]
) -> Plan:
    from vramx.kernels import channel_norm, channel_norm_backward

    bits, group, symmetric = packs
    rows = TILE // group
    constants: dict[str, Any] = {
        "BITS": bits, "POSITIONS": how, "INNER": divides[0], "CHANNELS": divides[1], "GROUP": group,
        "ROWS": rows, "TAIL_ROWS": max(1, rows // 4), "SYMMETRIC": symmetric, "num_warps": _WARPS,
    }  # fmt: skip
    if name == "channel_norm" and bits == 8:
        # Told nothing, the assembler keeps a word of some tiles in local memory.
        constants["maxnreg"] = _PACKING_REGISTERS
    backward = name in ("channel_norm_gradient", "channel_norm_input")
    module = channel_norm_backward if backward else channel_norm
    return Plan(getattr(module, f"{name}_kernel"), TILE, constants)


def _form(kept: Kept | None) -> tuple[int, bool] | None:
    if kept is None or kept.layout is None:
        return None
    return kept.layout.group_size, kept.layout.symmetric
