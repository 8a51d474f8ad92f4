"""Recomputation whose kept inputs are compressed: the call.

What a call saves is made again by again.py, from inputs that are kept as inputs.py says. Where more
is asked than that (a selective policy, a check of torch's, hooks or modes of others, a call within
another checkpoint) torch's non-reentrant checkpoint runs the region: it keeps the inputs as saved
tensors, and hooks around the call see each of them once.

Thread-safe: nothing is shared between calls. A call costs a walk over its arguments and one kernel
for each tensor that is packed; it never waits for the device.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from vramx.compression import enclosing
from vramx.compression.asked import options_of
from vramx.compression.config import Compression
from vramx.compression.notices import explain
from vramx.compression.stats import CompressionStats
from vramx.errors import InvalidValueError, refused
from vramx.recompute import again
from vramx.recompute.inputs import Inputs
from vramx.recompute.region import Region
from vramx.recompute.structure import flatten

Result = TypeVar("Result")
_TORCH_PARAMETERS = inspect.signature(torch_checkpoint).parameters
# What torch's checkpoint takes for itself, in any release; every other keyword is the function's.
TORCH_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


@dataclass(frozen=True)
class Settings:
    """What a call asks for: how its inputs are kept, and what torch's checkpoint is told."""

    compression: Compression | None
    offload: str | float | None
    torch_options: Mapping[str, Any]
    # Whether the writer of the function vouches for it: it is smooth, and need not be watched.
    vouched: bool = False


