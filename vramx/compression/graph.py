"""Compression inside a torch.compile'd graph: the hooks as graphs that the compiler inlines.

Python hooks around a compiled model see all it saved at its end, and all again at the start of its
backward, so that they save nothing at the peak. Hooks that are fx.GraphModules are traced into the
compiled graphs instead, for each tensor by itself, and fused there. This file holds that pair;
graph_policy.py decides about the nodes of a graph.

The codec is the reference's arithmetic with the rows of a group as the last dimension, so that no
padding is needed, and another noise: a hash of the element's number, a few instructions where seven
rounds of Philox are hundreds that a compiler repeats for every element. Needs a torch that says
which node a hook is inlined for, as 2.11 does. Building the hooks takes milliseconds, once for each
set of options; the rest happens while torch compiles.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from vramx.compression.asked import options_of
from vramx.compression.codec import random, reference
from vramx.compression.codec.rows import is_too_short
from vramx.compression.config import LEAST_OF_ROWS, Compression, Format
from vramx.compression.policy.graph_policy import (
    is_exact,
    is_normalised,
    is_statistic,
    multiplies_exponential,
    saturates,
    undoes_columns,
)
from vramx.errors import UnsupportedTorchError
from vramx.kernels.layout import has_outliers


def _find_hook_context() -> Callable[[], Any] | None:
    """Return torch's function that says which node the hooks are being inlined for."""
    try:
        from torch._functorch._aot_autograd import graph_compile
    except ImportError:  # an older torch has no such module
        return None
    return getattr(graph_compile, "_get_saved_tensor_hook_context", None)


_hook_context = _find_hook_context()
_PACKED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_SMALLEST_GROUP = 16
_MOST_ELEMENTS = (1 << 31) - 1  # that the noise has numbers for
# lowbias32 of Chris Wellons, "Prospecting for hash functions", 2018; as signed numbers.
_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))
_LIMITS = torch.finfo(torch.float32)
_GOLDEN = 0x9E3779B1 - (1 << 32)


# -- Noise ----------------------------------------------------------------------------------------


# torch 2.6 reads no schema off annotations that are strings.
@torch.library.custom_op(
    "vramx::noise_key", mutates_args=(), schema="(int slot, Device device) -> Tensor"
)
def noise_key(slot: int, device: torch.device) -> Tensor:
    """Return the key of one tensor's noise at this call: int32[4] on the device.

    An operation of its own, because a graph must not hold the number of a stream: it would draw the
    same noise in every step. `slot` only keeps two calls in one graph from being merged.
    """
    random.renew_on_replay(device)  # the number below is the same in all of them
    mixed = (random.next_stream() * 0x9E3779B97F4A7C15 + slot) & ((1 << 64) - 1)
    key = random.state(device).view(torch.int32).clone()
    key[2].add_(_signed(mixed))
    key[3].add_(_signed(mixed >> 32))
    return key


@noise_key.register_fake
def _(_slot: int, device: torch.device) -> Tensor:
    return torch.empty(4, dtype=torch.int32, device=device)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def hash_bytes(numel: int, key: Tensor) -> Tensor:
    """Return 8 random bits for each of `numel` elements, as int32: a hash of number and key."""
    h = torch.arange(numel, dtype=torch.int32, device=key.device) ^ key[0] ^ key[2]
    h = (h ^ ((h >> 16) & 0xFFFF)) * _FACTORS[0]
    # A second key within the hash: without it two keys would give the same noise, rearranged.
    h = h + (key[1] + key[3] + key[2] * _GOLDEN)
    h = (h ^ ((h >> 15) & 0x1FFFF)) * _FACTORS[1]
    return (h >> 24) & 0xFF


# -- The codec ------------------------------------------------------------------------------------


