"""A GPU that is not there: tensors without data whose operations run as on one.

Within fake_gpu(), torch's FakeTensorMode computes shapes instead of values for tensors on "cuda:0",
whether or not there is a GPU, and torch.cuda says what it says where there is one. Three things are
not torch's own. Where there is no GPU, the guard of the meta device, which asks no driver, stands
in for the one of CUDA, which a CPU-only build of torch has not and others cannot use. Backward runs
on the calling thread. And the engine, which asks for the device of each gradient to find its
stream, is told "meta", which has none; all else, autocast and dropout say, is told "cuda".

Everything is put back on leaving. Not thread-safe: other threads must not use torch meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from vramx.errors import UntraceableError
from vramx.nn import attention_kernels
from vramx.planning.fake_kernels import REPLACED, bounded, read_value

GPU = torch.device("cuda:0")
_META = torch.device("meta")
# c10::DeviceType, and the registry of guards that c10 exports.
_CUDA_TYPE, _META_TYPE, _TYPES = 1, 14, 20
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
# What a program asks of torch.cuda before it computes. Compute capability 9.0 is an H100's.
_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "current_device": 0,
    "device_count": 1,
    "get_device_capability": (9, 0),
    "synchronize": None,
    "empty_cache": None,
    "set_device": None,
    "_lazy_init": None,
    "manual_seed_all": None,
    "reset_peak_memory_stats": None,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
}


class _Idle:
    """A stream or an event of the fake GPU: what it is asked for is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *_: object) -> None: ...
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _constant(0.0 if name == "elapsed_time" else True)


