"""The process that benchmarks/activations.py starts for each case: it measures one model.

    python _activations.py CASE

Prints one line of JSON for each figure as soon as it is known, so that a crash takes only what
comes after it. The ways of keeping activations alternate in one process, with the same weights,
batch and random numbers; the first of them is the exact one. Bytes are those of torch's allocator,
with the parameters' gradients allocated before; on a processor they are left out.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import vramx
from benchmarks.models_workloads import WORKLOADS, Batch, Workload, build
from benchmarks.programs._report import Recorder, host_ms, in_turn, report, sized, timed_ms
from vramx.sizes import MIB

SEED = 1
WARMUP_STEPS = 4
MEASURED_STEPS, QUICK_STEPS = 21, 5
TRAINED_STEPS = 200
LAST_STEPS = 20  # whose mean is the loss of a training
SEEDS = range(1, 10)
# Of the long training, whose batches are small: as large a share is packed as of the large batch.
SMALL_MIN_BYTES = sized(1 << 14, 1)
MIN_BYTES = sized(1 << 20, 1)  # the default; all tensors of a tiny run are small
LINK_BYTES = 256 * MIB

PACKED_INPUTS = vramx.Compression(level="int8", min_bytes=MIN_BYTES)

Way = Callable[..., AbstractContextManager[Any]]


def main(case: str) -> None:
    recorder = Recorder(deterministic=False)
    name, _, what = case.partition("_")
    load_library(name)
    device = recorder.begin()
    if what == "training":
        compare_trainings(name, device)
        return
    compare(case, build(name, device, SEED), WAYS[what])
    if what == "offload":
        report_link(case, device)


def load_library(name: str) -> None:
    """Import what a model needs, ahead of the turn; the weights are drawn nowhere."""
    with torch.device("meta"):
        WORKLOADS[name]()


def exact(_: Workload, **__: Any) -> AbstractContextManager[Any]:
    return nullcontext()


@contextmanager
def compressed(workload: Workload, **options: Any) -> Iterator[list[Any]]:
    """Decorate what the workload says, in one line each; yield the counts of what they keep."""
    options = {"min_bytes": MIN_BYTES, **options}
    for target in workload.targets:
        vramx.compressed_activations(target, **options)
    try:
        yield [vramx.compression_stats(target) for target in workload.targets]
    finally:
        for target in workload.targets:
            vramx.restore(target)


@contextmanager
def checkpointed(workload: Workload, call: Callable[..., Any]) -> Iterator[None]:
    """Have every block run through a checkpoint function."""
    for block in workload.blocks:
        block.forward = partial(call, block.forward)
    try:
        yield
    finally:
        for block in workload.blocks:
            del block.forward


# What a case compares, by the part of its name behind the model's.
WAYS: dict[str, dict[str, Way]] = {
    "": {
        "exact": exact,
        "int8": compressed,
        "int4": partial(compressed, level="int4"),
    },
    "checkpoint": {
        "exact": exact,
        "torch": partial(checkpointed, call=partial(torch_checkpoint, use_reentrant=False)),
        "int8_inputs": partial(checkpointed, call=partial(vramx.checkpoint, level=PACKED_INPUTS)),
    },
    "offload": {
        "exact": exact,
        "int8": compressed,
        "int8_offload": partial(compressed, offload="cpu"),
        "int8_offload_half": partial(compressed, offload=0.5),
        "int8_offload_all": partial(compressed, offload=1.0),
    },
}


def compare(case: str, workload: Workload, ways: dict[str, Way]) -> None:
    """Measure memory, gradients and time of each way; the first is the one to compare with."""
    device = next(workload.model.parameters()).device
    batch = workload.draw(torch.Generator(device).manual_seed(SEED), True)
    for parameter in workload.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    # Kernels are compiled, and an offload learns what its link carries.
    for _ in range(sized(WARMUP_STEPS, 1)):
        for way in ways.values():
            with way(workload):
                take_step(workload, batch)
    compare_memory(case, workload, batch, ways)
    # Only now: gradients that are kept would count in the next one's peak.
    compare_gradients(case, workload, batch, ways)
    compare_times(case, workload, batch, ways)
    if torch.cuda.is_available():
        compare_devices(case, workload, batch, ways)
        if "_" not in case:
            compare_hosts(case, workload, ways)


def compare_memory(case: str, workload: Workload, batch: Batch, ways: dict[str, Way]) -> None:
    kept: dict[str, int] = {}
    for name, way in ways.items():
        with way(workload) as counts:
            kept[name] = report_memory(f"{case} {name}", workload, batch)
            report_counts(f"{case} {name}", counts or [])
            if case.endswith("_checkpoint"):
                report_block(f"{case} {name}", workload, batch, kept[name])
        if kept[name]:
            first = next(iter(kept.values()))
            report(f"{case} {name}", "kept_ratio", "1", [first / kept[name]])


def compare_gradients(case: str, workload: Workload, batch: Batch, ways: dict[str, Way]) -> None:
    reference: list[Tensor] = []
    for name, way in ways.items():
        with way(workload):
            gradients = gradients_of(workload, batch)
        reference = reference or gradients
        total, least = cosines(reference, gradients)
        report(f"{case} {name}", "gradient_cosine", "1", [total])
        report(f"{case} {name}", "gradient_cosine_least", "1", [least])


def compare_times(case: str, workload: Workload, batch: Batch, ways: dict[str, Way]) -> None:
    steps: dict[str, list[float]] = {name: [] for name in ways}
    for name in in_turn(ways, sized(MEASURED_STEPS, 1, QUICK_STEPS)):
        with ways[name](workload):
            steps[name].append(timed_ms(partial(take_step, workload, batch))[0])
    first = statistics.median(next(iter(steps.values())))
    for name, taken in steps.items():
        report(f"{case} {name}", "step_ms", "ms", taken)
        report(f"{case} {name}", "step_ratio", "1", [statistics.median(taken) / first])


def compare_devices(case: str, workload: Workload, batch: Batch, ways: dict[str, Way]) -> None:
    """Report what a step's kernels take by themselves, and how many they are: without the host."""
    for name, way in ways.items():
        with way(workload):
            take_step(workload, batch)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                take_step(workload, batch)
                torch.cuda.synchronize()
        found = [event for event in seen.key_averages() if event.self_device_time_total]
        taken_ms = sum(event.self_device_time_total for event in found) / 1000
        report(f"{case} {name}", "device_ms", "ms", [taken_ms])
        report(f"{case} {name}", "device_launches", "1", [sum(event.count for event in found)])


