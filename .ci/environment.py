"""Finds or makes the Python that `make` works with, and prints its path; the rest goes to stderr.

    python3 .ci/environment.py core|run [test] [docs] [dev]      what it must be able to do

The Python that calls this is used as it is when it already has torch: what else is missing there is
installed at the pinned version, and nothing that is there is touched. Otherwise .venv is made once,
with every pin of constraints.txt that the groups need; a stamp in it says from which pins, so that
the next call takes a twentieth of a second. A package that cannot be installed (a machine without
a network) is an error only when the work cannot start without it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PINS = ROOT / "constraints.txt"
PYTHONS = ((3, 10), (3, 14))  # from the first, below the second

# To build the core and replay recordings: without torch, which is gigabytes.
CORE = ("numpy", "rich", "matplotlib", "plotly", "setuptools", "pybind11", "ninja")
GROUPS = {
    "core": CORE,
    "run": ("torch", "triton", *CORE),
    "test": ("pytest", "pytest-xdist", "hypothesis"),
    "docs": ("mkdocs-material", "mkdocstrings", "mkdocstrings-python"),
    "dev": ("ruff", "mypy", "clang-format"),
}
# What no Python package brings, and the packages of distributions that do.
TOOLS = {
    "g++": ("C++ compiler; g++ 10 or newer is needed", "g++", "gcc-c++"),
    "Python.h": ("Python.h, the headers of this Python", "python3-dev", "python3-devel"),
    "ensurepip": ("pip for a new environment (ensurepip)", "python3-venv", "python3-pip"),
}
# Prints what a Python lacks of its headers and of the modules that are named.
PROBE = """
import importlib.util, os, sys, sysconfig
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print("Python.h")
print(*(name for name in sys.argv[1:] if not importlib.util.find_spec(name)))
"""
# Without one of these nothing can start; without another, what needs it says so itself.
ESSENTIAL = {"torch", "numpy", "setuptools", "pybind11", "ninja", "pytest", "ruff", "mypy"}
ESSENTIAL.update(GROUPS["docs"])


def main(groups: list[str]) -> int:
    unknown = sorted(set(groups) - set(GROUPS))
    if unknown or not groups:
        return fail(f"groups are {', '.join(GROUPS)}; got {' '.join(groups) or 'none'}")
    names = list(dict.fromkeys(name for group in groups for name in GROUPS[group]))
    if is_usable() and importlib.util.find_spec("torch"):
        return complete_active(names)
    return complete_venv(names)


def is_usable() -> bool:
    return PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]


def complete_active(names: list[str]) -> int:
    """Install what this Python lacks, and nothing else."""
    if lacks_tools(sys.executable):
        return 1
    missing = [name for name in names if not is_installed(name)]
    if missing:
        say(f"installing {', '.join(missing)} for {sys.executable}")
        # One by one: that one cannot be had must not keep another from being installed.
        failed = [name for name in missing if not install(sys.executable, [pin(name)])]
        if lost := sorted(ESSENTIAL.intersection(failed)):
            return fail(f"cannot go on without {', '.join(lost)}; pip's words are above")
        if failed:
            say(f"going on without {', '.join(failed)}")
    print(sys.executable)
    return 0


def complete_venv(names: list[str]) -> int:
    """Make .venv, or bring it up to the pins; nothing to do when its stamp says so."""
    stamp = VENV / "vramx-pins"
    wanted = {hashlib.sha256(PINS.read_bytes()).hexdigest()[:16], *names}
    known = set(stamp.read_text().split()) if stamp.exists() else set()
    python = VENV / "bin" / "python"
    if not (wanted <= known and python.exists()):
        if not python.exists() and not make_venv():
            return 1
        if not install(str(python), ["-c", str(PINS), *names]):
            return fail("the packages could not be installed; pip's words are above")
        same_pins = min(wanted - set(names)) in known
        stamp.write_text("\n".join(sorted(wanted | (known if same_pins else set()))) + "\n")
    print(python)
    return 0


def make_venv() -> bool:
    base = find_python()
    if base is None:
        first, last = PYTHONS[0][1], PYTHONS[1][1] - 1
        fail(f"no Python 3.{first} to 3.{last} on the PATH; this one is {sys.version.split()[0]}")
        return False
    if lacks_tools(base, "ensurepip"):
        return False
    say(f"making .venv with {base}")
    if subprocess.run([base, "-m", "venv", str(VENV)], stdout=sys.stderr, check=False).returncode:
        shutil.rmtree(VENV, ignore_errors=True)  # built whole or not at all
        fail(f"{base} -m venv failed; its words are above")
        return False
    return True


def lacks_tools(python: str, *modules: str) -> bool:
    """Say in a line for each what has to come from the system and is not there."""
    found = subprocess.run([python, "-c", PROBE, *modules], capture_output=True, check=False)
    missing = found.stdout.decode().split()
    if not shutil.which("g++") and not shutil.which("c++"):
        missing.insert(0, "g++")
    for name in missing:
        what, debian, fedora = TOOLS[name]
        say(f"no {what}: apt-get install {debian} (Debian, Ubuntu), dnf install {fedora} (Fedora)")
    return bool(missing)


def find_python() -> str | None:
    """Return a Python of an accepted version: this one, else the newest on the PATH."""
    if is_usable():
        return sys.executable
    for minor in range(PYTHONS[1][1] - 1, PYTHONS[0][1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        # A version manager's shim is on the PATH also for a version that is switched off.
        if found and starts(found):
            return found
    return None


def starts(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def is_installed(name: str) -> bool:
    """Say whether the package is there, or what does its work: torch brings pybind11's headers."""
    if name == "pybind11" and importlib.util.find_spec("torch"):
        return True
    if name in {"ninja", "clang-format"} and shutil.which(name):
        return True
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        # A build of one's own may have no metadata under this name.
        return importlib.util.find_spec(name.replace("-", "_")) is not None
    return True


def pin(name: str) -> str:
    """Return the requirement of constraints.txt for this package and this Python."""
    old = sys.version_info < (3, 11)
    lines = [line for line in PINS.read_text().splitlines() if line.startswith(name + "==")]
    for line in lines:
        if "python_version" not in line or ("<" in line) == old:
            return line
    return name


def install(python: str, arguments: list[str]) -> bool:
    quiet = ["--quiet", "--disable-pip-version-check", "--retries", "2"]
    command = [python, "-m", "pip", "install", *quiet, *arguments]
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode == 0


def say(text: str) -> None:
    print(f"vramx: {text}", file=sys.stderr)


def fail(text: str) -> int:
    say(text)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
