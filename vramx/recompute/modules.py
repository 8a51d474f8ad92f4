"""Checkpointing every call of some modules of a model.

A module records it as patch/ does, so that copies of any kind are checkpointed too, and
vramx.restore() undoes it. Not thread-safe while it changes modules; a call costs what
vramx.checkpoint does.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from vramx.compression.config import Compression
from vramx.compression.stats import CompressionStats
from vramx.errors import InvalidValueError, brief, refused
from vramx.patch.change import Change
from vramx.patch.function import check_runs_at_once
from vramx.patch.module import find, put_all
from vramx.patch.report import Report, report_on
from vramx.recompute.call import TORCH_OPTIONS, Settings, run, settings_of

Where = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | str

# Of an error's list of classes.
_MOST_NAMES = 12
_MOST_CLOSE = 3  # of its list of names
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
        isinstance(part, _COMPARING)
        or any(value in _COMPARING_FUNCTIONS for value in vars(part).values() if callable(value))
        for part in module.modules()
    )


class Recomputing(Change):
    """Calls are checkpointed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._exact = replace(settings, compression=None)
        self._stats = CompressionStats()  # of inputs that may be packed

    def run(self, module: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # What is asked of a module that is not training is a result, and not a step.
        if not module.training:
            return run(forward, args, kwargs, self._exact)
        return run(forward, args, kwargs, self.settings, self._stats)

    def __str__(self) -> str:
        compression, offload = self.settings.compression, self.settings.offload
        form = "exact" if compression is None else f"in {compression.level}"
        return f"recomputed, input {form}{' on the host' if offload else ''}"

    def effect(self) -> str:
        if not self._stats.saved_bytes or self.settings.compression is None:
            return ""
        return self._stats.brief(reasons=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return Recomputing, (self.settings,)  # a copy has counts of its own


def checkpoint_modules(
    model: nn.Module,
    where: Where,
    every: int = 1,
    level: str | Compression = "int8",
    **options: Any,
) -> Report:
    """Checkpoint every call of the modules that match, with inputs kept as `level` says.

    A module that is not `training` is recomputed from exact inputs.

    Args:
        where: a class, a tuple of classes, a predicate that is given each module, or a pattern of
            names as vramx.optimize takes them ("model.layers.*"): of what matches, the outermost
            modules that are called.
        every: every n-th of the modules that match, from the first, as model.modules() has them.
        options: what vramx.checkpoint takes: offload, preserve_rng_state, context_fn and so on.

    Returns:
        What was done; len() is the number of modules. vramx.restore(model) undoes it.

    Raises:
        InvalidValueError: nothing matches, a match is checkpointed already, or an option is not
            accepted. Nothing is wrapped then.

    Example:
        >>> import torch, vramx
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> len(vramx.checkpoint_modules(model, where=torch.nn.Linear, every=2))
        2
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> len(vramx.restore(model))
        2
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise refused("every", every, "is a number from 1 up")
    settings = _module_settings(level, dict(options))
    matches = _matches(model, where)[::every]
    for module in matches:
        if find(module, Recomputing) is not None:
            raise InvalidValueError(
                f"a {type(module).__name__} of this model is checkpointed already; "
                "call vramx.restore(model) first"
            )
        check_runs_at_once(module.forward)
    put_all([(module, Recomputing(settings)) for module in matches])
    return report_on(model, matches)


def _module_settings(level: str | Compression, options: dict[str, Any]) -> Settings:
    torch_options = {name: options.pop(name) for name in TORCH_OPTIONS if name in options}
    offload, use_reentrant = options.pop("offload", None), options.pop("use_reentrant", None)
    if options:
        accepted = ("offload", "use_reentrant", *TORCH_OPTIONS)
        raise refused("option", next(iter(options)), accepted)
    return settings_of(level, offload, use_reentrant, torch_options)


def _matches(model: nn.Module, where: Where) -> list[nn.Module]:
    if isinstance(where, str):
        return _named(model, where)
    predicate: Any = where
    if isinstance(where, (type, tuple)):
        predicate = functools.partial(_is_instance, where)
    elif not callable(where) or isinstance(where, nn.Module):
        raise refused(
            "where",
            where,
            "are a module class, a tuple of them, a predicate of a module and a pattern of names",
        )
    matches = [module for module in model.modules() if predicate(module)]
    if not matches:
        raise InvalidValueError(
            f"where {brief(where)} matches no module; the model has {_classes(model)}"
        )
    return matches


def _named(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the modules whose name matches, but for those within another, and lists of modules."""
    found: dict[str, nn.Module] = {}
    names = dict(model.named_modules())
    outer = ""
    for name, module in names.items():
        if outer and name.startswith(outer):
            continue
        is_called = name and getattr(type(module), "forward", None) is not nn.Module.forward
        if is_called and fnmatchcase(name, pattern):
            found[name], outer = module, f"{name}."
    if not found:
        closest = get_close_matches(pattern, names, n=_MOST_CLOSE, cutoff=0)
        raise InvalidValueError(
            f"where {pattern!r}: no module's name matches; closest are "
            f"{', '.join(map(repr, closest))}"
        )
    return list(found.values())


def _classes(model: nn.Module) -> str:
    """Name the classes of a model, those that it has most often first."""
    names = Counter(type(module).__name__ for module in model.modules())
    found = [name for name, _ in names.most_common(_MOST_NAMES)]
    return ", ".join(found) + (" and others" if len(names) > len(found) else "")


def _is_instance(classes: Any, module: nn.Module) -> bool:
    return isinstance(module, classes)
