"""A folder that makes torch find vramx's entry point where vramx is not installed as a package.

torch looks for entry points in the metadata of every installed package, which Python in turn finds
on sys.path. A checkout has none, and cannot simply go onto PYTHONPATH, where its tests and
benchmarks would hide a program's own. So the folder holds just two things:

    vramx                        a link to the package
    vramx-0.1.0.dist-info/       METADATA, entry_points.txt

It works for every process that inherits PYTHONPATH, spawned children and torchrun's workers
included, takes no sitecustomize from the user, and has the name of the real package, so that torch
calls it once where both are found. It lies in the cache, trusted and written as a shim is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from vramx import __version__
from vramx.allocator import shim_cache
from vramx.config import Config

_PACKAGE = Path(__file__).resolve().parent.parent
_ENTRY_POINT = "vramx._autoload:_autoload"
_ENTRY_POINTS = f"[torch.backends]\nvramx = {_ENTRY_POINT}\n"
_METADATA = f"Metadata-Version: 2.1\nName: vramx\nVersion: {__version__}\n"
_ASK = (
    "import importlib.metadata as m, importlib.util as u, sys; "
    f"found = any(e.value == {_ENTRY_POINT!r} for e in m.entry_points(group='torch.backends')); "
    "sys.exit(0 if found and u.find_spec('vramx') else 1)"
)


def python_of(command: str) -> str:
    """Return the Python that will run a command: itself, that of its first line, or else ours."""
    path = Path(command)
    if path.name.startswith("python"):
        return command
    try:
        with path.open("rb") as file:
            first = file.readline(512)
    except OSError:
        return sys.executable
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = words[1:]
    return words[0] if words and Path(words[0]).name.startswith("python") else sys.executable


def finds_entry_point(python: str) -> bool:
    """Tell whether that Python finds vramx and its entry point by itself."""
    try:
        # From a folder without Python files, as -c has the current folder first on its path.
        done = subprocess.run(
            [python, "-c", _ASK], cwd="/", capture_output=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def make(config: Config) -> Path:
    """Return the folder, made if it is not there yet.

    Raises:
        ShimError: no cache folder can be written.
    """
    key = hashlib.sha256(f"{_PACKAGE} {_ENTRY_POINTS} {_METADATA}".encode()).hexdigest()[:16]
    folders = shim_cache.cache_folders(config, "entry")
    if (found := shim_cache.find(key, folders)) is not None:
        return found
    parent = shim_cache.writable_folder(folders)
    work = Path(tempfile.mkdtemp(prefix=".", dir=parent))
    try:
        metadata = work / f"vramx-{__version__}.dist-info"
        metadata.mkdir(mode=0o700)
        (metadata / "METADATA").write_text(_METADATA)
        (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
        (work / "vramx").symlink_to(_PACKAGE, target_is_directory=True)
        _take_name(work, parent / key)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return parent / key


def _take_name(work: Path, target: Path) -> None:
    """Give a finished folder its name; somebody else's of the same name is as good."""
    try:
        os.rename(work, target)
    except OSError:
        if shim_cache.distrust(target) is not None:
            raise
