"""Launch the kernels of channel_norm_tables.py: what is of a channel, between passes over tensors.

As channel_norm_launch.py: the functions trust their arguments (1-D and contiguous), enqueue on the
current stream, never wait; any thread. Importing this module does not import triton.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from vramx.kernels.launch import Plan, dtypes_of, ready_for

_CHANNELS = 128  # of a program, where each has few numbers
# One of the sums has 32 bytes of a row, which memory gives at once, and 16 rows a thread in flight.
_SUMMED_CHANNELS = 8
_SUMMED_ROWS = 512
_WARPS = 8


def statistics(
    found: tuple[Tensor, Tensor],
    rstd: Tensor,
    running: tuple[Tensor | None, Tensor | None, Tensor | None],
    numbers: tuple[float, float, int],
) -> None:
    """Write rstd and move running statistics.

    Args:
        found: mean and variance of a batch's channels.
        running: mean and variance, or None both; and the number of batches, or None.
        numbers: eps, momentum, and the values of a channel.
    """
    eps, momentum, count = numbers
    channels, tensors = rstd.numel(), (*found, rstd, *running)
    kind = (*dtypes_of(tensors), rstd.get_device())
    ready = ready_for(_statistics_plan, (), (channels,), kind)
    ready.start(tensors, channels, eps, momentum, count / max(count - 1, 1))


def factors(
    shares: Tensor,
    tables: tuple[Tensor, Tensor | None],
    outputs: tuple[Tensor, Tensor | None, Tensor | None],
    count: int,
) -> None:
    """Write slope, offset and along of channels, and what is wanted of their gradients.

    Args:
        shares: what channel_norm_launch.shares_of_sums() returns.
        tables: rstd and weight.
        outputs: fp32 [3, channels], and the gradients of weight and bias.
        count: values of a channel.
    """
    channels = tables[0].numel()
    rows = shares.numel() // (2 * channels)
    tensors = (shares, *tables, *outputs)
    kind = (*dtypes_of(tensors), shares.get_device())
    ready = ready_for(_factors_plan, (_tile_of(rows),), (channels,), kind)
    ready.start(tensors, rows, channels, float(count))


def _tile_of(rows: int) -> int:
    return min(_SUMMED_ROWS, max(32, 1 << (rows - 1).bit_length()))


@lru_cache(maxsize=1)
def _statistics_plan() -> Plan:
    from vramx.kernels.channel_norm_tables import channel_norm_statistics_kernel

    constants = {"BLOCK": _CHANNELS, "num_warps": _CHANNELS // 32}
    return Plan(channel_norm_statistics_kernel, _CHANNELS, constants)


@lru_cache(maxsize=16)
def _factors_plan(tile: int) -> Plan:
    from vramx.kernels.channel_norm_tables import channel_norm_factors_kernel

    warps = max(1, _WARPS * tile // _SUMMED_ROWS)
    constants = {"ROWS": tile, "BLOCK": _SUMMED_CHANNELS, "num_warps": warps}
    return Plan(channel_norm_factors_kernel, _SUMMED_CHANNELS, constants)
