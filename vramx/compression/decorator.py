"""compressed_activations: compression around the calls of a module, a class of them or a function.

A module records it as patch/ does, and vramx.restore() undoes it. What happens inside a call is
hooks.py's. Calls may come from any thread; decorating may not. Some twenty microseconds a call, one
or two under no_grad.

torch.compile ends its graph at a wrapped call and compiles the forward within as a graph of its
own, whose saved tensors are packed: what compiling block by block does. `fullgraph=True` raises
with that advice.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import unserializable_hook

from vramx.compression.compiler import compile_only_callees
from vramx.compression.config import Compression
from vramx.compression.hooks import CompressionContext, compress
from vramx.compression.stats import CompressionStats
from vramx.errors import InvalidValueError, VramxWarning, brief
from vramx.patch.change import Change
from vramx.patch.function import check_runs_at_once, holder_of, wrap, wrap_method
from vramx.patch.module import find, put
from vramx.patch.report import changes_of, class_changes

Target = TypeVar("Target", bound=Callable[..., Any])
_ACCEPTED = "accepted are a Module, a class of Modules, and a function"
# What trainers call in place of a module's own call.
_STEP = "training_step"


@overload
def compressed_activations(
    target: Target, /, level: str | Compression = "int8", **options: Any
) -> Target: ...
@overload
def compressed_activations(
    *, level: str | Compression = "int8", **options: Any
) -> Callable[[Target], Target]: ...
def compressed_activations(
    target: Any = ..., /, level: str | Compression = "int8", **options: Any
) -> Any:
    """Keep what every call of a module or a function saves for backward in fewer bits.

    A module packs while it is `training`, and runs as it was in eval(); a function always packs.

    Args:
        target: a Module (the same object is returned), a class of Modules (every instance; a
            subclass with a forward of its own only where that calls super), a function or a bound
            method (a wrapped function is returned). Without one a decorator is returned.
        level: "int8", "int4" or "keep", or a Compression.
        **options: its other fields.

    Returns:
        The target, or the wrapped function, or the decorator.

    Raises:
        InvalidValueError: the target is none of these, it makes a generator or a coroutine, or an
            option is not accepted.

    Memory, Sync, Error bound: as compress(). compression_stats(target) gives the counts, summed
    over all calls. Decorating again replaces the options, also where others have wrapped the target
    since; vramx.restore(target) undoes it. A module that learns though its own forward is never
    called, as where a trainer calls its training_step, is told of by a warning: nothing is packed.

    Example:
        >>> layer = compressed_activations(torch.nn.Linear(8, 8), level="int8", min_bytes=0)
        >>> y = layer(torch.randn(4, 8, requires_grad=True) * 2)
        >>> compression_stats(layer).packed.tensors
        1
    """
    context = compress(level, **options)  # a mistake in the options is raised here
    if target is ...:
        return lambda actual: _wrap(actual, CompressionContext(context.options))
    return _wrap(target, context)


class Packing(Change):
    """What is saved for backward within the calls is packed."""

    def __init__(self, context: CompressionContext) -> None:
        self.context = context
        self.was_called = False
        self.may_learn = False  # it was called where gradients are enabled
        self._handle: Any = None  # of the hook on a parameter

    def run(self, module: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        context = self.context
        self.was_called = True
        self.may_learn = self.may_learn or torch.is_grad_enabled()
        context.enter(module)
        try:
            return forward(*args, **kwargs)
        finally:
            context.__exit__(*sys.exc_info())

    def __str__(self) -> str:
        options = self.context.options
        if not options.packs:
            return "not packed"
        return f"packed in {options.level}{' on the host' if options.offload else ''}"

    def effect(self) -> str:
        stats = self.context.stats
        # Where nothing is packed it is said why.
        return stats.brief(reasons=not stats.packed.tensors) if self.was_called else "never called"

    def watch(self, module: nn.Module) -> None:
        """Warn if the module learns without a call of its forward, at its first gradient."""
        learning = (p for p in module.parameters() if p.requires_grad)
        first = next((p for p in learning if not nn.parameter.is_lazy(p)), None)
        packing, place = weakref.ref(self), weakref.ref(module)

        @unserializable_hook  # or sharing the parameter with a process would warn
        def see(gradient: torch.Tensor) -> None:
            self, module = packing(), place()
            is_predicted = isinstance(gradient, FakeTensor)  # in a step of copies
            if self is not None and module is not None and not is_predicted:
                self.undone()
                if not self.may_learn:
                    _warn_of_no_call(type(module).__name__, is_replaced="forward" in vars(module))

        self._handle = None if first is None else first.register_hook(see)

    def undone(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return Packing, (self.context,)  # a copy has counts of its own


compile_only_callees(Packing.run)


class _Step(Change):
    """The same for the instances of a class, by a step of their trainer."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._was_told = False

    def run(self, module: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if not (self._packing.may_learn or self._was_told) and torch.is_grad_enabled():
            self._was_told = True
            _warn_of_no_call(type(module).__name__)
        return result

    def __str__(self) -> str:
        return ""


def _warn_of_no_call(name: str, *, is_replaced: bool = False) -> None:
    if is_replaced:
        why = (
            "the program has put another forward in its place, which does not call it. Decorate it "
            "after that, as once its trainer is made, or its blocks"
        )
    else:
        why = (
            "it learns, and its forward is never called with gradients. Decorate what is called: a "
            f"part of it, its blocks, or the method ({_STEP}, say)"
        )
    warnings.warn(
        f"compressed_activations of {name} has packed nothing: {why}",
        VramxWarning,
        stacklevel=3,
    )


def _wrap(target: Any, context: CompressionContext) -> Any:
    if isinstance(target, nn.Module):
        return _pack_module(target, context)
    if isinstance(target, type):
        if not issubclass(target, nn.Module):
            raise InvalidValueError(f"{target!r} cannot be compressed; {_ACCEPTED}")
        return _pack_class(target, context)
    if not callable(target):
        raise InvalidValueError(f"{brief(target)} cannot be compressed; {_ACCEPTED}")
    holder = holder_of(target)
    if holder is None:
        return wrap(target, Packing(context))
    holder.change = Packing(context)
    return target


def _pack_module(module: nn.Module, context: CompressionContext) -> nn.Module:
    check_runs_at_once(module.forward)
    place = _decorated_within(module)
    packing = Packing(context)
    put(place, packing)
    packing.watch(place)
    return module


def _decorated_within(module: nn.Module) -> nn.Module:
    """Return the module that was decorated, below wrappers; the given one where none was."""
    found = module
    while find(found, Packing) is None:
        children = list(found.children())
        if len(children) != 1 or next(found.parameters(recurse=False), None) is not None:
            return module
        found = children[0]
    return found


def _pack_class(target: type[nn.Module], context: CompressionContext) -> Any:
    packing = Packing(context)
    wrap_method(target, "forward", packing)
    if hasattr(target, _STEP):
        wrap_method(target, _STEP, _Step(packing))
    return target


def compression_stats(target: Any) -> CompressionStats:
    """Return the counts of a compressed module, class or function, summed over all its calls.

    Of a module these are of all that is compressed in it, below whatever wraps it, and of classes
    that were decorated. Of one, the counts themselves; of several, their sum as it is now.

    Raises:
        InvalidValueError: nothing of the target is compressed.

    Example:
        >>> print(compression_stats(compressed_activations(torch.nn.Linear(8, 8))))
        saved 0 B -> 0 B (1.00x); 0 % shared; params 0 B
    """
    found = {id(packing): packing.context.stats for packing in _packings(target)}
    if not found:
        raise InvalidValueError(
            f"{brief(target)} is not compressed; accepted is a decorated target"
        )
    stats = list(found.values())
    return stats[0] if len(stats) == 1 else CompressionStats.sum(stats)


def _packings(target: Any) -> Iterator[Packing]:
    changes: list[Any] = []
    if isinstance(target, nn.Module):
        for module in target.modules():
            changes.append(find(module, Packing))
            changes += [change for _, change in class_changes(type(module))]
    elif isinstance(target, type):
        changes += [change for _, change in class_changes(target)]
    elif callable(target):
        changes += changes_of(target)
    return (change for change in changes if isinstance(change, Packing))