def checkpoint(
    function: Callable[..., Result],
    *args: Any,
    level: str | Compression = "int8",
    offload: str | float | None = None,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Result:
    """Run a function and keep its inputs only, packed; recompute in backward what it saves.

    A drop-in for torch.utils.checkpoint.checkpoint(use_reentrant=False). Tensors are found in
    keyword arguments, pytrees and dataclasses as well.

    Args:
        function: may return anything. In the forward pass it gets its arguments themselves, in the
            recomputation new containers around decoded tensors.
        level: "int8" or "int4", a Compression, or "keep": inputs are kept exactly. Packed are
            inputs of a floating type that require grad and have at least Compression.min_bytes;
            masks, integers, parameters and small ones are kept as they are.
        offload: "cpu", or the fraction of the packed bytes, that moves to pinned host memory
            until backward; None leaves it to `level`, 0 forbids it.
        use_reentrant: None or False.
        kwargs: preserve_rng_state, context_fn, determinism_check, debug and early_stop are torch's
            and mean what they mean there; all others go to the function.

    Returns:
        What the function returns.

    Raises:
        InvalidValueError: use_reentrant=True; `function` cannot be called; or `level` or `offload`
            is not accepted.
        RecomputationError: the function writes into a tensor of an argument that is an object; or,
            in backward, it comes to an operation that no call of its kind had, from packed inputs,
            or saves other tensors than before.

    The first call of a function with arguments of some shapes is watched, operation by operation.
    Objects among the arguments, such as a cache, iterators, arrays of numpy, and buffers of
    modules, such as the statistics of a batch norm, are changed by the forward pass only: a
    recomputation works on copies. Of a generator there are none: one that the function reaches is
    warned of. Of an array that it closes over there is one up to 1 MiB. Nobody sees who writes into
    an argument through `tensor.data` before backward: a recomputation starts from what was written.
    TorchScript runs as it is written: what it fuses after its first run saves other tensors.

    Memory: 1.047 bytes kept for an element of an input at int8, 0.56 at int4, instead of 2 or 4.
        Of an input that a norm reads the normalised values are packed, with mean and deviation in 8
        bytes for each row or channel that is normalised by itself; and so of one whose rows are no
        multiple of the codec's groups.
    Error bound: the codec's, on the inputs of the recomputation only; the forward pass is exact.
        Where a gradient may jump with an input that moves a little (the region compares, chooses,
        sorts or rounds, or does what is not known), inputs are kept exactly, and a warning names
        the operation once. A policy that gives an operation such a level says that it is smooth.
        The same where the region gives a function of an input's elements, such as its gelu.
    Sync: never waits for the device.

    Within a transform of torch.func, under forward differentiation, and where torch.jit.trace
    records the call, the function runs as it is, and nothing is recomputed. Within another
    checkpoint, under torch.no_grad(), and where torch.compile traces the call, this is torch's
    checkpoint: nothing is kept here, or the compiler decides about it.

    Example:
        >>> import torch, vramx
        >>> layer = torch.nn.Linear(8, 8)
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> vramx.checkpoint(layer, x, level="int8").sum().backward()
        >>> x.grad.shape
        torch.Size([4, 8])
    """
    if not callable(function):
        raise refused("function", function, "is what is called: checkpoint(block, x), not block(x)")
    torch_options = {name: kwargs.pop(name) for name in TORCH_OPTIONS if name in kwargs}
    if torch.compiler.is_compiling():
        result: Result = _torch_checkpoint(function, args, kwargs, torch_options)
    else:
        settings = settings_of(level, offload, use_reentrant, torch_options)
        result = run(function, args, kwargs, settings)
    return result


def settings_of(
    level: str | Compression,
    offload: str | float | None,
    use_reentrant: bool | None,
    torch_options: Mapping[str, Any],
) -> Settings:
    if use_reentrant:
        raise InvalidValueError(
            "use_reentrant=True is not accepted: reentrant checkpointing runs the region outside "
            "of the graph, so that nested and keyword tensors cannot be packed; accepted are False "
            "and None"
        )
    compression = _compression(level)
    if offload is None:
        offload = compression.offload if compression is not None else None
    else:
        # Checked where all options are.
        offload = replace(compression or Compression(), offload=offload).offload
    return Settings(compression, offload or None, torch_options)


def _compression(level: str | Compression) -> Compression | None:
    options = _options_of_word(level) if isinstance(level, str) else options_of(level, {})
    return options if options.packs else None


@functools.lru_cache(maxsize=8)
def _options_of_word(level: str) -> Compression:
    return options_of(level, {})


def run(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings,
    stats: CompressionStats | None = None,
) -> Any:  # fmt: skip
    """Make a call; what is kept of its inputs is counted in `stats`."""
    # While it traces, dynamo must meet torch's own function first: that one it knows.
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and torch._C._get_tracing_state() is not None:
        # A trace has no region, and would have what packs its inputs.
        return function(*args, **kwargs)
    if is_compiling or not torch.is_grad_enabled():
        return _torch_checkpoint(function, args, kwargs, settings.torch_options)
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        # torch's checkpoint knows no transforms: it refuses, or recomputes another function.
        return function(*args, **kwargs)
    leaves, structure = flatten((args, kwargs))
    draws_again = settings.torch_options.get("preserve_rng_state", True)
    if not settings.torch_options and again.serves(leaves):
        inputs = Inputs(settings.compression, settings.offload, stats)
        region = Region(function, structure, (args, kwargs), inputs, vouched=settings.vouched)
        result = again.run(region, region.leaves_of(leaves), inputs)
        inputs.settle(region.judged())
        return result
    if not _keeps_inputs(settings):
        region = Region(function, structure, (args, kwargs), None, preserve_rng_state=draws_again)
        return _run_by_torch(region, leaves, settings)
    inputs = Inputs(settings.compression, settings.offload, stats)
    region = Region(
        function, structure, (args, kwargs), inputs, vouched=settings.vouched,
        preserve_rng_state=draws_again,
    )  # fmt: skip
    with inputs.collected():
        result = _run_by_torch(region, leaves, settings)
    inputs.settle(region.judged())
    return result


def _run_by_torch(region: Region, leaves: list[Any], settings: Settings) -> Any:
    try:
        return _torch_checkpoint(region, region.leaves_of(leaves), {}, settings.torch_options)
    except RuntimeError as error:
        explain(error)
        raise


def _keeps_inputs(settings: Settings) -> bool:
    """Tell whether the inputs need hooks of ours; within a region, that region keeps them."""
    if enclosing.in_checkpoint():
        return False
    exact = settings.compression is None and settings.offload is None
    # Exact means exact, also where a surrounding compress() would pack them.
    return not exact or enclosing.name_of(enclosing.top_hook()) == "Session.pack"


def _torch_checkpoint(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any], options: Mapping[str, Any]
) -> Any:
    stopping: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if "early_stop" in options and "early_stop" not in _TORCH_PARAMETERS:
        # Releases that do not take it as an argument have the context; their default is True.
        options = dict(options)
        if not options.pop("early_stop"):
            stopping = set_checkpoint_early_stop(False)
    with stopping:
        return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
