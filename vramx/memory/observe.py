"""Sees whose memory is whose while a program trains, by hooks that are few and change nothing.

Hooks of torch on every module's call and on every optimizer's step, and a function around the one
that starts autograd's engine. They are process-wide: nothing is put on a module, a tensor or an
optimizer, so that copies, pickles, fast paths and compiled code are what they were. Each makes a
note of a few words; what the notes mean is found out afterwards, by categories.py. A call of a
module costs some microseconds, a gradient or a state one. In a compiled region modules are not
called, and its memory is the caller's. Notes are made from any thread.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves

from vramx.compression import packs
from vramx.memory.categories import GRADIENTS, INPUTS, OPTIMIZER, PACKED, PARAMETERS
from vramx.memory.history import HistorySource, Tick, clock_ns
from vramx.memory.spans import BACKWARD, FORWARD, STEP
from vramx.memory.tensors import fingerprint, parameters_of, plain_tensors, states_of
from vramx.patch.watching import looks_on

# torch notes in them how a hook wants to be called, and some releases leave the note when it goes:
# then every module would be called the long way for good.
_MARKS_OF_HOOKS = ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called")
_NO_PATH: tuple[Any, str] = (lambda: None, "")
_TENSORS = (Tensor, nn.Parameter)
_ENGINE = "_engine_run_backward"
# Between two ticks clocks drift apart by less than a microsecond.
_TICK_NS = 50_000_000
_TRIES = 5
# Of hooks that are process-wide; these pass compiled modules by.
_WARNING_OF_COMPILER = r"Using `torch.compile\(module\)` when there are global hooks"


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
        self._filter: Any = None
        self._engine: Callable[..., Any] | None = None
        self._backwards = 0
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
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._begin_step),
            optimizers.register_optimizer_step_post_hook(self._end_step),
        ]
        warnings.filterwarnings("ignore", message=_WARNING_OF_COMPILER)
        self._filter = warnings.filters[0]
        self._wrap_engine()
        packs.watchers.append(self._see_pack)

    def stop(self) -> None:
        """Take the hooks away; what is alive is seen once more."""
        if self._see_pack in packs.watchers:
            packs.watchers.remove(self._see_pack)
        for handle in self._handles:
            handle.remove()
            for table in _MARKS_OF_HOOKS:
                getattr(modules, table, {}).pop(handle.id, None)
        self._handles = []
        with contextlib.suppress(ValueError):  # also where the program has its own filters by now
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        self._unwrap_engine()
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

    # -- Modules ----------------------------------------------------------------------------------

    # A compiler leaves out what stands behind this question, and so the hooks.
    @looks_on
    def _enter(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        reference, label = self._paths.get(id(module), _NO_PATH)
        if reference() is not module:
            label = f"({type(module).__name__})"
        thread, records = get_ident(), torch.is_grad_enabled()
        self._depths[thread] = self._depths.get(thread, 0) + 1
        self.marks.append((clock_ns(), FORWARD, True, thread, label, records))

    # After a failure torch calls without the keyword arguments.
    @looks_on
    def _leave(self, _module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        now_ns, thread = clock_ns(), get_ident()
        # Without a result the call has failed, as far as can be told.
        completed = kwargs_and_output[-1] is not None
        self.marks.append((now_ns, FORWARD, False, thread, "", completed))
        depth = self._depths[thread] = self._depths.get(thread, 1) - 1
        if depth <= 0:
            del self._depths[thread]
            for leaf in tree_leaves((args, kwargs_and_output[:-1])):
                self._see(leaf, INPUTS)
            self._tick(now_ns)

    # -- Backward ---------------------------------------------------------------------------------

    def _wrap_engine(self) -> None:
        engine = getattr(torch.autograd.graph, _ENGINE, None)
        if engine is None:  # this torch starts backward elsewhere
            return

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            thread = get_ident()
            self.marks.append((clock_ns(), BACKWARD, True, thread, "", True))
            self._backwards += 1
            try:
                return engine(*args, **kwargs)
            finally:
                self._backwards -= 1
                self.marks.append((clock_ns(), BACKWARD, False, thread, "", True))
                if not self._backwards:
                    self._see_gradients()

        self._engine, self._wrapper = engine, run_backward
        for place in _engine_places():
            setattr(place, _ENGINE, run_backward)

    def _unwrap_engine(self) -> None:
        if self._engine is None:
            return
        for place in _engine_places():
            if getattr(place, _ENGINE) is self._wrapper:  # else another has wrapped this one
                setattr(place, _ENGINE, self._engine)

    # -- Optimizers -------------------------------------------------------------------------------

    def _begin_step(self, optimizer: Any, *_arguments: Any) -> None:
        if id(optimizer) not in self._optimizers:
            self._meet(optimizer)
        if self._backwards:  # stepped in backward, and its gradients go before that is over
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
        with contextlib.suppress(TypeError):  # one that cannot be referred to is seen as it steps
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        self._know(("", parameter) for parameter in parameters_of(optimizer))

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


def _engine_places() -> list[Any]:
    """Return the modules that have the function by name."""
    places = (torch.autograd, torch.autograd.graph)
    return [place for place in places if hasattr(place, _ENGINE)]
