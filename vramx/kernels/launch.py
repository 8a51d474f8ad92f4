"""Launch the kernels: pick one for a layout, its tile and its grid, on the tensor's device.

The functions trust their arguments: flat tensors are 1-D and contiguous; a buffer is uint8, has
Layout.buffer_bytes bytes and begins at a multiple of 16, as every new tensor does; all lie on one
device. They enqueue on its current stream, allocate nothing, never wait, and can be captured in a
CUDA graph. Any thread. A launch is some microseconds of host time; the first of a layout compiles,
about a second. Importing this module does not import triton, calling it does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vramx.kernels.layout import Layout, has_outliers
from vramx.kernels.start import Ready, start

_OLDEST_CAPABILITY = (8, 0)  # bfloat16 arithmetic
_WARPS = 4
_THREADS = 32 * _WARPS
# Elements of a thread. More of them share what is done once a group, until the registers that they
# take leave too few threads to cover the latency of memory: finding outliers takes many.
_ELEMENTS = 64
_ELEMENTS_WITH_OUTLIERS = 32
# Registers of a thread there: on an H100 2.42 TB/s, without the limit 2.27, with 64 1.52.
_REGISTERS_WITH_OUTLIERS = 96
_MASK_BYTES_OF_PROGRAM = 512


class Plan(NamedTuple):
    """A kernel and its configuration for every tensor of one layout."""

    kernel: Any
    tile: int  # elements of a program
    constants: dict[str, Any]

    def start(
        self,
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
        numel: int,
        **constants: Any,
    ) -> None:
        """Launch the kernel for `numel` elements, with constants of its own and these."""
        grid = (-(-numel // self.tile),)
        start(self.kernel, grid, tensors, numbers, **constants, **self.constants)


def supported(device: torch.device) -> bool:
    """Tell whether the kernels run on a device: CUDA of capability 8.0 or later, with triton.

    With Triton's interpreter switched on they run on the CPU as well, for tests.

    Example:
        >>> supported(torch.device("meta"))
        False
    """
    if device.type == "cuda":
        old = torch.cuda.get_device_capability(device) < _OLDEST_CAPABILITY
        return torch.version.hip is None and not old and _has_triton()
    return device.type == "cpu" and _has_triton() and _is_interpreted()


def quantize(
    flat: Tensor, buffer: Tensor, layout: Layout, *, noise: Tensor | None, stream: int
) -> None:
    """Write the packed form of a tensor.

    Args:
        flat: bfloat16, float16 or float32.
        buffer: written; its bytes between the last code and the first header are left alone.
        layout: 8 or 4 bits.
        noise: seed and epoch, int64[2] on the same device, to round stochastically; None rounds to
            the nearest code, half to even.
        stream: number of the tensor's stream of noise, 0 to 2**32 - 1.
    """
    if layout.numel:
        of = (layout.bits, layout.symmetric, layout.group_size, noise is not None)
        ready = ready_for(quantize_plan, of, (layout.numel,), (flat.dtype, flat.get_device()))
        ready.start((flat, buffer, buffer if noise is None else noise), layout.numel, stream)


def dequantize(buffer: Tensor, flat_out: Tensor, layout: Layout) -> None:
    """Write the elements of a packed buffer, in the type of `flat_out`; 8 or 4 bits."""
    if layout.numel:
        of = (layout.bits, layout.symmetric, layout.group_size)
        kind = (flat_out.dtype, flat_out.get_device())
        ready = ready_for(dequantize_plan, of, (layout.numel,), kind)
        ready.start((buffer, flat_out), layout.numel)


_OF_STATISTICS = frozenset({"normal", "scaled"})
# Functions whose results stand for what they are of.
_UNCHANGED = frozenset({"within 6", "within 20"})


class Function(NamedTuple):
    """A function of mapped.py; of "normal" the statistics: element i has (i // inner) % period.

    "scaled" has no mean.
    """

    kind: str
    mean: Tensor | None = None  # float32 [period], contiguous
    rstd: Tensor | None = None
    inner: int = 1
    period: int = 1

    def place(self, group_size: int) -> str:
        """Return how a group's statistics are found."""
        if self.kind not in _OF_STATISTICS or self.inner % group_size == 0:
            return "group"
        return "split" if self.inner > group_size else "each"


def quantize_map(
    flat: Tensor, buffer: Tensor, layout: Layout, function: Function, *, noise: Tensor | None,
    stream: int,
) -> None:  # fmt: skip
    """Write the packed form of a function of a tensor; arguments as quantize()'s."""
    if layout.numel:
        name, mean, rstd, inner, period = function
        form = (layout.bits, layout.symmetric, layout.group_size, noise is not None)
        of = (form, name, function.place(layout.group_size))
        kind = (flat.dtype, flat.get_device())
        ready = ready_for(quantize_map_plan, of, (layout.numel, inner, period), kind)
        tensors = (flat, mean, rstd, buffer, buffer if noise is None else noise)
        ready.start(tensors, layout.numel, stream, inner, period)


def dequantize_map(buffer: Tensor, flat_out: Tensor, layout: Layout, function: Function) -> None:
    """Write what the function was of, in the type of `flat_out`."""
    if function.kind in _UNCHANGED:
        dequantize(buffer, flat_out, layout)
    elif layout.numel:
        name, mean, rstd, inner, period = function
        form = (layout.bits, layout.symmetric, layout.group_size)
        kind = (flat_out.dtype, flat_out.get_device())
        sizes = (layout.numel, inner, period)
        of = (form, name, function.place(layout.group_size))
        ready = ready_for(dequantize_map_plan, of, sizes, kind)
        ready.start((buffer, mean, rstd, flat_out), *sizes)


def pack_signs(flat: Tensor, buffer: Tensor) -> None:
    """Write a bit an element: whether it is above zero, or NaN."""
    if numel := flat.numel():
        kind = (flat.dtype, flat.get_device())
        ready_for(_pack_mask_plan, (), (numel,), kind).start((flat, buffer), numel)


def unpack_signs(buffer: Tensor, flat_out: Tensor) -> None:
    """Write 1 and 0 for bits, in the type of `flat_out`."""
    if numel := flat_out.numel():
        kind = (flat_out.dtype, flat_out.get_device())
        ready_for(_unpack_mask_plan, (), (numel,), kind).start((buffer, flat_out), numel)


def pack_mask(flat_bool: Tensor, buffer: Tensor) -> None:
    """Write the bits of a bool tensor; bytes beyond the last bit's are left alone."""
    pack_signs(flat_bool.view(torch.uint8), buffer)


def unpack_mask(buffer: Tensor, flat_bool_out: Tensor) -> None:
    """Write the bools of packed bits."""
    unpack_signs(buffer, flat_bool_out.view(torch.uint8))


def dtypes_of(tensors: tuple[Tensor | None, ...]) -> tuple[torch.dtype | None, ...]:
    """Return the types of what a kernel may do without, as of a seed where nothing is launched."""
    return tuple([None if tensor is None else tensor.dtype for tensor in tensors])


# A program packs tensors of the same few sizes and types in every step.
@lru_cache(maxsize=4096)
def ready_for(
    plan_of: Callable[..., Plan], of: tuple[Any, ...], sizes: tuple[int, ...], kind: tuple[Any, ...]
) -> Ready:  # fmt: skip
    """Return what launches a plan's kernel for tensors of some sizes, the first the elements.

    The kind, types of tensors and the index of a device, only tells those of one plan from each
    other, as sizes other than the first do. Tensors whose types it has not have always the same.
    """
    plan = plan_of(*of)
    return Ready(plan.constants, plan.kernel, (-(-sizes[0] // plan.tile),), kind[-1])


@lru_cache(maxsize=64)
def quantize_plan(bits: int, symmetric: bool, group_size: int, stochastic: bool) -> Plan:
    """Return how tensors of a layout are quantised."""
    from vramx.kernels.quantize import quantize_kernel

    finds = has_outliers(bits, symmetric)
    rows = _rows(group_size, _ELEMENTS_WITH_OUTLIERS if finds else _ELEMENTS)
    constants = _constants(bits, group_size, rows, symmetric) | {"STOCHASTIC": stochastic}
    if finds:
        constants["maxnreg"] = _REGISTERS_WITH_OUTLIERS
    return Plan(quantize_kernel, rows * group_size, constants)


@lru_cache(maxsize=64)
def dequantize_plan(bits: int, symmetric: bool, group_size: int) -> Plan:
    """Return how tensors of a layout are dequantised."""
    from vramx.kernels.quantize import dequantize_kernel

    rows = _rows(group_size, _ELEMENTS)
    constants = _constants(bits, group_size, rows, symmetric)
    return Plan(dequantize_kernel, rows * group_size, constants)


@lru_cache(maxsize=128)
def quantize_map_plan(format: tuple[int, bool, int, bool], kind: str, place: str) -> Plan:
    """Return how a function of tensors is quantised; the format is quantize_plan's arguments."""
    from vramx.kernels.mapped import quantize_map_kernel

    return _mapped(quantize_map_kernel, quantize_plan(*format), kind, place)


@lru_cache(maxsize=128)
def dequantize_map_plan(format: tuple[int, bool, int], kind: str, place: str) -> Plan:
    """Return how it becomes the tensors again; the format is dequantize_plan's arguments."""
    from vramx.kernels.mapped import dequantize_map_kernel

    return _mapped(dequantize_map_kernel, dequantize_plan(*format), kind, place)


def _mapped(kernel: Any, plan: Plan, kind: str, place: str) -> Plan:
    """Return a plan with a map's kernel in place of the plain one."""
    _, tile, constants = plan
    constants = {**constants, "MAP": kind, "PLACE": place}
    if place == "each":  # two loads an element: with as many more, registers spill
        tile //= 2
        constants |= {"ROWS": constants["ROWS"] // 2, "TAIL_ROWS": constants["TAIL_ROWS"] // 2}
        constants["TAIL_ROWS"] = max(1, constants["TAIL_ROWS"])
    return Plan(kernel, tile, constants)


@lru_cache(maxsize=2)
def mask_plan(*, packs: bool) -> Plan:
    """Return how masks, or the signs of numbers, are packed or unpacked."""
    from vramx.kernels.mask import pack_mask_kernel, unpack_mask_kernel

    constants = {"BYTES": _MASK_BYTES_OF_PROGRAM, "num_warps": _WARPS}
    kernel = pack_mask_kernel if packs else unpack_mask_kernel
    return Plan(kernel, 8 * _MASK_BYTES_OF_PROGRAM, constants)


def _pack_mask_plan() -> Plan:
    return mask_plan(packs=True)


def _unpack_mask_plan() -> Plan:
    return mask_plan(packs=False)


def _rows(group_size: int, elements: int) -> int:
    return max(1, _THREADS * elements // group_size)


def _constants(bits: int, group_size: int, rows: int, symmetric: bool) -> dict[str, Any]:
    # A quarter: the checked accesses of a short tile then take fewer registers than a whole tile.
    tail_rows = max(1, rows // 4)
    return {
        "BITS": bits, "GROUP": group_size, "ROWS": rows, "TAIL_ROWS": tail_rows,
        "SYMMETRIC": symmetric, "num_warps": _WARPS,
    }  # fmt: skip


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Return how many a device has; in the interpreter 2, so that programs are not one a row."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@lru_cache(maxsize=1)
def _is_interpreted() -> bool:
    import triton

    return not isinstance(mask_plan(packs=True).kernel, triton.JITFunction)
