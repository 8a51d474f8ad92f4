"""Records what a program allocates, with the line and the purpose of each allocation, into a file.

    with vramx.record("run.pickle", model, optimizer):
        for batch in batches:
            step(batch)

The history is torch's own, bounded, with vramx's events in it where its allocator is behind torch;
what the program does meanwhile is seen by a few hooks (observe.py), and the two are joined when the
recording ends. One recording at a time in a process. Nothing here runs while none is on.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramx import config
from vramx.errors import InvalidValueError, OutputError, VramxError, brief, refused
from vramx.files import written_whole
from vramx.memory.attribution import add_categories
from vramx.memory.categories import Log, Seen
from vramx.memory.history import TICK_BYTES, Clock, CudaHistory, HistorySource, clock_of
from vramx.memory.spans import Mark
from vramx.memory.trace import path_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vramx.memory.observe import Observer

_LOGGER = logging.getLogger("vramx")
_STACKS = ("python", "all")
# Some minutes of most programs, and 100 MB of the host's memory. Twice as many are twice that.
_MAX_ENTRIES = 200_000
_PICKLE_PROTOCOL = 4  # the newest that torch's viewer reads in every release

_lock = threading.Lock()
_active: list[Recorder] = []


class Recorder:
    """One recording: a context manager, or start() and stop()."""

    def __init__(
        self,
        path: Path,
        model: nn.Module | None,
        optimizers: tuple[torch.optim.Optimizer, ...],
        options: tuple[int, str],
    ) -> None:
        self._path = path
        self._model = model
        self._optimizers = optimizers
        self._max_entries, self._stacks = options
        self._source: HistorySource = CudaHistory()
        self._observer: Observer | None = None
        self._was_used = False

    def __enter__(self) -> Recorder:
        self.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.stop()
            return
        try:  # the program's own error is the one to see
            self.stop()
        except Exception as failure:
            _LOGGER.warning("vramx.record: %s was not written: %s", self._path, failure)

    def start(self) -> None:
        """Begin to record.

        Raises:
            VramxError: a recording is on already, of vramx or of torch alone; or there is no GPU.
            OutputError: the file cannot be written where it is to be.
        """
        from vramx.memory.observe import Observer

        if self._was_used:
            raise VramxError("this recording is over; vramx.record makes another")
        _check_folder(self._path.parent)
        with _lock:
            if _active:
                raise VramxError(
                    f"{_active[0]._path} is being recorded; end that before another begins"
                )
            self._source.start(self._max_entries, self._stacks)
            _active.append(self)
        observer = Observer(self._source, self._model, self._optimizers, 4 * self._max_entries)
        self._model, self._optimizers = None, ()  # what the program lets go of is to be gone
        try:
            observer.start()
        except BaseException:
            observer.stop()
            self._end()
            raise
        self._observer, self._was_used = observer, True

    def stop(self) -> Path:
        """End the recording, write the file and return its path.

        Raises:
            VramxError: it is not on.
            OutputError: the file cannot be written; the recording has ended.
        """
        observer, self._observer = self._observer, None
        if observer is None:
            raise VramxError(f"{self._path} is not being recorded")
        try:
            observer.stop()
            outside_bytes = self._source.outside_bytes()
        finally:
            snapshot = self._end()
        _drop_own_failures(snapshot)
        add_categories(
            snapshot,
            _log_of(observer, snapshot),
            workspace_sizes=self._source.workspace_sizes(),
            outside_bytes=outside_bytes,
        )
        path = _path_of_rank(self._path)
        _write(path, snapshot)
        return path

    def _end(self) -> dict[str, Any]:
        with _lock:
            _active.remove(self)
        return self._source.finish()


def record(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    max_entries: int = _MAX_ENTRIES,
    stacks: str = "python",
) -> Recorder:
    """Record allocations, with stacks and categories, into a snapshot that torch's viewers open.

    The file is written when the block is left, also by an error (an OutOfMemoryError, say), at once
    or not at all. `vramx stats`, `explain`, `diff`, `plot` and `replay` read it, as do
    torch.cuda._memory_viz, pytorch.org/memory_viz and vramx.Snapshot. Every allocation has one
    category: parameters (and buffers), gradients, optimizer (its states), activations, packed (what
    vramx keeps instead), inputs, workspaces (of cuBLAS), temporaries, unknown. They are found by
    whose memory it is, never by a name; vramx/memory/categories.py has the rules.

    Args:
        path: where to write; of a job of several processes each writes its own, with its rank in
            the name: run.rank3.pickle.
        model: whose parameters, buffers, modules and inputs are told apart. Without one there are
            no inputs, and modules go by their class.
        optimizer: one or several. Those that step while recording are found without.
        max_entries: how many events to keep, the last ones; one takes some hundred bytes of the
            host's memory.
        stacks: "python", or "all" for C++ frames too, with which writing takes minutes.

    Returns:
        A context manager; `start()` and `stop()` do the same by hand, and stop() returns the path.

    Raises:
        InvalidValueError: an argument is not what is accepted.
        VramxError: on entry, where there is no GPU, something is recording already, or the
            allocator behind torch keeps no history.
        OutputError: on entry or at the end, where the file cannot be written.

    Memory: of the GPU none that stays.
    Sync: none.

    Example:
        >>> with vramx.record("run.pickle", model, optimizer):          # doctest: +SKIP
        ...     for batch in batches:
        ...         train_step(batch)
    """
    import torch

    if model is not None and not isinstance(model, torch.nn.Module):
        raise InvalidValueError(f"model {brief(model)} is not accepted; a torch.nn.Module is")
    if type(max_entries) is not int or max_entries < 1:
        raise refused("max_entries", max_entries, "are 1, 2, ...")
    if stacks not in _STACKS:
        raise refused("stacks", stacks, f"are {', '.join(_STACKS)}")
    return Recorder(path_of(path).absolute(), model, _optimizers(optimizer), (max_entries, stacks))


def _optimizers(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    several = (given,) if hasattr(given, "param_groups") else given
    several = tuple(several) if isinstance(several, Iterable) else (several,)
    for each in several:
        if not hasattr(each, "param_groups") or not hasattr(each, "state"):
            raise refused("optimizer", each, "are a torch.optim.Optimizer and several of them")
    return several


def _log_of(observer: Observer, snapshot: dict[str, Any]) -> Log:
    """Return what was observed, in the time of the snapshot's events."""
    clock = _clock(observer, snapshot)
    to_us = clock.to_us
    return Log(
        [Mark(to_us(each[0]), *each[1:]) for each in observer.marks.copy()],
        [Seen(to_us(each[0]), *each[1:]) for each in observer.seen.copy()],
        clock.error_us,
    )


def _clock(observer: Observer, snapshot: dict[str, Any]) -> Clock:
    entries = [
        (entry["addr"], entry["time_us"])
        for trace in snapshot["device_traces"]
        for entry in trace
        if entry["action"] == "alloc" and entry["size"] == TICK_BYTES
    ]
    return clock_of(list(observer.ticks), sorted(entries, key=lambda entry: entry[1]))


def _drop_own_failures(snapshot: dict[str, Any]) -> None:
    """Leave out ticks for which there was no memory: they are no failures of the program."""
    for trace in snapshot["device_traces"]:
        trace[:] = [
            entry for entry in trace if entry["action"] != "oom" or entry["size"] != TICK_BYTES
        ]


def _path_of_rank(path: Path) -> Path:
    rank = _rank()
    return path if rank is None else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _rank() -> int | None:
    import torch

    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return config.rank()


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise OutputError(f"{folder} is no folder to write to")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{folder} cannot be written to")


def _write(path: Path, snapshot: dict[str, Any]) -> None:
    try:
        with written_whole(path) as file:
            pickle.dump(snapshot, file, protocol=_PICKLE_PROTOCOL)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None
