"""A GPU that is not there: tensors without data whose operations run as on one.

Within fake_gpu(), torch's FakeTensorMode computes shapes instead of values for tensors on "cuda:0",
whether or not there is a GPU, and torch.cuda says what it says where there is one. Three things are
not torch's own. Where there is no GPU, C++ is told that there is one (fake_device.py). Backward
runs on the calling thread. And the engine, which asks for the device of each gradient to find its
stream, is told "meta", which has none; all else, autocast and dropout say, is told "cuda".

Everything is put back on leaving. Not thread-safe: other threads must not use torch meanwhile.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from vramx.errors import UntraceableError
from vramx.nn.families.plain_plan import note_stand_in
from vramx.patch.torch_functions import called
from vramx.planning.fake_answers import (
    answering,
    fakes_for_each,
    moving,
    operators_opened,
    unchecked,
    undecided,
)
from vramx.planning.fake_batches import loading
from vramx.planning.fake_device import guarded
from vramx.planning.fake_kernels import REPLACED, SEQUENCES
from vramx.planning.fake_reads import COMPARISONS, as_numbers, read, read_equal, read_value
from vramx.planning.fake_results import bounded
from vramx.planning.fake_sparse import assume_elements, sparse_result
from vramx.planning.fake_values import (
    Copies,
    follow,
    forget_value,
    keep_value,
    taken_for_finite,
    taken_for_large,
)

GPU = torch.device("cuda:0")
_META = torch.device("meta")
_ALL_FINITE = "numbers are taken for finite, where the step asks for it"


class FakeGpu:
    """What a program on the fake GPU had assumed for it.

    Attributes:
        mode: torch's mode, which makes fake tensors.
        assumptions: what was taken for known though data decides it, each once.
    """

    def __init__(self, kind: str = "cuda") -> None:
        self.is_cuda = kind == "cuda"
        # Else an operation that has no fake kernel runs on the GPU itself, and takes its memory.
        self.mode = FakeTensorMode(
            allow_non_fake_inputs=True, allow_fallback_kernels=not self.is_cuda
        )
        # By storage, the first of the tensors that share it: as long as this, for where it is the
        # whole of a storage, as that of a recurrent layer's weights, nothing else refers to it.
        self._firsts: dict[int, Tensor] = {}
        self._copies: Copies = {}
        self.assumptions: dict[str, None] = {}

    def assume(self, text: str) -> None:
        self.assumptions[text] = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run what is within on the fake GPU."""
        engine = _Engine(self)
        with contextlib.ExitStack() as stack:
            stack.enter_context(undecided(self.assume))
            if self.is_cuda:
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                stack.enter_context(answering())
            stack.enter_context(operators_opened())
            stack.enter_context(fakes_for_each())
            stack.enter_context(moving())
            stack.enter_context(loading(self.stand_in))
            stack.enter_context(unchecked())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", engine))
            stack.enter_context(self.mode)
            stack.enter_context(_made_on_the_host())
            stack.enter_context(_Operations(self, engine))
            stack.enter_context(_Calls(self, engine))
            yield

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        """Have a guard for CUDA where torch has none, for as long as fake tensors are there."""
        return guarded() if self.is_cuda else contextlib.nullcontext()

    def like(self, tensor: Tensor, device: torch.device, *, shares: bool = True) -> Tensor:
        """Return a tensor without data that stands for one; tensors of one storage share one.

        Args:
            shares: the tensor is there as long as the program, as a batch that is loaded is not.
        """
        whole = tensor.untyped_storage()
        first = self._firsts.get(whole._cdata) if shares else None
        with self.mode, torch.enable_grad():
            if first is None and whole.nbytes() != tensor.numel() * tensor.itemsize:
                first = torch.empty(whole.nbytes(), dtype=torch.uint8, device=device)
            if first is None:
                made = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                )
            else:
                count = first.numel() * first.itemsize // tensor.itemsize * tensor.itemsize
                flat = first.detach().as_strided((first.numel(),), (1,), 0).view(torch.uint8)
                flat = flat[:count].view(tensor.dtype)
                made = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, tensor.requires_grad)
        if shares and whole._cdata not in self._firsts:
            self._firsts[whole._cdata] = made if first is None else first
        keep_value(made, tensor, self._copies if shares else None)
        note_stand_in(made, tensor)
        return made.requires_grad_(tensor.requires_grad)

    def stand_in(self, value: Any) -> Any:
        """Return a tensor without data for one of which no copy was made, as a library's."""
        if _is_real(value) and value.layout == torch.strided and not value.is_quantized:
            return self.like(value, value.device, shares=False)
        return value


