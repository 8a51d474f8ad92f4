"""Forward and backward of the norms by channel: kernels, and plain torch where there are none.

For operators_channel_norm.py, which says what tensors are. A pass is a kernel where there is one
for the device, the type and the shape. Statistics and the sums of backward are torch's own
reductions. 4 bits are packed in a second pass. Nothing here has a gradient; a call never waits for
the device; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vramx.compression.codec import codec
from vramx.compression.codec.reference import unpack_mask
from vramx.compression.config import MASK_FORMAT
from vramx.kernels import channel_norm_launch as launch
from vramx.kernels import channel_norm_tables_launch as tables_launch
from vramx.kernels.layout import Layout
from vramx.nn import reference_channel_norm as reference
from vramx.nn.keeping import (
    NOTHING,
    ORDERS,
    RAW,
    SIGNS,
    Spec,
    decode,
    dense_like,
    draw,
    empty_buffer,
    encode,
    flat_in,
    fused_layout,
    served,
    shaped_in,
)
from vramx.nn.reference_norm import wide


class Norm(NamedTuple):
    """What one norm is: groups (0: batch norm), eps, and the activation behind it."""

    groups: int
    eps: float
    kind: str
    leak: float

    def activation(self) -> launch.Activation:
        return launch.Activation(self.kind, self.leak)

    def by_sign(self) -> bool:
        """Whether a bit an element is kept."""
        return self.kind in reference.BY_SIGN


class Places(NamedTuple):
    """Where a tensor's channels lie, how it is packed by a kernel, and what its bits take."""

    channels: launch.Channels
    layout: Layout | None
    bits_bytes: int
    has_kernel: bool  # for channels that lie so


# A program has tensors of the same few shapes in every step.
@lru_cache(maxsize=4096)
def places_of(sizes: torch.Size, groups: int, form: Spec) -> Places:
    """Return what the shape of a tensor decides, which is dense in the order of its form."""
    numel = sizes.numel()
    if form.order:
        channels = launch.Channels(1, sizes[1])
    else:  # groups have an order of 0
        inner = sizes[2:].numel() if numel else 1
        channels = launch.Channels(inner, sizes[1] * (sizes[0] if groups else 1))
    layout = fused_layout(numel, form)
    has_kernel = launch.positions(channels) is not None
    return Places(channels, layout, codec.bytes_of(numel, MASK_FORMAT), has_kernel)


Tables = tuple[Tensor | None, Tensor | None]
Forward = tuple[Tensor, Tensor | None, Tensor | None]


def forward_kernel(
    sources: tuple[Tensor, Tensor | None], tables: Any, norm: Norm, form: Spec
) -> Forward:
    """Return y, the buffer and the bits; None if nothing is kept."""
    x, residual = sources
    y = torch.empty_like(x)
    channels, layout, bits_bytes, _ = places_of(x.shape, norm.groups, form)
    how = (channels, norm.activation())
    if form.bits == NOTHING:
        launch.forward((x, residual), tables, (y, None), how, None)
        return y, None, None
    bits = x.new_empty(bits_bytes if norm.by_sign() else 0, dtype=torch.uint8)
    packs = layout is not None
    n = None if form.bits == SIGNS else empty_buffer(x, form) if packs else torch.empty_like(x)
    kept = launch.Kept(n, bits if norm.by_sign() else None, layout)
    launch.forward(
        (x, residual), tables, (y, kept), how, draw(x.device, form, 1) if packs else None
    )
    return y, n if packs else encode(x if n is None else n, form), bits


def forward_reference(
    sources: tuple[Tensor, Tensor | None], tables: Any, norm: Norm, form: Spec
) -> Forward:
    """Return what forward_kernel() does."""
    x, residual = sources
    mean, rstd, weight, bias = tables
    view = reference.by_channel(wide(x), norm.groups)
    n = (view - reference.along(mean, view)) * reference.along(rstd, view)
    z = reference.affine(n, weight, bias, None).reshape(x.shape)
    z = (z if residual is None else z + residual).to(x.dtype)
    y = dense_like(x, form.order).copy_(reference.torchs_activation(z, norm.kind, norm.leak))
    if form.bits == NOTHING:
        return y, None, None
    bits = x.new_empty(0, dtype=torch.uint8)
    if norm.by_sign():
        passes = ~(flat_in(form.order, z) <= 0)
        bits = codec.pack(passes, MASK_FORMAT).buffer
    n = dense_like(x, form.order).copy_(n.reshape(x.shape)) if form.bits == RAW else n
    return y, encode(n.reshape(x.shape), form), bits


