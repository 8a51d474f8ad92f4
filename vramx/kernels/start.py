"""Start a Triton kernel that has run before, at half the host time of Triton's own call.

Triton's call binds the arguments, describes each, builds a key and reads its settings anew. What it
compiles depends on the types of the arguments, on whether pointers are multiples of 16 and on
little of each integer: start() keys on that, and hands what was compiled the arguments as Triton
would. A key's first call is Triton's own; so is each call of versions whose compiled kernels are
called in another way, of the interpreter, with a pointer that is no multiple of 16, and while a
hook watches launches. What Triton reads from its environment at each call is as at the first.
State: what was compiled. Any thread; some microseconds. Importing this does not import triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Of Triton, whose compiled kernels take what start() gives them: triton/runtime/jit.py, run().
_OLDEST, _NEWEST = (3, 3), (3, 7)
_ALIGNMENT = 16  # bytes; also what integers may be multiples of


class _Compiled(NamedTuple):
    """What Triton made of a kernel for one kind of arguments."""

    kernel: Any  # a key has its id: no other gets it
    run: Any
    function: Any
    metadata: Any
    stream_of: Any  # a device's current stream
    constants: tuple[Any, ...]  # of the parameters after tensors and numbers, in their order


_compiled: dict[tuple[Any, ...], _Compiled] = {}
# Off while a step is predicted: tensors without data have no address, or the one of another.
_launches = True


def start(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor | None],
    numbers: Sequence[float],
    **constants: Any,
) -> None:
    """Launch a kernel as kernel[grid](*tensors, *numbers, **constants) would, on their device.

    Args:
        kernel: what triton.jit made; its parameters are tensors, numbers and constants, in turn.
        tensors: the first is one, others may be None.
        numbers: int or float.
        constants: the parameters that are constants, and Triton's options.
    """
    _start(kernel, grid, tensors, numbers, constants)


class Ready:
    """A kernel whose launches differ in addresses only, and in numbers that it ignores the kind of.

    What start() looks up for each launch is looked up for the first one: whoever has a Ready gives
    it tensors of the same types on one device each time, and, but for integers that the kernel
    does not specialise on, the same numbers. The constants are not looked at again, nor may they
    change.
    """

    __slots__ = ("_compiled", "_constants", "_grid", "_index", "_kernel")

    def __init__(
        self, constants: dict[str, Any], kernel: Any, grid: tuple[int, ...], index: int
    ) -> None:
        self._constants = constants
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._index = index  # of the device; negative: the host
        self._compiled: _Compiled | None = None

    def start(self, tensors: tuple[Tensor | None, ...], *numbers: float) -> None:
        """Launch the kernel; tensors lie at multiples of 16, or Triton's own call is taken."""
        if not _launches:
            return
        compiled, index = self._compiled, self._index
        if compiled is not None and (index < 0 or index == _current_device()):
            pointers = [0 if t is None else t.data_ptr() for t in tensors]
            if reduce(or_, pointers) % _ALIGNMENT == 0 and not _is_watched(self._kernel):
                _, run, function, metadata, stream_of, values = compiled
                run(
                    *self._grid, stream_of(index), function, metadata, None, None, None,
                    *pointers, *numbers, *values,
                )  # fmt: skip
                return
        found = _start(self._kernel, self._grid, tensors, numbers, self._constants)
        self._compiled = found or compiled


def _start(
    kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor | None],
    numbers: Sequence[float], constants: dict[str, Any],
) -> _Compiled | None:  # fmt: skip
    """Launch a kernel; return what is known of it.

    By what its constants are: those of sizes that never return are the same few, in other objects.
    """
    if not _launches:
        return None
    first = tensors[0]
    assert first is not None
    index = first.get_device()
    if index >= 0 and index != _current_device():
        with torch.cuda.device(index):
            return _start(kernel, grid, tensors, numbers, constants)
    # Tensors outlive the call; their addresses spare Triton's launcher to ask for them. What is
    # None was compiled as a constant, and is not read.
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    dtypes = [None if t is None else t.dtype for t in tensors]
    key = id(kernel), *constants, *constants.values(), index, *dtypes, *map(_kind, numbers)
    compiled = _compiled.get(key)
    aligned = reduce(or_, pointers) % _ALIGNMENT == 0
    if compiled is None or not aligned or _is_watched(kernel):
        made = kernel[grid](*tensors, *numbers, **constants)
        if aligned:
            _remember(key, kernel, len(tensors) + len(numbers), constants, made)
        return _compiled.get(key)
    _, run, function, metadata, stream_of, values = compiled
    x, y, z = (*grid, 1, 1)[:3]
    run(
        x, y, z, stream_of(index), function, metadata, None, None, None,
        *pointers, *numbers, *values,
    )  # fmt: skip
    return compiled


def _kind(number: float) -> Any:
    """Return what Triton may distinguish of a number, or more."""
    if type(number) is not int:
        return type(number)
    return number == 1, number % _ALIGNMENT == 0, number >> 31 in (0, -1)


def _remember(
    key: tuple[Any, ...], kernel: Any, count: int, constants: dict[str, Any], made: Any
) -> None:
    """Keep what Triton's own call returned, if later calls can be made of it."""
    names = getattr(kernel, "arg_names", ())[count:]
    if not _is_known_version() or not hasattr(made, "packed_metadata"):
        return  # the interpreter's call returns nothing
    if all(name in constants for name in names):
        values = tuple(constants[name] for name in names)
        _compiled[key] = _Compiled(
            kernel, made.run, made.function, made.packed_metadata, _streams(), values
        )


def _streams() -> Any:
    """Return Triton's function of a device's index for that device's current stream."""
    from triton.runtime import driver

    return driver.active.get_current_stream


def _is_watched(kernel: Any) -> bool:
    """Tell whether somebody is to be told of each launch."""
    hooks = _hooks()
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    # Each is a chain of functions, one function or None.
    found = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
    return bool(found or kernel.pre_run_hooks)


@lru_cache(maxsize=1)
def _hooks() -> Any:
    """Return what has Triton's hooks of launches."""
    try:
        from triton.knobs import runtime
    except ImportError:
        from triton.compiler import CompiledKernel

        return CompiledKernel
    return runtime


# Of a process that has a tensor on a device, whose CUDA is set up, without a look whether it is.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def _is_known_version() -> bool:
    return _OLDEST <= triton_version() <= _NEWEST


@lru_cache(maxsize=1)
def triton_version() -> tuple[int, int]:
    """Return the installed Triton's major and minor version; imports it."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)
