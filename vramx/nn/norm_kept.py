"""What is kept of a norm, as kernels and tensor operations read it, and what is made of it again.

The normalised input is kept: as it is, or packed in groups that a kernel unpacks in the same pass
where they divide a row. No state; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vramx.kernels import norm_launch
from vramx.nn import reference_norm as reference
from vramx.nn.differentiation import attach
from vramx.nn.keeping import KERNEL_DTYPES, RAW, Spec, decode, served


def output_again(
    kept: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    shape: Sequence[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    spec: Sequence[int],
) -> Tensor:
    """Return what norm_output() does, inside of an operator; `dtypes` are its stored and dtype."""
    kind, (weight, bias), (stored, dtype) = Spec(*spec), affine, dtypes
    if weight is None and bias is None and kind.bits != RAW:
        return decode(kept, shape, dtype, kind)
    y = kept.new_empty(shape, dtype=dtype)
    like = y if stored == dtype else kept.new_empty(shape, dtype=stored)
    if not (has_kernel(like) and dtype in KERNEL_DTYPES):
        return y.copy_(reference.affine(normalised_of(kept, y, stored, kind), weight, bias))
    vectors = contiguous_of(norm_launch.Affine(weight, bias))
    norm_launch.norm_output(rows_of(kept, like, kind, None), vectors, y)
    return y


def input_again(kept: Tensor, rstd: Tensor, probe: Tensor, spec: Spec) -> Tensor:
    """Return a norm's input, up to a constant if it was centred, in its place in the graph."""
    normalised = normalised_of(kept, probe, probe.dtype, spec)
    return attach(normalised / rstd.unsqueeze(-1), probe)


def has_kernel(x: Tensor) -> bool:
    """Tell whether a kernel takes a tensor's device, type and rows."""
    return served(x) and x.shape[-1] <= norm_launch.LONGEST_ROW


def packs_in_kernel(x: Tensor, spec: Spec) -> bool:
    """Tell whether a kernel packs in the pass that normalises."""
    fits = spec.bits == 8 and spec.symmetric
    return bool(fits) and norm_launch.packs(x.shape[-1], x.numel(), spec.group_size)


def contiguous_of(affine: norm_launch.Affine) -> norm_launch.Affine:
    """Return weight and bias as kernels take them."""
    weight, bias = affine
    if (weight is None or weight.is_contiguous()) and (bias is None or bias.is_contiguous()):
        return affine
    return norm_launch.Affine(
        None if weight is None else weight.contiguous(), None if bias is None else bias.contiguous()
    )


def rows_of(kept: Tensor, like: Tensor, spec: Spec, rstd: Tensor | None) -> norm_launch.Kept:
    """Return what a kernel reads; `like` has the shape and the type of what was kept."""
    if packs_in_kernel(like, spec):
        return norm_launch.Kept(kept, rstd, spec.group_size)
    return norm_launch.Kept(decode(kept, like.shape, like.dtype, spec), rstd, 0)


def normalised_of(kept: Tensor, like: Tensor, stored: torch.dtype, spec: Spec) -> Tensor:
    """Return the normalised input of the shape of `like`, in the type that is computed in."""
    packed_wide = spec.bits != RAW and stored != torch.float64
    dtype = torch.float32 if packed_wide else stored
    return reference.wide(decode(kept, like.shape, dtype, spec))
