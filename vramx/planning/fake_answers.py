"""What Python is told while a step runs on the fake GPU: by torch.cuda, and by libraries.

A program asks torch.cuda before it computes; optimizers ask which tensors they may take at once,
and transformers reads its masks off data. Here are the answers, those of an H100; fake_gpu.py has
the tensors and the operations. Everything is put back on leaving. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from vramx.compression.offload import offload
from vramx.nn import attention_kernels
from vramx.nn.operators import Operator
from vramx.patch.torch_functions import stand_in
from vramx.planning.fake_kernels import REPLACED
from vramx.planning.fake_offload import FakeLinks, FakeStashes
from vramx.planning.fake_values import value_of

# What a program asks of torch.cuda before it computes. Compute capability 9.0 is an H100's.
_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "current_device": 0,
    "device_count": 1,
    "get_device_capability": (9, 0),
    "get_device_name": "NVIDIA H100",
    "get_device_properties": SimpleNamespace(
        name="NVIDIA H100",
        major=9,
        minor=0,
        total_memory=80 << 30,
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        L2_cache_size=50 << 20,
        regs_per_multiprocessor=65_536,
        shared_memory_per_multiprocessor=228 << 10,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        is_integrated=0,
        is_multi_gpu_board=0,
    ),
    "mem_get_info": (80 << 30, 80 << 30),
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
    "memory_stats": Counter[str](),
    "memory_summary": "",
    "memory_snapshot": [],
    "set_per_process_memory_fraction": None,
    "ipc_collect": None,
    "memory_usage": 0,
    "utilization": 0,
}
# What a program notes for its log, by other names.
_OF_ACCELERATOR = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_stats", "reset_peak_memory_stats", "empty_cache", "synchronize"),
)
_OF_NVTX = ("mark", "range_push", "range_pop")


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


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Have torch.cuda answer, and attention choose its kernel, as on a GPU."""
    with contextlib.ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, _constant(answer)))
        for name in _OF_ACCELERATOR:
            if hasattr(torch, "accelerator") and hasattr(torch.accelerator, name):
                answer = _constant(_ANSWERS[name])
                stack.enter_context(mock.patch.object(torch.accelerator, name, answer))
        for name in _OF_NVTX:
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, name, _constant(None)))
        for name in ("Stream", "Event", "stream", "current_stream", "default_stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, _Idle))
        # Random states of a device are read and set by checkpoints.
        state = _constant(torch.zeros(16, dtype=torch.uint8, device="cpu"))
        stack.enter_context(mock.patch.object(torch.cuda, "get_rng_state", state))
        stack.enter_context(mock.patch.object(torch.cuda, "set_rng_state", _constant(None)))
        kernels = (("_capability", (9, 0)), ("_prefers_cudnn", False))
        for name, answer in kernels:  # both are remembered for the device that is really there
            stack.enter_context(mock.patch.object(attention_kernels, name, _constant(answer)))
        available = "is_flash_attention_available"
        stack.enter_context(mock.patch.object(torch.backends.cuda, available, _constant(True)))
        for function, replacement in REPLACED.items():
            called, name = _heard(function, replacement), function.__name__
            if getattr(torch.nn.functional, name) is function:  # and not the program's own
                stack.enter_context(mock.patch.object(torch.nn.functional, name, called))
        # A fake tensor has torch initialise the GPU that is_available() tells of.
        if hasattr(fake_tensor, "init_gpu_context"):
            stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", _constant(None)))
        stack.enter_context(mock.patch.object(offload, "stash_of", FakeStashes()))
        stack.enter_context(mock.patch.object(offload, "link_of", FakeLinks()))
        # Kernels of cuDNN without data are in no build; torch's own keep about as much.
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def operators_opened() -> contextlib.AbstractContextManager[Any]:
    """Have operators of vramx run what they are made of, so that what they take within is seen.

    Transforms of torch.func need the operators themselves.
    """
    return mock.patch.object(Operator, "is_watched", _is_transformed)


def moving() -> contextlib.AbstractContextManager[Any]:
    """Have modules move to a device or to another type."""
    return mock.patch.object(torch.nn.Module, "_apply", _mover())


@contextlib.contextmanager
def undecided(assume: Callable[[str], None]) -> Iterator[None]:
    """Have transformers find no several sequences in one row, and no end of what it generates; and
    torch save nothing, of which there are no data: it would spoil a file that is there.

    It reads the first off positions: without data it makes the mask that they would need, a byte
    for each pair of tokens. It reads the second off the tokens that it drew.
    """

    def found(*_: Any, **__: Any) -> None:
        assume("a row of tokens is taken for one sequence, as transformers reads off positions")

    def ended(_: Any, tokens: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
        assume("what is generated is taken to be as long as it may be")
        return torch.full((tokens.shape[0],), False, device=tokens.device, dtype=torch.bool)

    def saved(*_: Any, **__: Any) -> None:
        assume("what the step saves by torch.save() is not written")

    masks = sys.modules.get("transformers.masking_utils")
    asked = getattr(masks, "is_tracing", None)

    def traced(tensor: Any = None) -> Any:
        # A mask whose values are known is looked at, as it is where there are data.
        return asked(tensor) if asked is not None and value_of(tensor) is None else False

    criteria = getattr(
        sys.modules.get("transformers.generation.stopping_criteria"), "EosTokenCriteria", None
    )
    replaced = (
        (torch, "save", saved),
        (masks, "find_packed_sequence_indices", found),
        (masks, "is_tracing", traced),
        (criteria, "__call__", ended),
    )
    with contextlib.ExitStack() as stack:
        for place, name, function in replaced:
            if hasattr(place, name) and place is not None:
                stack.enter_context(mock.patch.object(place, name, function))
        yield


@contextlib.contextmanager
def fakes_for_each() -> Iterator[None]:
    """Have optimizers take fake tensors all at once, as they do plain ones on a GPU."""
    kinds = (_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types)
    for kind in kinds:
        kind.append(FakeTensor)
    try:
        yield
    finally:
        for kind in kinds:
            kind.remove(FakeTensor)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Have what torch finds out by data taken for what it is in a program that works.

    Distributions do not check their parameters, and layers of a transformer do not look for padding
    to leave out.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with mock.patch.object(torch.distributions.Distribution, "_validate_args", False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _heard(function: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is called for a function: itself where modes hear of calls, as _Calls does.

    Hooks of compression know an operation by the function that was called.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        heard = torch._C._len_torch_function_stack() > 0
        return function(*args, **kwargs) if heard else replacement(*args, **kwargs)

    return stand_in(called, function.__name__)


def _is_transformed(*_: Any) -> bool:
    return bool(torch._C._are_functorch_transforms_active())


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _mover() -> Callable[..., torch.nn.Module]:
    """Return what does Module._apply, which cannot exchange parameters that are fake.

    A parameter that two modules share is one afterwards, as it is where torch exchanges its data.
    """
    moved: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
    depth = 0

    def apply(
        self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True
    ) -> torch.nn.Module:
        nonlocal depth
        depth += 1
        for child in self.children() if recurse else ():
            child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = parameter, _moved(parameter, fn)
                self._parameters[name] = moved[id(parameter)][1]
        for name, buffer in self._buffers.items():
            self._buffers[name] = buffer if buffer is None else fn(buffer)
        depth -= 1
        if not depth:
            moved.clear()
        return self

    return apply


def _moved(parameter: torch.nn.Parameter, fn: Callable[..., Any]) -> torch.nn.Parameter:
    with torch.no_grad():
        data = fn(parameter)
    return parameter if data is parameter else torch.nn.Parameter(data, parameter.requires_grad)