# dx, g, and the gradients of weight and bias: each None if it is not wanted.
Results = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
# Weight and bias by channel, and rstd by table.
Parameters = tuple[Tensor | None, Tensor | None, Tensor]


class Backward(NamedTuple):
    """How one backward pass is: the norm, what was kept, the shape, and what is asked for."""

    norm: Norm
    form: Spec
    shape: reference.Shape
    given: bool
    wanted: Sequence[int]  # of Results


def backward_kernel(
    dy: Tensor, kept: tuple[Tensor, Tensor], parameters: Parameters, how: Backward
) -> Results:
    if how.form.bits == SIGNS:
        return _backward_kernel_by_signs(dy, kept[1], parameters, how)
    norm, affine = how.norm, parameter_tables(parameters[:2], how.shape)
    channels, layout, *_ = places_of(dy.shape, norm.groups, how.form)
    buffer = kept[0] if layout else decode(kept[0], dy.shape, dy.dtype, how.form)
    source = launch.Kept(buffer, kept[1] if norm.by_sign() else None, layout)
    activation = norm.activation()
    g = dy
    if launch.sums_fit(channels, source):
        shares = launch.shares_of_sums(dy, source, affine, (channels, activation))
        if norm.groups:
            factors, vectors = _factors(shares.sum(1), parameters, how)
        else:
            factors, vectors = _factors_of_shares(shares, parameters, how)
    else:
        g, totals = _summed(dy, source, affine, (channels, activation), norm.groups)
        factors, vectors = _factors(totals, parameters, how)
        activation = launch.Activation("none", 0.0)
    wants_dx, wants_g, *_ = how.wanted
    # g is written there if it is not there yet, and dx over g if nobody else is given that.
    apart = wants_g and g is dy
    written = torch.empty_like(dy) if apart else None
    dx = None
    if wants_dx:
        dx = torch.empty_like(dy) if wants_g or g is dy else g
    if dx is not None or written is not None:
        tables = (*affine, factors[0], *((None, None) if how.given else factors[1:]))
        launch.input_gradient(g, source, tables, (written, dx), (channels, activation))
    return dx, written if apart else g if wants_g else None, *vectors


def _backward_kernel_by_signs(
    dy: Tensor, bits: Tensor, parameters: Parameters, how: Backward
) -> Results:
    """Return the gradients of what is linear but for the signs: no sum is part of dx."""
    weight, bias, rstd = parameters
    norm, (wants_dx, wants_g, _, wants_bias) = how.norm, how.wanted
    channels, *_ = places_of(dy.shape, norm.groups, how.form)
    source = launch.Kept(None, bits if norm.by_sign() else None, None)
    dx = torch.empty_like(dy) if wants_dx else None
    g = torch.empty_like(dy) if wants_g or (wants_bias and norm.by_sign()) else None
    if dx is not None or g is not None:
        tables = (None, None, rstd if weight is None else rstd * weight, None, None)
        launch.input_gradient(dy, source, tables, (g, dx), (channels, norm.activation()))
    dbias = None
    if wants_bias and bias is not None:
        others = [d for d in range(dy.dim()) if d != 1]
        dbias = (dy if g is None else g).sum(others, dtype=rstd.dtype).to(bias.dtype)
    return dx, g if wants_g else None, None, dbias


def _factors(
    totals: Tensor, parameters: Parameters, how: Backward
) -> tuple[Sequence[Tensor], Tables]:
    """Return the tables of reference.factors(), and the gradients of weight and bias."""
    weight, bias, rstd = parameters
    table = reference.parameter_table(weight, how.shape)
    return reference.factors(totals, rstd, table, how.shape), _vectors(totals, (weight, bias), how)


def _factors_of_shares(
    shares: Tensor, parameters: Parameters, how: Backward
) -> tuple[Sequence[Tensor], Tables]:
    """Return the same for batch norm, in one launch."""
    weight, bias, rstd = parameters
    dweight, dbias = (
        torch.empty_like(rstd if each is None else each) if want else None
        for each, want in zip((weight, bias), how.wanted[2:], strict=True)
    )
    factors = rstd.new_empty((3, *rstd.shape))
    count = how.shape.sizes.numel() // how.shape.sizes[1]
    weight = None if weight is None else weight.contiguous()
    tables_launch.factors(shares, (rstd, weight), (factors, dweight, dbias), count)
    return factors.unbind(), (dweight, dbias)


