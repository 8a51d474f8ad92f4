"""The totals of a long row, for all lanes of a program, with one barrier.

Triton's own reduction waits twice: for the sums of all warps, which some lanes add up, and for what
those found. Here every lane gathers the warps' sums and adds them up with the lanes beside it. A
tile is one row, of which each of LANES = 32 * warps threads has runs of 8 elements: lane i those
that begin at 8 * (i + k * LANES). That is Triton's layout of what is read 16 bytes at a time; in
another layout the totals are the same, and moving what is summed costs more than is gained. Pure
device code without state, in float32; the order of a sum depends on LANES only.
"""

from __future__ import annotations

import triton
import triton.language as tl

_OLDEST_TRITON = (3, 6)  # of whose gathers the machine code was read


def can_gather() -> bool:
    """Tell whether this version of Triton compiles what is here as is said above."""
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= _OLDEST_TRITON


@triton.jit
def warp_sums_of_two(a, b, LANES: tl.constexpr):
    """Return fp32[LANES // 16]: of each warp what it has of a, then of b, tiles [groups, GROUP]."""
    return tl.reshape(tl.join(_warp_sums(a, LANES), _warp_sums(b, LANES)), (LANES // 16,))


@triton.jit
def lane_totals_of_two(sums, LANES: tl.constexpr):
    """Return fp32[LANES] twice: in each lane the totals of both tiles, of warp_sums_of_two().

    LANES: 64 or more. A lane gathers two warps' sums of both, 16 bytes; a team of lanes has all.
    """
    TEAM: tl.constexpr = LANES // 64
    places = tl.arange(0, LANES) % TEAM * 4
    places = tl.join(places, places + 1)
    places = tl.reshape(tl.join(places, places + 2), (4 * LANES,))
    one, other = tl.split(tl.reshape(tl.gather(sums, places, 0), (LANES, 2, 2)))
    a, b = tl.split(one + other)
    return _team_totals(a, LANES, TEAM), _team_totals(b, LANES, TEAM)


@triton.jit
def spread_lanes(values, UNITS: tl.constexpr, LANES: tl.constexpr):
    """Return fp32[UNITS, 1] of fp32[LANES]: what each lane has, for each of its runs of 8."""
    many = tl.broadcast_to(values[None, :], (UNITS // LANES, LANES))
    return tl.reshape(many, (UNITS,))[:, None]


@triton.jit
def _warp_sums(tile, LANES: tl.constexpr):
    """Return fp32[LANES // 32], what each warp has of a tile."""
    UNITS: tl.constexpr = tile.shape[0] * tile.shape[1] // 8
    units = tl.sum(tl.reshape(tile, (UNITS, 8)), 1)
    lanes = tl.sum(tl.reshape(units, (UNITS // LANES, LANES)), 0)
    return tl.sum(tl.reshape(lanes, (LANES // 32, 32)), 1)


@triton.jit
def _team_totals(values, LANES: tl.constexpr, TEAM: tl.constexpr):
    """Return fp32[LANES], in each lane the sum of its team's: TEAM lanes that lie together."""
    teams = tl.sum(tl.reshape(values, (LANES // TEAM, TEAM)), 1)
    return tl.reshape(tl.broadcast_to(teams[:, None], (LANES // TEAM, TEAM)), (LANES,))
