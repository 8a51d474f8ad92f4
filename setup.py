"""Builds vramx._core, the compiled half of vramx. Everything else is in pyproject.toml.

Needs a C++20 compiler, ninja and pybind11's headers; neither torch nor CUDA. Ninja reads the
compiler's own list of headers, so a change of any header rebuilds exactly what includes it, and a
build with nothing to do takes a tenth of a second. All layers are compiled in one unit and the
bindings in another, at the same time. Objects are kept under build/, one folder for each Python.
Not here: csrc/torch, which is compiled for the torch that is installed, when it is first needed;
its sources travel inside the package (see CopySources).

    CXX=clang++        another compiler; g++ by default
    VRAMX_WERROR=1     warnings are errors, as `make lint` wants it
    VRAMX_JOBS=2       compilers at once; one for each core by default
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).resolve().parent
LAYERS = ("core", "driver", "process", "replay")
# What the shim for torch is compiled from.
SHIM_SOURCES = ("core/*.h", "process/allocators.h", "torch/*.h", "torch/*.cpp")
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wundef"]
COMPILE_FLAGS = [
    *("-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-pthread"),
    # Some distributions' compilers guard the stack by default, in most functions of a call.
    "-fno-stack-protector",
]
LINK_FLAGS = ["-shared", "-pthread", "-ldl"]
LEAST_SETUPTOOLS = 77  # that of pyproject.toml; an older one refuses the form of its license


def core_sources() -> list[str]:
    """Return the sources of vramx._core, relative to the root, in a fixed order."""
    found = [path for layer in LAYERS for path in (ROOT / "csrc" / layer).glob("*.cpp")]
    found += (ROOT / "csrc").glob("bindings*.cpp")
    return sorted(str(path.relative_to(ROOT)) for path in found)


def units(sources: list[str]) -> dict[str, list[str]]:
    """Return what is compiled for these sources, and the sources in each.

    One unit has the layers and one the bindings, which takes a third of the time: headers and
    templates that sources share take longer than they do. The sources of a unit must not give one
    name to two things outside of headers.
    """
    found: dict[str, list[str]] = {}
    for source in sources:
        name = "bindings" if Path(source).name.startswith("bindings") else "layers"
        found.setdefault(f"{object_folder()}/{name}.cpp", []).append(source)
    return found


def object_of(unit: str) -> str:
    """Return the file that a unit is compiled to."""
    return f"{unit.removesuffix('.cpp')}.o"


def write_if_changed(path: Path, text: str) -> None:
    """Leave the time of a file that says this already: ninja goes by it."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def pybind11_include() -> str:
    """Return the folder of pybind11's headers: the package's, else the copy that torch brings.

    Raises:
        PlatformError: neither is installed.
    """
    for package, folder in (("pybind11", "include"), ("torch", "include")):
        spec = importlib.util.find_spec(package)  # finds torch without importing it
        for location in (spec.submodule_search_locations or []) if spec else []:
            include = Path(location) / folder
            if (include / "pybind11" / "pybind11.h").exists():
                return str(include)
    raise PlatformError("pybind11 is missing; install it with: python3 -m pip install pybind11")


def python_include() -> str:
    """Return the folder of Python.h, or raise PlatformError with the way to get it."""
    include = sysconfig.get_path("include")
    if os.path.exists(os.path.join(include, "Python.h")):
        return include
    raise PlatformError(
        f"no Python.h in {include}: apt-get install python3-dev (Debian, Ubuntu) "
        "or dnf install python3-devel (Fedora, RHEL)"
    )


