"""What offload_optimizer() was told, and what of it can be done.

Values and checks; nothing here moves anything. Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch import distributed as dist

from vramx.errors import OffloadError
from vramx.optimizers.copies import unknown_wrapper, unwrapped
from vramx.optimizers.states import size_bytes
from vramx.sizes import MIB

_LEAST_BUCKET_BYTES, _MOST_BUCKET_BYTES = 64 * MIB, 256 * MIB


@dataclass(frozen=True)
class Options:
    """What offload_optimizer() was told."""

    bucket_bytes: int | None  # None: as bucket_bytes_of() has it
    least_bytes: int
    in_backward: bool
    keep_bytes: int = 0  # of each device

    def sizes(self, parameters: Sequence[Tensor]) -> tuple[int, int, int]:
        """Return what a device's stream of states is made with, for the first parameters there."""
        bucket_bytes = self.bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = bucket_bytes_of(parameters)
        return bucket_bytes, self.least_bytes, self.keep_bytes


def bucket_bytes_of(parameters: Sequence[Tensor]) -> int:
    """Return how large buckets are at their best.

    Each takes the host a millisecond, and the slots hold the states of the largest parameter
    anyway; but in backward a bucket's gradients wait for the last of them.
    """
    return min(max(_LEAST_BUCKET_BYTES, *map(size_bytes, parameters)), _MOST_BUCKET_BYTES)


def check_alone() -> None:
    """Raise where this process trains beside others.

    Raises:
        OffloadError: gradients are not yet those of all processes when they come.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise OffloadError(
            "in_backward=True: beside other processes gradients are not yet those of all when they "
            "come; accepted is False"
        )


def check_wrappers(optimizer: Any) -> None:
    """Raise for what is around an optimizer and may do more in its step than that does.

    Raises:
        OffloadError: it would do so when parameters were stepped already.
    """
    wrapper = unknown_wrapper(optimizer)
    if wrapper is not None:
        raise OffloadError(
            f"in_backward=True: {type(wrapper).__name__} is around a "
            f"{type(unwrapped(wrapper)).__name__}, and what it does before or after a step would "
            "come when parameters were stepped already; accepted are False, and the optimizer "
            "within"
        )


def check_one_device(parameters: list[Tensor]) -> None:
    """Raise for several: autograd has a thread for each, and gradients are hidden in one of them.

    Raises:
        OffloadError: parameters are on several devices.
    """
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise OffloadError(
            f"in_backward=True: parameters are on {', '.join(devices)}; accepted is one device"
        )
