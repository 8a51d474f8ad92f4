"""What a fused function keeps of a tensor for backward: one buffer, and how it is read again.

A buffer is uint8 always, so that neither autograd nor an enclosing compression takes it for data of
its own: packed as vramx/kernels/layout.py says, or the bytes of the tensor itself. A Spec says
which; its fields travel through operators as a list of integers. A buffer has lost its tensor's
place in autograd's graph: `probe`, an output of the operator that kept it, of the tensor's shape
and one element of memory, holds that place. Backward of backward attaches decoded values to it.
Immutable; any thread. encode() and decode() cost what the codec's pack() and unpack() do.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vramx.compression import random
from vramx.compression.codec import Packed, layout_of, pack, unpack
from vramx.compression.config import Compression, Format
from vramx.errors import InvalidValueError

# Values of Spec.bits that are no width.
NOTHING, RAW = -1, 0
KERNEL_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))
DTYPES = KERNEL_DTYPES | {torch.float64}


class Spec(NamedTuple):
    """How a tensor is kept: the fields of a Format as integers; `bits` may be NOTHING or RAW."""

    bits: int
    group_size: int
    symmetric: int
    stochastic: int

    def format(self) -> Format:
        """Return the codec's format; `bits` is neither NOTHING nor RAW."""
        rounding = "stochastic" if self.stochastic else "nearest"
        return _format(self.bits, self.group_size, bool(self.symmetric), rounding)


class Kept(NamedTuple):
    """What the Linears that follow need of a tensor, or of a norm's output.

    `buffer` holds the tensor, or the norm's input normalised; `rstd`, `weight`, `bias`, `eps` and
    `centred` are the norm's, None and 0 without one; `dtype` is of what the buffer holds.
    """

    buffer: Tensor
    probe: Tensor
    rstd: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool
    dtype: torch.dtype
    spec: Spec


@lru_cache(maxsize=64)
def _format(bits: int, group_size: int, symmetric: bool, rounding: str) -> Format:
    return Format(bits, group_size, symmetric, rounding)


_NOTHING = Spec(NOTHING, 0, 0, 0)
_RAW = Spec(RAW, 0, 0, 0)


def spec_of(keep: Compression | None) -> Spec:
    """Return how options want a tensor kept: RAW if they are not enabled, int8 if there are none.

    Raises:
        InvalidValueError: `keep` is neither a Compression nor None.

    Example:
        >>> spec_of(Compression(bits=4))
        Spec(bits=4, group_size=64, symmetric=0, stochastic=1)
    """
    if keep is None:
        return _DEFAULT
    if not isinstance(keep, Compression):
        raise InvalidValueError(f"keep {keep!r} is not accepted; accepted are a Compression, None")
    if not keep.enabled:
        return _RAW
    form = keep.format()
    return Spec(form.bits, form.group_size, int(form.symmetric), int(form.rounding == "stochastic"))


_DEFAULT = spec_of(Compression())


def spec_for(keep: Compression | None) -> Spec:
    """Return spec_of(keep), or NOTHING where autograd records nothing."""
    spec = spec_of(keep)
    return spec if torch.is_grad_enabled() else _NOTHING


def buffer_bytes(numel: int, dtype: torch.dtype, spec: Spec) -> int:
    """Return the size of a buffer.

    Example:
        >>> buffer_bytes(1 << 20, torch.bfloat16, spec_of(None))
        1064960
    """
    if spec.bits == NOTHING:
        return 0
    if spec.bits == RAW:
        return numel * dtype.itemsize
    return layout_of(numel, spec.format()).buffer_bytes


def renew_noise(device: torch.device, spec: Spec) -> None:
    """Let a CUDA graph that is being captured draw new noise in every replay.

    The numbers of its streams are the same every time; so the epoch advances in the graph.
    """
    packs = spec.bits not in (NOTHING, RAW) and spec.stochastic
    if packs and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        random.advance_epoch(device)


def encode(x: Tensor, spec: Spec) -> Tensor:
    """Return the buffer of a tensor; RAW of a contiguous one shares its memory."""
    flat = x.detach().reshape(-1)
    return flat.view(torch.uint8) if spec.bits == RAW else pack(flat, spec.format()).buffer


def decode(buffer: Tensor, numel: int, dtype: torch.dtype, spec: Spec) -> Tensor:
    """Return the elements of a buffer, 1-D; of a RAW one `dtype` must be the tensor's own."""
    if spec.bits == RAW:
        return buffer.view(dtype)
    return unpack(Packed(buffer, numel, dtype, spec.format()))


def new_probe(x: Tensor) -> Tensor:
    """Return a tensor of x's shape and type in one element of memory, of no certain value."""
    return x.new_empty(()).expand(x.shape)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, probe: Tensor) -> Tensor:  # noqa: ARG004
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # noqa: ARG004
        return None, gradient


def attach(value: Tensor, probe: Tensor) -> Tensor:
    """Return `value` in the place that `probe` has in autograd's graph; probe is not read."""
    return _Attach.apply(value, probe)  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def launches_on(device: torch.device) -> bool:
    """Tell whether the kernels serve a device."""
    from vramx.kernels import launch

    return launch.supported(device)
