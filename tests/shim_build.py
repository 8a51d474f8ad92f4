"""Builds torch's shim beside a stand-in for CUDA, and calls it.

The shim is the real one, compiled for the installed torch; libc10 is that torch's. tests/torch_stub
supplies what a torch without CUDA lacks, and an allocator in the place of torch's own. Built once
for the sources as they are, also where tests of several processes want it at the same time.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from native_build import alone_in

if TYPE_CHECKING:
    from vramx import _core

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
STUB = ROOT / "tests" / "torch_stub"
BUILD = ROOT / "build" / "shim"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wundef")
MIB = 1 << 20
NO_LIMIT = (1 << 64) - 1
# The default stream, one of torch's own pool, and another library's: torch tells them by the
# lowest bit of an id, and the stand-in's handles are the ids.
STREAM, SIDE_STREAM, FOREIGN_STREAM = 0, 7, 8
POOL = 3  # the number of a memory pool
CURRENT, PEAK, ALLOCATED, FREED = range(4)  # of a statistic, in torch's order


def torch_folder() -> Path | None:
    """Return the folder of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def has_cuda_libraries() -> bool:
    """Say whether importing torch would load its CUDA libraries, beside the stand-in's symbols."""
    torch = torch_folder()
    return torch is not None and (torch / "lib" / "libtorch_cuda.so").exists()


def cuda_include() -> Path | None:
    """Return a folder with CUDA's headers: the ones that triton brings, or the toolkit's."""
    spec = importlib.util.find_spec("triton")
    found = [Path("/usr/local/cuda/include")]
    if spec is not None and spec.origin:
        found.insert(0, Path(spec.origin).parent / "backends" / "nvidia" / "include")
    return next((path for path in found if (path / "cuda_runtime_api.h").exists()), None)


def missing() -> str:
    """Say what is missing to compile the shim here; empty if nothing is."""
    if shutil.which("g++") is None:
        return "no g++"
    if torch_folder() is None:
        return "no torch"
    return "" if cuda_include() else "no CUDA headers"


def flags(torch_include: Path) -> list[str]:
    """Return what the compiler is told for a torch whose headers lie there."""
    folders = [torch_include, torch_include / "torch/csrc/api/include", cuda_include()]
    c10 = torch_include.parent / "lib" / "libc10.so"
    # Wheels of torch 2.6 for CUDA have strings of the older form.
    is_old = c10.exists() and b"torchCheckFailEPKcS2_jRKSs" in c10.read_bytes()
    macros = torch_include / "c10/cuda/impl/cuda_cmake_macros.h"
    return [
        *("-std=c++20", "-Og", "-fPIC", "-fvisibility=hidden", f"-I{CSRC}", *WARNINGS),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(not is_old)}",
        *(part for folder in folders for part in ("-isystem", str(folder))),
        *([] if macros.exists() else ["-DC10_USING_CUSTOM_GENERATED_MACROS"]),
    ]


