"""A memory snapshot of a request that failed, written while what filled the memory is still there.

torch calls the observer in the thread that asked, before the error is raised. No lock is held then:
the shim's `fail()` calls observers after it has let go of its own lock and outside of the core's
and the native allocator's, and native unlocks before it calls them. torch takes the GIL for the
call. Without a lock of the allocator's in hand neither that, nor taking a snapshot, nor a tensor
that Python's collector frees meanwhile can wait for this thread. The lock here is never waited for.

The error is made afterwards, by C++ and with a text that an observer cannot change under the native
allocator. So what was written is added where Python makes the exception of it: the class's
`__init__`, which is the same for both allocators. An error whose size nobody observed is left as it
is, and an error that C++ catches, as cuDNN's search for an algorithm does, is never made.

At most four files a process, then one in ten minutes; one for each size, device and stack; sixteen
in a folder; 64 MiB each. A failure that has its file already costs a microsecond a frame of its
stack.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from vramx import config
from vramx.allocator import oom_document, shim_cache
from vramx.config import Config
from vramx.files import written_whole

KIND = "oom"  # of files in the cache
_MOST_FILES = 4  # of a process, before it rests
_REST_S = 600.0
_MOST_KEPT = 16  # in a folder: two of each rank of eight
_MOST_PENDING = 16  # failures whose exception is not made yet
_NAME = re.compile(r"oom-\d{8}T\d{6}-rank\d+-pid\d+-\d+\.pickle")
_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|B|KiB|MiB|GiB)\b")
_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_log = logging.getLogger("vramx")

# What makes two failures the same: the device, the size and the lines that asked.
_Key = tuple[int, int, tuple[tuple[str, int], ...]]


class OomSnapshots:
    """Writes snapshots of failures, and says in their errors where they are; one a process."""

    def __init__(self, torch: ModuleType, settings: Config) -> None:
        self._torch = torch
        self._settings = settings
        self._writing = threading.Lock()
        self._lines: dict[_Key, str] = {}
        self._last_s = 0.0
        self._pending: deque[tuple[int, str]] = deque(maxlen=_MOST_PENDING)

    def observe(self, device: int, size: int, total: int, free: int) -> None:
        """Be told by torch of a request that failed; raises nothing."""
        del total
        if not self._writing.acquire(blocking=False):
            return  # of another thread, or of this one, whose snapshot is being written
        try:
            # Nothing of Python is behind it in a thread of autograd.
            line = self._line(device, size, free, sys._getframe().f_back)
        except Exception as error:
            _log.debug("vramx: a failure could not be looked at", exc_info=error)
            line = ""
        finally:
            self._writing.release()
        self._pending.append((size, line))

    def add_line(self, text: str) -> str:
        """Return an error's text with the line of the failure that it tells of, if one is known."""
        asked = _ASKED.search(text)
        if asked is None:
            return text
        unit = _UNITS[asked[2]]
        asked_bytes = float(asked[1]) * unit
        for pending in reversed(list(self._pending)):
            # The text has two digits after the point.
            if abs(pending[0] - asked_bytes) <= 0.006 * unit:
                with contextlib.suppress(ValueError):  # another thread has just taken it
                    self._pending.remove(pending)
                return f"{text}\n{pending[1]}" if pending[1] else text
        return text

    def _line(self, device: int, size: int, free: int, frame: FrameType | None) -> str:
        stack = oom_document.stack_of(frame)
        key = device, size, tuple((each["filename"], each["line"]) for each in stack)
        if key in self._lines:
            return self._lines[key]
        now_s = time.monotonic()
        if len(self._lines) >= _MOST_FILES and now_s - self._last_s < _REST_S:
            return ""
        try:
            path = self._write(oom_document.Failure(device, size, free, stack))
            line = f"A memory snapshot of this, which `vramx explain` reads, is in\n{path}"
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            line = f"No memory snapshot of this could be written: {reason}"
        self._lines[key] = line  # also of a failure to write, which is not tried again
        self._last_s = time.monotonic()
        return line

    def _write(self, failure: oom_document.Failure) -> Path:
        folder = _writable_folder(self._settings)
        data = oom_document.pickled(self._torch.cuda.memory._snapshot(), failure)
        stamp = time.strftime("%Y%m%dT%H%M%S")
        number = len(self._lines) + 1
        path = folder / f"oom-{stamp}-rank{config.rank() or 0}-pid{os.getpid()}-{number}.pickle"
        with written_whole(path, 0o600) as file:
            file.write(data)
        for old in written(folder)[_MOST_KEPT:]:
            with contextlib.suppress(OSError):  # gone, by another rank's hand
                old.unlink()
        return path


def folders(settings: Config) -> list[Path]:
    """Return where snapshots of failures may lie, the preferred place first."""
    if settings.oom_dir is not None:
        return [settings.oom_dir.absolute()]
    return shim_cache.cache_folders(settings, KIND)


def _writable_folder(settings: Config) -> Path:
    if settings.oom_dir is None:
        return shim_cache.writable_folder(folders(settings))
    (folder,) = folders(settings)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def written(folder: Path) -> list[Path]:
    """Return the snapshots of failures in a folder, the newest first."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if _NAME.fullmatch(path.name) and not path.is_symlink():
                    found.append((path.stat().st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def newest(settings: Config) -> Path | None:
    """Return the snapshot that was written last, of any process of this user."""
    found = [path for folder in folders(settings) for path in written(folder)[:1]]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


_attached: list[OomSnapshots] = []


def attach(torch: ModuleType, settings: Config) -> None:
    """Have failures of this process written from now on; once a process. CUDA is initialised."""
    if _attached:
        return
    snapshots = OomSnapshots(torch, settings)
    try:
        torch._C._cuda_attach_out_of_memory_observer(snapshots.observe)
    except (AttributeError, RuntimeError) as error:  # plain mode: no snapshots either
        _log.info("vramx: failures leave no snapshot: %s", error)
        return
    _attached.append(snapshots)  # torch cannot let go of an observer
    _say_where(torch.OutOfMemoryError, snapshots)


def _say_where(error_type: Any, snapshots: OomSnapshots) -> None:
    original = error_type.__init__

    @functools.wraps(original)
    def with_line(error: Any, *args: Any) -> None:
        if len(args) == 1 and isinstance(args[0], str):
            args = (snapshots.add_line(args[0]),)
        original(error, *args)

    error_type.__init__ = with_line
