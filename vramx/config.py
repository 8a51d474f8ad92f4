"""The environment, read in this module and in no other.

Turns the VRAMX_* variables into one frozen value, and makes the environment that `vramx run` gives
to the program it starts, so that the two ends cannot drift apart. What the variables mean for the
allocator is decided in vramx/allocator. A name that is nearly one of these is refused, as it would
do nothing; others are let be, which another version may know. Changes nothing but one switch of
torch's, for its NCCL groups, when asked to; thread-safe.

    VRAMX=1               install the allocator in every process that uses CUDA
    VRAMX_LIMIT           24GiB, bytes, or a fraction of each device: 0.9
    VRAMX_CROSS_STREAM    never, under_pressure or always
    VRAMX_DEVICES         0,2: the devices to serve; all of them by default
    VRAMX_RECORD=1        keep the last events, the allocator's own and torch's history
    VRAMX_STRICT=0        make do with plain mode where the shim cannot be had
    VRAMX_CACHE_DIR       where the shim is kept
    VRAMX_VERBOSE=1       say on stderr what is done
    VRAMX_STATS           file that gets the statistics at exit, as JSON
    VRAMX_PEAKS           folder that gets what each process held at most, at its exit
    VRAMX_ALLOCATOR       torch: keep torch's own, and only watch; vramx by default
    VRAMX_OOM_DIR         where the snapshot of a request that failed goes
    VRAMX_OOM_SNAPSHOT=0  write none
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from vramx.errors import InvalidValueError

ALLOCATORS = ("vramx", "torch")
CROSS_STREAM = ("never", "under_pressure", "always")
# What tells torch not to call the entry points of other packages, vramx's among them.
TORCH_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# How many processes of a job a launcher (torchrun, Open MPI) started on this host.
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
# The number of this process in its job, as launchers give it.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SWITCH = {"": None, "0": False, "1": True}
# The process that `vramx run` becomes; its children find another number there than their own.
_ROOT_PROCESS = "VRAMX_ROOT_PID"
# What has torch register all of its memory with NCCL, by address; the older name still counts.
_NCCL_REGISTRATION = (
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)
_PREFIX = "VRAMX_"
# What parse() reads besides VRAMX, without the prefix.
_NAMES = (
    "LIMIT", "CROSS_STREAM", "DEVICES", "RECORD", "STRICT", "CACHE_DIR", "VERBOSE", "STATS",
    "PEAKS", "ALLOCATOR", "OOM_DIR", "OOM_SNAPSHOT", "ROOT_PID",
)  # fmt: skip
# How alike two names are from which on one is taken for the other: one letter too many or too few
# gives 0.9, "SRC" and "STRICT" have 0.67.
_LIKENESS = 0.75


@dataclass(frozen=True)
class Config:
    """What the environment asks for. A limit and sizes are still text: they depend on the GPU."""

    enabled: bool = False
    limit: str | None = None
    cross_stream: str | None = None
    strict: bool = True
    devices: tuple[int, ...] | None = None
    record: bool = False
    verbose: bool = False
    cache_dir: Path | None = None
    stats_file: Path | None = None
    root_pid: int | None = None
    allocator: str = "vramx"
    peaks_dir: Path | None = None
    oom_dir: Path | None = None
    oom_snapshot: bool = True
    # Not vramx's own, but read here as well.
    xdg_cache_home: Path | None = None
    compiler: str = "g++"
    cuda_home: Path | None = None
    torch_autoload: bool = True


def is_enabled() -> bool:
    """Tell whether VRAMX asks for anything; one look-up, for it runs at every `import torch`."""
    return os.environ.get("VRAMX", "0") not in ("", "0")


def local_ranks() -> int:
    """Return how many processes of this job are on this host, as far as its launcher says."""
    return max(1, *(_number(os.environ.get(name, "")) or 1 for name in _LOCAL_RANKS))


def rank() -> int | None:
    """Return this process's number among those of its job, as far as its launcher says."""
    numbers = (_number(os.environ.get(name, "")) for name in _RANKS)
    return next((number for number in numbers if number is not None), None)


def cublas_workspace_bytes() -> int | None:
    """Return the bytes that CUBLAS_WORKSPACE_CONFIG asks for, None where it asks for none.

    It has pairs of a size in KiB and a count, as in ":4096:2:16:8".
    """
    words = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "").strip(":").split(":")
    if len(words) % 2 or not all(word.isascii() and word.isdigit() for word in words):
        return None
    numbers = [int(word) for word in words]
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return sum(size_kib * count for size_kib, count in pairs) << 10


def cublaslt_workspace_bytes() -> int | None:
    """Return the bytes that CUBLASLT_WORKSPACE_SIZE, in KiB, asks for; None where it asks for none.

    torch reads a number at the beginning, and nothing else.
    """
    size_kib = _number(os.environ.get("CUBLASLT_WORKSPACE_SIZE", "").strip())
    return None if size_kib is None else size_kib << 10