@contextlib.contextmanager
def _made_on_the_host() -> Iterator[None]:
    """Have torch.tensor(..., device="cuda") copy to the GPU what it makes on the host.

    Else it asks the allocator of a device that is not there.
    """
    put = getattr(torch._C, "_set_only_lift_cpu_tensors", None)
    if put is None:
        yield
        return
    before = torch._C._only_lift_cpu_tensors()
    put(True)
    try:
        yield
    finally:
        put(before)


class _Engine:
    """Runs backward, and knows whether it or a function that Python called asks for a device."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._run: Any = torch.autograd.graph._engine_run_backward
        self.asks = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A function that Python called, as Tensor.backward is, has taken the mode off. Transforms
        # of torch.func say of their tensors where they are, whatever is answered here.
        asks = not torch._C._are_functorch_transforms_active()
        with self.set(asks), _Calls(self._gpu, self):
            return self._run(*args, **kwargs)

    @contextlib.contextmanager
    def set(self, asks: bool) -> Iterator[None]:
        before, self.asks = self.asks, asks
        try:
            yield
        finally:
            self.asks = before


class _Calls(TorchFunctionMode):
    """Functions that Python calls: "cuda" is the fake GPU, some choose their kernel, some read."""

    def __init__(self, gpu: FakeGpu, engine: _Engine) -> None:
        super().__init__()
        self._gpu = gpu
        self._engine = engine

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        func = called(func, sys._getframe(1))
        if isinstance(func, torch._ops.OpOverload):  # also of modes, which call on
            return func(*args, **kwargs)
        with self._engine.set(False):
            found = read(func, args, self._gpu.assume)
            if found is NotImplemented:
                args, are_known = as_numbers(func, args)
                found = self._run(SEQUENCES.get(func, func), args, kwargs)
                if not are_known:
                    forget_value(found)
            if taken_for_finite(func, args, found):
                self._gpu.assume(_ALL_FINITE)
            return found

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self._gpu.is_cuda:
            return func(*args, **kwargs)
        kwargs = {name: _indexed(value) for name, value in kwargs.items()}
        if func is torch.Tensor.cuda:
            return args[0].to(GPU)
        if func in (torch.Tensor.pin_memory, torch.Tensor.record_stream):
            return args[0]
        return REPLACED.get(func, func)(*map(_indexed, args), **kwargs)


class _Operations(TorchDispatchMode):
    """Operations: the engine's question is answered, and what data decides is bounded."""

    supports_higher_order_operators = True

    def __init__(self, gpu: FakeGpu, engine: _Engine) -> None:
        super().__init__()
        self._gpu = gpu
        self._engine = engine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, torch._ops.HigherOrderOperator):
            if "flex_attention" in func.name():
                self._gpu.assume("flex_attention() is taken to be compiled, and to make no scores")
            return func(*args, **kwargs)
        if func is torch.ops.prim.device.default:
            device = args[0].fake_device
            return _META if self._engine.asks and device.type == "cuda" else device
        if func is torch.ops.aten._local_scalar_dense.default:
            return read_value(args[0], self._gpu.assume)
        if func in COMPARISONS:
            return read_equal(func, args, kwargs)
        # What the engine was told; a program's own tensors of the meta device are what they are.
        on_gpu = ("cuda", "meta") if self._engine.asks else ("cuda",)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type in on_gpu:
            kwargs["device"] = GPU
            known = getattr(args[0], "constant", None) if args else None
            if known is not None:  # torch would compute with the number, on a GPU
                dtype = kwargs.get("dtype") or args[0].dtype
                made = torch.empty(args[0].shape, dtype=dtype, device=GPU)
                follow(func, args, kwargs, made)
                return made
        if any(type(x) is torch.nn.Parameter for x in (*args, *kwargs.values())):
            raise UntraceableError(
                f"{func} meets a parameter of the program itself, of which predict has made no "
                "copy: give predict the model, or a step that refers to it"
            )
        return self._followed(func, args, kwargs)

    def _followed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what an operation makes, with what is known of its values."""
        if any(map(_is_real, tree_leaves((args, kwargs)))):
            args, kwargs = tree_map(self._gpu.stand_in, (args, kwargs))
        result = bounded(func, args, kwargs, self._gpu.assume)
        if result is NotImplemented:
            result = sparse_result(func, args, self._gpu.assume)
        if result is NotImplemented:
            result = func(*args, **kwargs)
            assume_elements(func, result, self._gpu.assume)
        follow(func, args, kwargs, result)
        if taken_for_finite(func, args, result):
            self._gpu.assume(_ALL_FINITE)
        if taken_for_large(func, result):
            self._gpu.assume("a single number that is drawn at random is taken for 1.0")
        return result


def _indexed(value: Any) -> Any:
    """Return a device with its number: only an initialised CUDA knows the current one."""
    if isinstance(value, (str, torch.device)) and str(value) == "cuda":
        return GPU
    return value


def _is_real(value: Any) -> bool:
    return type(value) is Tensor
