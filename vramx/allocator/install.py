"""Putting the core behind torch, once a process.

Order: options, preconditions, the shim, the core's devices, torch. Each step can fail and none
before the last changes anything that torch sees, so a failed installation leaves torch's own
allocator in place and may be tried again. What is installed stays to the end of the process: torch
holds pointers to it from destructors that run after Python's end. Thread-safe; one lock, under
which nothing of torch's that initialises CUDA is called.
"""

from __future__ import annotations

import importlib
import logging
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramx import config
from vramx.allocator import cuda_init, preconditions, profiler_start, shim_build
from vramx.allocator.options import DEFAULT_CROSS_STREAM, Options, choose, switch
from vramx.allocator.shim import Shim
from vramx.errors import InstallError, NotInstalledError, ShimError, VramxWarning

if TYPE_CHECKING:
    from torch.cuda.memory import CUDAPluggableAllocator

_RECORDED_EVENTS = 65_536
_log = logging.getLogger("vramx")


@dataclass(frozen=True)
class Installation:
    """What is installed in this process, from the core up to torch."""

    options: Options
    devices: Any  # vramx._core.Devices
    shim: Shim | None  # none in plain mode
    allocator: Any  # torch's object for it
    torch: ModuleType


@dataclass
class _State:
    """What this process has; written under the lock, and read without it, as it is set once."""

    installed: Installation | None = None


_lock = threading.RLock()
_state = _State()


def install_allocator(
    *,
    limit: int | float | str | None = None,
    devices: Iterable[int] | None = None,
    cross_stream: str = DEFAULT_CROSS_STREAM,
    record: bool = False,
    strict: bool = True,
    late: bool = False,
) -> CUDAPluggableAllocator:
    """Serve torch's CUDA memory from vramx, in this process, from now on.

    Call it before anything uses CUDA; it does not initialise CUDA itself. The first call on a
    machine compiles the part that belongs to the installed torch, which takes some ten seconds.

    Args:
        limit: the most that vramx and torch's own allocator hold of a device together: bytes, a
            size ("24GiB"), or a fraction of each device (0.9). None: all there is.
        devices: the GPUs to serve, as torch numbers them; the others keep torch's own allocator.
        cross_stream: when memory freed on one stream may go to another: "never",
            "under_pressure" (only when the device would have to grow otherwise), or "always".
        record: keep the last 65,536 events of each device, in torch's history too, with the lines
            of Python behind them (some microseconds an allocation).
        strict: raise where the compiled part cannot be had. False: make do with plain mode, which
            has no statistics, CUDA graphs or memory pools, and warn once.
        late: accept that CUDA is initialised already; tensors that exist stay where they are.

    A request that fails leaves a memory snapshot, which the last line of the error names and
    `vramx explain` reads: in VRAMX_OOM_DIR, else in the cache folder. VRAMX_OOM_SNAPSHOT=0: none.

    What a call leaves at its default is taken from VRAMX_LIMIT, VRAMX_DEVICES, VRAMX_CROSS_STREAM
    and VRAMX_RECORD. A second call with the same options returns the same object.

    Returns:
        torch's object for the allocator, as torch.cuda.MemPool takes it.

    Raises:
        InvalidValueError: an option is not accepted, or VRAMX_* holds what is not.
        InstallError: it cannot be installed here or now; ShimError, if that is for want of the
            compiled part. Torch's own allocator stays.
        NotInstalledError: it was installed, and the program has set another allocator since.

    Sync: none.

    Example:
        >>> import vramx
        >>> vramx.install_allocator(limit="24GiB")      # doctest: +SKIP
    """
    settings = config.config()
    options = choose(limit, devices, cross_stream, record, settings)
    strict, late = switch("strict", strict), switch("late", late)
    if settings.verbose:
        _speak()
    torch = _import_torch()
    with _lock:
        if _state.installed is None:
            preconditions.check(torch, options, late)
            _state.installed = _install(torch, options, strict, late)
            _finish(_state.installed)
        elif options != _state.installed.options:
            raise _refusal(_state.installed.options, options)
        allocator: CUDAPluggableAllocator = current().allocator
        return allocator


def allocator_installed() -> bool:
    """Tell whether torch's CUDA memory comes from vramx in this process.

    Example:
        >>> allocator_installed()
        False
    """
    installed = _state.installed
    # A program may have set another allocator since; torch allows it until CUDA is initialised.
    return installed is not None and (installed.shim is None or installed.shim.is_installed())


