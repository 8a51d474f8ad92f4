"""predict(): the peak of a training step that is not run, without a GPU and without its memory.

The step runs on tensors without data (fake_gpu.py), on a copy of what it refers to (program.py),
once for each level; what it allocates is recorded (recording.py) by the tracer that plans use, and
replayed under each policy (memory/replay). It lies beside plan() because it shares the tracer, the
loop and the words. Not thread-safe; takes some seconds a level, tens of microseconds an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from vramx.compression.fakes import fakes_are_plain
from vramx.compression.parts import is_distributed
from vramx.errors import InvalidValueError, UntraceableError, VramxError, refused
from vramx.memory.replay import POLICIES, check_policies, replay
from vramx.planning.blocks import find_blocks
from vramx.planning.fake_gpu import GPU, FakeGpu
from vramx.planning.fake_sparse import is_sparse, sparse_like
from vramx.planning.prediction import AS_IT_IS, PredictedRow, Prediction
from vramx.planning.program import check_ran, check_step, device_type_of, found_in, is_on_the_host
from vramx.planning.program_copy import Copied
from vramx.planning.recording import BEFORE, CUBLAS, CUDNN, Place, Recording
from vramx.planning.states_kept import generators_as_before
from vramx.planning.step_programs import Program, program_of
from vramx.planning.words import WORDS, apply_words, can_have
from vramx.sizes import MIB

# Of a handle of cuBLAS, of which forward and backward have one each, in their own threads:
# :4096:2:16:8 of CUBLAS_WORKSPACE_CONFIG, and 32 MiB from compute capability 9.0 (an H100) on, as
# ATen/cuda/CublasHandlePool.cpp has it. Larger than what older GPUs take, 8.125 MiB.
CUBLAS_BYTES = 32 * MIB
# About what a process of torch takes of a GPU before its first tensor. It depends on the driver and
# the libraries, so it stands beside the peak and never in it.
CONTEXT_BYTES = 512 * MIB
_NO_WORKSPACES = "workspaces of cuDNN, which it chooses when it runs, are not counted"
_NOTHING_THERE = (
    "nothing that the step makes is on a GPU: it is on the host, where the step says no device"
)
# As torch 2.13 says it, and as releases before it do.
_TWO_DEVICES = ("found at least two devices", "found two different devices")
_ON_THE_HOST = (
    "; what the step refers to is taken to be on a GPU, and what it makes is where it makes it: "
    "make it before the step, or on the device of the model's parameters"
)
_PICKLED = "what is pickled, as into a file, has no data; leave it out of the step"
_SCRIPTED = "what torch.jit has compiled cannot run without data"
_NOT_FOLLOWED = {
    "the TorchScript interpreter": _SCRIPTED,
    "RecursiveScriptModule": _SCRIPTED,  # a copy of it has none of its methods
    "shape_env must not be None": "nested tensors cannot be made without data",
    "Can't pickle": _PICKLED,  # as releases of Python say it
    "Can't get local object": _PICKLED,
    "numpy() is not supported for tensor subclasses": (
        "a tensor on the GPU, or with a gradient, has no numpy(); call detach().cpu() before it"
    ),
    "Unread": (
        "an integer that depends on data, and is read by item(), is no index, size or value; "
        "compute it before the step, or have predict run without it"
    ),
}
_NO_ACCELERATOR = "Cannot access accelerator device"
_TRANSFORMED = (
    " This build of torch has no CUDA, and there torch.func's derivatives are predicted with "
    "device='cpu' alone."
)
_UNSEEN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


def predict(
    step: Any,
    *arguments: Any,
    optimizer: Any = None,
    gradients: str | None = None,
    levels: str | Collection[str] | None = None,
    policies: str | Collection[str] = POLICIES,
    device: str = "cuda",
    steps: int = 2,
) -> Prediction:
    """Predict the peak of a training step before it runs, without a GPU and without its memory.

    Nothing is computed and no tensor of a model's size is made: the step runs on tensors without
    data, on a copy of the models, optimizers and tensors that it refers to. autocast, checkpoints,
    accumulation and optimizers count as they are written. A model may be on the meta device, the
    CPU or a GPU: on the CPU and the meta device it is predicted as if it was moved to a GPU, with
    the tensors that the step refers to. What else the step refers to is the program's own: a
    generator that it takes batches from is advanced, a DataLoader's iterator is not.

    Args:
        step: one step of training as it is written, called with `arguments`: zeroing gradients,
            forward, backward, the optimizer's step. Or a model, followed by a sample as vramx.plan
            takes it; then `optimizer` and `gradients` are plan's as well, and those of a
            LightningModule are what it makes and what Lightning does.
        levels: words of vramx.plan, one row each, in the order given: "keep", "int8", "int4",
            "recompute_mlp", "recompute_all" and "left"; blocks that have no such word are left.
            None is the step as it is.
        policies: of vramx.replay: what "native", "expandable" and "vramx" would reserve; "live"
            is what is requested at once.
        device: "cuda", or "cpu" for what the step takes on the host.
        steps: how often the step is taken; states of an optimizer are there from the second on.

    Returns:
        A Prediction. cuBLAS's workspaces and CUDA's context are beside its peaks, not in them.

    Raises:
        InvalidValueError: a value is not accepted.
        UntraceableError: the step needs data, or an operation that cannot run without; the text
            names it.

    Memory: host memory for the events, some hundred bytes each; none of the device.
    Sync: only where numbers that the step may read, as counters are, lie on a GPU. Other threads
        must not use torch meanwhile.
    Error bound: exact to the byte in what operations return. What kernels use within themselves,
        workspaces of cuDNN above all, is not seen. Attention is taken to run the kernel that a GPU
        of compute capability 8.0 or above would choose, recurrent layers torch's own kernels.

    Example:
        >>> import torch, vramx
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(1024, 1024, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        >>> prediction = vramx.predict(model, torch.ones(16, 1024), optimizer=optimizer)
        >>> prediction.peak_bytes() // 2**20  # weights, gradients, momentum and the batch
        12
    """
    names = check_policies(policies)
    kind = device_type_of(device)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise refused("steps", steps, "is 1 or more")
    levels = (levels,) if isinstance(levels, str) else levels
    for word in levels or ():
        if word not in WORDS:
            raise refused("level", word, WORDS)
    program = program_of(step, arguments, optimizer, gradients)
    tracer = _Tracer(program, kind, steps)
    rows = [tracer.row(word, names) for word in (levels if levels is not None else [None])]
    return Prediction(tuple(rows), tracer.beside(), tuple(tracer.assumptions))


def predict_made(function: Callable[[], Any], **options: Any) -> Prediction:
    """Predict what a function makes, on tensors without data; options are predict's.

    It returns a step, or a model and a sample and perhaps an optimizer, in a tuple; where it
    returns neither, it is a step itself.

    Raises:
        InvalidValueError, UntraceableError: as predict().
    """
    check_step(function)
    kind = device_type_of(options.get("device", "cuda"))
    gpu, recording = FakeGpu(kind), Recording(kind)
    with gpu.guarded():
        on_host = is_on_the_host(found_in(function))
        copied = _copied(gpu, recording, on_host, function)
        with _Named(recording, gpu), gpu.entered():
            made = copied.values[0]()
    if isinstance(made, tuple) and made and isinstance(made[0], nn.Module):
        model, *rest = made
        return predict(model, *rest[:1], **options, optimizer=rest[1] if len(rest) > 1 else None)
    is_step = callable(made) and not isinstance(made, (type, nn.Module))
    return predict(made if is_step else function, **options)


class _Tracer:
    """Traces a program at one level after the other."""

    def __init__(self, program: Program, kind: str, steps: int) -> None:
        self._program = program
        self._kind = kind
        self._steps = steps
        self._found = found_in(*program.values)
        self._on_host = is_on_the_host(self._found)
        self._kernels: set[tuple[str, bool]] = set()
        self.assumptions: dict[str, None] = dict.fromkeys(program.said)

    def row(self, word: str | None, policies: list[str]) -> PredictedRow:
        """Return the row of a level; None is the program as it is."""
        name = AS_IT_IS if word is None else word
        gpu, recording = FakeGpu(self._kind), Recording(self._kind)
        with generators_as_before(self._found), gpu.guarded(), fakes_are_plain():
            copied = _copied(gpu, recording, self._on_host, *self._program.values)
            try:
                self._apply(copied.found.models, word)
            except InvalidValueError as error:
                return PredictedRow(name, {}, why_not=str(error))
            before = recording.storages.live_bytes
            with _Named(recording, gpu), gpu.entered(), recording.running(copied.found.models):
                copied.take_states_over()
                step = self._program.run(*copied.values)
                copied.let_go()
                for _ in range(self._steps):
                    check_ran(step())
                recording.check_threads()
            for handle in copied.handles:
                handle.remove()
        self.assumptions |= gpu.assumptions
        self._kernels |= recording.kernels
        if self._kind == "cuda" and recording.place.phase == BEFORE:
            self.assumptions[_NOTHING_THERE] = None
        trace = recording.trace(name)
        results = replay(trace, policies)
        peaks = {result.policy: result.peak_reserved_bytes for result in results}
        allocated = {result.policy: result.peak_allocated_bytes for result in results}
        if "live" in peaks:
            peaks["live"] = allocated["live"] = recording.peak_bytes
        place = recording.place
        return PredictedRow(
            name, peaks, place.phase, place.module, before, allocated_bytes=allocated
        )

    def _apply(self, models: Sequence[nn.Module], word: str | None) -> None:
        if word is None:
            return
        device, done = torch.device(self._kind), 0
        for model in models:
            blocks = find_blocks(model)
            words = {b: word for b in blocks if can_have(b, word, device)}
            apply_words(model, words)
            done += len(words)
        if not done:
            raise InvalidValueError(f"no block of the step's models has the level {word!r}")

    def beside(self) -> dict[str, int]:
        """Return what a GPU holds beside the peaks."""
        if self._kind != "cuda":
            return {}
        handles = len({in_backward for name, in_backward in self._kernels if name == CUBLAS})
        found = {"workspaces of cuBLAS (compute capability 9.0)": handles * CUBLAS_BYTES}
        if any(name == CUDNN for name, _ in self._kernels):
            self.assumptions[_NO_WORKSPACES] = None
        return {name: n for name, n in found.items() if n} | {"CUDA's context": CONTEXT_BYTES}


def _copied(gpu: FakeGpu, recording: Recording, on_host: bool, *values: Any) -> Copied:
    """Copy values of a program; what is on the host there may be moved to the GPU here."""

    def make(tensor: Tensor) -> Tensor:
        return _fake(gpu, recording, tensor, on_host)

    def make_here(tensor: Tensor) -> Tensor:
        return _fake(gpu, recording, tensor, False)

    def make_on_host(tensor: Tensor) -> Tensor:
        made = gpu.like(tensor, torch.device("cpu"))
        recording.storages.add(made, counts=True)
        return made

    return Copied(make, make_here, make_on_host, *values)


def _fake(gpu: FakeGpu, recording: Recording, tensor: Tensor, on_host: bool) -> Tensor:
    """Return what stands for a tensor of the program: on the GPU, or where the program puts it."""
    if is_sparse(tensor):
        parts = [
            _fake(gpu, recording, part, on_host) for part in (tensor._indices(), tensor._values())
        ]
        with gpu.mode, torch.enable_grad():
            return sparse_like(tensor, *parts)
    if is_distributed(type(tensor)):
        raise UntraceableError(
            "a DTensor has parts in other processes; predict before tensor parallelism, FSDP or "
            "others split the model"
        )
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise UntraceableError(
            f"a tensor of layout {tensor.layout} cannot be made without data; accepted are strided "
            "tensors"
        )
    on_device = gpu.is_cuda and (on_host or tensor.device.type != "cpu")
    made = gpu.like(tensor, GPU if on_device else torch.device("cpu"))
    recording.storages.add(made, counts=True)
    return made


class _Named:
    """Turns what goes wrong without data into one error that names the operation and the module,
    and what was assumed by then.

    No generator, which would have the tensors of the step wait for the collector.
    """

    def __init__(self, recording: Recording, gpu: FakeGpu) -> None:
        self._recording = recording
        self._gpu = gpu

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, VramxError):
            assumed = "".join(f"; assumed: {each}" for each in self._gpu.assumptions)
            raise _untraceable(error, self._recording.now(), assumed) from error


def _untraceable(error: Exception, place: Place, assumed: str) -> UntraceableError:
    cause: Any = error
    while not isinstance(cause, _UNSEEN) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, _UNSEEN):
        return UntraceableError(
            f"{cause.args[0] if cause.args else cause} cannot run without data, in {place}: "
            "the size of its result depends on them, or it has no fake kernel "
            "(torch.library.register_fake)"
        )
    text = " ".join(str(error).split())[:300]
    text = next((said for words, said in _NOT_FOLLOWED.items() if words in text), text)
    if any(words in text for words in _TWO_DEVICES):
        text += _ON_THE_HOST
    if _NO_ACCELERATOR in text:
        text += _TRANSFORMED
    return UntraceableError(
        f"the step fails without data, in {place}: {type(error).__name__}: {text}{assumed}"
    )
