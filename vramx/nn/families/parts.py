"""The steps that blocks are made of, each on modules that are understood and on any others.

Activations, the feed-forward part and a residual addition take the modules of a block and compute
them together. What a Linear computes, with its adapters, is projection.py's, and what a norm does
is norm_modules.py's. A module that is not understood - of another class, with hooks, with a forward
of its own, with a weight that is no plain tensor - is called as it is, in its place. No state; any
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.compression.config import Compression
from vramx.nn import passes
from vramx.nn.dropout import dropout_add
from vramx.nn.families.norm_modules import normalise
from vramx.nn.families.projection import (
    Projection,
    Source,
    behind,
    probability_of,
    projected,
    projection_of,
    tensor_of,
    terms_of,
)
from vramx.nn.families.questions import all_untouched, class_name, untouched
from vramx.nn.families.swap import RECOMPUTE_MLP, Settings
from vramx.nn.feed_forward import TwoLinears, two_linears
from vramx.nn.linear import linears
from vramx.nn.mlp import mlp
from vramx.nn.norm import Sources
from vramx.nn.products import is_long
from vramx.nn.readers import Behind
from vramx.nn.recomputed import recomputed
from vramx.nn.unit_linear import unit_linear

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


# -- Activations ----------------------------------------------------------------------------------


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
    terms = None if apart and not _keeps_nothing(source, settings) else terms_of_all(part)
    if terms is not None:
        return partial(whole_feed_forward, source, TwoLinears(*terms), settings)
    found = _found(part)
    if settings.level == RECOMPUTE_MLP and found.is_known():
        run = partial(_in_order, found, settings.keep)
        return lambda residual: recomputed(run, source, residual, settings.keep)
    return _begin(found, settings.keep, source)


def _keeps_nothing(source: Source, settings: Settings) -> bool:
    """Tell whether a part computes what is inside it again in backward.

    So it is where a block with many rows is recomputed as a whole: what is inside then goes through
    in tiles, and is computed as often, for the second pass of the block computes none of it.
    """
    if settings.level == RECOMPUTE_MLP:
        return True
    return passes.saves_are_brief() and is_long(tensor_of(source))


def whole_feed_forward(
    source: Source, terms: TwoLinears, settings: Settings, residual: Tensor | None
) -> Tensor:
    """Compute a feed-forward part from its terms and add a residual."""
    keep, (weights, biases, kind, scale) = settings.keep, terms
    again = _keeps_nothing(source, settings)
    if not again and not passes.saves_are_brief():
        return two_linears(source, terms, residual, keep)
    if scale is not None:
        last = biases[-1]
        weights = [*weights[:-1], weights[-1] * scale.view(-1, 1)]
        biases = [*biases[:-1], None if last is None else last * scale]
    if again:
        return mlp(source, weights, biases, activation=kind, residual=residual, keep=keep)
    (inside,) = linears(source, weights[:1], biases[:1], keep)
    return unit_linear((inside,), kind, Behind(weights[-1], biases[-1], residual), keep)[0]


def feed_forward_add(finish: Finish, dropout: Any, residual: Tensor) -> Tensor:
    """Return dropout(a feed-forward part's result) + residual."""
    if probability_of(dropout) == 0:
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


class _Found(NamedTuple):
    """What a feed-forward part computes now: adapters come and go between two calls."""

    inner: tuple[Projection, ...]
    activation: Any
    kind: str | None
    outer: Projection

    def is_known(self) -> bool:
        """Tell whether all of it is, so that it may run again on an input that is a pack's."""
        return self.kind is not None and all(p.is_known() for p in (*self.inner, self.outer))


def _found(part: FeedForward) -> _Found:
    inner = tuple([projection_of(module) for module in part.inner])
    return _Found(inner, part.activation, kind_of(part.activation), projection_of(part.outer))


def can_repeat(part: FeedForward) -> bool:
    """Tell whether a part can be computed again in backward."""
    return terms_of_all(part) is not None or _found(part).is_known()


def _in_order(part: _Found, keep: Compression, source: Source, residual: Tensor | None) -> Tensor:
    return _begin(part, keep, source)(residual)


def _begin(part: _Found, keep: Compression, source: Source) -> Finish:
    inside = projected(source, part.inner, keep)
    return partial(_finish, inside, part, keep)


def _finish(
    inside: Sequence[Tensor], part: _Found, keep: Compression, residual: Tensor | None
) -> Tensor:
    kind, y = part.kind, None
    if kind is not None:
        y = behind(part.outer, lambda read: unit_linear(inside, kind, read, keep), residual)
    if y is not None:
        return y
    (y,) = projected(_unit(inside, part.activation, kind, keep), [part.outer], keep)
    return y if residual is None else residual + y


def _unit(inside: Sequence[Tensor], activation: Any, kind: str | None, keep: Compression) -> Tensor:
    """Return what goes into the last Linear."""
    if kind is not None:
        return unit_linear(inside, kind, Behind(), keep)[0]
    first, *up = inside
    value: Tensor = activation(first)
    return value * up[0] if up else value


# -- Residuals -------------------------------------------------------------------------------------


def add(dropout: Any, x: Tensor, residual: Tensor) -> Tensor:
    """Return dropout(x) + residual for a Dropout module, or any other one."""
    p = probability_of(dropout)
    return dropout(x) + residual if p is None else dropout_add(x, residual, p, p > 0)


def add_normalise(
    dropout: Any, norm: nn.Module, parts: tuple[Tensor, Tensor], keep: Compression
) -> tuple[Source, Tensor]:
    """Return norm(dropout(x) + residual) and the sum, for `parts` = (x, residual)."""
    x, residual = parts
    p = probability_of(dropout)
    sources = Sources(dropout(x), residual) if p is None else Sources(x, residual, p)
    return normalise(norm, sources, keep)


def nothing(module: Any) -> bool:
    """Tell whether a module returns its input."""
    return probability_of(module) == 0 and all_untouched([module])