def compiler() -> str:
    """Return the C++ compiler to call, or raise PlatformError with the way to get one."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name.split()[0]):
        return name
    raise PlatformError(
        f"no C++ compiler: {name!r} is not on the PATH. vramx needs g++ 10 or newer: "
        "apt-get install g++ (Debian, Ubuntu) or dnf install gcc-c++ (Fedora, RHEL); "
        "or set CXX to another one"
    )


def ninja() -> list[str]:
    """Return the command that runs ninja: the Python package's, else the system's."""
    if importlib.util.find_spec("ninja"):
        return [sys.executable, "-m", "ninja"]
    for name in ("ninja", "ninja-build"):
        if found := shutil.which(name):
            return [found]
    raise PlatformError("ninja is missing; install it with: python3 -m pip install ninja")


def ninja_file(sources: list[str], target: str) -> str:
    """Return the text of the build.ninja that makes `target` from `sources`."""
    # The units include sources by their path from the root.
    includes = ["-Icsrc", "-iquote .", f"-isystem {shlex.quote(pybind11_include())}"]
    includes.append(f"-isystem {shlex.quote(python_include())}")
    werror = ["-Werror"] if warnings_are_errors() else []
    compiled = list(units(sources))
    objects = [object_of(unit) for unit in compiled]
    lines = [
        "ninja_required_version = 1.5",
        f"builddir = {object_folder()}",
        f"cxx = {compiler()}",
        f"flags = {' '.join(COMPILE_FLAGS + WARNINGS + werror + includes)}",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $flags -c $in -o $out",
        "  deps = gcc",
        "  depfile = $out.d",
        "  description = compile $in",
        "rule link",
        f"  command = $cxx $in -o $out {' '.join(LINK_FLAGS)}",
        "  description = link $out",
        *(f"build {o}: compile {s}" for o, s in zip(objects, compiled, strict=True)),
        f"build {ninja_path(target)}: link {' '.join(objects)}",
    ]
    return "\n".join(lines) + "\n"


def ninja_path(path: str) -> str:
    """Return a path as ninja wants it written where it lists paths."""
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def check_setuptools() -> None:
    """End with a line where setuptools is too old: only pip, when it isolates, brings a new one."""
    version = setuptools.__version__
    if int(version.partition(".")[0]) < LEAST_SETUPTOOLS:
        needed = f"'setuptools>={LEAST_SETUPTOOLS}'"
        sys.exit(f"setuptools {version} is too old: python3 -m pip install {needed}")


def warnings_are_errors() -> bool:
    return os.environ.get("VRAMX_WERROR", "0") not in ("", "0")


def object_folder() -> str:
    # Apart from each other, because a change of flags rebuilds everything.
    suffix = "-werror" if warnings_are_errors() else ""
    return f"build/core-{sys.implementation.cache_tag}{suffix}"


class NinjaBuild(build_ext):
    """build_ext that leaves the compiling to ninja."""

    def build_extension(self, ext: Extension) -> None:
        if not sys.platform.startswith("linux"):
            raise PlatformError(f"vramx runs on Linux; this is {sys.platform}")
        target = os.path.relpath(self.get_ext_fullpath(ext.name), ROOT)
        (ROOT / target).parent.mkdir(parents=True, exist_ok=True)
        script = ROOT / object_folder() / "build.ninja"
        write_if_changed(script, ninja_file(ext.sources, target))
        for unit, members in units(ext.sources).items():
            write_if_changed(ROOT / unit, "".join(f'#include "{member}"\n' for member in members))
        jobs = os.environ.get("VRAMX_JOBS", str(len(os.sched_getaffinity(0))))
        command = [*ninja(), "-f", str(script.relative_to(ROOT)), "-j", jobs]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise CompileError("vramx._core could not be built; the compiler's words are above")


class CopySources(build_py):
    """build_py that also packs what the shim for torch is compiled from, as vramx/csrc."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        csrc = ROOT / "csrc"
        for source in [path for pattern in SHIM_SOURCES for path in csrc.glob(pattern)]:
            target = Path(self.build_lib) / "vramx" / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


if __name__ == "__main__":
    check_setuptools()
    setup(
        ext_modules=[Extension("vramx._core", core_sources(), language="c++")],
        cmdclass={"build_ext": NinjaBuild, "build_py": CopySources},
    )
