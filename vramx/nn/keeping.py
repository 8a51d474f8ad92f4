"""What a fused function keeps of a tensor for backward: one buffer, and how it is read again.

A buffer is uint8 always, so that neither autograd nor an enclosing compression takes it for data of
its own: packed as vramx/kernels/layout.py says, or the bytes of the tensor itself. A Spec says
which; its fields travel through operators as a list of integers, which is what a schema can say.
Where a tensor was in autograd's graph is differentiation.py's. Immutable, no state but caches; any
thread. encode() and decode() cost what the codec's pack() and unpack() do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vramx.compression import packs
from vramx.compression.codec import random
from vramx.compression.codec.codec import bytes_of, decoded, encoded, layout_of
from vramx.compression.config import BITS, GROUP_SIZES, Compression, Format, format_of
from vramx.errors import refused
from vramx.kernels import elementwise_launch
from vramx.kernels.layout import Layout
from vramx.nn import passes

# Values of Spec.bits that are no width. SIGNS: of a norm by constants, whose input is not needed.
SIGNS, NOTHING, RAW = -2, -1, 0
KERNEL_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))
DTYPES = KERNEL_DTYPES | {torch.float64}
# Orders of elements in memory that are to be kept: convolutions have one.
ORDERS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
# Whose language has tuples of arguments and gathers; the codec's kernels need neither.
OLDEST_TRITON = (3, 3)


class Spec(NamedTuple):
    """How a tensor is kept: the fields of a Format as integers; `bits` may be one of the above.

    `order` is an index of ORDERS: elements are kept as they lie in memory.
    """

    bits: int
    group_size: int
    symmetric: int
    stochastic: int
    order: int = 0

    def format(self) -> Format:
        """Return the codec's format; `bits` is a width."""
        return _format(*self[:4])


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


def fields_of(kept: Kept) -> tuple[Any, ...]:
    """Return the first seven fields, as operators take them; torch 2.6 compiles no slice of it."""
    return kept.buffer, kept.probe, kept.rstd, kept.weight, kept.bias, kept.eps, kept.centred


def in_order(spec: Spec, order: int) -> Spec:
    """Return a spec with another order of elements."""
    if spec.order == order:
        return spec
    return Spec(spec.bits, spec.group_size, spec.symmetric, spec.stochastic, order)


def kept_tensor(buffer: Tensor, probe: Tensor, spec: Spec) -> Kept:
    """Return what is kept of a tensor that no norm made."""
    return Kept(buffer, probe, None, None, None, 0.0, False, probe.dtype, spec)


@lru_cache(maxsize=64)
def _format(bits: int, group_size: int, symmetric: int, stochastic: int) -> Format:
    return Format(bits, group_size, bool(symmetric), "stochastic" if stochastic else "nearest")


# A program has few, each of a model or a call of optimize().
_MOST_OPTIONS = 64
AS_IT_IS = Spec(NOTHING, 0, 0, 0)
BY_SIGNS = Spec(SIGNS, 0, 0, 0)
EXACTLY = Spec(RAW, 0, 0, 0)


# -- How -------------------------------------------------------------------------------------------


def once_for_options(function: Callable[[Compression], Spec]) -> Callable[[Compression], Spec]:
    """Remember what a function finds of options, which never change, by which object they are.

    A hash of them would take longer than the function.
    """
    known: dict[int, tuple[Compression, Spec]] = {}

    @wraps(function)
    def once(keep: Compression) -> Spec:
        if torch.compiler.is_dynamo_compiling():
            return function(keep)
        found = known.get(id(keep))
        if found is None:
            if len(known) >= _MOST_OPTIONS:
                known.clear()
            # With the options themselves, so that no others come to lie where they did.
            known[id(keep)] = found = keep, function(keep)
        return found[1]

    return once


