"""compressed_activations: compression around the calls of a module, a class of them or a function.

Wraps `forward`, and changes nothing else: names, parameters, hooks, classes and state_dicts stay,
and uncompress() restores what was there. What happens inside a call is hooks.py's. Calls may come
from any thread; decorating may not. Some twenty microseconds a call, one or two under no_grad.

torch.compile ends its graph at a wrapped call and compiles the forward within as a graph of its
own, whose saved tensors are packed: what compiling block by block does. `fullgraph=True` raises
with that advice.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from vramx.compression.compiler import compile_only_callees
from vramx.compression.config import Compression
from vramx.compression.hooks import CompressionContext, compress
from vramx.compression.stats import CompressionStats
from vramx.errors import InvalidValueError

Target = TypeVar("Target", bound=Callable[..., Any])
_ATTRIBUTE = "_vramx_compression"
_ACCEPTED = "accepted are a Module, a class of Modules, and a function"


@overload
def compressed_activations(target: Target, /, **options: Any) -> Target: ...
@overload
def compressed_activations(
    target: Compression | None = None, /, **options: Any
) -> Callable[[Target], Target]: ...
def compressed_activations(target: Any = None, /, **options: Any) -> Any:
    """Keep what every call of a module or a function saves for backward in fewer bits.

    A module packs while it is `training`, and runs as it was in eval(); a function always packs.

    Args:
        target: a Module (the same object is returned, its forward wrapped), a class of Modules
            (every instance; a subclass with a forward of its own only where that calls super), a
            function or a bound method (a wrapped function is returned). Without one, or with a
            Compression, a decorator is returned.
        **options: fields of Compression.

    Returns:
        The target, or the wrapped function, or the decorator.

    Raises:
        InvalidValueError: the target is none of these, or an option is not accepted.

    Memory, Sync, Error bound: as compress(). compression_stats(target) gives the counts, summed
    over all calls. Decorating again replaces the options. Replicas of torch.nn.DataParallel need
    the class decorated rather than the instance.

    Example:
        >>> layer = compressed_activations(torch.nn.Linear(8, 8), bits=8, min_bytes=0)
        >>> y = layer(torch.randn(4, 8, requires_grad=True) * 2)
        >>> compression_stats(layer).packed.tensors
        1
    """
    if target is None or isinstance(target, Compression):
        context = compress(target, **options)  # a mistake in the options is raised here
        return lambda actual: _wrap(actual, CompressionContext(context.options))
    return _wrap(target, compress(**options))


def _wrap(target: Any, context: CompressionContext) -> Any:
    if isinstance(target, torch.nn.Module):
        return _wrap_instance(target, context)
    if isinstance(target, type):
        if not issubclass(target, torch.nn.Module):
            raise InvalidValueError(f"{target!r} cannot be compressed; {_ACCEPTED}")
        return _wrap_class(target, context)
    if not callable(target):
        raise InvalidValueError(f"{target!r} cannot be compressed; {_ACCEPTED}")
    return _wrapper(_original(target), context, method=False)


def _original(function: Any) -> Any:
    """Return what a wrapper of ours wraps; anything else is its own original."""
    return function.__wrapped__ if hasattr(function, _ATTRIBUTE) else function


def _wrapper(function: Any, context: CompressionContext, *, method: bool) -> Any:
    """Return `function` inside the context; a method's first argument is the module that runs."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        context.enter(args[0] if method else None)
        try:
            return function(*args, **kwargs)
        finally:
            context.__exit__()

    compile_only_callees(wrapped)
    setattr(wrapped, _ATTRIBUTE, context)
    return wrapped


def _wrap_class(target: type[torch.nn.Module], context: CompressionContext) -> Any:
    own = target.__dict__.get("forward")
    inherited = own is None
    function = _original(target.forward if inherited else own)
    wrapped = _wrapper(function, context, method=True)
    wrapped._vramx_inherited = inherited or getattr(own, "_vramx_inherited", False)
    target.forward = wrapped
    return target


