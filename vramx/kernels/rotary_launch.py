"""Launch the kernel of rotary position embedding.

As launch.py: the function trusts its arguments, enqueues on the current stream, allocates nothing,
never waits, can be captured in a CUDA graph, and may be called from any thread. Importing this
module does not import triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from vramx.kernels.launch import Plan
from vramx.kernels.start import Ready

# Swept on an H200, with 32 heads of 128: 2 warps reach 96 to 101 % of a copy, 4 warps 94 to 99 %.
_WARPS = 2
_ELEMENTS = 8  # of each half, of a thread, at once: one access of 16 bytes in a type of two
_STEPS = 2  # blocks of heads that share their cosines: their loads are under way together


def rotate(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, *, transposed: bool) -> None:
    """Write y, x turned, or turned by the transposed matrix.

    x and y are [batch, heads, tokens, size] with a last stride of 1; cos and sin, which broadcast
    to that, have it too, and the same shape and strides.
    """
    if x.numel():
        of_cos = (cos.shape, cos.stride())
        kind = (x.dtype, cos.dtype, y.dtype, x.get_device())
        ready, numbers = _of_shape(x.shape, (x.stride(), y.stride()), of_cos, transposed, kind)
        ready.start((x, cos, sin, y), *numbers)


@lru_cache(maxsize=1024)
def _of_shape(
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    of_cos: tuple[tuple[int, ...], tuple[int, ...]],
    transposed: bool,
    kind: tuple[Any, ...],
) -> tuple[Ready, tuple[int, ...]]:
    """Return what launches the kernel, and its numbers.

    The kind, types of tensors and the index of the device, tells launches from each other.
    """
    batch, heads, tokens, size = shape
    # As expand() would have them.
    kept = [stride if size > 1 else 0 for size, stride in zip(*of_cos, strict=True)]
    of_cosines = [0] * (len(shape) - len(kept)) + kept
    plan = rotary_plan((heads, size), transposed, shares=of_cosines[1] == 0)
    known = plan.constants
    blocks = -(-heads // (known["HEADS"] * known["STEPS"])) * -(-tokens // known["TOKENS"])
    numbers = (heads, tokens, *(s for each in (*strides, of_cosines) for s in each[:3]))
    return Ready(known, plan.kernel, (batch * blocks,), kind[-1]), numbers


@lru_cache(maxsize=64)
def rotary_plan(shape: tuple[int, int], transposed: bool, *, shares: bool) -> Plan:
    """Return how so many heads of a size are turned; `shares`: all heads have the same cosines."""
    from vramx.kernels.rotary import rotary_kernel

    heads, size = shape
    lanes = 1 << max(0, (size // 2 - 1).bit_length())
    rows = max(1, 32 * _WARPS * _ELEMENTS // lanes)
    block = min(rows, 1 << (heads - 1).bit_length())
    steps = _STEPS if shares and heads > block else 1
    constants = {
        "SIZE": size, "LANES": lanes, "HEADS": block, "TOKENS": rows // block, "STEPS": steps,
        "TRANSPOSED": transposed, "num_warps": _WARPS,
    }  # fmt: skip
    return Plan(rotary_kernel, rows * steps * size, constants)
