"""The built shim in this process: its six C functions, with their types.

Loaded with ctypes after torch, whose libraries it then finds in the process, and never unloaded:
torch keeps pointers into it until the last instruction. Refused if it was made for another torch
than the one that is running, which an upgrade during a session can bring about. Calls are made
under the installation's lock.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from vramx.allocator.torch_facts import release_of
from vramx.errors import ShimError

ALL_DEVICES = -1


class Shim:
    """The functions of a loaded shim.

    Raises:
        ShimError: the file cannot be loaded, lacks a function, or is for another torch.
    """

    def __init__(self, path: Path, running_torch: str) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            self._declare()
        except (OSError, AttributeError) as error:
            raise ShimError(
                f"the shim cannot be loaded: {error}; remove {path} to have it built again"
            ) from None
        built_for = self._text(self._library.vramx_torch_built_for())
        if built_for != release_of(running_torch):
            raise ShimError(
                f"the shim {path} is for torch {built_for or '?'}, and torch {running_torch} is "
                "running; start the program again"
            )

    def _declare(self) -> None:
        library = self._library
        library.vramx_torch_built_for.restype = ctypes.c_char_p
        library.vramx_torch_built_for.argtypes = []
        library.vramx_torch_install.restype = ctypes.c_int
        library.vramx_torch_install.argtypes = [ctypes.c_void_p, ctypes.c_int]
        library.vramx_torch_error.restype = ctypes.c_char_p
        library.vramx_torch_error.argtypes = []
        library.vramx_torch_set_limit.restype = None
        library.vramx_torch_set_limit.argtypes = [ctypes.c_int, ctypes.c_ulonglong]
        library.vramx_torch_note_profiler.restype = None
        library.vramx_torch_note_profiler.argtypes = []
        library.vramx_torch_is_installed.restype = ctypes.c_int
        library.vramx_torch_is_installed.argtypes = []
        library.vramx_torch_keeps_history.restype = ctypes.c_int
        library.vramx_torch_keeps_history.argtypes = []

    def install(self, handle_address: int, late: bool) -> None:
        """Put the core behind torch.

        Raises:
            ShimError: torch refused it; the text is the shim's.
        """
        if self._library.vramx_torch_install(handle_address, int(late)):
            raise ShimError(self._text(self._library.vramx_torch_error()) or "torch refused it")

    def set_limit(self, device: int, limit_bytes: int) -> None:
        """Bound what vramx and torch's own allocator hold of a device together."""
        self._library.vramx_torch_set_limit(device, limit_bytes)

    def note_profiler(self) -> None:
        """Have frees, too, look for a profiler on their thread; for good."""
        self._library.vramx_torch_note_profiler()

    def is_installed(self) -> bool:
        """Tell whether torch's allocator is the shim's."""
        return bool(self._library.vramx_torch_is_installed())

    def torch_keeps_history(self) -> bool:
        """Tell whether torch's allocator of now keeps a history; before CUDA's start none does.

        torch._C._cuda_isHistoryEnabled would crash there.
        """
        return bool(self._library.vramx_torch_keeps_history())

    @staticmethod
    def _text(raw: bytes | None) -> str:
        return raw.decode(errors="replace") if raw else ""
