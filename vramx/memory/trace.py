"""A recorded run as arrays: every allocation and free of a program, in time order.

`load_trace` reads the two forms such a recording has on disk: vramx's own .npz and torch's memory
snapshots (snapshot_reader.py). It checks the form: the arrays are there, of one length, of the
right type, and nothing in a file is ever executed. Whether the events make sense together (a free
of an unknown id, say) is checked where they are replayed. An .npz of 100 000 events takes 10 ms.

A trace .npz holds five arrays of one length:

    op      uint8   0 allocate, 1 free requested, 2 free completed (reusable from here on)
    id      uint32  the allocation, numbered from 0 in order of allocation
    size    uint64  requested bytes, unrounded
    stream  uint8   0 is the default stream
    t       uint32  microseconds since the first event

and `version`, one integer: 2 where the arrays are as trace_columns.py has them, and 1, or no such
array, where they are the columns themselves. Version 2 is written, in an archive of LZMA: 100 000
events take 60 KB, a quarter of version 1.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vramx.errors import TraceError, refused
from vramx.memory import trace_columns

ALLOCATE, FREE_REQUESTED, FREE_COMPLETED = 0, 1, 2
VERSION = 2
_VERSIONS = (1, VERSION)

# A day of the busiest recorded program. What claims to be more is damaged, or made to fill memory.
MAX_EVENTS = 1 << 27

_DTYPES: dict[str, np.dtype[Any]] = {
    "op": np.dtype("<u1"),
    "id": np.dtype("<u4"),
    "size": np.dtype("<u8"),
    "stream": np.dtype("<u1"),
    "t": np.dtype("<u4"),
}
_HEADER_BYTES = 1 << 16  # more than the header of any array in a trace
_ZIP_MAGIC = b"PK"


@dataclass(frozen=True, eq=False)
class Trace:
    """The events of one run; arrays of one length, read-only.

    `name` is the file's name without its folder. `device` is the device of a snapshot's events.
    `failed` has the ids of requests that ended in OutOfMemoryError when they were recorded: each is
    allocated and freed at once, so that it has to be served in a replay.
    """

    name: str
    op: npt.NDArray[np.uint8]
    id: npt.NDArray[np.uint32]
    size: npt.NDArray[np.uint64]
    stream: npt.NDArray[np.uint8]
    time_us: npt.NDArray[np.uint32]
    device: int | None = None
    failed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for array in (self.op, self.id, self.size, self.stream, self.time_us):
            array.flags.writeable = False
        lengths = {name: len(array) for name, array in self.arrays().items()}
        if len(set(lengths.values())) != 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise TraceError(f"the arrays have unequal lengths ({listed}); one length is needed")
        if not len(self.op):
            raise TraceError("the trace is empty; at least one event is needed")

    def __len__(self) -> int:
        return len(self.op)

    def part(self, rows: npt.NDArray[np.int64]) -> Trace:
        """Return the trace of some of the rows, which are in order."""
        return replace(
            self,
            op=self.op[rows],
            id=self.id[rows],
            size=self.size[rows],
            stream=self.stream[rows],
            time_us=self.time_us[rows],
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz, which is a fiftieth of a snapshot's size and says nothing of the program.

        Raises:
            InvalidValueError: the path is none.
            OSError: it cannot be written.
        """
        path = path_of(path)
        written = {"version": np.array(VERSION), **trace_columns.differences(self.arrays())}
        # Some builds of Python have no LZMA.
        packing = zipfile.ZIP_LZMA if zipfile.lzma else zipfile.ZIP_DEFLATED  # type: ignore[attr-defined]
        with zipfile.ZipFile(path, "w", packing) as archive:
            for name, array in written.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays under the names they have in a file."""
        return {
            "op": self.op,
            "id": self.id,
            "size": self.size,
            "stream": self.stream,
            "t": self.time_us,
        }


def load_trace(path: str | os.PathLike[str], *, device: int | None = None) -> Trace:
    """Read a trace (.npz) or a torch memory snapshot (.pickle, .pkl, .json, each also .gz).

    The content decides which of them a file is, not its name.

    Args:
        device: for a snapshot of several devices, the one whose events are wanted; by default the
            one that ran out of memory, else the one with the most events.

    Raises:
        InvalidValueError: the path is none.
        TraceError: the file cannot be read or is neither; the text does not repeat its name.

    Example:
        >>> trace = load_trace("train.npz")          # doctest: +SKIP
        >>> len(trace), trace.name                   # doctest: +SKIP
        (123074, 'train.npz')
    """
    path = path_of(path)
    if is_trace_file(path):
        return _load_npz(path)
    from vramx.memory.snapshot_reader import read_snapshot

    return read_snapshot(path, device).trace


def path_of(path: Any) -> Path:
    """Return a path, or raise InvalidValueError for what is none."""
    try:
        return Path(path)
    except TypeError:
        raise refused("path", path, "is a file's name, as text or pathlib.Path") from None


def is_trace_file(path: Path) -> bool:
    """Say whether a file is an archive, as an .npz is, and not a snapshot.

    Raises:
        TraceError: it is empty, is no file, or cannot be read.
    """
    magic = _first_bytes(path)
    if not magic:
        raise TraceError("the file is empty; a trace (.npz) or a torch snapshot is needed")
    return magic == _ZIP_MAGIC


def _first_bytes(path: Path) -> bytes:
    try:
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_ZIP_MAGIC))
        path.stat()  # raises for a file that is not there
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TraceError(f"cannot be read: {reason}") from None
    what = "a directory" if path.is_dir() else "no regular file"
    raise TraceError(f"it is {what}; a trace (.npz) or a torch snapshot is needed")


def _load_npz(path: Path) -> Trace:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info.file_size for info in archive.infolist()}
        _check_members(members)
        with np.load(path, allow_pickle=False) as archive:
            version = _read_version(archive)
            arrays = {name: _read_array(archive, name) for name in _DTYPES}
    except TraceError:
        raise
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror or error}") from None
    except RuntimeError as error:  # of zipfile: no module for the archive's compression, or locked
        raise TraceError(f"the archive cannot be unpacked: {_one_line(error)}") from None
    except Exception as error:  # a damaged archive meets zipfile, zlib, numpy and tokenize unready
        raise TraceError(f"the archive is damaged or cut short ({_one_line(error)})") from None
    written = _trace_of(path.name, arrays)  # of one length, or refused
    return written if version == 1 else _trace_of(path.name, trace_columns.columns(arrays))


def _trace_of(name: str, arrays: dict[str, npt.NDArray[Any]]) -> Trace:
    op, ids, size, stream, time_us = (arrays[each] for each in _DTYPES)
    return Trace(name=name, op=op, id=ids, size=size, stream=stream, time_us=time_us)


def _check_members(members: dict[str, int]) -> None:
    """Refuse by the archive's index, before anything is unpacked."""
    missing = [name for name in _DTYPES if f"{name}.npy" not in members]
    if missing:
        raise TraceError(
            f"the archive has no array {missing[0]!r}; a trace holds op, id, size, stream and t"
        )
    for name, dtype in _DTYPES.items():
        if members[f"{name}.npy"] > MAX_EVENTS * dtype.itemsize + _HEADER_BYTES:
            raise TraceError(f"array {name!r} claims more than the {MAX_EVENTS} events accepted")


def _read_version(archive: Any) -> int:
    if "version" not in archive.files:
        return 1
    version = archive["version"]
    if version.size != 1 or version.dtype.kind not in "iu" or version.item() not in _VERSIONS:
        shown = _one_line(version.tolist())
        accepted = " and ".join(map(str, _VERSIONS))
        raise TraceError(f"the trace is of version {shown}; versions {accepted} are accepted")
    return int(version.item())


def _read_array(archive: Any, name: str) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = archive[name]
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise TraceError(
                f"array {name!r} holds pickled Python objects, which are never loaded; "
                f"{_DTYPES[name].name} is accepted"
            ) from None
        raise
    if not isinstance(array, np.ndarray) or array.dtype != _DTYPES[name] or array.ndim != 1:
        form = f"{array.ndim}-D {array.dtype}" if isinstance(array, np.ndarray) else "no array"
        raise TraceError(f"array {name!r} is {form}; 1-D {_DTYPES[name].name} is accepted")
    return array


def _one_line(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
