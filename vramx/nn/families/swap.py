"""Computing a block as a family of fused ones does, and which calls are left to the original.

A swapped module has the change Fusing, and its family, a mixin over Fused, before its class
(patch/ says how): a family says which calls it understands and how it computes them; every other
call is the original's. Optimising and restoring are not thread-safe; calls are, but for the first
call of a module that is to be verified. A call costs some microseconds for the questions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vramx.compression.config import Compression
from vramx.compression.fakes import PLAIN
from vramx.errors import VramxError, VramxWarning, warn_once
from vramx.nn import passes
from vramx.nn.families import questions
from vramx.nn.families.questions import (
    cache_of,
    class_name,
    is_transformed,
    parameters_of,
    part_of,
    roles_of,
)
from vramx.patch.change import Change
from vramx.patch.module import find, original_class, put, remove
from vramx.patch.subclass import Patch
from vramx.patch.torch_functions import OF_MODULES, replaced
from vramx.patch.watching import has_other_hooks
from vramx.recompute import call as recompute

RECOMPUTE_ALL, RECOMPUTE_MLP = "recompute_all", "recompute_mlp"

# Models of transformers make a cache in training too, unless they are told not to.
UNCACHED = (
    "blocks that are recomputed leave the cache of keys and values empty; use_cache=False in the "
    "model's config makes none"
)
FILLED = (
    "blocks that are given a filled cache of keys and values are not recomputed: what it has is "
    "part of their result"
)
LEFT_EMPTY = (
    "a block is given a cache of keys and values that it left empty, as it is recomputed: what "
    "should be in it is missing; level='recompute_mlp' fills caches"
)
CHECKPOINTED = (
    "blocks are checkpointed by the model: each is computed twice, and nothing is packed in them; "
    "call model.gradient_checkpointing_disable(), and optimize(model, level='recompute_all') to "
    "keep as little as checkpoints do"
)


@dataclass
class Settings:
    """How one module is computed: the level's word, how tensors are kept, what is to be checked."""

    level: str
    keep: Compression
    _: KW_ONLY
    unverified: bool = False
    # Whether it has a ReLU, say: what is recomputed of it needs its input exactly.
    compares: bool = False
    read: Any = None  # of a block that no family names, the plain_plan.Plan


class Fused:
    """What every swapped class has before its original class in the order of resolution."""

    # The originals' modules and names.
    CLASSES: ClassVar[tuple[str, ...]] = ()
    # Dotted names of what an original must have, and of what it may have; the first parameters of
    # its forward, which calls may give by position; all parameters that are known, of forwards by
    # dotted name; and the classes of parts, as class_name() has them.
    PARTS: ClassVar[tuple[str, ...]] = ()
    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    ARGUMENTS: ClassVar[tuple[str, ...]] = ("hidden_states",)
    PARAMETERS: ClassVar[dict[str, str]] = {}
    TYPES: ClassVar[dict[str, str]] = {}

    # Whether the levels that recompute say something to it.
    RECOMPUTES: ClassVar[bool] = True

    _vramx: Patch
    _vramx_original: ClassVar[type[nn.Module]]
    training: bool

    @property
    def vramx_settings(self) -> Settings:
        """How it is computed."""
        # The innermost change, where there is one; without a loop, as this is traced often.
        fusing: Any = self._vramx.changes[0]
        settings: Settings = fusing.settings
        return settings

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Return why a module of a class in CLASSES cannot be swapped; None: it can."""
        for path in cls.PARTS:
            if part_of(module, path) is None:
                return f"it has no {path}"
        if roles_of(module)[: len(cls.ARGUMENTS)] != cls.ARGUMENTS:
            return f"its forward does not begin with {', '.join(cls.ARGUMENTS)}"
        for path, known in cls.PARAMETERS.items():
            unknown = set(roles_of(part_of(module, path))).difference(known.split())
            if unknown:
                return f"{path or 'its forward'} takes {', '.join(sorted(unknown))}: not known"
        for path, name in cls.TYPES.items():
            kind = type(part_of(module, path))
            if class_name(kind) != name:
                return f"its {path} is a {kind.__name__}"
        return None

    @classmethod
    def small(cls, module: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
        """Return a small module of a module's class, and calls of it, for a trial of the family."""
        raise NotImplementedError

    def vramx_understands(self, call: dict[str, Any]) -> bool:
        """Tell whether vramx_fused() computes a call, given all of its arguments by name."""
        raise NotImplementedError

    def vramx_feed_forward(self) -> Any:
        """Return the parts.FeedForward that can be computed as one; None: it has none now."""
        return None

    def vramx_fused(self, x: Tensor, /, **others: Any) -> Any:
        """Compute what the original's forward does; `x` is its first argument."""
        raise NotImplementedError

    def vramx_is_in(self, cache: Any) -> bool:
        """Tell whether a cache of keys and values has some of this block already."""
        return cache is not None

    def vramx_recomputed(self) -> Any:
        """Return what a call that is recomputed calls, now and again in backward."""
        return self.vramx_fused


