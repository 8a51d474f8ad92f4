"""The steps that blocks are made of, each on modules that are understood and on any others.

A norm, projections, the feed-forward part and a residual addition take the modules of a block and
compute them together. A module that is not understood - of another class, with hooks, with a
forward of its own, with a weight that is no plain tensor - is called as it is, in its place. So a
block with a LoRA at one projection is fused but for that one. No state; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.compression.config import Compression
from vramx.compression.fakes import PLAIN
from vramx.nn import passes
from vramx.nn.activation import gelu_linear, silu_linear
from vramx.nn.arguments import autocast_dtype
from vramx.nn.dropout import dropout_add
from vramx.nn.families.swap import RECOMPUTE_MLP, Settings, class_name, untouched
from vramx.nn.feed_forward import TwoLinears, two_linears
from vramx.nn.glu import glu_linear
from vramx.nn.linear import linears
from vramx.nn.mlp import mlp
from vramx.nn.norm import Normed, rms_norm
from vramx.nn.norm import norm as norm_as

HALVES = (torch.bfloat16, torch.float16)
# What goes into projections: a norm's result, or any tensor.
Source = Normed | Tensor
Terms = tuple[Tensor, Tensor | None]

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
CONV1D = "transformers.pytorch_utils.Conv1D"
# GELU's kinds by class; nn.GELU says its own.
_KINDS = {
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.PytorchGELUTanh": "gelu_tanh",
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
}


def tensor_of(source: Source) -> Tensor:
    """Return the tensor that a source stands for."""
    return source.y if isinstance(source, Normed) else source


# -- Norms -----------------------------------------------------------------------------------------


def normalise(
    norm: nn.Module,
    x: Tensor,
    residual: Tensor | None,
    keep: Compression,
    into: Sequence[nn.Module] = (),
) -> tuple[Source, Tensor]:
    """Return a norm module's result for x + residual, and that sum.

    `into`: the Linears that the result goes into, and nothing else; none where it may be read by
    others. Under autocast it then has the type that they compute in.
    """
    if residual is not None and residual.dtype != x.dtype and keep.packs:
        # Under autocast: the sum has the type of the residual stream, and of the norm's weight.
        # Not worth another operator where nothing is packed.
        x, residual = x + residual, None
    normed = normed_by(norm, x, residual, keep, into) if untouched(norm) else None
    if normed is not None:
        return normed, normed.residual_sum
    total = x if residual is None else x + residual
    return norm(total), total


def normed_by(
    norm: Any,
    x: Tensor,
    residual: Tensor | None,
    keep: Compression,
    into: Sequence[nn.Module] = (),
) -> Normed | None:
    """Return the result by what a norm's class is; None for a class or weights not understood."""
    name = class_name(type(norm))
    weight: Any = getattr(norm, "weight", None)
    if weight is not None and not plain_tensor(weight):
        return None
    if name == GEMMA_NORM:
        return rms_norm(x, 1.0 + weight.float(), norm.eps, residual, keep)
    if type(norm) is nn.LayerNorm or (name == TIMM_NORM and not norm._fast_norm):
        if len(norm.normalized_shape) != 1 or not (_fits(weight, x) or _widens(weight, x, keep)):
            return None
        asks = into and torch.is_autocast_enabled(x.device.type)
        asks = asks and all(terms_of(module) is not None for module in into)
        dtype = autocast_dtype(x) if asks else None
        return norm_as((x, residual), (weight, norm.bias), (norm.eps, True), keep, dtype)
    if name in RMS_NORMS and _fits(weight, x):
        return rms_norm(x, weight, norm.variance_epsilon, residual, keep)
    return None


def _fits(weight: Tensor | None, x: Tensor) -> bool:
    """Tell whether a norm's result has the type of x: another is promoted, or there is none."""
    return weight is None or weight.dtype == x.dtype


def _widens(weight: Tensor, x: Tensor, keep: Compression) -> bool:
    """Tell whether autocast gives torch's layer norm a copy of x, and a pack can be in its place.

    Its weights are in float32 then, as is the copy, which torch keeps. What lives for one block's
    backward is not worth an operator.
    """
    half = x.dtype in HALVES and weight.dtype == torch.float32
    packs = keep.packs and not passes.saves_are_brief()
    return half and packs and torch.is_autocast_enabled(x.device.type)


# -- Linears ---------------------------------------------------------------------------------------


def terms_of(module: Any) -> Terms | None:
    """Return the weight (outputs, inputs) and the bias of a Linear; None if it is no plain one."""
    transposed = type(module) is not nn.Linear
    if transposed and class_name(type(module)) != CONV1D:
        return None
    weight, bias = module.weight, module.bias
    plain = plain_tensor(weight) and (bias is None or plain_tensor(bias))
    if not plain or not untouched(module):
        return None
    return weight.t() if transposed else weight, bias


def project(source: Source, modules: Sequence[nn.Module], keep: Compression) -> list[Tensor]:
    """Return what each of several Linears makes of one source, which they keep together."""
    found = [terms_of(module) for module in modules]
    ours = [terms for terms in found if terms is not None]
    weights, biases = [weight for weight, _ in ours], [bias for _, bias in ours]
    done = iter(linears(source, weights, biases, keep) if ours else ())
    y = tensor_of(source)
    return [
        module(y) if terms is None else next(done)
        for module, terms in zip(modules, found, strict=True)
    ]


