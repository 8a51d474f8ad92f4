"""Checkpointing every call of some modules of a model, and undoing it.

Wraps `forward` on the instance; names, parameters, hooks, state_dict and classes stay. A copy made
with copy.deepcopy is checkpointed too; one that was pickled is not. Not thread-safe while it wraps;
a wrapped call costs what vramx.checkpoint does.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.compression.config import Compression
from vramx.errors import InvalidValueError
from vramx.recompute.call import TORCH_OPTIONS, Settings, run, settings_of

Where = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]

_MARK = "_vramx_checkpoint"
# Their gradients jump where an argument crosses a bound, or where another becomes the largest.
_COMPARING = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Threshold, nn.Hardtanh),
    *(nn.Hardshrink, nn.Softshrink, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
)
_COMPARING_FUNCTIONS = (F.relu, torch.relu, F.relu6, F.leaky_relu)


def compares(module: nn.Module) -> bool:
    """Tell whether a module has parts, such as a ReLU, whose gradient jumps at a bound.

    What is recomputed of it from a packed input gets wrong gradients where the noise moves an
    argument across: those of a ResNet-50 whose blocks were had a cosine of 0.88 with the right ones
    (benchmarks/results/fused.csv). What a forward calls by itself is not seen.

    Example:
        >>> compares(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), compares(nn.GELU())
        (True, False)
    """
    return any(
        isinstance(part, _COMPARING) or any(v in _COMPARING_FUNCTIONS for v in _functions(part))
        for part in module.modules()
    )


def _functions(module: nn.Module) -> list[Any]:
    return [value for value in vars(module).values() if callable(value)]


class CheckpointHandle:
    """The modules that one checkpoint_modules() wrapped; remove() restores them."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules

    def __len__(self) -> int:
        return len(self._modules)

    def remove(self) -> None:
        """Restore the modules; a second time does nothing.

        Raises:
            InvalidValueError: the forward of one of them was replaced again since; nothing changed.
        """
        _restore_all([module for module in self._modules if _is_wrapped(module)])
        self._modules = []


def checkpoint_modules(
    model: nn.Module,
    where: Where,
    every: int = 1,
    compress: int | Compression | None = 8,
    **options: Any,
) -> CheckpointHandle:
    """Checkpoint every call of the modules that match, with inputs kept as `compress` says.

    Args:
        where: a class, a tuple of classes, or a predicate that is given each module.
        every: every n-th of the modules that match, from the first, as model.modules() has them.
        options: what vramx.checkpoint takes: offload, preserve_rng_state, context_fn and so on.

    Returns:
        A handle whose remove() undoes it, as vramx.uncheckpoint(model) does; len() is the number of
        modules.

    Raises:
        InvalidValueError: nothing matches, a match is checkpointed already, or an option is not
            accepted. Nothing is wrapped then.

    Example:
        >>> import torch, vramx
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> handle = vramx.checkpoint_modules(model, where=torch.nn.Linear, every=2)
        >>> len(handle)
        2
        >>> model(torch.ones(2, 8)).sum().backward(); handle.remove()
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise InvalidValueError(f"every {every!r} is not accepted; accepted is a number from 1 up")
    settings = _module_settings(compress, dict(options))
    matches = _matches(model, where)[::every]
    for module in matches:
        if _is_wrapped(module):
            raise InvalidValueError(
                f"a {type(module).__name__} of this model is checkpointed already; "
                "call vramx.uncheckpoint(model) first"
            )
    for module in matches:
        _wrap(module, settings)
    return CheckpointHandle(matches)


def uncheckpoint(model: nn.Module) -> int:
    """Undo every checkpoint_modules() on a model; return how many modules were restored.

    Raises:
        InvalidValueError: the forward of one of them was replaced again since; nothing changed.

    Example:
        >>> import torch, vramx
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> _ = vramx.checkpoint_modules(model, where=torch.nn.Linear)
        >>> vramx.uncheckpoint(model)
        1
    """
    modules = [module for module in model.modules() if _is_wrapped(module)]
    _restore_all(modules)
    return len(modules)


def _module_settings(compress: int | Compression | None, options: dict[str, Any]) -> Settings:
    torch_options = {name: options.pop(name) for name in TORCH_OPTIONS if name in options}
    offload, use_reentrant = options.pop("offload", None), options.pop("use_reentrant", None)
    if options:
        accepted = ", ".join(("offload", "use_reentrant", *TORCH_OPTIONS))
        raise InvalidValueError(
            f"option {next(iter(options))!r} is unknown; accepted are {accepted}"
        )
    return settings_of(compress, offload, use_reentrant, torch_options)


def _matches(model: nn.Module, where: Where) -> list[nn.Module]:
    predicate: Any = where
    if isinstance(where, (type, tuple)):
        predicate = functools.partial(_is_instance, where)
    elif not callable(where):
        raise InvalidValueError(
            f"where {where!r} is not accepted; accepted are a module class, a tuple of them and a "
            "predicate of a module"
        )
    matches = [module for module in model.modules() if predicate(module)]
    if not matches:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise InvalidValueError(f"where {where!r} matches no module; the model has {classes}")
    return matches


def _is_instance(classes: Any, module: nn.Module) -> bool:
    return isinstance(module, classes)


class _Wrapping:
    """What a wrapped forward is known by: functools.wraps hands it on to what is put over ours."""

    def __init__(self, before: Any, own: Callable[..., Any] | None) -> None:
        self.before = before  # what the instance had for a forward; None: that of its class
        self.own = own  # the function of it, where it was a method of the instance
        self.function: Callable[..., Any] | None = None

    def forward_of(self, module: nn.Module) -> Callable[..., Any]:
        # Bound anew, for a deep copy must call its own forward; by what dynamo can trace.
        if self.own is not None:
            return functools.partial(self.own, module)
        return self.before or functools.partial(type(module).forward, module)


def _wrap(module: nn.Module, settings: Settings) -> None:
    before: Any = module.__dict__.get("forward")
    is_method = isinstance(before, types.MethodType) and before.__self__ is module
    wrapping = _Wrapping(before, before.__func__ if is_method else None)

    @functools.wraps(module.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(wrapping.forward_of(self), args, kwargs, settings)

    wrapping.function = forward
    setattr(forward, _MARK, wrapping)
    module.__dict__["forward"] = types.MethodType(forward, module)


def _is_wrapped(module: nn.Module) -> bool:
    return hasattr(module.__dict__.get("forward"), _MARK)


def _restore_all(modules: list[nn.Module]) -> None:
    for module in modules:
        forward = module.__dict__["forward"]
        if getattr(forward, "__func__", None) is not getattr(forward, _MARK).function:
            raise InvalidValueError(
                f"the forward of a {type(module).__name__} was replaced after it was checkpointed; "
                "undo that first"
            )
    for module in modules:
        wrapping = getattr(module.__dict__.pop("forward"), _MARK)
        if wrapping.own is not None:
            module.__dict__["forward"] = types.MethodType(wrapping.own, module)
        elif wrapping.before is not None:
            module.__dict__["forward"] = wrapping.before
