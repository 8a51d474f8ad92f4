"""A program whose requests for CUDA memory fail as torch's do, on a CUDA that is not there."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, shim
from snapshot_writer import KEPT, MIB, Recording

import vramx
from vramx.allocator import oom_snapshot

__all__ = ["shim"]

GIB = 1 << 30


class Program:
    """A program under the allocator whose requests fail as torch's do: observers, then the error.

    The error is made by Python's C interface from a text, as torch's translation of C++ errors
    makes it.
    """

    def __init__(self, cuda: FakeCuda, folder: Path) -> None:
        self.cuda = cuda
        self.folder = folder
        self.snapshots = 0
        self.recording = Recording()
        self.recording.alloc(40 * MIB, KEPT)
        self.history = False
        cuda.patch.setattr(torch.cuda.memory, "_snapshot", self._snapshot)
        cuda.configure(oom_dir=folder)
        # Undone after what the installation sets there.
        cuda.patch.setattr(torch.OutOfMemoryError, "__init__", RuntimeError.__init__)

    def start(self) -> None:
        vramx.install_allocator()
        self.cuda.initialise()

    def _snapshot(self) -> dict[str, Any]:
        self.snapshots += 1
        return self.recording.snapshot(None if self.history else 0)

    def observe(self, size: int) -> None:
        for observer in self.cuda.observers:
            observer(0, size, 2 * GIB, 123 * MIB)

    def fail(self, size: int) -> str:
        """Return the text of the error of a request for so many bytes."""
        self.observe(size)
        return error_text(size)

    @property
    def files(self) -> list[Path]:
        return oom_snapshot.written(self.folder)


def error_text(size: int) -> str:
    text = f"CUDA out of memory. Tried to allocate {size / GIB:.2f} GiB. Try a smaller batch."
    set_error = ctypes.pythonapi.PyErr_SetString
    set_error.argtypes, set_error.restype = (ctypes.py_object, ctypes.c_char_p), None
    with pytest.raises(torch.OutOfMemoryError) as caught:
        set_error(torch.OutOfMemoryError, text.encode())
    assert type(caught.value) is torch.OutOfMemoryError
    assert len(caught.value.args) == 1
    assert str(caught.value).startswith(text)
    return str(caught.value).removeprefix(text)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shim: Path) -> FakeCuda:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return FakeCuda(monkeypatch, tmp_path, shim)


@pytest.fixture
def program(cuda: FakeCuda, tmp_path: Path) -> Program:
    started = Program(cuda, tmp_path / "oom")
    started.start()
    return started
