"""How many bytes of the host this process may count on: its machine's, its container's, its ranks'.

A container's limit is in files of its control group, of version 1 or 2, and those of each group
around it hold as well. What cannot be read limits nothing. Reads some small files; any thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from vramx import config

# Beyond these the kernel kills, or takes memory back that pinning does not let it have.
_LIMITS_V2 = ("memory.max", "memory.high")
_LIMITS_V1 = ("memory.limit_in_bytes",)


def host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that the processes of this container may have together.

    Args:
        root: below which /proc and /sys are found.

    Example:
        >>> host_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        True
    """
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical_bytes, *_limits(root)])


def bytes_of_a_rank(root: Path = Path("/")) -> int:
    """Return this process's even part of host_bytes() among the ranks of a job on this host."""
    return host_bytes(root) // config.local_ranks()


def _limits(root: Path) -> Iterator[int]:
    for folder, names in _groups(root):
        for name in names:
            # A limit that is not set is "max", or in version 1 about 2**63.
            text = _read(folder / name).strip()
            if text.isascii() and text.isdigit():
                yield int(text)


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the folders of this process's groups and of those around them, and the files there.

    Where the folders of a container are not named as its host names them, only the outermost is
    found, which is the container's own then.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        tops: tuple[Path, ...]
        names: tuple[str, ...]
        if not controllers:
            tops, names = (mount, mount / "unified"), _LIMITS_V2
        elif "memory" in controllers.split(","):
            tops, names = (mount / "memory",), _LIMITS_V1
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for top in tops:
            for group in (inside, *inside.parents):
                yield top / group, names


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
