"""What a measurement was made on: processor, GPU, driver, versions and the commit.

Nothing that identifies a host, a user or a folder. Each fact is found by its own short function,
and one that cannot be found is "unknown" or "none"; none of them raises. Takes about 50 ms.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NVIDIA_VERSION = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Machine:
    """The columns of a row that say where it was measured."""

    commit: str
    dirty: str  # "yes" when tracked or new files differ from the commit, results apart
    cpu: str
    cores: int  # that this process may use
    gpu: str
    driver: str
    torch: str
    python: str


def describe_machine(root: Path) -> Machine:
    """Describe this machine and the state of the repository at `root`."""
    return Machine(
        commit=_git(root, "rev-parse", "--short=12", "HEAD") or "unknown",
        dirty=_dirty(root),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        gpu=_gpu(),
        driver=_driver(),
        torch=_version("torch"),
        python=platform.python_version(),
    )


def _git(root: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _dirty(root: Path) -> str:
    # Results are left out: writing the first benchmark's file must not mark the second's rows.
    status = _git(root, "status", "--porcelain", "--", ".", ":!benchmarks/results")
    if status is None:
        return "unknown"
    return "yes" if status else "no"


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _gpu() -> str:
    try:
        from vramx import _core
    except ImportError:
        return "unknown"
    devices = _core.probe_cuda()["devices"]
    return ", ".join(device["name"] for device in devices) or "none"


def _driver() -> str:
    """Return the driver's release, as 580.159.03: its kernel module says it, else nvidia-smi."""
    try:
        text = _NVIDIA_VERSION.read_text()
    except OSError:
        text = _nvidia_smi()
    match = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return match[0] if match else "none"


def _nvidia_smi() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
