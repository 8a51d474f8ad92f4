"""Where built shims are kept, and whose of them are trusted.

A shim is machine code that is loaded into the user's process, so a file is taken only if nobody but
this user or root could have written it: owned by one of them, writable by nobody else, and so is
its folder. Folders are tried in order; a shim is looked for in all of them, the read-only ones too,
and built in the first that can be written. Safe between processes: a file gets its name when it is
complete, and who builds holds a lock that the kernel drops with the process. That is why
torch.utils.cpp_extension is not used here: its lock is a file, which a killed build leaves behind,
and everybody waits for it for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vramx.config import Config
from vramx.errors import ShimError

SHIMS = "shim"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folders(config: Config, kind: str = SHIMS) -> list[Path]:
    """Return the folders for shims, or files of another kind, the preferred one first."""
    if config.cache_dir is not None:
        roots = [config.cache_dir]
    elif config.xdg_cache_home is not None:
        roots = [config.xdg_cache_home / "vramx"]
    else:
        roots = [_home() / ".cache" / "vramx"]
    roots.append(Path(tempfile.gettempdir()) / f"vramx-{os.geteuid()}")
    return [root.absolute() / kind for root in roots]


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user whom the system does not know, as in many containers
        return Path(tempfile.gettempdir())


def find(name: str, folders: list[Path]) -> Path | None:
    """Return the file of that name that may be trusted, in the first folder that has it."""
    for folder in folders:
        path = folder / name
        if distrust(folder) is None and distrust(path) is None:
            return path
    return None


def distrust(path: Path) -> str | None:
    """Return why a file or folder may not be trusted, or None if it may."""
    try:
        found = path.lstat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a symbolic link"
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user"
    if found.st_mode & _WRITABLE_BY_OTHERS:
        return f"{path} can be written by other users"
    return None


def writable_folder(folders: list[Path]) -> Path:
    """Return the first folder that can be built in, created if need be.

    Raises:
        ShimError: there is none; the text has the reason for each.
    """
    reasons = []
    for folder in folders:
        reason = _prepare(folder)
        if reason is None:
            return folder
        reasons.append(reason)
    raise ShimError(f"no folder to keep files in: {'; '.join(reasons)}; set VRAMX_CACHE_DIR to one")


def _prepare(folder: Path) -> str | None:
    """Make a folder ready to be written; return why it cannot be."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if reason := distrust(folder):
            return reason
        # Asking beats permission bits: a quota or a read-only mount does not show in them.
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror or error}"


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock of that name against other processes; waits as long as somebody has it.

    Where the file system has no locks nobody is kept out. Then several build the same file, each
    under a name of its own, and the last to finish gives it the final name: wasteful and right.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # drops the lock
