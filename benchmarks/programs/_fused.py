"""The process that benchmarks/fused.py starts for each model: all ways of one model, alternating.

    python _fused.py MODEL

Every way (_fused_ways.py) has a copy of the model, with the same parameters and gradients. There is
no loss: backward starts from a fixed random gradient of the stack's result, so that logits are in
no figure, and no gradient is the same for many tokens. Kept bytes are what torch's allocator has
more after forward than before it; those of a block are the difference that fewer blocks make. The
peak is above weights and gradients. Prints a line of JSON for each figure, and one with a status
for a way that cannot run or failed. On a processor bytes are left out. Takes under 150 s on an
H200, most of it torch.compile.
"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models_workloads import Batch, Workload, build_by, cnn, convnext, gpt2, llama, vit
from benchmarks.programs._activations import cosines
from benchmarks.programs._adapters import Adapters, adapt, quantise
from benchmarks.programs._fused_ways import COMPILED, WAYS, SkippedError, Subject
from benchmarks.programs._report import Recorder, in_turn, report, report_status, sized, timed_ms

SEED = 1
WARMUP_STEPS = 3
MEASURED_ROUNDS = sized(7, 1, quick=3)
PREPARE_LIMIT_S = 110.0  # what has not been prepared by then is skipped; rounds take 20 s more


def _hidden(model: Any, batch: Batch) -> Tensor:
    states: Tensor = model(input_ids=batch.inputs).last_hidden_state
    return states


def _scores(model: Any, batch: Batch) -> Tensor:
    scores: Tensor = model(batch.inputs)
    return scores


def _adapted(dropout: float, *, quantised: bool = False) -> Workload:
    """Return the Llama with adapters at every linear layer of its blocks, all else frozen."""
    workload = llama(sized(8, 2))
    if quantised:
        try:
            quantise(workload.model)
        except ImportError as error:
            raise SkippedError(f"bitsandbytes cannot be imported: {error}") from None
    rank = sized(16, 2)
    adapters = Adapters(rank=rank, alpha=2 * rank, dropout=dropout, size=0.1)
    adapt(workload.model, adapters, torch.bfloat16)
    return workload


@dataclass(frozen=True)
class Case:
    """A model: how it is built, which part of it runs and how, and in which ways."""

    build: Callable[[], Workload]
    stack: str
    forward: Callable[[Any, Batch], Tensor]
    ways: tuple[str, ...]


# What differs from model to model, in a minute for each; the stack of Llama has every way.
_PLAIN = ("eager", "keep", "int8", "recompute_mlp", "recompute_all", "checkpoint", "compile")
_UNCOMPILED = tuple(way for way in WAYS if way not in COMPILED)
_EVERY = sized(tuple(WAYS), tuple(WAYS), quick=_UNCOMPILED)  # compiling takes a minute
# Batches of whoever runs out of memory: eager keeps some 15 GiB for backward. On an H200 its step
# then takes 7.7 times (GPT-2), 3.4 times (ViT) and 1.4 times (ConvNeXt) what the host needs to
# launch it (step_ms and host_ms in benchmarks/results/fused.csv). A quarter of the ViT's batch, as
# in benchmarks/activations.py, takes the host as long as the GPU: that would measure Python.
CASES = {
    "llama": Case(lambda: llama(sized(8, 2)), "model", _hidden, _EVERY),
    # A dropout of 0.05 before adapters is the usual, none is peft's default.
    "lora": Case(lambda: _adapted(0.05), "model", _hidden, _PLAIN),
    "lora_undropped": Case(lambda: _adapted(0.0), "model", _hidden, _PLAIN),
    "qlora": Case(lambda: _adapted(0.05, quantised=True), "model", _hidden, _PLAIN),
    "gpt2": Case(lambda: gpt2(sized(32, 2)), "transformer", _hidden, _PLAIN),
    "vit": Case(lambda: vit(sized(256, 2)), "", _scores, _PLAIN),
    "convnext": Case(convnext, "", _scores, _PLAIN),
    # As cuDNN's kernels for bfloat16 want it, and as torch.compile lays it out by itself.
    "cnn": Case(lambda: cnn(sized(384, 4), torch.channels_last), "", _scores, _PLAIN),
}


class Arena:
    """One model, its batch, and a copy of it for each way.

    The copies share parameters, and so gradients, which those that learn have; buffers are each
    copy's own.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        workload = build_by(case.build, device, SEED)
        generator = torch.Generator(device).manual_seed(SEED)
        self.batch = workload.draw(generator, True)
        self._device = device
        self.is_autocast = workload.is_autocast
        self._forward = case.forward
        self._stack = workload.model.get_submodule(case.stack)
        blocks = {id(block) for block in workload.blocks}
        self._blocks = [name for name, m in self._stack.named_modules() if id(m) in blocks]
        self.layers = len(self._blocks)
        self.elements = workload.elements // self.layers  # tokens x hidden
        self._shared = {id(p): p for p in self._stack.parameters()}
        self.parameters = [p for p in self._stack.parameters() if p.requires_grad]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            result = self._autocast(case.forward, self._stack, self.batch)
        self._gradient = torch.randn(
            result.shape, dtype=result.dtype, device=device, generator=generator
        )

    def subject(self) -> Subject:
        """Return a copy of the model with the same parameters, as it was built."""
        model = copy.deepcopy(self._stack, dict(self._shared))
        blocks = tuple(model.get_submodule(name) for name in self._blocks)
        return Subject(model, blocks, partial(self._autocast, self._forward))

    def _autocast(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        options = {"dtype": torch.bfloat16, "enabled": self.is_autocast}
        with torch.autocast(self._device.type, **options):  # type: ignore[arg-type]
            return function(*arguments)

    def step(self, subject: Subject) -> int:
        """Run forward and backward with the same random numbers; return the bytes kept between."""
        torch.manual_seed(SEED)
        with subject.around():
            before = allocated_bytes()
            result = subject.run(self.batch)
            kept = allocated_bytes() - before
            # A clone, for Liger's norm writes over the gradient that it is given.
            result.backward(self._gradient.to(result.dtype, copy=True))
        return kept

    def gradients(self, subject: Subject) -> list[Tensor]:
        """Return the gradients of one step without dropout and autocast.

        Where weights are float32, the rounding of bfloat16 would hide what a way of keeping does:
        a ResNet's gradients differ by a tenth if its inputs do by half a percent.
        """
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        is_autocast, self.is_autocast = self.is_autocast, False
        try:
            in_full = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
            with without_dropout(subject.model), in_full:
                self.step(subject)
        finally:
            self.is_autocast = is_autocast
        return [
            parameter.grad.clone() for parameter in self.parameters if parameter.grad is not None
        ]

    @contextmanager
    def fewer_blocks(self, subject: Subject) -> Iterator[int]:
        """Leave out three quarters of the blocks; yield how many are left, 0 if none can be."""
        containers = {name.rpartition(".")[0] for name in self._blocks}
        container = containers.pop() if containers else ""
        if containers or not container:  # of several widths: no difference says what one keeps
            yield 0
            return
        parent, _, name = container.rpartition(".")
        holder: Any = getattr(subject.model, "_orig_mod", subject.model).get_submodule(parent)
        blocks = getattr(holder, name)
        fewer = max(1, self.layers // 4)
        setattr(holder, name, blocks[:fewer])
        try:
            yield fewer
        finally:
            setattr(holder, name, blocks)


def allocated_bytes() -> int:
    """Return the bytes in use on the GPU; the allocator knows without waiting for it."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


@contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    """Make every dropout one of probability 0: ways draw different masks."""
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    before = [module.p for module in dropouts]
    for module in dropouts:
        module.p = 0.0
    try:
        yield
    finally:
        for module, p in zip(dropouts, before, strict=True):
            module.p = p


def main(name: str) -> None:
    recorder = Recorder(deterministic=False)
    try:
        with torch.device("meta"):  # imports the model's library ahead of the turn
            CASES[name].build()
    except SkippedError as error:
        report_failure(f"{name} eager", error)
        return
    device = recorder.begin()
    arena = Arena(CASES[name], device)
    subjects = prepare(name, arena)
    compare_times(name, arena, subjects)


def prepare(case: str, arena: Arena) -> dict[str, Subject]:
    """Make every way ready and report its memory and gradients; leave out what cannot run."""
    start_s = time.monotonic()
    subjects: dict[str, Subject] = {}
    reference: list[Tensor] = []
    for way in CASES[case].ways:
        name = f"{case} {way}"
        try:
            if time.monotonic() - start_s > PREPARE_LIMIT_S:
                raise SkippedError(f"{PREPARE_LIMIT_S:.0f} s were over")
            subject = WAYS[way](arena.subject())
            for _ in range(sized(WARMUP_STEPS, 1)):
                arena.step(subject)
            report_memory(name, arena, subject)
            reference = report_gradients(name, arena, subject, reference)
        except Exception as error:
            report_failure(name, error)
        else:
            subjects[way] = subject
        print(f"{name}: ready after {time.monotonic() - start_s:.0f} s", file=sys.stderr)
    return subjects


def report_failure(case: str, error: Exception) -> None:
    """Say why a way has no figures; whatever its reason, the others go on."""
    lines = str(error).strip().splitlines() or [""]
    reason = f"failed: {type(error).__name__}: {lines[0]}"
    status = f"skipped: {error}" if isinstance(error, SkippedError) else reason[:200]
    report_status(case, status)


def report_memory(case: str, arena: Arena, subject: Subject) -> None:
    """Report the bytes kept, in all and by one block, and the peak of a step."""
    kept, peak = measure_memory(arena, subject)
    with arena.fewer_blocks(subject) as fewer:
        if fewer:
            arena.step(subject)  # what compiles does so again
            fewer_kept, _ = measure_memory(arena, subject)
    if not torch.cuda.is_available():
        return
    report(case, "kept_bytes", "B", [kept])
    report(case, "peak_bytes", "B", [peak])
    if fewer:
        block = (kept - fewer_kept) / (arena.layers - fewer)
        report(case, "block_kept_bytes", "B", [block])
        report(case, "block_kept_per_token_hidden", "B", [block / arena.elements])


def measure_memory(arena: Arena, subject: Subject) -> tuple[int, int]:
    """Return the bytes kept after forward, and the peak of a step above weights and gradients."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = allocated_bytes()
    kept = arena.step(subject)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return kept, peak - before


def report_gradients(
    case: str, arena: Arena, subject: Subject, reference: list[Tensor]
) -> list[Tensor]:
    """Report where the gradients point; return those of the first way."""
    if case.split()[1] in COMPILED and arena.is_autocast:
        return reference  # without autocast it is another graph, of other types
    gradients = arena.gradients(subject)
    reference = reference or gradients
    total, least = cosines(reference, gradients)
    report(case, "gradient_cosine", "1", [total])
    report(case, "gradient_cosine_least", "1", [least])
    return reference


def compare_times(case: str, arena: Arena, subjects: dict[str, Subject]) -> None:
    """Let all ways take steps in turn, every other round backwards; report the times."""
    gc.collect()
    steps: dict[str, list[float]] = {way: [] for way in subjects}
    hosts: dict[str, list[float]] = {way: [] for way in subjects}
    rounds = in_turn(reversed(subjects), 1 + MEASURED_ROUNDS)
    for number, way in enumerate(rounds):
        step_ms, host_ms = timed_ms(partial(arena.step, subjects[way]))
        if number >= len(subjects):  # in the first round, the allocator's blocks are cut anew
            steps[way].append(step_ms)
            hosts[way].append(host_ms)
    first = next(iter(steps.values()), [])
    for way, taken in steps.items():
        report(f"{case} {way}", "step_ms", "ms", taken)
        report(f"{case} {way}", "host_ms", "ms", hosts[way])
        ratios = [ours / theirs for ours, theirs in zip(taken, first, strict=True)]
        report(f"{case} {way}", "step_ratio", "1", [statistics.median(ratios)])


if __name__ == "__main__":
    main(sys.argv[1])