def compare_hosts(case: str, workload: Workload, ways: dict[str, Way]) -> None:
    """Report what the host takes to ask for a step, and for each packed tensor more than exactly.

    The batch is small, so that the device is not waited for; as large a share of it is packed.
    """
    device = next(workload.model.parameters()).device
    batch = workload.draw(torch.Generator(device).manual_seed(SEED), False)
    least: dict[str, float] = {}
    for name, way in ways.items():
        with way(workload, min_bytes=SMALL_MIN_BYTES) as counts:
            take_step(workload, batch)
            before = _packed(counts)
            steps = range(sized(MEASURED_STEPS, 1, QUICK_STEPS))
            taken = [host_ms(partial(take_step, workload, batch)) for _ in steps]
            packed = (_packed(counts) - before) / len(taken)
        least[name] = min(taken)
        report(f"{case} {name}", "host_ms", "ms", taken)
        if packed:
            more_us = 1000 * (least[name] - next(iter(least.values())))
            report(f"{case} {name}", "packed_tensors", "1", [packed])
            report(f"{case} {name}", "host_us_per_packed", "us", [more_us / packed])


def _packed(counts: Any) -> int:
    return sum(found.packed.tensors for found in counts or ())


def forward(workload: Workload, batch: Batch) -> Tensor:
    device = next(workload.model.parameters()).device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=workload.is_autocast):
        return workload.forward(batch)


def take_step(workload: Workload, batch: Batch) -> None:
    """Run forward and backward, with the same dropout each time."""
    torch.manual_seed(SEED)
    workload.loss(forward(workload, batch), batch).backward()


def gradients_of(workload: Workload, batch: Batch) -> list[Tensor]:
    workload.model.zero_grad(set_to_none=False)
    take_step(workload, batch)
    found = [p.grad.clone() for p in workload.model.parameters() if p.grad is not None]
    workload.model.zero_grad(set_to_none=False)
    return found


def cosines(ours: list[Tensor], theirs: list[Tensor]) -> tuple[float, float]:
    """Return the cosine of all gradients as one vector, and the least of a single matrix's.

    Vectors such as biases are left out of the second: some have gradients that are zero but for
    rounding (the bias of a key does not change attention), and so no direction.
    """
    products = torch.zeros(3, dtype=torch.float64)
    least = 1.0
    for our, their in zip(ours, theirs, strict=True):
        a, b = our.flatten().float(), their.flatten().float()
        own = torch.stack([a @ b, a @ a, b @ b]).double().cpu()
        products += own
        if a.numel() > 1 << 14 and own[1] > 0 and own[2] > 0:
            least = min(least, float(own[0] / (own[1] * own[2]).sqrt()))
    return float(products[0] / (products[1] * products[2]).sqrt()), least


