"""What the shim is compiled with: sources, compiler, CUDA's headers. Finds things, runs nothing
but `compiler --version`.

CUDA's headers are wherever torch's own wheels, a toolkit or triton left them, in that order: the
first is sure to fit the installed torch. No nvcc and no CUDA library is needed, as the shim calls
neither. A search costs a few stat calls.
"""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vramx.allocator.torch_facts import TorchFacts
from vramx.config import Config
from vramx.errors import ShimError

# The second is asked for too because the wheel of CUDA's runtime has the first without it: it is in
# the compiler's wheel, which only building torch needs.
CUDA_HEADERS = ("cuda_runtime_api.h", "crt/host_config.h")
_PACKAGE = Path(__file__).resolve().parent.parent
_WAY_OUT = (
    "install g++ 10 or newer (apt-get install g++, dnf install gcc-c++), or set CXX to another "
    "C++20 compiler; strict=False, or VRAMX_STRICT=0, does without and loses statistics, CUDA "
    "graphs and memory pools"
)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the words that call it, and what it says it is."""

    command: tuple[str, ...]
    version: str


def find_sources() -> Path:
    """Return the folder csrc: the package's own, or that of the checkout around it.

    Raises:
        ShimError: neither is there.
    """
    # Resolved, because a package may be reached through a link (see cli/run).
    for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if any((folder / "torch").glob("*.cpp")):
            return folder
    raise ShimError(f"the sources of the shim are missing from {_PACKAGE}; install vramx again")


def find_compiler(config: Config) -> Compiler:
    """Return the C++ compiler: $CXX, else g++.

    Raises:
        ShimError: it is not on the PATH, or does not run; the text has the way out.
    """
    command = tuple(shlex.split(config.compiler))
    if not command or shutil.which(command[0]) is None:
        raise ShimError(f"no C++ compiler: {config.compiler!r} is not on the PATH; {_WAY_OUT}")
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ShimError(f"the C++ compiler {config.compiler!r} does not run: {error}") from None
    if done.returncode or not done.stdout:
        raise ShimError(f"the C++ compiler {config.compiler!r} does not run; {_WAY_OUT}")
    return Compiler(command, done.stdout.splitlines()[0].strip())


def find_cuda_headers(torch: TorchFacts, config: Config) -> Path:
    """Return a folder with CUDA's runtime headers.

    Raises:
        ShimError: there is none; the text names what would bring them.
    """
    candidates = cuda_header_candidates(torch, config)
    for folder in candidates:
        if all((folder / header).is_file() for header in CUDA_HEADERS):
            return folder
    searched = ", ".join(str(folder) for folder in candidates)
    raise ShimError(
        f"CUDA's headers are missing: no {' and '.join(CUDA_HEADERS)} in {searched}; they come "
        "with triton, or with a CUDA toolkit in $CUDA_HOME"
    )


def cuda_header_candidates(torch: TorchFacts, config: Config) -> list[Path]:
    """Return where CUDA's headers may be, the best fit first."""
    nvidia = _package_folders("nvidia", torch)
    major = (torch.cuda or "").split(".")[0]
    folders = [folder / f"cu{major}" / "include" for folder in nvidia if major]
    folders += [folder / "cuda_runtime" / "include" for folder in nvidia]
    folders += [config.cuda_home / "include"] if config.cuda_home else []
    folders.append(Path("/usr/local/cuda/include"))
    triton = _package_folders("triton", torch)
    return folders + [folder / "backends" / "nvidia" / "include" for folder in triton]


def _package_folders(name: str, torch: TorchFacts) -> list[Path]:
    """Return where a package is: beside torch first, then wherever Python would look."""
    spec = importlib.util.find_spec(name)
    found = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return list(dict.fromkeys([torch.folder.parent / name, *found]))


def compile_flags(torch: TorchFacts, csrc: Path, cuda_headers: Path) -> list[str]:
    """Return the flags that compile one source of the shim."""
    include = torch.folder / "include"
    flags = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall"]
    flags.append("-fno-stack-protector")  # as setup.py has it
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}")
    if not (include / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h").is_file():
        # Builds of torch without CUDA lack this generated header; the macro says not to want it.
        flags.append("-DC10_USING_CUSTOM_GENERATED_MACROS")
    flags.append(f"-I{csrc}")
    # As system headers, because their warnings are not ours to mend.
    for folder in (include, include / "torch" / "csrc" / "api" / "include", cuda_headers):
        flags += ["-isystem", str(folder)]
    return flags


def link_flags(torch: TorchFacts) -> list[str]:
    """Return the flags that link the shim: against torch's libraries by name, and not cudart.

    What the shim takes from cudart is found through torch's own libraries when it is loaded, so one
    binary serves every CUDA that this torch was built for. No run path: torch is loaded already.
    """
    flags = ["-shared", "-pthread", f"-L{torch.folder / 'lib'}"]
    for name in ("c10", "c10_cuda", "torch_cuda"):
        if (torch.folder / "lib" / f"lib{name}.so").is_file():
            flags.append(f"-l{name}")
    return flags
