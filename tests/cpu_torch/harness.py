"""Loads the library that puts torch's CPU tensors on a core; see cpu_allocator.cpp.

One process can install it once, and keeps it: the core has to outlive every tensor. The library is
compiled for the torch that is imported, in two seconds, and kept (see benchmarks/native/build.py).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from benchmarks.native.build import load_library

DEFECTS = {"early_free": 1, "shared_address": 2}
_INSTALL_ERRORS = {1: "there is an allocator on a core already", 2: "the core's version differs"}


class Counts(ctypes.Structure):
    """What went through the core so far."""

    _fields_ = (
        ("blocks", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("frees", ctypes.c_uint64),
        ("refused_frees", ctypes.c_uint64),
        ("defects", ctypes.c_uint64),
    )


class CpuAllocator:
    """torch's allocator for the CPU, on the core; constructing it installs it.

    Args:
        handle_address: of an AllocatorsHandle; its device 0 is used.
        poison: overwrite blocks with not-a-number when they are handed out and when they are freed.
    """

    def __init__(self, handle_address: int, poison: bool = True) -> None:
        self._library = _load()
        code = self._library.vramx_cpu_install(ctypes.c_void_p(handle_address), int(poison))
        if code:
            raise RuntimeError(_INSTALL_ERRORS[code])

    def plant(self, defect: str, period: int) -> None:
        """Hand every `period`-th larger block out wrongly, from now on: one of DEFECTS."""
        self._library.vramx_cpu_plant(DEFECTS[defect], ctypes.c_uint64(period))

    def leave(self) -> None:
        """Let torch's own allocator serve new tensors; those that are there go back to the core."""
        self._library.vramx_cpu_leave()

    def counts(self) -> dict[str, int]:
        counts = Counts()
        self._library.vramx_cpu_counts(ctypes.byref(counts))
        return {name: int(getattr(counts, name)) for name, _ in Counts._fields_}


def _load() -> ctypes.CDLL:
    torch_folder = Path(torch.__file__).parent
    flags = [
        f"-isystem{torch_folder / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        # Bound by name to the copy that torch has loaded.
        f"-L{torch_folder / 'lib'}",
        "-lc10",
    ]
    return load_library(Path(__file__).parent / "cpu_allocator.cpp", flags)
