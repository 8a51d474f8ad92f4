"""The statistics of this process in a file when it ends, for `vramx run --stats`.

The process that `vramx run` became writes the file itself, its children each a file of their own
with their number at the end: nobody waits for anybody and nothing is overwritten. Only a process
that has allocated writes one. A file appears whole or not at all; what goes wrong is a warning, as
the program's exit code is the program's. A process that is killed writes nothing.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

from vramx.allocator.install import current
from vramx.allocator.stats import allocator_stats
from vramx.files import written_whole

SCHEMA = 1
_log = logging.getLogger("vramx")


def write_at_exit(file: Path, root_pid: int | None) -> None:
    """Have this process write its statistics when Python ends.

    Args:
        file: where to; absolute, or below the folder that is current now.
        root_pid: the process that writes `file` itself; any other adds its number.
    """
    pid, file = os.getpid(), file.absolute()
    target = file if pid == root_pid else file.with_name(f"{file.name}.{pid}")
    atexit.register(_write_if_owner, target, pid)


def _write_if_owner(target: Path, pid: int) -> None:
    if os.getpid() != pid:  # a forked child runs what its parent registered
        return
    try:
        if document := collect():
            with written_whole(target) as file:
                file.write(f"{json.dumps(document, indent=2)}\n".encode())
    except Exception as error:
        _log.warning("vramx: the statistics could not be written to %s: %s", target, error)


def collect() -> dict[str, Any]:
    """Return the statistics of every device that has allocated; nothing if none has."""
    installed = current()
    started = installed.devices.started()
    if not started:
        return {}
    return {
        "schema": SCHEMA,
        "pid": os.getpid(),
        "torch": installed.torch.__version__,
        "options": dataclasses.asdict(installed.options),
        "mode": "plain" if installed.shim is None else "full",
        "devices": [dataclasses.asdict(allocator_stats(device)) for device in started],
    }
