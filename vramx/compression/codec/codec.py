"""Packing a tensor into fewer bits and back: chooses the kernel or the reference, checks the input.

A Packed is one buffer and what is needed to decode it; it is never written again after pack().
Knows nothing of autograd, views or policies: its caller flattens and decides. No state but the
counter of the noise's streams; any thread. pack() and unpack() are a launch each (some microseconds
of host time) and never wait for the device.

Let s be the step of an element's group, with amax = max |x| and L = 2**(bits - 1) - 1 (symmetric),
or the range max x - min x in place of amax and L = 2**bits - 1 (asymmetric). Symmetric with 8 bits,
the two different numbers of the largest magnitudes in a group are outliers: bfloat16, as precise
as that rounds, |decoded - x| <= 2**-8 |x|; amax is of the others, and L = 126.
  s <= amax / L * (1 + 2**-20) * (1 + 2**-7) < 1.0079 amax / L
      from the margin against clipping and from rounding s up to a bfloat16, whose neighbours are
      2**-7 apart at most; the range first grows by what rounding min x down to a bfloat16 adds
  nearest     |decoded - x| <= s / 2          E may be off by as much: biased
  stochastic  |decoded - x| < s, |E decoded - x| <= 2**-9 s, variance P (1 - P) s**2 <= s**2 / 4
      x lies a fraction f of a step above a code, and is rounded up with probability P. The noise
      takes 256 values, all equally likely: 256 P of them lift x to the next code, so 256 P is 256 f
      rounded to an integer and |P - f| <= 2**-9. P = f where f is a multiple of 2**-8; over
      elements whose f are spread wider than that P - f averages out. The noise of one element, up
      to s / 2, is 256 times that bias; at 8 bits bfloat16 itself rounds the upper half of a
      group's range by more. Sixteen random bits would be a seventh of what a kernel computes.
plus the rounding errors of float32, 2**-15 s, and of the tensor's own type, half its unit at x.
A NaN or an infinity decodes to NaN, so that a check for overflow sees it: symmetric with 8 bits by
itself, else with all of its group.
At the very end of float32's and bfloat16's range x + s overflows: a decoded element can be infinite
from 3.36e38 at 8 bits and from 2.96e38 at 4. An asymmetric group of a wider range is NaN.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from vramx.compression import packs
from vramx.compression.codec import random, reference
from vramx.compression.codec.mapping import Mapping
from vramx.compression.config import MASK_BITS, MASK_FORMAT, Format
from vramx.compression.fakes import PLAIN
from vramx.compression.lifetime import current_stream, outlive_all
from vramx.errors import InvalidValueError
from vramx.kernels.layout import Layout

# float64 is computed in float32 and never by a kernel; a policy passes it by unless it is forced.
FLOAT_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))
_MASK_DTYPES = frozenset((torch.bool,))
_KERNEL_DTYPES = (FLOAT_DTYPES | _MASK_DTYPES) - {torch.float64}
_KERNEL_BITS = (8, 4, MASK_BITS)
Size = tuple[int, ...]


class Packed:
    """One packed tensor: not written again once it is made, and equal to itself only.

    Args:
        buffer: uint8, 1-D, laid out as vramx/kernels/layout.py says; on any device, at an address
            that is a multiple of 16.
        numel: elements of the tensor.
        dtype: of the tensor.
        format: of the buffer.
        mapping: what its numbers are of the elements; None: the elements.
        stream: whose memory the buffer is, as current_stream() says it; None: not known.

    Memory: nbytes; 1.047 bytes an element at 8 bits and 0.5625 at 4 with the formats by default.

    Example:
        >>> pack(torch.zeros(1 << 20, dtype=torch.bfloat16), Format())
        Packed(1048576 x bfloat16 in 1097728 bytes, 8 bits, group 128, symmetric, stochastic, cpu)
    """

    __slots__ = ("__weakref__", "buffer", "dtype", "format", "mapping", "nbytes", "numel", "stream")

    def __init__(
        self, buffer: Tensor, numel: int, dtype: torch.dtype, format: Format,
        mapping: Mapping | None, *, stream: int | None = None,
    ) -> None:  # fmt: skip
        self.buffer = buffer
        self.numel = numel
        self.dtype = dtype
        self.format = format
        self.mapping = mapping
        self.stream = stream
        self.nbytes = buffer.numel()

    def __repr__(self) -> str:
        form = self.format
        kind = "symmetric" if form.symmetric else "asymmetric"
        how = f"{form.bits} bits, group {form.group_size}, {kind}, {form.rounding}"
        return (
            f"Packed({self.numel} x {str(self.dtype).removeprefix('torch.')} in {self.nbytes} "
            f"bytes, {'a bit each' if form.bits == MASK_BITS else how}, {self.buffer.device})"
        )


def layout_of(numel: int, format: Format) -> Layout:
    """Return where the codes and headers of `numel` elements lie.

    Example:
        >>> layout_of(1 << 20, Format()).buffer_bytes
        1097728
    """
    facts = format.bits, format.group_size, format.symmetric
    if type(numel) is not int:  # as in bytes_of()
        return Layout(numel, *facts)
    return _facts(torch.float32, numel, *facts)[1]


def bytes_of(numel: int, format: Format) -> int:
    """Return the size of their buffer.

    Example:
        >>> bytes_of(1 << 20, Format())
        1097728
    """
    facts = format.bits, format.group_size, format.symmetric
    if type(numel) is not int:  # of a compiler, which knows of a size no more than its name
        return Layout(numel, *facts).buffer_bytes
    return _facts(torch.float32, numel, *facts)[2]


# A program packs tensors of the same few sizes in every step.
@lru_cache(maxsize=4096)
def _facts(
    dtype: torch.dtype, numel: int, bits: int, group_size: int, symmetric: bool
) -> tuple[bool, Layout, int]:
    """Return whether kernels pack tensors like this, the layout, and the bytes of the buffer."""
    layout = Layout(numel, bits, group_size, symmetric)
    return dtype in _KERNEL_DTYPES and bits in _KERNEL_BITS, layout, layout.buffer_bytes


def pack(
    flat: Tensor,
    format: Format,
    streams: random.Streams | None = None,
    mapping: Mapping | None = None,
) -> Packed:
    """Pack a tensor.

    Args:
        flat: 1-D and contiguous; bfloat16, float16, float32 or float64, or bool with the format of
            masks. May be empty. It is only read, and needs no gradient.
        format: of the result.
        streams: where the number of the stream of noise comes from; None: the process-wide count.
        mapping: what is packed in place of the elements; with the format of masks, their signs.

    Raises:
        InvalidValueError: `flat` is none of these; the text says what it is.

    Memory: the packed buffer; temporary: none by a kernel, up to 26 bytes an element by the
    reference.
    Sync: none. Enqueued on the current stream of the tensor's device.
    Error bound: see the head of this file. Masks are exact.

    Example:
        >>> x = torch.randn(1000)
        >>> (unpack(pack(x, Format())) - x).abs().max() < x.abs().max() / 126
        tensor(True)
    """
    mask = format.bits == MASK_BITS and mapping is None
    if (
        type(flat) not in PLAIN
        or flat.dtype not in (_MASK_DTYPES if mask else FLOAT_DTYPES)
        or flat.dim() != 1
        or flat.layout is not torch.strided
        or flat.is_nested
        or flat.is_meta
        or not flat.is_contiguous()
    ):
        raise InvalidValueError(_what_is_wrong(flat, mask))
    return packed(flat, format, streams, mapping)


def packed(
    flat: Tensor, format: Format, streams: random.Streams | None, mapping: Mapping | None
) -> Packed:
    """Return what pack() does; arguments are trusted. The tensor may have any shape and a graph."""
    form = MASK_FORMAT if format.bits == MASK_BITS else format
    buffer, stream = encoded(flat, form, streams, mapping), current_stream(flat)
    return Packed(buffer, flat.numel(), flat.dtype, form, mapping, stream=stream)


def unpack(packed: Packed, shape: tuple[Size, Size] | None = None) -> Tensor:
    """Decode a packed tensor into fresh memory, on the device of its buffer.

    1-D; or of the `shape`, where a kernel does it: a size and a stride that reach over as many
    elements, each of them once.

    Memory: the decoded tensor; temporary: none by a kernel, up to 12 bytes an element by the
    reference.
    Sync: none. Enqueued on the current stream of the buffer's device.

    Example:
        >>> unpack(pack(torch.tensor([True, False]), MASK_FORMAT))
        tensor([ True, False])
    """
    buffer = packed.buffer
    if packed.stream is None or packed.stream != current_stream(buffer):
        # Backward reads it on another stream than the one that packed it.
        function = None if packed.mapping is None else packed.mapping.function
        outlive_all((buffer, *(function or ())))
    return decoded(buffer, packed.numel, packed.dtype, packed.format, packed.mapping, shape)


def decoded(
    buffer: Tensor, numel: int, dtype: torch.dtype, format: Format, mapping: Mapping | None = None,
    shape: tuple[Size, Size] | None = None,
) -> Tensor:  # fmt: skip
    """Return what unpack() does of a buffer; arguments are trusted."""
    bits, device = format.bits, buffer.device
    has_kernels, layout, _ = _facts(dtype, numel, bits, format.group_size, format.symmetric)
    launch = _launch(device) if has_kernels else None
    function = None if launch is None or mapping is None else mapping.function
    if mapping is not None and function is None:
        of = torch.bool if bits == MASK_BITS else torch.float32
        return mapping.back(decoded(buffer, numel, of, format), dtype)
    if launch is None:
        if bits == MASK_BITS:
            return reference.unpack_mask(buffer, numel)
        return reference.dequantize(buffer, layout, dtype)
    # Made in its shape: a view of it takes as long as the memory.
    size, stride = shape or ((numel,), (1,))
    flat = torch.empty_strided(size, stride, dtype=dtype, device=device)
    if bits == MASK_BITS:
        (launch.unpack_mask if function is None else launch.unpack_signs)(buffer, flat)
    elif function is None:
        launch.dequantize(buffer, flat, layout)
    else:
        launch.dequantize_map(buffer, flat, layout, function)
    return flat


def encoded(
    flat: Tensor,
    format: Format,
    streams: random.Streams | None = None,
    mapping: Mapping | None = None,
) -> Tensor:
    """Return the buffer of what packed() returns."""
    device, bits, noise, stream = flat.device, format.bits, None, 0
    has_kernels, layout, nbytes = _facts(
        flat.dtype, flat.numel(), bits, format.group_size, format.symmetric
    )
    launch = _launch(device) if has_kernels else None
    function = None if launch is None or mapping is None else mapping.function
    if mapping is not None and function is None:
        return encoded(mapping.of(_range(flat)), format, streams)
    if format.rounding == "stochastic":
        noise = random.state(device)
        stream = random.next_stream() if streams is None else streams.next()
    if launch is None:
        plain = _range(flat)
        if bits == MASK_BITS:
            return packs.made(reference.pack_mask(plain))
        return packs.made(reference.quantize(plain, layout, noise=noise, stream=stream))
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if bits == MASK_BITS:
        (launch.pack_mask if function is None else launch.pack_signs)(flat, buffer)
    elif function is None:
        launch.quantize(flat, buffer, layout, noise=noise, stream=stream)
    else:
        launch.quantize_map(flat, buffer, layout, function, noise=noise, stream=stream)
    return packs.made(buffer) if packs.watchers else buffer


def _range(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as 1-D, without a graph; kernels ask for its address only."""
    plain = tensor.dim() == 1 and not tensor.requires_grad
    return tensor if plain else tensor.detach().view(-1)


