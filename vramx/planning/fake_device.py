"""What torch's C++ is told of a GPU where there is none: by two of its registries, for a while.

Dispatched operations and autograd ask c10's guard for CUDA to set devices and to find streams. A
build without CUDA has no guard, and that of a build with CUDA asks a driver that is not there: the
guard of the meta device, which does nothing, stands in. For a build with CUDA, whose autograd
compares streams, it is a copy that has one stream; and ATen's hooks, which are asked before each
backward pass whether a device has a context and check that it exists, say yes. A virtual function
is exchanged in a copy of its object's table, at the place that the installed headers give it.

Everything is put back on leaving. Not thread-safe; Linux on x86-64.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from vramx.errors import UntraceableError

# c10::DeviceType, and the registry of guards that c10 exports.
_CUDA_TYPE, _META_TYPE, _TYPES = 1, 14, 20
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_TORCH = Path(torch.__file__).parent
_VIRTUAL = re.compile(r"\bvirtual\b[^;{=(]*?(~?\w+)\s*\(")
# Itanium C++ ABI 2.5: a table begins with an offset and the type, and an object points behind
# these; a virtual destructor has two places.
_BEFORE_TABLE = 2
_WORD = ctypes.sizeof(ctypes.c_void_p)
# x86-64 code of functions that return: a c10::Stream, which is the device cuda:0 in rax and the
# number 0 in rdx; true; and nothing.
_STREAM = bytes.fromhex("b80100000031d2c3")
_TRUE = bytes.fromhex("b801000000c3")
_NOTHING = bytes.fromhex("c3")
_OF_GUARD = {
    "getStream": _STREAM,
    "getDefaultStream": _STREAM,
    "exchangeStream": _STREAM,
    "record": _NOTHING,
    "block": _NOTHING,
}
# Of native_functions.yaml, those with a kernel for CUDA and CompositeImplicitAutograd for others.
_OF_A_GPU = ("silu_backward", "mish_backward", "_fused_rms_norm")
_OF_HOOKS = {"hasPrimaryContext": _TRUE}


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Where there is no GPU, have C++ find one that does nothing.

    Raises:
        UntraceableError: this build of torch has not what is exchanged here.
    """
    if torch.cuda.is_available():
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_guard())
            stack.enter_context(_whole())
            if torch.version.cuda is not None:
                stack.enter_context(_hooks())
        except (OSError, ValueError, AttributeError) as error:
            raise UntraceableError(
                f"this build of torch cannot be told of a GPU that is not there ({error}); predict "
                "on Linux, or with device='cpu'"
            ) from None
        yield


@contextlib.contextmanager
def _guard() -> Iterator[None]:
    library = ctypes.CDLL(str(_TORCH / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * _TYPES).in_dll(library, _REGISTRY)
    before, meta = registry[_CUDA_TYPE], registry[_META_TYPE]
    if torch.version.cuda is not None:
        names = _functions("c10/core/impl/DeviceGuardImplInterface.h")
        table = _Table(_table_of(meta).value, names, _OF_GUARD)
        stand_in = ctypes.c_void_p(table.address)
        meta = ctypes.addressof(stand_in)
    registry[_CUDA_TYPE] = meta
    try:
        yield
    finally:
        registry[_CUDA_TYPE] = before


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """Have operations be one kernel each which are so on a GPU alone.

    A build without CUDA has no such kernel, and autograd takes these operations apart.
    """
    if torch.version.cuda is not None:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in _OF_A_GPU:
            if hasattr(torch.ops.aten, name):
                library.impl(name, _unreached, "CUDA")
        yield
    finally:
        library._destroy()


def _unreached(*_: object) -> None:
    """Stand for a kernel: tensors without data have another one."""
    raise AssertionError("a kernel of the GPU runs without a GPU")


@contextlib.contextmanager
def _hooks() -> Iterator[None]:
    names = _functions("ATen/detail/AcceleratorHooksInterface.h")
    names += _functions("ATen/detail/CUDAHooksInterface.h")
    get = ctypes.CDLL(str(_TORCH / "lib" / "libtorch_cpu.so"))[_HOOKS]
    get.restype = ctypes.c_void_p
    hooks = _table_of(get())
    before = hooks.value
    table = _Table(before, names, _OF_HOOKS)
    hooks.value = table.address
    try:
        yield
    finally:
        hooks.value = before


def _table_of(instance: int | None) -> ctypes.c_void_p:
    """Return where an object holds the address of its table: in its first word."""
    if instance is None:
        raise ValueError("it has no guard for the meta device")
    return ctypes.c_void_p.from_address(instance)


class _Table:
    """A copy of a table of virtual functions in which some are others.

    Args:
        original: its address.
        names: of its functions, in order.
        code: by name, that of the functions that take the place of the original's.
    """

    def __init__(self, original: int | None, names: Sequence[str], code: dict[str, bytes]) -> None:
        if original is None or platform.machine() != "x86_64":
            raise ValueError(f"no table of functions for {platform.machine()}")
        self._words = (ctypes.c_void_p * (_BEFORE_TABLE + len(names)))()
        size = ctypes.sizeof(self._words)
        ctypes.memmove(self._words, original - _BEFORE_TABLE * _WORD, size)
        self._code = mmap.mmap(
            -1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        )
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._code))
        for name, function in code.items():
            at = self._code.tell()
            self._code.write(function)
            self._words[_BEFORE_TABLE + names.index(name)] = start + at
        self.address = ctypes.addressof(self._words) + _BEFORE_TABLE * _WORD


def _functions(header: str) -> list[str]:
    """Return the virtual functions of an interface in the order of its table, by its header.

    Raises:
        OSError: the header is not there.
    """
    text = (_TORCH / "include" / header).read_text()
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    names = [match[1] for match in _VIRTUAL.finditer(text)]
    return [place for name in names for place in ([name] * (2 if name.startswith("~") else 1))]