def report_memory(case: str, workload: Workload, batch: Batch) -> int:
    """Report the bytes kept after a forward pass and the peak of a step; return the first."""
    kept = measure_kept(workload, batch)
    if not torch.cuda.is_available():
        return 0
    report(case, "kept_bytes", "B", [kept])
    report(case, "peak_bytes", "B", [torch.cuda.max_memory_allocated()])
    if workload.elements:
        report(case, "kept_per_token_hidden_layer", "B", [kept / workload.elements])
    return kept


def report_block(case: str, workload: Workload, batch: Batch, kept: int) -> None:
    """Report what one block keeps: the difference that leaving out half of them makes."""
    assert workload.set_depth is not None
    all_blocks = len(workload.blocks)
    fewer_blocks = all_blocks // 2
    workload.set_depth(fewer_blocks)
    try:
        fewer = measure_kept(workload, batch)
    finally:
        workload.set_depth(all_blocks)
    report(case, "kept_per_block", "B", [(kept - fewer) / (all_blocks - fewer_blocks)])


def measure_kept(workload: Workload, batch: Batch) -> int:
    """Take a step; return the bytes that were kept after its forward pass."""
    if not torch.cuda.is_available():
        take_step(workload, batch)
        return 0
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(SEED)
    result = forward(workload, batch)
    torch.cuda.synchronize()
    vramx.offload_report()  # it lets go of what has been copied by now
    kept = torch.cuda.memory_allocated() - before
    workload.loss(result, batch).backward()
    del result
    torch.cuda.synchronize()
    return kept


def report_counts(case: str, counts: list[Any]) -> None:
    """Report the share of the saved bytes that was packed: without it nothing here means much.

    Indices do not count: nothing can be left out of an integer.
    """
    saved = sum(found.saved_bytes for found in counts)
    saved -= sum(found.kept["integer"].seen_bytes for found in counts if "integer" in found.kept)
    if saved:
        packed = sum(found.packed.seen_bytes for found in counts)
        report(case, "packed_share", "1", [packed / saved])


def report_link(case: str, device: torch.device) -> None:
    """Report what the link to the host carries, and what the offload says of itself."""
    if device.type == "cuda":
        there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
        here = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        for metric, copy in (
            ("link_to_host", lambda: here.copy_(there, non_blocking=True)),
            ("link_from_host", lambda: there.copy_(here, non_blocking=True)),
        ):
            times = [timed_ms(copy)[0] for _ in range(5)][1:]
            report(f"{case} link", metric, "GB/s", [LINK_BYTES / 1e6 / ms for ms in times])
    for found in vramx.offload_report():
        for name, value in asdict(found).items():
            if isinstance(value, (int, float)) and name != "share":
                report(f"{case} share {found.share}", name, _unit(name), [float(value)])


def _unit(name: str) -> str:
    units = {"_bytes": "B", "_bytes_per_s": "B/s", "_ms": "ms"}
    return next((unit for end, unit in units.items() if name.endswith(end)), "1")


def compare_trainings(name: str, device: torch.device) -> None:
    """Report the loss after a long training of each seed, exact and in int8."""
    losses = [train(name, device, seed, exact) for seed in SEEDS]
    report(f"{name} exact", "loss_trained", "1", losses)
    small = partial(compressed, min_bytes=SMALL_MIN_BYTES)
    ours = [train(name, device, seed, small) for seed in SEEDS]
    report(f"{name} int8", "loss_trained", "1", ours)
    report(f"{name} exact", "loss_seed_deviation", "1", [statistics.stdev(losses)])
    gaps = [our - loss for our, loss in zip(ours, losses, strict=True)]
    report(f"{name} int8", "loss_gap_same_seed", "1", gaps)


def train(name: str, device: torch.device, seed: int, way: Way) -> float:
    """Train a model on small batches; return the mean loss of the last steps."""
    workload = build(name, device, seed)
    generator = torch.Generator(device).manual_seed(seed)
    parameters = workload.model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, fused=device.type == "cuda")
    losses = []
    with way(workload):
        for _ in range(sized(TRAINED_STEPS, 3)):
            batch = workload.draw(generator, False)
            loss = workload.loss(forward(workload, batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return float(torch.stack(losses[-LAST_STEPS:]).mean())


if __name__ == "__main__":
    main(sys.argv[1])