def spec_of(keep: Compression | None) -> Spec:
    """Return how options want a tensor kept: RAW at level "keep", int8 if there are none.

    min_bytes, policy, offload, strict and deterministic are options of the hooks and not read here.

    Raises:
        InvalidValueError: `keep` is neither a Compression nor None.

    Example:
        >>> spec_of(Compression(level="int4"))
        Spec(bits=4, group_size=64, symmetric=0, stochastic=1, order=0)
    """
    return _DEFAULT if keep is None else _spec_of(keep)


@once_for_options
def _spec_of(keep: Compression) -> Spec:
    if not isinstance(keep, Compression):
        raise refused("keep", keep, "are a Compression, None")
    return spec_with(keep, BITS[keep.level]) if keep.packs else EXACTLY


def spec_with(keep: Compression, bits: int) -> Spec:
    """Return how options want a tensor kept whose codes have so many bits."""
    return Spec(*_constant_spec(bits, keep.group_size, keep.rounding, keep.symmetric))


# Of plain values: what the compiler of torch 2.11 takes for constants are no dataclasses.
@torch.compiler.assume_constant_result
def _constant_spec(
    bits: int, group_size: int | None, rounding: str, symmetric: bool | None
) -> tuple[int, ...]:
    form = format_of(bits, group_size, rounding, symmetric)
    return form.bits, form.group_size, int(form.symmetric), int(form.rounding == "stochastic")


_DEFAULT = spec_of(Compression())


def spec_for(keep: Compression | None) -> Spec:
    """Return spec_of(keep), NOTHING where autograd records nothing, RAW in a pass of a block."""
    spec = spec_of(keep)
    if not torch.is_grad_enabled():
        return AS_IT_IS
    return EXACTLY if passes.saves_are_brief() else spec


def in_rows(spec: Spec, length: int) -> Spec:
    """Return a spec in which no group has parts of two rows of a length; EXACTLY if none can be.

    A row may be much larger than the next one, and a layer behind make both count alike.

    Example:
        >>> [in_rows(spec_of(None), length).group_size for length in (256, 192, 80, 100)]
        [128, 64, 16, 0]
    """
    if spec.bits <= RAW or length % spec.group_size == 0:
        return spec
    group_size = spec.group_size
    while length % group_size:
        group_size //= 2
    if group_size < GROUP_SIZES[0]:
        return EXACTLY
    return Spec(spec.bits, group_size, spec.symmetric, spec.stochastic, spec.order)