def encode(rows: Tensor, format: Format, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (uint8), headers (int16, or int32 where asymmetric) and outliers (int32, empty
    without), a row a group.

    The formulas are the reference's; see there.
    """
    x = rows.to(torch.float32)
    marks, outliers = None, x.new_empty(0, dtype=torch.int32)
    if has_outliers(format.bits, format.symmetric):
        marks, outliers, scale_bits = reference.split_outliers(x)
        header = (scale_bits >> 16).to(torch.int16)
    elif format.symmetric:
        scale_bits = reference._scale_bits(x.abs().amax(1), (1 << (format.bits - 1)) - 1)
        header = (scale_bits >> 16).to(torch.int16)
    else:
        low_bits = reference._round_down(x.amin(1))
        low = low_bits.view(torch.float32)
        scale_bits = reference._scale_bits(x.amax(1) - low, (1 << format.bits) - 1)
        header = ((scale_bits >> 16) & 0xFFFF) | low_bits
        x = x - low[:, None]
    t = x * (1.0 / scale_bits.view(torch.float32))[:, None]
    if key is None:
        values = (t + reference._MAGIC).view(torch.int32)
    else:
        fixed = (t + reference._MAGIC_OF_256THS).view(torch.int32)
        values = (fixed + hash_bytes(t.numel(), key).view_as(t)) >> 8
    if marks is not None:
        values = torch.where(marks != 0, marks, values)
    if format.bits == 4:
        half = format.group_size // 2
        values = (values[:, :half] & 15) | ((values[:, half:] & 15) << 4)
    return (values & 0xFF).to(torch.uint8), header, outliers


def decode(
    codes: Tensor, header: Tensor, outliers: Tensor, format: Format, dtype: torch.dtype
) -> Tensor:
    """Return the rows of groups again."""
    q = codes.to(torch.int32)
    if format.bits == 4:
        q = torch.cat([q & 15, q >> 4], 1)
    if format.symmetric:
        top = 1 << (format.bits - 1)
        x = torch.where(q >= top, q - 2 * top, q).to(torch.float32)
        scale = (header.to(torch.int32) << 16).view(torch.float32)[:, None]
        if has_outliers(format.bits, format.symmetric):
            x = reference.decode_with_outliers(x, scale, outliers)
        else:
            x = x * scale
    else:
        x = q.to(torch.float32) * (header << 16).view(torch.float32)[:, None]
        x = x + (header & reference._UPPER_HALF).view(torch.float32)[:, None]
    return _in(dtype, x)


def _in(dtype: torch.dtype, x: Tensor) -> Tensor:
    if dtype == torch.float16:
        x = x.clamp(-reference._FLOAT16_MAX, reference._FLOAT16_MAX)
    return x.to(dtype)


# -- The hooks ------------------------------------------------------------------------------------


class _Hooks:
    """The pair of functions of one set of options, called while torch traces, with fake tensors."""

    def __init__(self, options: Compression) -> None:
        self._options = options
        self._slots = itertools.count()

    def pack(self, tensor: Tensor) -> Any:
        if not torch._subclasses.fake_tensor.is_fake(tensor):
            return tensor.detach()  # between the graphs: kept
        form = self._format(tensor)
        if form is None:
            return tensor
        order = _dense_order(tensor)
        dims = tensor.permute(order)
        factors: tuple[Tensor, ...] = ()
        if _share_groups(tensor, order[-1], form.group_size):
            factors = (_factors(dims),)
            dims = _roots(dims.to(torch.float32) * factors[0])
        key = None
        if form.rounding == "stochastic":
            key = noise_key(next(self._slots), tensor.device)
        codes, header, outliers = encode(dims.reshape(-1, form.group_size), form, key)
        # Constants become part of the graphs; an object of ours could not.
        stored = (form.bits, form.group_size, form.symmetric)
        sizes, places = _distinct(dims.shape)
        kind = tensor.dtype, tuple(order)
        return codes, header, outliers, stored, kind, sizes, places, *factors

    @staticmethod
    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        codes, header, outliers, stored, (dtype, order), sizes, places, *factors = packed
        size = [sizes[place] for place in places]
        form = Format(*stored)
        dims = decode(codes, header, outliers, form, torch.float32 if factors else dtype).view(size)
        for each in factors:  # one, or none
            dims = _in(dtype, dims * dims.abs() / each)
        back = [0] * len(order)
        for position, dim in enumerate(order):
            back[dim] = position
        return dims.permute(back)

    def _format(self, tensor: Tensor) -> Format | None:
        """Return the format of a tensor that is packed, None of one that is kept."""
        if tensor.dtype not in _PACKED_DTYPES or tensor.numel() == 0 or tensor.shape[-1:] == (1,):
            return None  # (..., 1) is a statistic of a row: its error is that of the whole row
        if tensor.numel() * tensor.element_size() < int(self._options.min_bytes):
            return None
        if tensor.numel() > _MOST_ELEMENTS:
            return None
        form = self._options.format()
        order = _dense_order(tensor)
        group = form.group_size
        while order and group > _SMALLEST_GROUP and _is_too_large(group, tensor, order[-1]):
            group //= 2
        if not order or tensor.numel() % group or _is_exact_here():
            return None
        if _share_groups(tensor, order[-1], group) and is_too_short(
            tensor, tensor.shape[order[-1]]
        ):
            return None
        return Format(form.bits, group, form.symmetric, form.rounding)


def _is_too_large(group: int, tensor: Tensor, last: int) -> bool:
    """Tell whether groups do not fit, or have parts of two rows and need not."""
    row = tensor.shape[last] if 2 <= tensor.dim() <= 3 else group
    return bool(tensor.numel() % group or (row % LEAST_OF_ROWS == 0 and row % group))


def _share_groups(tensor: Tensor, last: int, group: int) -> bool:
    """Tell whether groups have parts of two rows of a matrix or of three dimensions."""
    return 2 <= tensor.dim() <= 3 and bool(tensor.shape[last] % group)


def _factors(rows: Tensor) -> Tensor:
    """Return what rows are multiplied by, so that they share groups as they are: see rows.py."""
    factors = rows.abs().amax(-1, keepdim=True).to(torch.float32).reciprocal()
    useless = (factors < _LIMITS.tiny) | (factors > _LIMITS.max)
    return torch.where(useless, 1.0, factors)


def _roots(x: Tensor) -> Tensor:
    return x.abs().sqrt().copysign(x)


def _dense_order(tensor: Tensor) -> list[int]:
    """Return the dimensions from the slowest to the fastest; none where the tensor has holes."""
    stride = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -stride[dim])
    span = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and stride[dim] != span:
            return []
        span = span * tensor.shape[dim]
    return order


def _distinct(shape: torch.Size) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes that a shape has, and which of them each dimension is.

    torch renames what a hook returns and erases what had the name before, so that a graph with
    dynamic shapes must not return one size twice: torch 2.11 to 2.13 fail where it does. Sizes are
    told apart by their text, as comparing them would tie the graph to the answer.
    """
    texts = [str(size) for size in shape]
    distinct = list(dict.fromkeys(texts))
    sizes = tuple(shape[texts.index(text)] for text in distinct)
    return sizes, tuple(map(distinct.index, texts))


def _module(function: Callable[..., Any], name: str, options: Compression) -> fx.GraphModule:
    """Return a graph of one call, which torch traces through when it inlines it."""
    graph = fx.Graph()
    node = graph.call_function(function, (graph.placeholder("saved"),))
    # What the compiler's caches may know the call by; the code decides as much as the options.
    node.meta.update(is_wrapped=True, user_cache_hash=f"vramx {name} {options} {_source_hash()}")
    graph.output(node)
    return fx.GraphModule(torch.nn.Module(), graph, f"Vramx{name}")


@lru_cache(maxsize=1)
def _source_hash() -> str:
    sources = (inspect.getsource(sys.modules[__name__]), inspect.getsource(reference))
    return hashlib.sha256("".join(sources).encode()).hexdigest()


@lru_cache(maxsize=32)
def hooks(options: Compression) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the pack and the unpack hook for some options, always the same: graphs guard on them.

    Raises:
        UnsupportedTorchError: torch is too old to inline them.
    """
    if _hook_context is None:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} cannot compress within a compiled graph, 2.11 can; compile "
            "block by block inside vramx.compress() instead"
        )
    pair = _Hooks(options)
    return _module(pair.pack, "Pack", options), _module(_Hooks.unpack, "Unpack", options)


def compressed_graphs(
    level: str | Compression = "int8", **options: Any
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which compiled graphs keep what their backward needs in fewer bits.

    For a model that is compiled as a whole: enter it around the call of the compiled model, which
    is compiled anew for it. Around one that is compiled block by block use vramx.compress().

    Packed are the intermediates that nothing else holds. Inputs, outputs and parameters are not,
    nor what backward takes an exponential of, compares, divides by, or subtracts a mean from, nor
    what attention saves.
    What runs between the graphs is kept as it is.

    Args:
        level: "int8", "int4" or "keep", or a Compression, of which only `level`, `group_size`,
            `symmetric`, `rounding` and `min_bytes` count: the operations of a graph are not those
            that a policy names, and nothing is offloaded.
        **options: its other fields.

    Raises:
        UnsupportedTorchError: torch is too old; 2.11 is not.
        InvalidValueError: a field has a value that is not accepted.

    Memory: as vramx.compress(), where the compiler frees a tensor once it is packed.
    Sync: none.

    Example:
        >>> import torch, vramx
        >>> model = torch.compile(torch.nn.Linear(64, 64), backend="aot_eager")
        >>> with vramx.compressed_graphs(min_bytes=0):
        ...     y = model(torch.randn(8, 64))
        >>> y.sum().backward()
    """
    base = options_of(level, options)
    if not base.packs:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(*hooks(base))


def _is_exact_here() -> bool:
    """Answer for the tensor that torch traces the hooks for now."""
    assert _hook_context is not None
    context = _hook_context()
    if context is None:
        return True
    made = context["_node"]
    saved = made.name
    exact = saturates, is_normalised, is_statistic, multiplies_exponential, undoes_columns
    if any(rule(made) for rule in exact):
        return True
    for node in context["_bw_graph"].find_nodes(op="placeholder"):
        if node.name == saved:
            return is_exact(node)
    return True
