"""The facts about this machine that `vramx doctor` judges, as plain values.

Nothing here may fail for want of a package: that is what it is asked about. Starts no CUDA context.
Takes the seconds that importing torch takes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from vramx import __version__, config
from vramx.allocator import preconditions, shim_build
from vramx.allocator.options import Options

# Live mappings that one device bears before cuMemSetAccess says out of memory: measured on an H200
# with driver 580.159, for chunks of 2 MiB.
MAPPING_CEILING = 520_192
NO_CORE = "the compiled core cannot be loaded"


def collect() -> dict[str, Any]:
    """Return the facts about this machine, as plain values."""
    return {
        "vramx": {"version": __version__, "core_error": _import_error("vramx._core")},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cuda": _cuda(),
        "torch": _torch(),
        "triton": _version("triton"),
        "compiler": _compiler(),
        "python_headers": (Path(sysconfig.get_path("include")) / "Python.h").exists(),
        "allocator": _allocator(),
        "packages": {name: _version(name) for name in ("numpy", "rich", "matplotlib", "plotly")},
    }


def _import_error(module: str) -> str:
    """Import a module; return why it cannot be, or nothing."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken installation raises anything: OSError, AttributeError...
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _cuda() -> dict[str, Any]:
    if _import_error("vramx._core"):
        return {"error": NO_CORE, "driver_version": 0, "devices": []}
    from vramx import _core

    probe: dict[str, Any] = dict(_core.probe_cuda())
    for device in probe["devices"]:
        device["mapping_ceiling"] = MAPPING_CEILING if device["vmm_supported"] else 0
    return probe


def _torch() -> dict[str, Any]:
    version = _version("torch")
    if version is None:
        return {"version": None, "cuda": None, "error": "not installed"}
    error = _import_error("torch")
    cuda = None if error else importlib.import_module("torch").version.cuda
    return {"version": version, "cuda": cuda, "error": error}


def _allocator() -> dict[str, Any]:
    """Return what the installation of the allocator would meet here, without doing any of it."""
    entry_points = importlib.metadata.entry_points(group="torch.backends")
    facts: dict[str, Any] = {
        "obstacle": _obstacle(),
        "entry_point": any(point.value == "vramx._autoload:_autoload" for point in entry_points),
        "shim_torch": None,
        "shim_built": None,
        "shim_fault": "",
    }
    try:
        status = shim_build.shim_status(config.config())
    except Exception as error:  # a variable that vramx does not understand
        return {**facts, "shim_fault": " ".join(str(error).split())}
    built = None if status.built is None else str(status.built)
    return {**facts, "shim_torch": status.torch, "shim_built": built, "shim_fault": status.fault}


def _obstacle() -> str:
    """Return what keeps torch from taking another allocator here, or nothing."""
    try:
        preconditions.check(importlib.import_module("torch"), Options(), late=True)
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compiler() -> str | None:
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if done.returncode == 0 and done.stdout:
                return done.stdout.splitlines()[0]
    return None
