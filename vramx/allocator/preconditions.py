"""Whether the allocator can be put behind this torch, on this machine, now.

Asked before anything is built, opened or changed, from the surest obstacle to the least sure, and
answered with one line each. Initialises no CUDA: the count of devices comes from NVML where that
works, as torch itself counts them. Some milliseconds.
"""

from __future__ import annotations

import ctypes
from types import ModuleType

from vramx import config
from vramx.allocator import cuda_init
from vramx.allocator.options import Options
from vramx.errors import InstallError, InvalidValueError


def check(torch: ModuleType, options: Options, late: bool) -> None:
    """Raise what stands in the way.

    Raises:
        InstallError: torch, the driver, the GPUs, another allocator or an early CUDA is in the way.
        InvalidValueError: a device of `options.devices` is not there.
    """
    _check_build(torch)
    _check_driver()
    _check_devices(torch, options)
    _check_backend(torch)
    if late:
        _check_groups(torch)
    else:
        _check_time(torch)


def _check_build(torch: ModuleType) -> None:
    if torch.version.hip:
        raise InstallError(f"torch {torch.__version__} is built for ROCm; vramx needs CUDA")
    if not torch.version.cuda or not hasattr(torch._C, "_cuda_getAllocator"):
        raise InstallError(
            f"torch {torch.__version__} is built without CUDA; install a build with it"
        )


def _check_driver() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise InstallError(f"the NVIDIA driver is missing: {error}") from None


def _check_devices(torch: ModuleType, options: Options) -> None:
    count = torch.cuda.device_count()
    if count == 0:
        raise InstallError("torch sees no GPU; CUDA_VISIBLE_DEVICES may hide them")
    absent = [device for device in options.devices or () if device >= count]
    if absent:
        raise InvalidValueError(f"devices holds {absent[0]}; torch sees {count}, from 0 on")


def _check_backend(torch: ModuleType) -> None:
    backend = torch.cuda.get_allocator_backend()
    if backend == "vramx":
        raise InstallError(
            "vramx is installed in this process by another copy of it, or was before it was "
            "reloaded; it serves on. To use this copy, start the process again"
        )
    if backend != "native":
        raise InstallError(
            f"torch's allocator is {backend!r}, and vramx stands before the native one; leave "
            "backend: out of PYTORCH_ALLOC_CONF and change_current_allocator out of the program"
        )


def _check_groups(torch: ModuleType) -> None:
    """Refuse where NCCL knows addresses already: nothing tells it that memory is mapped anew."""
    name = config.nccl_registration()
    if name and torch.distributed.is_available() and torch.distributed.is_initialized():
        raise InstallError(
            f"torch.distributed is initialised with {name}=1, by which torch's memory is "
            "registered with NCCL; call install_allocator() before, or leave that variable out"
        )


def _check_time(torch: ModuleType) -> None:
    if not torch.cuda.is_initialized():
        return
    site = cuda_init.first_site()
    culprit = f"at {site}" if site else "where vramx was not there to see it"
    raise InstallError(
        f"CUDA was initialised already, {culprit}; call install_allocator() before that, or with "
        "late=True, which leaves the tensors that exist to torch's own allocator"
    )