class _Bound:
    """A callable in the __dict__ of a module that does not keep the module alive.

    A method would make a cycle, and memory on a device would wait for the garbage collector.
    Copies and pickles go with the module that they are in.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def __self__(self) -> torch.nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this compressed forward no longer exists")
        return module

    def _parts(self) -> tuple[Any, ...]:
        return ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.__self__, *self._parts())

    def __deepcopy__(self, memo: dict[int, Any]) -> _Bound:
        return type(self)(*copy.deepcopy((self.__self__, *self._parts()), memo))


class _Forward(_Bound):
    """The forward of one compressed module; `previous` is what was in its __dict__ before."""

    def __init__(
        self, module: torch.nn.Module, context: CompressionContext, previous: Any = None
    ) -> None:
        super().__init__(module)
        self._vramx_compression = context
        self.previous = previous

    def _parts(self) -> tuple[Any, ...]:
        return self._vramx_compression, self.previous

    @property
    def __wrapped__(self) -> Any:
        module = self.__self__
        if self.previous is not None:
            return self.previous
        return type(module).forward.__get__(module, type(module))

    @property
    def __code__(self) -> Any:
        return self.__wrapped__.__code__  # torch.export tells the arguments' names by it

    @property
    def __name__(self) -> str:
        return "forward"

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return str(self.__wrapped__.__doc__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = self._vramx_compression
        context.enter(self._module())
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            context.__exit__()


class _Uncompress(_Bound):
    """`module.uncompress()`."""

    def __call__(self) -> Any:
        return uncompress(self.__self__)


def _wrap_instance(module: torch.nn.Module, context: CompressionContext) -> torch.nn.Module:
    previous = module.__dict__.get("forward")
    if isinstance(previous, _Forward):
        previous = previous.previous
    module.__dict__["forward"] = _Forward(module, context, previous)
    if not hasattr(module, "uncompress"):
        module.__dict__["uncompress"] = _Uncompress(module)
    return module


def uncompress(target: Any) -> Any:
    """Undo compressed_activations.

    Args:
        target: what was decorated: a Module, a class of Modules, or the wrapped function.

    Returns:
        The target itself, or the function that was wrapped.

    Raises:
        InvalidValueError: the target is not compressed.

    Example:
        >>> layer = compressed_activations(torch.nn.Linear(8, 8))
        >>> "forward" in vars(layer), "forward" in vars(uncompress(layer))
        (True, False)
    """
    _context_of(target, own=True)
    if isinstance(target, torch.nn.Module):
        previous = target.__dict__.pop("forward").previous
        if previous is not None:
            target.__dict__["forward"] = previous
        if isinstance(target.__dict__.get("uncompress"), _Uncompress):
            del target.__dict__["uncompress"]
        return target
    if not isinstance(target, type):
        return target.__wrapped__
    wrapped = target.__dict__["forward"]
    if wrapped._vramx_inherited:
        del target.forward  # type: ignore[attr-defined]
    else:
        target.forward = wrapped.__wrapped__  # type: ignore[attr-defined]
    return target


def compression_stats(target: Any) -> CompressionStats:
    """Return the counts of a compressed module, class or function, summed over all its calls.

    A module that is not compressed itself gives those of its class.

    Raises:
        InvalidValueError: the target is not compressed.

    Example:
        >>> print(compression_stats(compressed_activations(torch.nn.Linear(8, 8))))
        saved 0 B -> 0 B (1.00x); 0 % shared; params 0 B
    """
    return _context_of(target, own=False).stats


def _context_of(target: Any, *, own: bool) -> CompressionContext:
    """Return the context of a decorated target; `own`: not one that it has from its class."""
    holder = target
    if isinstance(target, (torch.nn.Module, type)):
        holder = vars(target).get("forward") if own else getattr(target, "forward", None)
    context = getattr(holder, _ATTRIBUTE, None)
    if not isinstance(context, CompressionContext):
        raise InvalidValueError(f"{target!r} is not compressed; accepted is a decorated target")
    return context


compile_only_callees(_Forward.__call__)