def syntax_errors(torch_include: Path) -> str:
    """Return what the compiler says of the shim's sources with these headers, all in one unit."""
    sources = sorted((CSRC / "torch").glob("*.cpp"))
    text = "".join(f'#include "torch/{source.name}"\n' for source in sources)
    command = ["g++", "-fsyntax-only", *flags(torch_include), "-x", "c++", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.stderr or ("failed" if done.returncode else "")


def libraries() -> tuple[Path, Path]:
    """Compile the stand-in and the shim, if the sources changed, and return their paths.

    Raises:
        RuntimeError: one does not compile; the text is the compiler's.
    """
    torch = torch_folder()
    assert torch is not None
    options = flags(torch / "include")
    stub, shim = sorted(STUB.glob("*.cpp")), sorted((CSRC / "torch").glob("*.cpp"))
    digest = hashlib.sha256(" ".join(options).encode())
    for path in _with_headers([*stub, *shim]):
        digest.update(path.read_bytes())
    folder = BUILD / digest.hexdigest()[:16]
    with alone_in(BUILD):
        if not folder.exists():
            partial = BUILD / "partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _build({"stub": stub, "shim": shim}, partial, options)
            partial.rename(folder)
    return folder / "stub.so", folder / "shim.so"


def _with_headers(sources: list[Path]) -> list[Path]:
    """Return these files and all of ours that they include, in one order."""
    found: set[Path] = set()
    waiting = list(sources)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
        candidates = [folder / name for name in names for folder in (CSRC, path.parent)]
        waiting += [candidate for candidate in candidates if candidate.exists()]
    return sorted(found)


def _build(sources: dict[str, list[Path]], folder: Path, options: list[str]) -> None:
    # Each in one unit, because torch's headers take longer than what includes them.
    for name, members in sources.items():
        unit = folder / f"{name}.cpp"
        unit.write_text("".join(f'#include "{member}"\n' for member in members))
        # The stand-in is to be found by the shim, as torch's libraries are.
        own = ["-fvisibility=default"] if name == "stub" else []
        _run(["g++", *options, *own, "-shared", str(unit), "-o", str(folder / f"{name}.so")])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


class ShimError(Exception):
    """What the allocator interface raised: the C++ type's name and its text."""


class Bench:
    """torch's allocator interface with the stand-in behind it, and the simulated core to install.

    Calls of the stand-in's C functions are methods: `bench.allocate(512)` is bench_allocate(). One
    that raises in C++ raises ShimError.
    """

    _POINTERS = ("allocate", "raw_alloc", "native_allocate")
    _TEXTS = (
        "error",
        "journal",
        "stats",
        "snapshot",
        "tracked",
        "observed",
        "name",
        "share",
        "stop_profiler",
        "recorded",
        "user_metadata",
    )
    _DOUBLES = ("fraction", "native_fraction")
    _JSON = ("stats", "snapshot", "tracked", "observed", "stop_profiler")

    devices: _core.Devices

    def __init__(self) -> None:
        stub, shim = libraries()
        torch = torch_folder()
        assert torch is not None
        ctypes.CDLL(str(torch / "lib" / "libc10.so"), ctypes.RTLD_GLOBAL)
        self._stub = ctypes.CDLL(str(stub), ctypes.RTLD_GLOBAL)
        self.shim = ctypes.CDLL(str(shim))
        self.shim.vramx_torch_built_for.restype = ctypes.c_char_p
        self.shim.vramx_torch_error.restype = ctypes.c_char_p
        self.shim.vramx_torch_install.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self.shim.vramx_torch_set_limit.argtypes = (ctypes.c_int, ctypes.c_ulonglong)
        self._stub.bench_start()

    def install(self, handle: int, late: bool = False) -> str:
        """Install the shim over a core; return what it says against it, or nothing."""
        failed = self.shim.vramx_torch_install(handle, int(late))
        return str(self.shim.vramx_torch_error().decode()) if failed else ""

    def set_limit(self, device: int, limit_bytes: int) -> None:
        self.shim.vramx_torch_set_limit(device, limit_bytes)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._stub, f"bench_{name}")
        if name in self._POINTERS:
            function.restype = ctypes.c_void_p
        elif name in (*self._TEXTS, *self._JSON):
            function.restype = ctypes.c_char_p
        elif name in self._DOUBLES:
            function.restype = ctypes.c_double
        elif name in ("cache_info", "base_allocation", "recording_core"):
            function.restype = ctypes.c_size_t

        def call(*arguments: Any) -> Any:
            result = function(*map(_as_c, arguments))
            if name != "error" and (raised := self.error()):
                raise ShimError(raised)
            return self._parsed(name, result)

        return call

    def _parsed(self, name: str, result: Any) -> Any:
        if isinstance(result, bytes):
            result = result.decode()
        if name in self._JSON:
            return json.loads(result)
        return result.splitlines() if name in ("journal", "recorded") else result


def _as_c(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        return ctypes.c_double(value)
    if isinstance(value, str):
        return value.encode()
    return ctypes.c_uint64(value) if value >= 0 else ctypes.c_int(value)


def try_install(
    bench: Bench, count: int = 2, capacity_bytes: int = 1 << 30, late: bool = False
) -> str:
    """Open `count` devices and install the shim over them; return what it says against it."""
    from vramx import _core

    # They go with their last reference, and the shim has none.
    bench.devices = _core.open_simulated(count, capacity_bytes, has_bytes=False)
    return bench.install(bench.devices.handle_address, late)


def installed(bench: Bench, visible: int = 2, **options: Any) -> _core.Devices:
    """Install the shim as try_install() does, and initialise it as torch does with `visible`."""
    assert try_install(bench, **options) == ""
    bench.init(visible)
    return bench.devices


def in_pool(bench: Bench, size_bytes: int) -> int:
    """Allocate from torch's allocator, as a graph or a memory pool does."""
    bench.begin_pool(0, POOL, STREAM)
    try:
        pointer = int(bench.allocate(size_bytes))
    finally:
        bench.end_pool(0, POOL)
    bench.journal()
    return pointer


def stat(bench: Bench, name: str) -> list[int]:
    """Return a statistic of device 0 for requests of every size."""
    values: list[int] = bench.stats(0)[name][0]
    return values


@contextmanager
def raises(start: str) -> Iterator[list[str]]:
    """Expect a ShimError whose text starts like this, and yield a list that gets it."""
    texts: list[str] = []
    try:
        yield texts
    except ShimError as error:
        texts.append(str(error))
    assert texts, "nothing was raised"
    assert texts[0].startswith(start), texts[0]
