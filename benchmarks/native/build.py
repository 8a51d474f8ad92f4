"""Compiles a C++ source into a shared library and keeps it, by the content that it was made from.

A library is compiled again when its source, a header that it may include, the compiler or its flags
have changed, and otherwise found under build/native-libraries. Safe for processes that build at the
same time: a finished library is moved into its place. Compiling takes seconds, finding one
milliseconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
KEPT = ROOT / "build" / "native-libraries"
# What code outside of the core may include: the interface's header and what that includes.
HEADERS = ("core/config.h", "core/stats.h", "core/units.h", "process/allocators.h")
KIND = ("-std=c++20", "-O2", "-g1", "-fPIC", "-shared", "-pthread")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wundef")


class BuildError(Exception):
    """A source does not compile; the text is the compiler's, its last line the first error."""


def load_library(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile a source where that is needed, and load the library.

    Args:
        flags: for the compiler, beside the usual ones and csrc's include path; also libraries.

    Raises:
        BuildError: it does not compile, or there is no g++.
    """
    return ctypes.CDLL(str(build_library(source, flags)))


def build_library(source: Path, flags: Sequence[str] = ()) -> Path:
    """Compile a source where that is needed and return the library's path."""
    kept = KEPT / f"{source.stem}-{_key(source, flags)}.so"
    if kept.exists():
        return kept
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as folder:
        target = Path(folder) / kept.name
        # Libraries come behind the source that needs them.
        command = [
            "g++",
            *KIND,
            *WARNINGS,
            f"-I{ROOT / 'csrc'}",
            str(source),
            *flags,
            "-o",
            str(target),
        ]
        _run(command)
        os.replace(target, kept)
    return kept


def _key(source: Path, flags: Sequence[str]) -> str:
    content = hashlib.sha256()
    beside = sorted(source.parent.glob("*.h"))
    for path in (source, *beside, *(ROOT / "csrc" / header for header in HEADERS)):
        content.update(path.read_bytes())
    content.update(repr((KIND, WARNINGS, list(flags), _run(["g++", "--version"]))).encode())
    return content.hexdigest()[:16]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BuildError("there is no g++ on the PATH") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise BuildError("\n".join([" ".join(command), done.stderr, *errors[:1]]))
    return done.stdout