class Swapped(Change):
    """What optimising does to a module."""

    INNERMOST = True


class Fusing(Swapped):
    """Calls are computed as a family does, where it understands them."""

    def __init__(
        self,
        family: type[Fused],
        settings: Settings,
        arguments: tuple[str, ...] | None = None,
        kinds: tuple[tuple[str, type], ...] = (),
    ) -> None:
        self.family = family
        self.settings = settings
        # Of parts that have parts, by dotted name, the classes: what these compute is known.
        self.kinds = kinds
        # What the original calls those that may be given by position.
        self.arguments = family.ARGUMENTS if arguments is None else arguments

    @property
    def mixin(self) -> type:
        return self.family

    def run(self, module: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(module, Fused):  # restored since: what recomputes may hold this function
            return forward(*args, **kwargs)
        if len(args) > len(self.arguments):
            return forward(*args, **kwargs)
        # torch 2.6 compiles neither a zip() of what differs in length nor a sum of dictionaries.
        call = {**dict(zip(self.arguments[: len(args)], args, strict=True)), **kwargs}
        if not torch.compiler.is_compiling() and self.settings.level == RECOMPUTE_ALL:
            _refuse_left_empty(module, call)
        fused = _trains(module, call) and not _is_called_otherwise()
        fused = fused and self._finds_its_parts(module)
        if fused and module.vramx_understands(call):
            if self.settings.unverified and not _verified(module, self, call):
                return forward(*args, **kwargs)  # it is restored
            return _compute(module, self.settings, call)
        return forward(*args, **kwargs)

    def _finds_its_parts(self, module: Any) -> bool:
        """Tell whether no part has another class, nor a class another function, and name such."""
        compiles = torch.compiler.is_compiling()
        for path, cls in (("", module._vramx_original), *self.kinds):
            part = part_of(module, path)
            other = path and type(part) is not cls
            if other and (part is None or original_class(part) is not cls):
                found = f"its {path} is a {type(part).__name__} now"
            elif not compiles and not questions.has_its_functions(cls):
                found = f"{class_name(cls)} has other functions now"
            else:
                continue
            name = class_name(module._vramx_original)
            warn_once(f"{name} is computed as it was before optimize(): {found}")
            return False
        return True

    def __str__(self) -> str:
        return f"fused, {self.settings.level}, as {self.family.__name__}"


def swap(module: nn.Module, family: type[Fused], settings: Settings) -> None:
    """Have a module computed as a family does."""
    names = tuple(p.name for p in parameters_of(module))
    outer = dict.fromkeys(
        path.rsplit(".", cut)[0] for path in family.PARTS for cut in range(path.count("."), 0, -1)
    )
    kinds = tuple((path, original_class(part_of(module, path))) for path in outer)
    for cls in (original_class(module), *(cls for _, cls in kinds)):
        questions.note_functions(cls)
    put(module, Fusing(family, settings, names[: len(family.ARGUMENTS)], kinds))


def unswap(module: nn.Module) -> bool:
    """Have a swapped module computed as its class does; return whether it was swapped."""
    swapped = find(module, Swapped)
    return swapped is not None and remove(module, swapped)


@torch.compiler.assume_constant_result
def _is_called_otherwise() -> bool:
    """Tell whether the program has changed what a call of any part does, and name that."""
    name = replaced(OF_MODULES)
    if name is not None:
        found = f"torch.nn.functional.{name} is not torch's own"
    elif has_other_hooks():
        found = "the calls of all modules have hooks"
    else:
        return False
    warn_once(f"blocks are computed as they were before optimize(): {found}")
    return True


def _trains(module: Fused, call: dict[str, Any]) -> bool:
    """Tell whether a call is one of training, with gradients or without.

    Of one without nothing is kept. It may be the first pass of a reentrant checkpoint, whose second
    one is to drop the same, or what a ratio is taken of that is to be 1, as PPO does. With a filled
    cache, as while text is generated, it is the original.
    """
    if not module.training or is_transformed():
        return False
    if not torch.is_grad_enabled():
        cache = cache_of(call)[1]
        if cache is not None and module.vramx_is_in(cache):
            return False
        # What Dynamo traces asks nothing of the mode.
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            return False
    x: Any = call.get(module.ARGUMENTS[0])
    if type(x) not in PLAIN or x.is_meta:  # of which nothing is kept
        return False
    return x.is_floating_point() and not x.is_nested


def _compute(module: Fused, settings: Settings, call: dict[str, Any]) -> Any:
    others = dict(call)
    x = others.pop(module.ARGUMENTS[0])
    compiles = torch.compiler.is_compiling()
    recomputes = module.RECOMPUTES and settings.level == RECOMPUTE_ALL
    # Where the model checkpoints its blocks itself, this is inside of that.
    inside = getattr(module, "gradient_checkpointing", False)
    if inside and not compiles:
        if settings.keep.packs and not recomputes:
            warn_once(CHECKPOINTED)
        with passes.running(passes.EITHER):
            return module.vramx_fused(x, **others)
    if inside or not recomputes:
        return module.vramx_fused(x, **others)
    name, cache = cache_of(others)
    if cache is not None and module.vramx_is_in(cache):
        if not compiles:
            warn_once(FILLED)
        return module.vramx_fused(x, **others)
    if cache is not None and not torch.is_grad_enabled():
        return module.vramx_fused(x, **others)  # nothing is recomputed, and the cache is read
    if cache is not None:
        others[name] = None
        if not compiles:
            warnings.warn(UNCACHED, VramxWarning, stacklevel=4)
            # In the cache: a copy of it has as little.
            cache.vramx_left_by = {*getattr(cache, "vramx_left_by", ()), id(module)}
    function = module.vramx_recomputed()
    region = function if compiles else _Recomputed(module, function)
    exact = settings.compares or not settings.keep.packs
    offload = None if exact else settings.keep.offload or None
    asked = recompute.Settings(None if exact else settings.keep, offload, {}, vouched=True)
    return recompute.run(region, (x,), others, asked)


def _refuse_left_empty(module: Fused, call: dict[str, Any]) -> None:
    """Raise if a block is given a cache again that it has put nothing into."""
    cache = cache_of(call)[1]  # or what torch.fx passes through a module, which has any attribute
    if id(module) in getattr(cache, "__dict__", {}).get("vramx_left_by", ()):
        raise VramxError(LEFT_EMPTY)


class _Recomputed:
    """What a checkpoint calls: first for the block's result, and then for what it saves alone.

    Whether it has run is in a slot: a recomputation finds attributes as the first run did. So is
    the change, which no run changes: in attributes it would be copied, and compared, in each call.
    That it is the module's, as a method is, says that it reads all of the module's parameters.
    """

    __slots__ = ("__dict__", "__weakref__", "_fusing", "_has_run")

    def __init__(self, module: Any, function: Callable[..., Any]) -> None:
        self.__self__ = module
        self._fusing = find(module, Fusing)
        self._function = function
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        word = passes.SECOND if self._has_run else passes.FIRST
        self._has_run = True
        with passes.running(word), self._swapped():
            return self._function(*args, **kwargs)

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """Have the module as it was in the forward pass: it may have been restored since."""
        fusing: Any = self._fusing
        module = self.__self__
        is_restored = fusing is not None and find(module, Fusing) is None
        if is_restored:
            put(module, fusing)
        try:
            yield
        finally:
            if is_restored:
                remove(module, fusing)


def _verified(module: Any, fusing: Fusing, call: dict[str, Any]) -> bool:
    """Compare a module's first call with its original's; one that differs is restored."""
    from vramx.nn.families.verify import difference

    if torch.compiler.is_compiling():
        return True  # it cannot be made twice: a later call is the first
    found = _why_not_compared(module) or difference(module, call)
    fusing.settings.unverified = False  # not before: one that ran out of memory has shown nothing
    if found is None:
        return True
    name = class_name(module._vramx_original)
    remove(module, fusing)
    warnings.warn(f"{name} is left as it was: {found}", VramxWarning, stacklevel=4)
    return False


def _why_not_compared(module: nn.Module) -> str | None:
    """Return why a block cannot be run once more within a step, backward too; None: it can.

    The end of a backward pass through a part that FSDP shards shards all again.
    """
    inner = [type(part) for part in module.modules() if part is not module]
    sharded = (
        cls.__module__.startswith("torch.distributed") for kind in inner for cls in kind.mro()
    )
    if not any(sharded):
        return None
    return (
        "verify=True cannot compare a block whose parts are sharded by themselves; compare before "
        "that, or shard the block as a whole"
    )
