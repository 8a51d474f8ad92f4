"""The installed torch as the shim's build sees it, found without importing it.

Importing torch takes seconds, and `vramx run` needs nothing from it but four facts. They are read
where torch keeps them: version.py, and the symbols of libc10.so for the C++ ABI. Reads two files,
a few milliseconds. Not here: whether this torch can have vramx behind it (see install).
"""

from __future__ import annotations

import ast
import importlib.util
import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramx.errors import InstallError

MIN_VERSION = (2, 6)
# A constructor of c10::Error that takes a std::string of the ABI from before C++11.
_OLD_ABI_SYMBOL = b"_ZN3c105ErrorC2ENS_14SourceLocationESs"


@dataclass(frozen=True)
class TorchFacts:
    """Which torch is installed, and where. Two equal ones take the same shim."""

    folder: Path
    version: str  # as torch.__version__ has it: "2.11.0+cu130"
    cuda: str | None
    build: str  # the revision that it was built from
    cxx11_abi: bool

    @property
    def release(self) -> str:
        """Return the version without what comes after the third number."""
        return release_of(self.version)


def release_of(version: str) -> str:
    """Return "2.11.0" of "2.11.0+cu130" and of "2.11.0a0+git123"."""
    match = re.match(r"\d+\.\d+(?:\.\d+)?", version)
    return match[0] if match else version


def find_torch() -> TorchFacts:
    """Return the torch that `import torch` would import.

    Raises:
        InstallError: there is none, it is too old, or it is no torch at all.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise InstallError("torch is not installed; install a build of it with CUDA")
    return read_torch(Path(next(iter(spec.submodule_search_locations))))


def read_torch(folder: Path) -> TorchFacts:
    """Return the facts of the torch in `folder`.

    Raises:
        InstallError: the folder lacks what makes a torch, or it is older than 2.6.
    """
    try:
        values = _assignments((folder / "version.py").read_text())
        cxx11_abi = not _contains(folder / "lib" / "libc10.so", _OLD_ABI_SYMBOL)
    except (OSError, ValueError, SyntaxError) as error:
        raise InstallError(f"the torch in {folder} is incomplete: {error}") from None
    version = str(values.get("__version__", ""))
    numbers = tuple(int(part) for part in release_of(version).split(".")[:2] if part.isdigit())
    if numbers < MIN_VERSION:
        raise InstallError(f"torch {version or '?'} is too old; vramx needs 2.6 or newer")
    return TorchFacts(
        folder=folder,
        version=version,
        cuda=values.get("cuda"),
        build=str(values.get("git_version", "")),
        cxx11_abi=cxx11_abi,
    )


def _assignments(source: str) -> dict[str, Any]:
    """Return the constants that a module assigns at its top level, without running it."""
    values = {}
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                values[target.id] = value.value
    return values


def _contains(path: Path, symbol: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(symbol) >= 0