def current() -> Installation:
    """Return what is installed.

    Raises:
        NotInstalledError: nothing is, or the program has set another allocator since.
    """
    installed = _state.installed
    if installed is None:
        raise NotInstalledError(
            "the allocator is not installed in this process; call vramx.install_allocator() first"
        )
    if not allocator_installed():
        raise NotInstalledError(
            "torch.cuda.memory.change_current_allocator was called after the installation, and "
            "that allocator serves this process; leave the call out, or use its allocator for "
            "some tensors, by torch.cuda.use_mem_pool(torch.cuda.MemPool(allocator.allocator()))"
        )
    return installed


def current_device() -> int:
    """Return torch's current device, without initialising CUDA."""
    torch = current().torch
    return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0


def _import_torch() -> ModuleType:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise InstallError(f"torch cannot be imported: {error}") from None
    cuda_init.watch()
    return torch


def _refusal(installed: Options, wanted: Options) -> InstallError:
    return InstallError(
        f"the allocator is installed already, with {installed}; it cannot be changed to {wanted}, "
        "but for the limit, by vramx.set_limit()"
    )


def _install(torch: ModuleType, options: Options, strict: bool, late: bool) -> Installation:
    try:
        shim = Shim(shim_build.ensure_shim(config.config()), torch.__version__)
    except ShimError as error:
        if strict:
            raise
        return _install_plain(torch, options, error)
    return _install_shim(torch, options, late, shim)


def _install_shim(torch: ModuleType, options: Options, late: bool, shim: Shim) -> Installation:
    _warn_of_what_is_lost(shim)
    devices = open_devices(options)
    shim.install(devices.handle_address, late)
    config.stop_nccl_registration()
    profiler_start.watch(shim.note_profiler)
    memory = torch.cuda.memory
    # Its __init__ would load a library by path; the shim is loaded, and torch has it already.
    allocator = object.__new__(memory.CUDAPluggableAllocator)
    allocator._allocator = torch._C._cuda_getAllocator()
    _log.info("vramx: installed for torch %s: %s", torch.__version__, options)
    return Installation(options, devices, shim, allocator, torch)


def _warn_of_what_is_lost(shim: Shim) -> None:
    """Name what will not go on, before it is done: a warning may have been made an error."""
    if name := config.nccl_registration():
        warnings.warn(
            f"{name} is switched off, as torch does with expandable_segments: NCCL would keep "
            "addresses under which memory changes. Register a pool instead: "
            "torch.cuda.MemPool(backend.mem_allocator) and backend.register_mem_pool(pool)",
            VramxWarning,
            stacklevel=5,
        )
    if shim.torch_keeps_history():
        warnings.warn(
            "torch's memory history was switched on before the installation and will have nothing "
            "of vramx's memory; call torch.cuda.memory._record_memory_history() after it",
            VramxWarning,
            stacklevel=5,
        )


def _install_plain(torch: ModuleType, options: Options, reason: ShimError) -> Installation:
    from vramx.allocator import plain

    # Nothing is behind it that could serve the rest.
    if torch.cuda.is_initialized():
        raise InstallError(f"plain mode cannot be installed late; {reason}") from None
    if options.devices is not None:
        raise InstallError(f"plain mode serves all devices or none; {reason}") from None
    # Before it is done, because a warning may have been made an error.
    warnings.warn(
        f"the allocator runs in plain mode, without {plain.MISSING}: {reason}",
        VramxWarning,
        stacklevel=4,
    )
    devices = open_devices(options)
    allocator = plain.install(torch)
    return Installation(options, devices, None, allocator, torch)


def open_devices(options: Options) -> Any:
    """Open the core's devices for `options`; nothing of a GPU is used before its first block."""
    try:
        return _import_core().open_gpus(
            cross_stream=options.cross_stream,
            trace_events=_RECORDED_EVENTS if options.record else 0,
            devices=None if options.devices is None else list(options.devices),
        )
    except (ImportError, RuntimeError) as error:
        raise InstallError(f"the compiled core cannot be used: {error}") from None


def _import_core() -> Any:
    return importlib.import_module("vramx._core")


def _finish(installed: Installation) -> None:
    """Do what needs the allocator in place."""
    from vramx.allocator import exit_stats, limits, watching

    if installed.options.limit is not None:
        limits.apply(installed.options.limit, None)
    settings = config.config()
    if settings.stats_file is not None:
        exit_stats.write_at_exit(settings.stats_file, settings.root_pid)
    watching.start(installed.torch, records=installed.options.record)


def _speak() -> None:
    """Have what is done written to stderr."""
    if not _log.handlers:
        _log.addHandler(logging.StreamHandler())
        _log.setLevel(logging.INFO)
