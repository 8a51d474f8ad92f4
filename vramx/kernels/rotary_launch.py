"""Launch the kernel of rotary position embedding.

As launch.py: the function trusts its arguments, enqueues on the current stream, allocates nothing,
never waits, can be captured in a CUDA graph, and may be called from any thread. Importing this
module does not import triton.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from vramx.kernels.launch import Plan, device_of

_WARPS = 4
_ELEMENTS = 8  # of each half, of a thread: one access of 16 bytes in a type of two


def rotate(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, *, transposed: bool) -> None:
    """Write y, x turned, or turned by the transposed matrix.

    All are [batch, heads, tokens, size] with a last stride of 1, cos and sin of the same strides.
    """
    batch, heads, tokens, size = x.shape
    if rows := batch * heads * tokens:
        plan = rotary_plan(size, transposed)
        with device_of(x):
            plan.kernel[(-(-rows // plan.constants["ROWS"]),)](
                x, cos, sin, y, rows, heads, tokens,
                *x.stride()[:3], *y.stride()[:3], *cos.stride()[:3], **plan.constants,
            )  # fmt: skip


@lru_cache(maxsize=16)
def rotary_plan(size: int, transposed: bool) -> Plan:
    """Return how heads of a size are turned."""
    from vramx.kernels.rotary import rotary_kernel

    lanes = 1 << max(0, (size // 2 - 1).bit_length())
    rows = max(1, 32 * _WARPS * _ELEMENTS // lanes)
    constants = {
        "SIZE": size,
        "LANES": lanes,
        "ROWS": rows,
        "TRANSPOSED": transposed,
        "num_warps": _WARPS,
    }
    return Plan(rotary_kernel, rows * size, constants)
