"""Sees whose memory is whose while a program trains, by hooks that are few and change nothing.

Functions around `nn.Module.__call__` and around the one that starts autograd's engine, and torch's
hooks on every optimizer's step. They are process-wide: nothing is put on a module, a tensor or an
optimizer, so that copies, pickles, fast paths and compiled code are what they were. Each makes a
note of a few words; what the notes mean is found out afterwards, by categories.py. A call of a
module costs a microsecond or two (torch's hooks on every module would cost several, for a module
with hooks is called the long way), a gradient or a state one. In a compiled region modules are not
called, and its memory is the caller's. Notes are made from any thread.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves

from vramx.compression import packs
from vramx.memory.categories import GRADIENTS, INPUTS, OPTIMIZER, PACKED, PARAMETERS
from vramx.memory.history import HistorySource, Tick, clock_ns
from vramx.memory.spans import BACKWARD, FORWARD, STEP
from vramx.memory.tensors import fingerprint, parameters_of, plain_tensors, states_of
from vramx.patch.watching import looks_on

_GONE: Callable[[], Any] = lambda: None  # noqa: E731 - as a weak reference
_NO_PATH: tuple[Any, str] = _GONE, ""
_TENSORS = (Tensor, nn.Parameter)
_ENGINE = "_engine_run_backward"
# Between two ticks clocks drift apart by less than a microsecond.
_TICK_NS = 50_000_000
_TRIES = 5


class Observer:
    """The hooks, and what they noted, with times of `clock_ns`.

    Attributes:
        marks, seen: the fields of Mark and Seen; plain tuples, which are made four times faster.
        ticks: of the source.

    Nothing of the program's is kept alive.
    """

    def __init__(
        self,
        source: HistorySource,
        model: nn.Module | None,
        given: Iterable[torch.optim.Optimizer],
        most_notes: int,
    ) -> None:
        self.marks: deque[tuple[int, str, bool, int, str, bool]] = deque(maxlen=most_notes)
        self.seen: deque[tuple[int, int, int, str, str]] = deque(maxlen=most_notes)
        self.ticks: deque[Tick] = deque(maxlen=most_notes)
        self._source = source
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._paths = _paths(model)
        self._known: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # parameters, by their ids
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self._states: dict[int, int] = {}  # of an optimizer, which they were
        self._depths: dict[int, int] = {}  # of a thread, how many calls are open
        self._handles: list[Any] = []
        self._replaced: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []
        self._is_over = False
        self._backwards = 0
        self._threads: set[int] = set()  # those that ran backward
        self._backwards_lock = RLock()
        self._last_tick_ns = 0
        self._least_width_ns = 1 << 62
        if model is not None:
            self._know(model.named_parameters())
        for optimizer in given:
            self._meet(optimizer)

    def start(self) -> None:
        """Begin to observe, with all that is there already."""
        self._source.tick()  # the first takes memory from the driver, perhaps
        self._tick(clock_ns())
        self.see_all()
        self._handles = [
            optimizers.register_optimizer_step_pre_hook(self._begin_step),
            optimizers.register_optimizer_step_post_hook(self._end_step),
        ]
        self._replace(nn.Module, "__call__", self._around_call)
        for place in _engine_places():
            self._replace(place, _ENGINE, self._around_engine)
        packs.watchers.append(self._see_pack)

    def stop(self) -> None:
        """Take the hooks away; what is alive is seen once more."""
        if self._see_pack in packs.watchers:
            packs.watchers.remove(self._see_pack)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._is_over = True  # for those that stay, where another has put its own around them
        for place, name, original, replacement in self._replaced:
            if getattr(place, name) is replacement:
                setattr(place, name, original)
        self._replaced = []
        self.see_all()
        self._last_tick_ns = 0
        self._tick(clock_ns())

    def see_all(self) -> None:
        """See parameters, buffers, gradients and states, as they are now."""
        model = self._model()
        if model is not None:
            self._know(model.named_parameters())
            for name, buffer in model.named_buffers():
                self._see(buffer, PARAMETERS, name)
        for optimizer in self._met():
            self._meet(optimizer)
            self._see_states(optimizer)
        for reference, name in list(self._known.values()):
            self._see(reference(), PARAMETERS, name)
        self._see_gradients()

    def _replace(
        self, place: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        original = getattr(place, name)
        replacement = around(original)
        self._replaced.append((place, name, original, replacement))
        setattr(place, name, replacement)

    # -- Modules ----------------------------------------------------------------------------------

    def _around_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note, depths, paths = self.marks.append, self._depths, self._paths
        is_compiling, records = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A compiler leaves out what stands behind this question.
            if is_compiling() or self._is_over:
                return original(module, *args, **kwargs)
            reference, label = paths.get(id(module), _NO_PATH)
            if reference() is not module:
                label = f"({type(module).__name__})"
            thread = get_ident()
            depth = depths.get(thread, 0)
            depths[thread] = depth + 1
            completed = False
            note((clock_ns(), FORWARD, True, thread, label, records()))
            try:
                result = original(module, *args, **kwargs)
                completed = True
                return result
            finally:
                now_ns = clock_ns()
                note((now_ns, FORWARD, False, thread, "", completed))
                if depth:
                    depths[thread] = depth
                else:
                    del depths[thread]
                    for leaf in tree_leaves((args, kwargs)):
                        self._see(leaf, INPUTS)
                    self._tick(now_ns)

        return looks_on(call, around=original)

    # -- Backward ---------------------------------------------------------------------------------

    def _around_engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if self._is_over:
                return original(*args, **kwargs)
            thread = get_ident()
            self.marks.append((clock_ns(), BACKWARD, True, thread, "", True))
            with self._backwards_lock:
                self._backwards += 1
                if not _is_nested():
                    self._threads.add(thread)
            try:
                return original(*args, **kwargs)
            finally:
                self.marks.append((clock_ns(), BACKWARD, False, thread, "", True))
                # None begins meanwhile: it would write, without the GIL, the gradients seen here.
                with self._backwards_lock:
                    self._backwards -= 1
                    if not self._backwards:
                        self._see_gradients()

        return run_backward

    # -- Optimizers -------------------------------------------------------------------------------

    def _begin_step(self, optimizer: Any, *_arguments: Any) -> None:
        if self._optimizers.get(id(optimizer), _GONE)() is not optimizer:
            self._meet(optimizer)
        # Stepped in backward, its gradients go before that is over; and where several threads
        # train, each looks at its own alone.
        if self._backwards or len(self._threads) > 1:
            for parameter in parameters_of(optimizer):
                self._see(parameter.grad, GRADIENTS, self._name(parameter))
        now_ns = clock_ns()
        self.marks.append((now_ns, STEP, True, get_ident(), "", True))
        self._tick(now_ns)

    def _end_step(self, optimizer: Any, *_arguments: Any) -> None:
        self.marks.append((clock_ns(), STEP, False, get_ident(), "", True))
        if self._states.get(id(optimizer)) != fingerprint(optimizer):
            self._see_states(optimizer)

    def _meet(self, optimizer: Any) -> None:
        self._forget_what_is_gone()
        with contextlib.suppress(TypeError):  # one that cannot be referred to is seen as it steps
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        self._know(("", parameter) for parameter in parameters_of(optimizer))

    def _forget_what_is_gone(self) -> None:
        """Let no pass over what is known take longer with each model that a process has had."""
        self._known = {key: k for key, k in list(self._known.items()) if k[0]() is not None}
        self._optimizers = {key: o for key, o in list(self._optimizers.items()) if o() is not None}
        self._states = {key: s for key, s in list(self._states.items()) if key in self._optimizers}

    def _met(self) -> Iterator[Any]:
        for reference in list(self._optimizers.values()):
            optimizer = reference()
            if optimizer is not None:
                yield optimizer

    # -- Tensors ----------------------------------------------------------------------------------

    def _know(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in parameters:
            known = self._known.get(id(parameter))
            if known is None or known[0]() is not parameter:
                self._known[id(parameter)] = weakref.ref(parameter), name

    def _name(self, parameter: Tensor) -> str:
        reference, name = self._known.get(id(parameter), _NO_PATH)
        return name if reference() is parameter else ""

    def _see_gradients(self) -> None:
        if len(self._threads) > 1:  # another may let go of what is looked at here
            return
        for reference, name in list(self._known.values()):
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                self._see(parameter.grad, GRADIENTS, name)

    def _see_states(self, optimizer: Any) -> None:
        self._states[id(optimizer)] = fingerprint(optimizer)
        for parameter, key, value in states_of(optimizer):
            name = self._name(parameter) if isinstance(parameter, Tensor) else ""
            label = f"{name}.{key}" if name else str(key)
            for leaf in tree_leaves(value):
                self._see(leaf, OPTIMIZER, label)

    def _see_pack(self, buffer: Tensor) -> None:
        self._see(buffer, PACKED)

    def _see(self, value: Any, category: str, label: str = "") -> None:
        is_plain = type(value) in _TENSORS and value.layout is torch.strided
        for tensor in (value,) if is_plain else plain_tensors(value):
            if tensor.device.type != self._source.device_type:
                continue
            try:
                storage = tensor.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
            except (RuntimeError, NotImplementedError):
                continue  # fake ones and the like have none
            if size:
                self.seen.append((clock_ns(), address, size, category, label))

    def _tick(self, now_ns: int) -> None:
        if now_ns - self._last_tick_ns < _TICK_NS:
            return
        for _ in range(_TRIES):  # one that was interrupted tells little
            tick = self._source.tick()
            if tick is None:
                return
            self.ticks.append(tick)
            self._last_tick_ns = now_ns
            width_ns = tick.end_ns - tick.begin_ns
            self._least_width_ns = min(self._least_width_ns, width_ns)
            if len(self.ticks) >= _TRIES and width_ns <= 2 * self._least_width_ns:
                return


def _paths(model: nn.Module | None) -> dict[int, tuple[Any, str]]:
    """Return the path of each module by its id, with a reference: ids are used again."""
    if model is None:
        return {}
    root = type(model).__name__
    return {id(each): (weakref.ref(each), path or root) for path, each in model.named_modules()}


def _is_nested() -> bool:
    """Tell whether a backward begins within another, as a reentrant checkpoint's does.

    It may be on a thread of autograd's own. A torch that does not tell is taken for one of several
    threads there, whose gradients are then seen as optimizers step.
    """
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def _engine_places() -> list[Any]:
    """Return the modules that have the function by name; a torch may start backward elsewhere."""
    places = (torch.autograd, torch.autograd.graph)
    return [place for place in places if hasattr(place, _ENGINE)]