def _summed(
    dy: Tensor,
    source: launch.Kept,
    affine: Tables,
    how: tuple[launch.Channels, launch.Activation],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Return g and the sums, by torch's reductions of g and n in memory."""
    n = torch.empty_like(dy) if source.layout else source.buffer
    assert n is not None
    g = dy if how[1].kind == "none" else torch.empty_like(dy)
    outputs = (None if g is dy else g, n if source.layout else None)
    if outputs != (None, None):
        launch.gradient(dy, source, affine, outputs, how)
    return g, _sums(g, n, groups)


def backward_reference(
    dy: Tensor, kept: tuple[Tensor, Tensor], parameters: Parameters, how: Backward
) -> Results:
    """Return what backward_kernel() does."""
    norm, order = how.norm, how.form.order
    n = reference.by_channel(decode_wide(kept[0], dy, how.form), norm.groups)
    z = reference.affine(n, *parameter_tables(parameters[:2], how.shape), None).reshape(dy.shape)
    signs = passing(kept[1], dy.shape, order) if norm.by_sign() else None
    g = reference.activation_gradient(wide(dy), z, norm.kind, norm.leak, signs)
    view = reference.by_channel(g, norm.groups)
    factors, vectors = _factors(reference.sums(view, n), parameters, how)
    slope, offset, along = (reference.along(each, view) for each in factors)
    wants_dx, wants_g, *_ = how.wanted
    dx = None
    if wants_dx:
        found = view * slope if how.given else view * slope - offset - n * along
        dx = dense_like(dy, order).copy_(found.reshape(dy.shape))
    return dx, dense_like(dy, order).copy_(g) if wants_g else None, *vectors


# -- Shapes, tables and sums -----------------------------------------------------------------------


def passing(bits: Tensor, shape: Sequence[int], order: int) -> Tensor:
    """Return what bits say, in the shape and the order of the tensor that they are of."""
    return shaped_in(order, unpack_mask(bits, torch.Size(shape).numel()), shape)


def new_bits(x: Tensor, norm: Norm) -> Tensor:
    """Return memory for a bit for each element, empty where the norm's kind needs none."""
    size_bytes = codec.bytes_of(x.numel(), MASK_FORMAT) if norm.by_sign() else 0
    return x.new_empty(size_bytes, dtype=torch.uint8)


def empty_in_order(like: Tensor, shape: Sequence[int], dtype: torch.dtype, order: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=ORDERS[order])


def has_kernel(x: Tensor, shape: reference.Shape, form: Spec) -> bool:
    return served(x) and places_of(x.shape, shape.groups, form).has_kernel


def parameter_tables(parameters: Tables, shape: reference.Shape) -> Tables:
    weight, bias = parameters
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    if not shape.groups:
        return weight, bias
    return reference.parameter_table(weight, shape), reference.parameter_table(bias, shape)


def statistics(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance, in float32 or wider, by torch's batch norm."""
    if not x.is_cuda or not x.numel():
        return reference.statistics(x, groups)
    if groups:
        x = x.view(1, x.shape[0] * groups, -1)
    found = torch.batch_norm_update_stats(x, None, None, 0.0)
    return found[0], found[1]


def _sums(g: Tensor, n: Tensor, groups: int) -> Tensor:
    g, n = (reference.by_channel(each, groups) for each in (g, n))
    if not g.is_cuda or not g.numel():
        return reference.sums(wide(g), wide(n))
    zero = g.new_zeros(g.shape[1], dtype=torch.float32)
    total, along, _, _ = torch.batch_norm_backward_reduce(
        g, n, zero, zero + 1, None, True, False, False
    )
    return torch.stack((total, along))


def _vectors(totals: Tensor, parameters: Tables, how: Backward) -> Tables:
    """Return the gradients of weight and bias, from the sums of g and of g n."""
    found: list[Tensor | None] = []
    pairs = zip(totals.unbind()[::-1], parameters, how.wanted[2:], strict=True)
    for total, parameter, want in pairs:
        vector = total.view(-1, how.shape.sizes[1]).sum(0) if how.shape.groups else total
        dtype = vector.dtype if parameter is None else parameter.dtype
        # A copy: results of an operator have no memory in common.
        found.append(vector.to(dtype, copy=True) if want else None)
    return found[0], found[1]


def decode_wide(kept: Tensor, like: Tensor, form: Spec) -> Tensor:
    """Return n of the shape of `like`, which has the type of what was kept."""
    packed_wide = form.bits != RAW and like.dtype != torch.float64
    dtype = torch.float32 if packed_wide else like.dtype
    return wide(decode(kept, like.shape, dtype, form))