class FakeGpu:
    """What a program on the fake GPU had assumed for it.

    Attributes:
        mode: torch's mode, which makes fake tensors.
        assumptions: what was taken for known though data decides it, each once.
    """

    def __init__(self, kind: str = "cuda") -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.is_cuda = kind == "cuda"
        self._bases: dict[int, Tensor] = {}  # by storages that several tensors may share
        self.assumptions: dict[str, None] = {}

    def assume(self, text: str) -> None:
        self.assumptions[text] = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run what is within on the fake GPU."""
        engine = _Engine()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_unpacked(self.assume))
            if self.is_cuda:
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                stack.enter_context(_answering())
            stack.enter_context(_fakes_for_each())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", engine))
            stack.enter_context(self.mode)
            stack.enter_context(_made_on_the_host())
            stack.enter_context(_Operations(self, engine))
            if self.is_cuda:
                stack.enter_context(_Calls(engine))
            yield

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        """Have a guard for CUDA where torch has none, for as long as fake tensors are there."""
        return _guarded() if self.is_cuda else contextlib.nullcontext()

    def like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a tensor without data that stands for one; tensors of one storage share one."""
        whole = tensor.untyped_storage()
        with self.mode, torch.no_grad():
            if whole.nbytes() == tensor.numel() * tensor.itemsize:
                made = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                )
            else:
                base = self._bases.get(whole._cdata)
                if base is None:
                    base = torch.empty(whole.nbytes(), dtype=torch.uint8, device=device)
                    self._bases[whole._cdata] = base
                base = base[: len(base) // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
                made = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Where there is no GPU, have a guard for CUDA that asks no driver."""
    if torch.cuda.is_available():
        yield
        return
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        registry = (ctypes.c_void_p * _TYPES).in_dll(library, _REGISTRY)
    except (OSError, ValueError) as error:
        raise UntraceableError(
            f"this build of torch cannot be told of a GPU that is not there ({error}); predict on "
            "Linux, or with device='cpu'"
        ) from None
    before = registry[_CUDA_TYPE]
    registry[_CUDA_TYPE] = registry[_META_TYPE]
    try:
        yield
    finally:
        registry[_CUDA_TYPE] = before


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, _constant(answer)))
        for name in ("Stream", "Event", "stream", "current_stream", "default_stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, _Idle))
        # Random states of a device are read and set by checkpoints.
        state = _constant(torch.zeros(16, dtype=torch.uint8))
        stack.enter_context(mock.patch.object(torch.cuda, "get_rng_state", state))
        stack.enter_context(mock.patch.object(torch.cuda, "set_rng_state", _constant(None)))
        stack.enter_context(mock.patch.object(torch.nn.Module, "_apply", _apply))
        kernels = (("_capability", (9, 0)), ("_prefers_cudnn", False))
        for name, answer in kernels:  # both are remembered for the device that is really there
            stack.enter_context(mock.patch.object(attention_kernels, name, _constant(answer)))
        available = "is_flash_attention_available"
        stack.enter_context(mock.patch.object(torch.backends.cuda, available, _constant(True)))
        for function, replacement in REPLACED.items():
            called = _heard(function, replacement)
            stack.enter_context(mock.patch.object(torch.nn.functional, function.__name__, called))
        # Kernels of cuDNN without data are in no build; torch's own keep about as much.
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


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


def _unpacked(assume: Callable[[str], None]) -> contextlib.AbstractContextManager[Any]:
    """Have transformers find no several sequences in one row, which it reads off the positions.

    Without data it makes the mask that they would need: a byte for each pair of tokens.
    """
    masks = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if masks is None or not hasattr(masks, name):
        return contextlib.nullcontext()

    def found(*_: Any, **__: Any) -> None:
        assume("a row of tokens is taken for one sequence, as transformers reads off positions")

    return mock.patch.object(masks, name, found)


@contextlib.contextmanager
def _fakes_for_each() -> Iterator[None]:
    """Have optimizers take fake tensors all at once, as they do plain ones on a GPU."""
    kinds = (_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types)
    for kind in kinds:
        kind.append(FakeTensor)
    try:
        yield
    finally:
        for kind in kinds:
            kind.remove(FakeTensor)


def _heard(function: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is called for a function: itself where modes hear of calls, as _Calls does.

    Hooks of compression know an operation by the function that was called.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        heard = torch._C._len_torch_function_stack() > 0
        return function(*args, **kwargs) if heard else replacement(*args, **kwargs)

    return called


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
    """Do what Module._apply does, which cannot exchange parameters that are fake."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for name, parameter in self._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                moved = fn(parameter)
            if moved is not parameter:
                self._parameters[name] = torch.nn.Parameter(moved, parameter.requires_grad)
    for name, buffer in self._buffers.items():
        self._buffers[name] = buffer if buffer is None else fn(buffer)
    return self


class _Engine:
    """Runs backward, and knows whether it or a function that Python called asks for a device."""

    def __init__(self) -> None:
        self._run: Any = torch.autograd.graph._engine_run_backward
        self.asks = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A function that Python called, as Tensor.backward is, has taken the mode off.
        with self.set(True), _Calls(self):
            return self._run(*args, **kwargs)

    @contextlib.contextmanager
    def set(self, asks: bool) -> Iterator[None]:
        before, self.asks = self.asks, asks
        try:
            yield
        finally:
            self.asks = before


class _Calls(TorchFunctionMode):
    """Functions that Python calls: "cuda" is the fake GPU, and some choose their kernel here."""

    def __init__(self, engine: _Engine) -> None:
        super().__init__()
        self._engine = engine

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {name: _indexed(value) for name, value in (kwargs or {}).items()}
        if isinstance(func, torch._ops.OpOverload):  # also of modes, which call on
            return func(*args, **kwargs)
        with self._engine.set(False):
            if func is torch.Tensor.cuda:
                return args[0].to(GPU)
            if func in (torch.Tensor.pin_memory, torch.Tensor.record_stream):
                return args[0]
            return REPLACED.get(func, func)(*map(_indexed, args), **kwargs)


class _Operations(TorchDispatchMode):
    """Operations: the engine's question is answered, and what data decides is bounded."""

    def __init__(self, gpu: FakeGpu, engine: _Engine) -> None:
        super().__init__()
        self._gpu = gpu
        self._engine = engine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            device = args[0].fake_device
            return _META if self._engine.asks and device.type == "cuda" else device
        if func is torch.ops.aten._local_scalar_dense.default:
            return read_value(args[0], self._gpu.assume)
        # What the engine was told; a program's own tensors of the meta device are what they are.
        on_gpu = ("cuda", "meta") if self._engine.asks else ("cuda",)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type in on_gpu:
            kwargs["device"] = GPU
            known = getattr(args[0], "constant", None) if args else None
            if known is not None:  # torch would compute with the number, on a GPU
                dtype = kwargs.get("dtype") or args[0].dtype
                return torch.empty(args[0].shape, dtype=dtype, device=GPU)
        if any(type(x) is torch.nn.Parameter for x in (*args, *kwargs.values())):
            raise UntraceableError(
                f"{func} meets a parameter of the program itself, of which predict has made no "
                "copy: give predict the model, or a step that refers to it"
            )
        limited = bounded(func, args, self._gpu.assume)
        return func(*args, **kwargs) if limited is NotImplemented else limited


def _indexed(value: Any) -> Any:
    """Return a device with its number: only an initialised CUDA knows the current one."""
    if isinstance(value, (str, torch.device)) and str(value) == "cuda":
        return GPU
    return value


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)