def nccl_registration() -> str | None:
    """Return the variable by which torch registers all of its memory with NCCL, if one is on."""
    off = ("", "0", "n", "no", "f", "false")
    on = (name for name in _NCCL_REGISTRATION if os.environ.get(name, "").lower() not in off)
    return next(on, None)


def stop_nccl_registration() -> None:
    """Switch that off in this process and its children. torch reads it when a group is made."""
    for name in _NCCL_REGISTRATION:
        if name in os.environ:
            os.environ[name] = "0"


@lru_cache(maxsize=1)
def config() -> Config:
    """Return the configuration of this process, as the environment was at the first call.

    Raises:
        InvalidValueError: a variable holds what is not accepted.
    """
    return parse(os.environ)


def parse(environment: Mapping[str, str]) -> Config:
    """Read a configuration from variables.

    Raises:
        InvalidValueError: a variable holds what is not accepted, or has nearly the name of one;
            the text names it.

    Example:
        >>> parse({"VRAMX": "1", "VRAMX_DEVICES": "0,2"}).devices
        (0, 2)
    """
    _refuse_near_names(environment)
    return Config(
        enabled=_switch(environment, "VRAMX", default=False),
        limit=environment.get("VRAMX_LIMIT") or None,
        cross_stream=_choice(environment, "VRAMX_CROSS_STREAM", CROSS_STREAM),
        strict=_switch(environment, "VRAMX_STRICT", default=True),
        devices=_devices(environment),
        record=_switch(environment, "VRAMX_RECORD", default=False),
        verbose=_switch(environment, "VRAMX_VERBOSE", default=False),
        cache_dir=_path(environment, "VRAMX_CACHE_DIR"),
        stats_file=_path(environment, "VRAMX_STATS"),
        allocator=_choice(environment, "VRAMX_ALLOCATOR", ALLOCATORS) or "vramx",
        peaks_dir=_path(environment, "VRAMX_PEAKS"),
        oom_dir=_path(environment, "VRAMX_OOM_DIR"),
        oom_snapshot=_switch(environment, "VRAMX_OOM_SNAPSHOT", default=True),
        root_pid=_number(environment.get(_ROOT_PROCESS, "")),
        xdg_cache_home=_path(environment, "XDG_CACHE_HOME"),
        compiler=environment.get("CXX") or "g++",
        cuda_home=_path(environment, "CUDA_HOME") or _path(environment, "CUDA_PATH"),
        torch_autoload=environment.get(TORCH_AUTOLOAD, "1") == "1",
    )


def _refuse_near_names(environment: Mapping[str, str]) -> None:
    for name in environment:
        rest = name.removeprefix(_PREFIX)
        if rest == name or rest in _NAMES:
            continue
        if near := get_close_matches(rest.upper(), _NAMES, n=1, cutoff=_LIKENESS):
            raise InvalidValueError(f"{name} is no variable; did you mean {_PREFIX}{near[0]}?")


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _switch(environment: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = environment.get(name, "")
    if text not in _SWITCH:
        raise InvalidValueError(f"{name}={text!r} is not understood; accepted are 0 and 1")
    value = _SWITCH[text]
    return default if value is None else value


def _choice(environment: Mapping[str, str], name: str, accepted: tuple[str, ...]) -> str | None:
    text = environment.get(name) or None
    if text is not None and text not in accepted:
        raise InvalidValueError(
            f"{name}={text!r} is not understood; accepted are {', '.join(accepted)}"
        )
    return text


def _devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    text = environment.get("VRAMX_DEVICES") or None
    try:
        return parse_devices(text) if text else None
    except InvalidValueError as error:
        raise InvalidValueError(f"VRAMX_DEVICES: {error}") from None


def parse_devices(text: str) -> tuple[int, ...]:
    """Read a list of device numbers, as in "0,2".

    Raises:
        InvalidValueError: it is no such list.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) <= 4 for word in words):
        raise InvalidValueError(f"{text!r} is no list of device numbers; accepted is 0 or 0,2")
    return tuple(sorted({int(word) for word in words}))


def _path(environment: Mapping[str, str], name: str) -> Path | None:
    text = environment.get(name)
    return Path(text).expanduser() if text else None


def program_environment(settings: Mapping[str, str], path: Path | None = None) -> dict[str, str]:
    """Return this process's environment with VRAMX on, for a program that takes its place.

    Args:
        settings: further variables.
        path: a folder to put first on PYTHONPATH.
    """
    environment = {**os.environ, **settings, "VRAMX": "1", _ROOT_PROCESS: str(os.getpid())}
    if path is not None:
        rest = environment.get("PYTHONPATH")
        # Unset rather than empty: an empty entry would stand for the current folder.
        environment["PYTHONPATH"] = f"{path}{os.pathsep}{rest}" if rest else str(path)
    return environment
