"""Launch the kernels of elementwise functions and of dropout.

As launch.py: the functions trust their arguments (contiguous tensors of one type, on one device),
enqueue on the current stream, allocate nothing, never wait, can be captured in a CUDA graph, and
may be called from any thread. What is packed has a layout of 8 or 4 bits; a layout of None is a
tensor that is kept as it is, or not at all. Importing this module does not import triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from vramx.kernels.launch import Plan, dtypes_of, ready_for
from vramx.kernels.layout import Layout

# Bits of the codes that activations and gated units pack.
WIDTHS = (4, 8)
_WARPS = 4
_THREADS = 32 * _WARPS
# Elements of a thread. One access of 16 bytes is 16 codes of 8 bits, or 32 of 4. More share what
# noise and scales cost once a group; a backward kernel has little of that and more to hold.
_ELEMENTS = 16
_ELEMENTS_WIDE = 32
# What packs to 8 bits is limited in registers: without, the assembler takes so many that 16 warps
# fit, too few for the latency of memory. Fewer registers than these would be spilled.
_PACKING_WARPS = 2
_PACKING = {"activation": (32, 96), "glu": (16, 72)}  # elements and registers of a thread
_MASK_BYTES_OF_PROGRAM = 512
_UNPACKED_GROUP = 128
_DROPOUT_COLUMNS = 128


class Noise(NamedTuple):
    """Seed and epoch on the device, and the number of a stream for each tensor to be packed."""

    state: Tensor
    streams: tuple[int, ...]


def activation(
    x: Tensor, y: Tensor, buffer: Tensor, layout: Layout | None, kind: str, noise: Noise | None
) -> None:
    """Write y = act(x) and, with a layout, the packed x."""
    if x.numel():
        of = ("activation", kind, _form(layout), noise is not None)
        state, (stream,) = noise or (x, (0,))
        _start(_tile_plan, of, (x, y, buffer, state), (x.numel(), stream))


def activation_backward(
    dy: Tensor, kept: Tensor, dx: Tensor, y: Tensor | None, layout: Layout | None, kind: str
) -> None:
    """Write dx and, where it is given, y = act(x); y may be dy."""
    if dy.numel():
        of = ("activation_backward", kind, _form(layout), y is not None)
        _start(_tile_plan, of, (dy, kept, dx, dy if y is None else y), (dy.numel(),))


def glu(
    inputs: tuple[Tensor, Tensor], z: Tensor, buffers: tuple[Tensor, Tensor], layout: Layout | None,
    kind: str, noise: Noise | None,
) -> None:  # fmt: skip
    """Write z = act(gate) * up and, with a layout, the packed gate and up."""
    if z.numel():
        of = ("glu", kind, _form(layout), noise is not None)
        state, streams = noise or (z, (0, 0))
        _start(_tile_plan, of, (*inputs, z, *buffers, state), (z.numel(), *streams))


def glu_backward(
    dz: Tensor, kept: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor], z: Tensor | None,
    layout: Layout | None, kind: str,
) -> None:  # fmt: skip
    """Write dgate and dup and, where it is given, z; z may be dz."""
    if dz.numel():
        of = ("glu_backward", kind, _form(layout), z is not None)
        _start(_tile_plan, of, (dz, *kept, *outputs, dz if z is None else z), (dz.numel(),))


def relu(x: Tensor, y: Tensor, bits: Tensor) -> None:
    """Write y = max(x, 0) and a bit an element: whether its gradient passes."""
    if x.numel():
        _start(relu_plan, ("relu_kernel",), (x, y, bits), (x.numel(),))


def relu_backward(dy: Tensor, bits: Tensor, dx: Tensor) -> None:
    """Write dx = dy where its bit is set, else 0."""
    if dy.numel():
        _start(relu_plan, ("relu_backward_kernel",), (dy, bits, dx), (dy.numel(),))


def dropout(x: Tensor, residual: Tensor | None, y: Tensor, key: Tensor, kept: int) -> None:
    """Write y: x * 65536 / kept where a value of the key's noise is below `kept`, plus residual."""
    if x.numel():
        scale = 65536.0 / kept if kept else 0.0
        tensors = (x, x if residual is None else residual, y, key)
        _start(dropout_plan, (residual is not None,), tensors, (x.numel(), 0, kept, scale))


def _start(
    plan_of: Callable[..., Plan],
    of: tuple[Any, ...],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
) -> None:
    """Launch a plan's kernel; the first number is how many elements the first tensor has."""
    kind = (*dtypes_of(tensors), tensors[0].get_device())
    ready_for(plan_of, of, numbers[:1], kind).start(tensors, *numbers)


def tile_plan(name: str, kind: str, layout: Layout | None, option: bool) -> Plan:
    """Return how a kernel of groups is launched; `option` is noise, or backward the value."""
    return _tile_plan(name, kind, _form(layout), option)


def _form(layout: Layout | None) -> tuple[int, int, bool] | None:
    return None if layout is None else (layout.bits, layout.group_size, layout.symmetric)


@lru_cache(maxsize=256)
def _tile_plan(name: str, kind: str, form: tuple[int, int, bool] | None, option: bool) -> Plan:
    from vramx.kernels import activation, glu

    bits, group, symmetric = form or (0, _UNPACKED_GROUP, True)
    backward = name.endswith("backward")
    elements, warps = _ELEMENTS_WIDE if bits == 4 else _ELEMENTS, _WARPS
    constants: dict[str, Any] = {}
    if bits == 8 and not backward:
        (elements, constants["maxnreg"]), warps = _PACKING[name], _PACKING_WARPS
    rows = max(1, 32 * warps * elements // group)
    constants |= {
        "KIND": kind,
        "BITS": bits,
        "GROUP": group,
        "ROWS": rows,
        "TAIL_ROWS": max(1, rows // 4),
        "SYMMETRIC": symmetric,
        "WITH_VALUE" if backward else "STOCHASTIC": option,
        "num_warps": warps,
    }
    module = glu if name.startswith("glu") else activation
    return Plan(getattr(module, f"{name}_kernel"), rows * group, constants)


@lru_cache(maxsize=2)
def relu_plan(name: str) -> Plan:
    """Return how one of the two kernels of ReLU is launched."""
    from vramx.kernels import activation

    constants = {"BYTES": _MASK_BYTES_OF_PROGRAM, "num_warps": _WARPS}
    return Plan(getattr(activation, name), 8 * _MASK_BYTES_OF_PROGRAM, constants)


@lru_cache(maxsize=2)
def dropout_plan(adds: bool) -> Plan:
    """Return how dropout is launched, with a residual or without."""
    from vramx.kernels.dropout import dropout_kernel

    rows = _THREADS * _ELEMENTS_WIDE // _DROPOUT_COLUMNS
    constants = {
        "ROWS": rows, "TAIL_ROWS": rows // 4, "COLS": _DROPOUT_COLUMNS, "ADD": adds,
        "num_warps": _WARPS,
    }  # fmt: skip
    return Plan(dropout_kernel, rows * _DROPOUT_COLUMNS, constants)