def form_of(keep: Compression | None, *inputs: Tensor) -> list[int]:
    """Return how inputs are packed, for an operator; NOTHING: they are saved as they are.

    That is where nothing is differentiated and where the level is "keep".
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return list(AS_IT_IS)
    spec = spec_for(keep)
    if 2 <= inputs[0].dim() <= 3:  # of more dimensions they are an image, or heads
        spec = in_rows(spec, inputs[0].shape[-1])
    return list(AS_IT_IS) if spec.bits == RAW else list(spec)


def order_of(x: Tensor) -> int:
    """Return the order of a tensor's elements in memory that is to be kept.

    Example:
        >>> order_of(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
        1
    """
    order = {4: 1, 5: 2}.get(x.dim(), 0)
    if not order or x.is_contiguous() or not x.is_contiguous(memory_format=ORDERS[order]):
        return 0
    return order


# -- Buffers: inside operators ---------------------------------------------------------------------


def buffer_bytes(numel: int, dtype: torch.dtype, spec: Sequence[int]) -> int:
    """Return the size of a buffer.

    Example:
        >>> buffer_bytes(1 << 20, torch.bfloat16, spec_of(None))
        1097728
    """
    if spec[0] in (SIGNS, NOTHING):
        return 0
    if spec[0] == RAW:
        return numel * dtype.itemsize
    return bytes_of(numel, _format(*spec[:4]))


def empty_buffer(x: Tensor, spec: Sequence[int]) -> Tensor:
    """Return a buffer for a tensor, to be written."""
    buffer = x.new_empty(buffer_bytes(x.numel(), x.dtype, spec), dtype=torch.uint8)
    return buffer if spec[0] in (NOTHING, RAW) else packs.made(buffer)


def dense_like(x: Tensor, order: int) -> Tensor:
    """Return a tensor like x, dense in an order, to be written."""
    return torch.empty_like(x, memory_format=ORDERS[order])


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies, and how: of two that are alive, equal ones are the same data."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride()


def encode(x: Tensor, spec: Sequence[int]) -> Tensor:
    """Return the buffer of a tensor; RAW of a contiguous one shares its memory."""
    bits, *_, order = Spec(*spec)
    if bits in (SIGNS, NOTHING):
        return x.new_empty(0, dtype=torch.uint8)
    flat = flat_in(order, x)
    if bits == RAW:
        return flat.view(torch.uint8)
    renew_noise(x.device, spec)
    return encoded(flat, _format(*spec[:4]))


def pack_of(x: Tensor, spec: Sequence[int]) -> Tensor | None:
    """Return encode(x, spec); None with NOTHING."""
    return None if spec[0] == NOTHING else encode(x, spec)


def empty_pack_of(x: Tensor, spec: Sequence[int]) -> Tensor | None:
    """Return what stands for pack_of(x, spec) where nothing is computed."""
    return None if spec[0] == NOTHING else empty_buffer(x, spec)


def decode(buffer: Tensor, shape: Sequence[int], dtype: torch.dtype, spec: Sequence[int]) -> Tensor:
    """Return what was kept, dense in its order; of a RAW buffer `dtype` must be the tensor's own.

    With NOTHING the tensor itself was saved, and is cast; its shape may have been another. With
    SIGNS it is not needed, and zero.
    """
    bits, *_, order = Spec(*spec)
    if bits == NOTHING:
        return buffer.to(dtype).reshape(shape)
    if bits == SIGNS:
        return torch.zeros((), dtype=dtype, device=buffer.device).expand(shape)
    if bits == RAW:
        flat = buffer.view(dtype)
    else:
        flat = decoded(buffer, torch.Size(shape).numel(), dtype, _format(*spec[:4]))
    return shaped_in(order, flat, shape)


def flat_in(order: int, x: Tensor) -> Tensor:
    """Return the elements of a tensor in an order, 1-D."""
    return (x.movedim(1, -1) if order else x).reshape(-1)


def shaped_in(order: int, flat: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a view of a shape of elements that are in an order."""
    if not order:
        return flat.view(shape)
    return flat.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def fused_layout(numel: int, spec: Sequence[int], widths: tuple[int, ...] = (8,)) -> Layout | None:
    """Return the layout that kernels pack to and from; None if they pack no codes of that width."""
    return layout_of(numel, _format(*spec[:4])) if spec[0] in widths else None


def draw(device: torch.device, spec: Sequence[int], count: int) -> elementwise_launch.Noise | None:
    """Return noise for `count` tensors that a kernel packs; None where it rounds to nearest."""
    if not spec[3]:
        return None
    renew_noise(device, spec)
    streams = tuple([random.next_stream() for _ in range(count)])
    return elementwise_launch.Noise(random.state(device), streams)


def renew_noise(device: torch.device, spec: Sequence[int]) -> None:
    """Let a CUDA graph that is being captured draw new noise in every replay.

    The numbers of its streams are the same every time; so the epoch advances in the graph.
    """
    if spec[3] and spec[0] not in (NOTHING, RAW):
        random.renew_on_replay(device)


def served(tensor: Tensor) -> bool:
    """Tell whether the kernels take a tensor; else it is computed by plain torch."""
    return tensor.dtype in KERNEL_DTYPES and _launches_on(tensor.device)


@lru_cache(maxsize=64)
def _launches_on(device: torch.device) -> bool:
    from vramx.kernels import launch, start

    return launch.supported(device) and start.triton_version() >= OLDEST_TRITON
