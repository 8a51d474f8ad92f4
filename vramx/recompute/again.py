"""What a region saves is made again: a checkpoint of our own, where nothing is asked of torch's.

torch's checkpoint has for each tensor that is saved a dictionary of its shape, a weak reference and
a handle: work for the host, and objects that Python's collector follows. Here each is a number. The
region runs again when the first of them is read in a backward pass, until it has saved as many as
it did; each is given once, and forgotten. Autocast and torch's random numbers are as they were. A
tensor of another shape, type or device than in the first run is an error, as with torch.

Belongs to one call. Threads that run backward through it at once each make what they read, and may
do so for each tensor. Nothing waits for the device.

Memory: what the graph holds of a call are its inputs, as inputs.py keeps them; in backward, all
that the region saves and the graph may ask for, less what was given.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import checkpoint
from torch.utils.checkpoint import _StopRecomputationError

from vramx.compression import enclosing
from vramx.compression.codec.geometry import shape_of
from vramx.compression.compiler import run_uncompiled
from vramx.compression.notices import explain
from vramx.errors import RecomputationError
from vramx.recompute.told import refuse_change, refusing_changes

# Devices of which random numbers and autocast are restored.
_KINDS = ("cpu", "cuda")
_NO_TASK = -1  # what torch says outside of a backward pass
# What a backward pass has made: which pass it is, and the tensors that are still to be given.
_Made = tuple[Any, list[Tensor | None]]
_NOTHING_MADE: _Made = (_NO_TASK, [])
# Of passes that are to share what they make; not in every release.
_group: Callable[[], Any] = getattr(torch._C, "_get_graph_exec_group", lambda: None)


class Held(Protocol):
    """What is kept of a tensor among the arguments."""

    def open(self) -> Tensor: ...


class Inputs(Protocol):
    """How the tensors among the arguments are kept."""

    def held(self, tensor: Tensor, /) -> Held: ...


def serves(leaves: Sequence[Any]) -> bool:
    """Tell whether a call with these arguments can be made again here.

    Hooks of others see the inputs that torch's checkpoint saves (those of compress() have no say:
    inputs.py keeps these), modes what it asks; a program may have asked it for more for a while;
    inference tensors it refuses in words that help; and before release 2.8 torch does not tell of
    hooks.
    """
    hook = enclosing.top_hook()
    is_of_others = hook is not None and enclosing.name_of(hook) != "Session.pack"
    if not enclosing.is_told() or is_of_others or _len_torch_dispatch_stack():
        return False
    if _more_is_asked():
        return False
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return all(x.device.type in _KINDS and not x.is_inference() for x in tensors)


def _more_is_asked() -> bool:
    """Tell what set_checkpoint_early_stop() and set_checkpoint_debug_enabled() say now."""
    ends_early = getattr(checkpoint, "_enable_checkpoint_early_stop", True)
    return ends_early is False or bool(getattr(checkpoint, "_checkpoint_debug_enabled", False))


@run_uncompiled
def run(function: Callable[..., Any], leaves: Sequence[Any], inputs: Inputs) -> Any:
    """Return function(*leaves); of what it saves the graph has a call with `inputs`."""
    again = _Again(function, leaves, inputs)
    try:
        with enclosing.Hooks(again.numbers, again.open):
            return function(*leaves)
    except RuntimeError as error:
        explain(error)
        raise


class _Numbers:
    """The hook of the first run: numbers what is saved. Is taken for torch's own by its name."""

    __qualname__ = f"{enclosing.FORWARD_HOOK}numbers"

    def __init__(self) -> None:
        # Numbers, which the collector does not follow. Those of what is saved are floats: of small
        # integers Python has one each, and it is not told whether the graph still has it.
        self.forms: list[int] = []
        self._given: list[float] = []

    def __call__(self, tensor: Tensor) -> float:
        self.forms.append(_form(tensor))
        self._given.append(float(len(self._given)))
        return self._given[-1]

    def is_held(self, index: int) -> bool:
        """Tell whether the graph still has a number, and so may ask for what it stands for."""
        return sys.getrefcount(self._given[index]) > _OF_ONE_LIST


_alone = [float(len(_KINDS))]
_OF_ONE_LIST = sys.getrefcount(_alone[0])


def _form(tensor: Tensor) -> int:
    shape = shape_of(tensor) if tensor.is_nested else tensor.shape
    return hash((shape, tensor.dtype, tensor.device))


class _Keep:
    """The hook of a later run, which it ends; the same."""

    __qualname__ = f"{enclosing.RECOMPUTE_HOOK}keep"

    def __init__(self, numbers: _Numbers, function: Callable[..., Any]) -> None:
        self._numbers = numbers
        self._function = function
        self.made: list[Tensor | None] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        forms, index = self._numbers.forms, len(self.made)
        if index == len(forms):  # of a function that caught the end, and went on
            raise _StopRecomputationError
        is_held = self._numbers.is_held(index)
        if is_held:
            refuse_change(tensor)
        if is_held and _form(tensor) != forms[index]:
            if tensor.is_nested:
                raise RecomputationError(
                    "a nested tensor that the region makes has sizes of its own each time that it "
                    "is made, which torch takes for others; make it outside of the region, as by "
                    "checkpointing the blocks that it goes through"
                )
            raise _of_another_way(
                f"a tensor of {tensor.dtype}, shape {list(shape_of(tensor))} and {tensor.device} "
                "where the forward pass saved another",
                self._function,
            )
        # Detached: the graph that this run makes goes with it.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        self.made.append(tensor if is_held else None)
        if len(self.made) == len(forms):
            raise _StopRecomputationError
        return tensor


