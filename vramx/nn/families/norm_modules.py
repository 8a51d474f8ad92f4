"""The norms of blocks, each on a module that is understood and on any other.

A module that is not understood is called as it is, in its place. No state; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vramx.compression.config import Compression
from vramx.nn import passes
from vramx.nn.arguments import autocast_dtype, own, sum_dtype
from vramx.nn.families.projection import Source, plain_tensor, projection_of
from vramx.nn.families.questions import class_name, untouched
from vramx.nn.norm import Normed, Sources
from vramx.nn.norm import norm as norm_as

HALVES = (torch.bfloat16, torch.float16)
_HF = "transformers.models"
RMS_NORMS = frozenset(
    f"{_HF}.{name}.modeling_{name}.{prefix}RMSNorm"
    for name, prefix in (
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("qwen2", "Qwen2"),
        ("qwen3", "Qwen3"),
    )
)
GEMMA_NORM = f"{_HF}.gemma.modeling_gemma.GemmaRMSNorm"
TIMM_NORM = "timm.layers.norm.LayerNorm"


def normalise(
    norm: nn.Module, sources: Sources, keep: Compression, into: Sequence[nn.Module] = ()
) -> tuple[Source, Tensor]:
    """Return a norm module's result for dropout(x) + residual, and that sum.

    `into`: the Linears that the result goes into, and nothing else; none where it may be read by
    others. Under autocast it then has the type that they compute in.
    """
    normed = normed_by(norm, sources, keep, into) if untouched(norm) else None
    if normed is not None:
        return normed, normed.residual_sum
    total = sources.total()
    return norm(total), total


def normed_by(
    norm: Any, sources: Sources, keep: Compression, into: Sequence[nn.Module] = ()
) -> Normed | None:
    """Return the result by what a norm's class is; None for a class or weights not understood."""
    name = class_name(type(norm))
    weight: Any = own(norm, "weight")
    if weight is not None and not plain_tensor(weight):
        return None
    if name == GEMMA_NORM:
        return norm_as(sources, (1.0 + weight.float(), None), (norm.eps, False), keep)
    if type(norm) is nn.LayerNorm or (name == TIMM_NORM and not norm._fast_norm):
        if len(norm.normalized_shape) != 1:
            return None
        return layer_normed((weight, own(norm, "bias"), norm.eps), sources, keep, into)
    if name in RMS_NORMS and _fits(weight, _dtype_of_sum(sources, keep)):
        return norm_as(sources, (weight, None), (norm.variance_epsilon, False), keep)
    return None


def layer_normed(
    terms: tuple[Tensor | None, Tensor | None, float],
    sources: Sources,
    keep: Compression,
    into: Sequence[nn.Module] = (),
) -> Normed | None:
    """Return a layer norm's result by its weight, bias and eps; None for what is not understood."""
    weight, bias, eps = terms
    if weight is not None and not plain_tensor(weight):
        return None
    x, dtype = sources.x, _dtype_of_sum(sources, keep)
    if not _fits(weight, dtype) and not _widens(weight, x, dtype, keep):
        return None
    asks = into and torch.is_autocast_enabled(x.device.type)
    asks = asks and all(projection_of(module).weight is not None for module in into)
    result = autocast_dtype(x) if asks else None
    return norm_as(sources, (weight, bias), (eps, True), keep, result)


def _dtype_of_sum(sources: Sources, keep: Compression) -> torch.dtype:
    """Return the type of what is normalised.

    Under autocast the sum has the type of the residual stream, and of the norm's weight. That is
    not worth an operator where nothing is packed or dropped.
    """
    x = sources.x
    return sum_dtype(x, sources.residual) if keep.packs or sources.p else x.dtype


def _fits(weight: Tensor | None, dtype: torch.dtype) -> bool:
    """Tell whether a norm's result has the type of what is normalised: others are promoted."""
    return weight is None or weight.dtype == dtype


def _widens(weight: Tensor | None, x: Tensor, dtype: torch.dtype, keep: Compression) -> bool:
    """Tell whether autocast gives torch's layer norm a copy of x, and a pack can be in its place.

    Its weights are in float32 then, as is the copy, which torch keeps. What lives for one block's
    backward is not worth an operator.
    """
    half = dtype in HALVES and weight is not None and weight.dtype == torch.float32
    packs = keep.packs and not passes.saves_are_brief()
    return half and packs and torch.is_autocast_enabled(x.device.type)
