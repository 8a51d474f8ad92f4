"""Attention of a block, from heads to the output projection.

Where a model calls torch's scaled_dot_product_attention, vramx's takes its place, with the output
projection in the same operator: values are packed, and the result is not kept. Any other call goes
to the model's own function, found as its modules find it, with the arguments that it is given
there. So masks, windows and random state are the model's. No state but a cache; any thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vramx.compression.config import Compression
from vramx.errors import warn_once
from vramx.nn import attention_kernels as kernels
from vramx.nn import passes
from vramx.nn.attention import attention_linear, scaled_dot_product_attention
from vramx.nn.attention_groups import Heads as InGroups
from vramx.nn.attention_groups import attention_in_groups
from vramx.nn.families.projection import (
    Projection,
    Source,
    behind,
    project,
    projected,
    projection_of,
    tensor_of,
)
from vramx.nn.families.questions import cache_of, names_of
from vramx.nn.keeping import NOTHING, Kept
from vramx.nn.norm import Normed
from vramx.nn.products import tiles
from vramx.nn.recomputed import Held
from vramx.nn.rotary import rotary
from vramx.patch.torch_functions import replaced

KNOWN = ("sdpa", "eager")
_SDPA = "transformers.integrations.sdpa_attention"
# What transformers' function for torch's attention does with these is known.
_UNDERSTOOD = frozenset(
    (
        *("module", "query", "key", "value", "attention_mask"),
        *("dropout", "scaling", "is_causal", "kwargs"),
    )
)

Heads = Sequence[Tensor]
# Returns what an output projection, a module, makes of attention's result; None: the result.
Finish = Callable[[nn.Module | None], Tensor]
_AS_IT_IS = Compression(level="keep")
_ATTENTION = ("scaled_dot_product_attention",)


def implementation(attention: Any) -> str | None:
    """Return the word for the function that an attention module calls, None if it is not known."""
    word = getattr(attention.config, "_attn_implementation", None)
    return word if word in KNOWN else None


class Attending(NamedTuple):
    """An attention module of transformers, and the function that it calls."""

    module: Any
    function: Callable[..., Any]


def attending(attention: Any) -> Attending | None:
    """Return an attention module with its function, found as it finds it; None: not known."""
    word, names = implementation(attention), names_of(attention)
    if word is None:
        return None
    eager = word == "eager"
    function = names.eager_attention_forward if eager else names.ALL_ATTENTION_FUNCTIONS[word]
    return Attending(attention, function)


def heads_of(projections: Sequence[Tensor], head_size: int) -> list[Tensor]:
    """Return (..., tokens, heads * size) as (..., heads, tokens, size), views."""
    shape = (*projections[0].shape[:-1], -1, head_size)
    return [p.view(shape).transpose(1, 2) for p in projections]


def takes_cache(call: dict[str, Any]) -> bool:
    """Tell whether a call has no cache, or one that wants nothing but keys and values."""
    _, cache = cache_of(call)
    return cache is None or type(cache).__name__ == "DynamicCache"


def is_in(cache: Any, attention: Any) -> bool:
    """Tell whether a cache has keys of an attention module's layer."""
    return bool(cache.get_seq_length(attention.layer_idx))


def attend(
    of: Attending,
    heads: Heads,
    mask: Tensor | None,
    options: dict[str, Any],
    keep: Compression,
    values: Callable[[], Tensor] | None = None,
) -> Finish:
    """Attend as a model of transformers does; the projection is to be called next.

    `values` as values_again() returns it.
    """
    attention, function = of
    # What a recomputed block saves is not packed, and a mask with shared heads is better off with
    # the model's function, which repeats them: torch's kernels do not take both.
    packs = keep.packs and not passes.saves_are_brief()
    q, k, v = heads
    tokens = q.shape[2]
    alike = packs and tokens == k.shape[2] == v.shape[2]
    if alike and _is_plain(function, tokens, mask, options):
        how = {
            "is_causal": _is_causal(attention, tokens, mask, options),
            "scale": options["scaling"],
            "dropout_p": options["dropout"],
            "values": values,
        }
        return packed(heads, mask, how, keep)
    result: Tensor = function(attention, *heads, mask, **options)[0]
    return of_result(result.reshape(*result.shape[:-2], -1).contiguous())


def is_in_groups(source: Source) -> bool:
    """Tell whether attention of a norm's result goes through some heads at a time.

    So it does in a block that is recomputed as a whole, of sequences that are long: what attention
    takes in backward is most of what grows with them then.
    """
    return passes.saves_are_brief() and len(tiles(tensor_of(source).shape[-2])) > 1