def kind_of(activation: Any) -> str | None:
    """Return the kernels' word for an activation, a module or a function; None: not known."""
    if not isinstance(activation, nn.Module):
        return {F.gelu: "gelu", F.silu: "silu"}.get(activation)
    if not untouched(activation):
        return None
    if type(activation) is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    return _KINDS.get(class_name(type(activation)))


# -- The feed-forward part -------------------------------------------------------------------------


class FeedForward(NamedTuple):
    """Modules: the first Linear, or gate and up; the activation; the last Linear."""

    inner: tuple[nn.Module, ...]
    activation: Any
    outer: nn.Module


# Computes the last Linear of a feed-forward part and adds a residual, or None.
Finish = Callable[[Tensor | None], Tensor]


def feed_forward(source: Source, part: FeedForward, settings: Settings) -> Finish:
    """Compute a feed-forward part but for its last Linear, which is to be called next.

    So a caller can let go of the source between the two, where a tensor of its size matters: of a
    gated unit. All of any other part that is understood, and of one that is to be computed again
    in backward, is left to the second call.
    """
    apart = len(part.inner) > 1 or passes.saves_are_brief()
    terms = None if apart and settings.level != RECOMPUTE_MLP else terms_of_all(part)
    if terms is not None:
        return partial(whole_feed_forward, source, TwoLinears(*terms), settings)
    inside = project(source, part.inner, settings.keep)
    return partial(_finish, inside, part, settings.keep)


def whole_feed_forward(
    source: Source, terms: TwoLinears, settings: Settings, residual: Tensor | None
) -> Tensor:
    """Compute a feed-forward part from its terms and add a residual."""
    keep, (weights, biases, kind, scale) = settings.keep, terms
    if settings.level != RECOMPUTE_MLP and not passes.saves_are_brief():
        return two_linears(source, terms, residual, keep)
    if scale is not None:
        last = biases[-1]
        weights = [*weights[:-1], weights[-1] * scale.view(-1, 1)]
        biases = [*biases[:-1], None if last is None else last * scale]
    if settings.level == RECOMPUTE_MLP:
        return mlp(source, weights, biases, activation=kind, residual=residual, keep=keep)
    (inside,) = linears(source, weights[:1], biases[:1], keep)
    return _activated_linear(inside, kind, (weights[-1], biases[-1]), keep, residual)


def feed_forward_add(finish: Finish, dropout: Any, residual: Tensor) -> Tensor:
    """Return dropout(a feed-forward part's result) + residual."""
    if _probability(dropout) == 0:
        return finish(residual)
    return add(dropout, finish(None), residual)


def terms_of_all(part: FeedForward) -> tuple[list[Tensor], list[Tensor | None], str] | None:
    """Return the weights, the biases and the activation's word; None if one is not understood."""
    kind = kind_of(part.activation)
    found = [terms_of(module) for module in (*part.inner, part.outer)]
    known = [terms for terms in found if terms is not None]
    if kind is None or len(known) < len(found):
        return None
    return [weight for weight, _ in known], [bias for _, bias in known], kind


def _finish(
    inside: Sequence[Tensor], part: FeedForward, keep: Compression, residual: Tensor | None
) -> Tensor:
    kind, terms = kind_of(part.activation), terms_of(part.outer)
    first, *up = inside
    if kind is None or terms is None:
        value = part.activation(first)
        y: Tensor = part.outer(value * up[0] if up else value)
        return y if residual is None else residual + y
    if up:
        return glu_linear(first, up[0], *terms, activation=kind, residual=residual, keep=keep)
    return _activated_linear(first, kind, terms, keep, residual)


def _activated_linear(
    x: Tensor, kind: str, terms: Terms, keep: Compression, residual: Tensor | None
) -> Tensor:
    if kind == "silu":
        return silu_linear(x, *terms, residual=residual, keep=keep)
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    return gelu_linear(x, *terms, approximate, residual=residual, keep=keep)


# -- Residuals -------------------------------------------------------------------------------------


def add(dropout: Any, x: Tensor, residual: Tensor) -> Tensor:
    """Return dropout(x) + residual for a Dropout module, or any other one."""
    p = _probability(dropout)
    return dropout(x) + residual if p is None else dropout_add(x, residual, p, p > 0)


def add_normalise(
    dropout: Any, norm: nn.Module, parts: tuple[Tensor, Tensor], keep: Compression
) -> tuple[Source, Tensor]:
    """Return norm(dropout(x) + residual) and the sum, for `parts` = (x, residual)."""
    x, residual = parts
    p = _probability(dropout)
    if p is None:
        return normalise(norm, dropout(x), residual, keep)
    if p > 0:
        return normalise(norm, dropout_add(x, residual, p), None, keep)
    return normalise(norm, x, residual, keep)


def _probability(dropout: Any) -> float | None:
    """Return the probability of a Dropout, 0 of what does nothing; None if it is neither."""
    if type(dropout) is nn.Identity and untouched(dropout):
        return 0.0
    if type(dropout) is not nn.Dropout or not untouched(dropout):
        return None
    return float(dropout.p) if dropout.training else 0.0


def plain_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor of no subclass: neither quantised nor distributed."""
    return type(value) in PLAIN
