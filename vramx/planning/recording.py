"""Records what a step without data allocates: events for memory/replay, and where each peak is.

Every storage on the device is an event when it comes and when it goes, at the place where the
program is: forward or backward of which module, or the optimizer's step. Not thread-safe; costs
what the tracer of storages.py does.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from vramx.errors import UntraceableError
from vramx.memory.trace import ALLOCATE, FREE_COMPLETED, Trace
from vramx.patch.watching import looks_on
from vramx.planning.reductions import staging_bytes
from vramx.planning.storages import Storages, Watch
from vramx.recompute.structure import leaves_of

FORWARD, BACKWARD, OPTIMIZER, BEFORE = "forward", "backward", "optimizer's step", "before the step"


@dataclass(frozen=True)
class Place:
    """Where a program is: a phase, and the module that runs in it; "" outside of all."""

    phase: str
    module: str = ""

    def __str__(self) -> str:
        return f"{self.phase} of {self.module}" if self.module else self.phase


class Recording:
    """The events of a program, in order.

    Attributes:
        peak_bytes: the most that was there at once, unrounded.
        place: where the program was then.
    """

    def __init__(self, device: str) -> None:
        # Weakly: storages that refer to who hears of them would all wait for the collector.
        hears = weakref.WeakMethod(self._hear)
        self.storages = Storages(device, lambda *event: _call(hears(), *event))
        self.place = Place(BEFORE)
        self.peak_bytes = 0
        self._in_threads = False
        self._thread = threading.get_ident()
        self.kernels: set[tuple[str, bool]] = set()
        self._now = Place(BEFORE)
        self._events: list[tuple[int, int, int]] = []
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._marked: set[int] = set()

    def _hear(self, comes: bool, number: int, nbytes: int) -> None:
        self._events.append((ALLOCATE if comes else FREE_COMPLETED, number, nbytes))
        if comes:
            live = self.storages.live_bytes + nbytes  # it is told before it is added
            if live > self.peak_bytes:
                self.peak_bytes, self.place = live, self._where()

    def check_threads(self) -> None:
        """Raise where another thread called a module: no mode sees what it made there."""
        if self._in_threads:
            raise UntraceableError(
                "the step runs a model in another thread, which is not followed without data: "
                "accepted is a step that runs it in its own"
            )

    def now(self) -> Place:
        """Return where the program is."""
        return self._where()

    def _where(self) -> Place:
        if torch._C._current_graph_task_id() == -1 and self._now.phase == BACKWARD:
            self._now = Place(FORWARD)
        elif torch._C._current_graph_task_id() != -1 and self._now.phase == FORWARD:
            self._now = Place(BACKWARD)
        if self._now.phase == FORWARD:
            return Place(FORWARD, self._stack[-1] if self._stack else "")
        return self._now

    def trace(self, name: str) -> Trace:
        """Return the events for a replay, of which each takes a microsecond."""
        events = np.array(self._events or [(ALLOCATE, 0, 1)], dtype=np.uint64)
        return Trace(
            name=name,
            op=events[:, 0].astype(np.uint8),
            id=events[:, 1].astype(np.uint32),
            size=events[:, 2].copy(),
            stream=np.zeros(len(events), np.uint8),
            time_us=np.arange(len(events), dtype=np.uint32),
        )

    @contextlib.contextmanager
    def running(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Record what happens within; the modules of models are named."""
        for model in models:
            self._names |= {
                id(m): name or type(model).__name__ for name, m in model.named_modules()
            }
        hooks = nn.modules.module
        self._now = Place(FORWARD)
        with contextlib.ExitStack() as stack:
            for handle in (
                hooks.register_module_forward_pre_hook(self._enter),
                hooks.register_module_forward_hook(self._leave, always_call=True),
                register_optimizer_step_pre_hook(self._begin_optimizer),
                register_optimizer_step_post_hook(self._end_optimizer),
            ):
                stack.callback(handle.remove)
            stack.enter_context(_Recorder(self))
            yield

    @looks_on
    def _enter(self, module: nn.Module, _: Any) -> None:
        if id(module) not in self._names:
            return
        if threading.get_ident() != self._thread:
            self._in_threads = True
            self.check_threads()
        self._stack.append(self._names[id(module)])

    @looks_on
    def _leave(self, module: nn.Module, _: Any, result: Any) -> None:
        name = self._names.get(id(module))
        if name is None or name not in self._stack:
            return
        while self._stack.pop() != name:  # what raised, as an early stop of a checkpoint does
            pass
        for tensor in leaves_of(result):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self._mark(tensor, name)

    def _mark(self, tensor: Tensor, name: str) -> None:
        """Have backward of a module begin where the gradient of its result is there."""
        node = tensor.grad_fn
        if node is None or id(tensor) in self._marked:
            return  # of the innermost of the modules that return it
        key = id(tensor)
        self._marked.add(key)

        def begin(_: Tensor) -> None:
            self._now = Place(BACKWARD, name)
            self._marked.discard(key)

        tensor.register_hook(begin)

    def _begin_optimizer(self, *_: Any) -> None:
        self._now = Place(OPTIMIZER)

    def _end_optimizer(self, *_: Any) -> None:
        self._now = Place(FORWARD)


def _call(function: Callable[..., None] | None, *arguments: Any) -> None:
    if function is not None:
        function(*arguments)


class _Recorder(Watch):
    """A watch that also notes which libraries' kernels run, in which pass, and what sums take."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording.storages)
        self._kernels = recording.kernels

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        asks = func is torch.ops.prim.device.default
        if torch.is_inference_mode_enabled() and not asks and hasattr(func, "decompose"):
            with self:  # autograd, which takes such an operation apart, is off
                made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        library = _KERNELS.get(getattr(func, "__name__", "").partition(".")[0])
        if getattr(func, "namespace", "") == "vramx":  # most of whose operators have products
            library = CUBLAS
        if library is not None:
            self._kernels.add((library, torch._C._current_graph_task_id() != -1))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if nbytes := staging_bytes(func, args, kwargs or {}):
            self._storages.pass_by(nbytes)
        return result


CUBLAS, CUDNN = "cuBLAS", "cuDNN"
_KERNELS = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot"), CUBLAS),
    **dict.fromkeys(("convolution", "convolution_backward"), CUDNN),
}