def attend_in_groups(
    attention: Any, source: Source, mask: Tensor | None, options: dict[str, Any], heads: InGroups
) -> Tensor | None:
    """Attend from a norm's result to the output projection; None: not some heads at a time."""
    x = tensor_of(source)
    function = names_of(attention).ALL_ATTENTION_FUNCTIONS["sdpa"]
    tokens = x.shape[-2]
    if implementation(attention) != "sdpa" or not _is_plain(function, tokens, mask, options):
        return None
    modules = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    found = [projection_of(module) for module in modules]
    terms = [(each.weight, each.bias) for each in found if each.weight is not None]
    if len(terms) < len(found) or any(each.adapters for each in found):
        return None
    causal = _is_causal(attention, tokens, mask, options)
    call = kernels.Call(kernels.NO_KERNEL, options["dropout"], causal, options["scaling"])
    return attention_in_groups(x, terms, heads, mask, call)


def of_result(y: Tensor, kept: Kept | None = None) -> Finish:
    """Return how a projection is made of a result that is there already."""

    def finish(module: nn.Module | None) -> Tensor:
        # Without a pack the projection keeps what attention keeps, too.
        return y if module is None else project(y, [module], _AS_IT_IS, kept)[0]

    return finish


def packed(heads: Heads, mask: Tensor | None, options: dict[str, Any], keep: Compression) -> Finish:
    """Attend by vramx's scaled_dot_product_attention; the projection is to be called next."""
    q, k, v = heads
    values = options.pop("values", None)
    how = {"attn_mask": mask, "enable_gqa": q.shape[1] != k.shape[1], "keep": keep, **options}

    def finish(module: nn.Module | None) -> Tensor:
        y = None
        if module is not None:
            y = behind(
                projection_of(module),
                lambda read: attention_linear((q, k, v), read, values=values, **how),
            )
        if y is not None:
            return y
        alone = scaled_dot_product_attention(q, k, v, **how)
        return of_result(alone.y.transpose(1, 2).flatten(2), alone.kept)(module)

    return finish


def values_again(source: Source, found: Projection, head_size: int) -> Callable[[], Tensor] | None:
    """Return how values are made again in backward, from what a norm keeps; None: they are packed.

    They are where the projection's weight is frozen. Frozen weights take two products where others
    take three, and one more of the narrowest is a hundredth of a Llama block's time, for a fiftieth
    of what the block keeps. Not under autocast, which backward is without, and not where a mask
    would have to be drawn again.
    """
    learns = found.weight is not None and found.weight.requires_grad
    if learns or not found.is_known() or any(adapter.p for adapter in found.adapters):
        return None
    if not isinstance(source, Normed) or source.kept.spec.bits == NOTHING:
        return None
    if torch.is_autocast_enabled(source.y.device.type):
        return None
    held = Held(source.kept, source.y.shape, source.y.dtype)

    def make() -> Tensor:
        with torch.no_grad():
            return heads_of(projected(held.open(), [found], _AS_IT_IS), head_size)[0]

    return make


def turn(attention: Any, q: Tensor, k: Tensor, positions: tuple[Tensor, Tensor]) -> Heads:
    """Return q and k turned as the model's apply_rotary_pos_emb() does."""
    names = names_of(attention)
    function = names.apply_rotary_pos_emb
    cos, sin = positions
    if function.__module__ != names.__name__ or cos.dim() != 3:
        return function(q, k, cos, sin)  # type: ignore[no-any-return]
    return rotary(q, k, cos.unsqueeze(1), sin.unsqueeze(1))


def cannot_centre(found: Projection) -> bool:
    """Tell whether keys that are turned by their positions may have a large constant before that.

    Packed attention takes the keys' mean away, so that none of it reaches the gradient of the
    queries. A bias that was turned is another one at each position, and its mean is not it. The
    known case without is a projection that has no bias; all else may have one.
    """
    return found.may_add()


def _is_causal(attention: Any, tokens: int, mask: Tensor | None, options: dict[str, Any]) -> bool:
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(attention, "is_causal", True)
    return bool(causal and mask is None and tokens > 1)


def _is_plain(
    function: Callable[..., Any], tokens: int, mask: Tensor | None, options: dict[str, Any]
) -> bool:
    """Tell whether a call of transformers' function is torch's attention and nothing else.

    `tokens` are those of queries, keys and values.
    """
    if function.__module__ != _SDPA or not (mask is None or mask.shape[-1] == tokens):
        return False
    if not attention_is_torchs():
        return False
    return not any(options.get(name) is not None for name in _not_understood(function))


@torch.compiler.assume_constant_result
def attention_is_torchs() -> bool:
    """Tell whether torch's attention is torch's own: a program may have its own in that place."""
    is_own = replaced(_ATTENTION) is None
    if not is_own:
        warn_once(
            "attention of blocks is computed as before optimize(): "
            "torch.nn.functional.scaled_dot_product_attention is not torch's own"
        )
    return is_own


@torch.compiler.assume_constant_result
def _not_understood(function: Callable[..., Any]) -> tuple[str, ...]:
    return _other_parameters(function)


@lru_cache(maxsize=64)
def _other_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple({"softcap", *inspect.signature(function).parameters} - _UNDERSTOOD)