@lru_cache(maxsize=64)
def _launch(device: torch.device) -> ModuleType | None:
    """Return the launchers where the kernels serve a device; imports triton no sooner than then."""
    launch = importlib.import_module("vramx.kernels.launch")
    return launch if launch.supported(device) else None


def _what_is_wrong(flat: object, mask: bool) -> str:
    accepted = "accepted is a contiguous 1-D tensor of " + (
        "bool" if mask else "bfloat16, float16, float32 or float64"
    )
    if type(flat) not in PLAIN:
        return f"cannot pack a {type(flat).__name__}; {accepted}"
    assert isinstance(flat, Tensor)
    if flat.is_nested:
        return f"cannot pack a nested tensor; {accepted}"
    name = str(flat.dtype).removeprefix("torch.")
    shape = tuple(flat.shape)
    if flat.layout is not torch.strided:
        return f"cannot pack a tensor of layout {flat.layout} and shape {shape}; {accepted}"
    if flat.dtype not in (_MASK_DTYPES if mask else FLOAT_DTYPES):
        return f"cannot pack a tensor of {name}; {accepted}"
    if flat.is_meta:
        return f"cannot pack a tensor on the meta device, which has no data; {accepted}"
    return f"cannot pack a tensor of shape {shape} and strides {flat.stride()}; {accepted}"