def _of_another_way(saved: str, function: Callable[..., Any]) -> RecomputationError:
    name = getattr(function, "name", "a region")
    return RecomputationError(
        f"a recomputation of {name} saved {saved}: it took another way, by something that vramx "
        "does not set back, as handlers that a library enters around a forward pass, what it "
        f"caches, or what helpers count in a file; leave {name} out, or checkpoint parts of it"
    )


class _Again:
    """What the graph holds of a call."""

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Any], inputs: Inputs) -> None:
        self.numbers = _Numbers()
        self._function = function
        self._leaves = [_Leaf(x, inputs) if isinstance(x, Tensor) else x for x in leaves]
        self._then = _Then(leaves)
        self._made = _NOTHING_MADE

    @run_uncompiled
    def open(self, number: float) -> Tensor:
        """Return a saved tensor. The call runs again in each backward pass that asks."""
        now, index = _pass(), int(number)
        found = _take(self._made, now, index)
        if found is None:
            self._made = _NOTHING_MADE  # what is left of an earlier pass goes first
            made = now, self._make()
            if now != _NO_TASK:
                self._made = made
            found = _take(made, now, index)
        assert found is not None
        return found

    def _make(self) -> list[Tensor | None]:
        keep = _Keep(self.numbers, self._function)
        ending = contextlib.suppress(_StopRecomputationError)  # innermost: no other context sees it
        # A vmap of backward is over its gradients: what the call saves is not batched.
        with (
            _outside_of_vmap(),
            self._then.restored(),
            torch.enable_grad(),
            refusing_changes(),
        ):
            leaves = [x.open() if isinstance(x, _Leaf) else x for x in self._leaves]
            with enclosing.Hooks(keep, _same), ending:
                self._function(*leaves)
        if len(keep.made) != len(self.numbers.forms):
            raise _of_another_way(
                f"{len(keep.made)} tensors, and the forward pass {len(self.numbers.forms)}",
                self._function,
            )
        return keep.made


@contextlib.contextmanager
def _outside_of_vmap() -> Iterator[None]:
    """Leave torch.vmap, and that of torch.autograd.grad(is_grads_batched=True), meanwhile."""
    with temporarily_clear_interpreter_stack(), torch._C._ExcludeDispatchKeyGuard(_VMAP):
        yield


_MODE: Any = torch._C._parse_dispatch_key("VmapMode")
_VMAP = torch._C.DispatchKeySet(_MODE)


def _pass() -> Any:
    """Return which backward pass this is."""
    return _group() or torch._C._current_graph_task_id()


def _take(made: _Made, now: Any, index: int) -> Tensor | None:
    """Return what this pass has made and not given yet."""
    made_in, tensors = made
    if made_in != now or index >= len(tensors):
        return None
    found, tensors[index] = tensors[index], None
    return found


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Leaf:
    """A tensor among the arguments, as it is kept."""

    __slots__ = ("_held", "_learns")

    def __init__(self, tensor: Tensor, inputs: Inputs) -> None:
        self._held: Held = inputs.held(tensor)
        self._learns = tensor.requires_grad

    def open(self) -> Tensor:
        tensor = self._held.open()
        if self._learns and not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
        return tensor


class _Then:
    """Autocast and torch's random numbers as they are before a call."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        self._devices = sorted({x.get_device() for x in tensors if x.is_cuda})
        if not self._devices and torch.cuda.is_initialized():  # the function may reach some itself
            self._devices = [torch.cuda.current_device()]
        self._random = self._states()
        self._caches = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _KINDS
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Have them as they were meanwhile."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                now = torch.get_autocast_dtype(kind)
                if enabled or torch.is_autocast_enabled(kind):
                    autocast = torch.autocast(
                        kind, dtype, enabled=enabled, cache_enabled=self._caches
                    )
                    stack.enter_context(autocast)
                elif dtype != now:  # for a function that enters autocast itself
                    stack.callback(torch.set_autocast_dtype, kind, now)
                    torch.set_autocast_dtype(kind, dtype)
            # Whether the call drew some is not told by the numbers that it leaves: it may have set
            # them back.
            stack.callback(self._set, self._states())
            self._set(self._random)
            yield

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]

    def _set(self, states: list[Tensor]) -> None:
        # Only where they differ: a CUDA graph that is captured may refuse it.
        for device, now, then in zip((None, *self._devices), self._states(), states, strict=True):
            if torch.equal(now, then):
                continue
            if device is None:
                torch.set_rng_state(then)
            else:
                torch.cuda.set_rng_state(then, device)
