"""What a model's weights hold, and its gradients and Adam's states after them.

Every training begins so: tensors that stay, of sizes that are seldom multiples of two mebibytes,
with small ones between them. One case for each model, what is allocated, and policy; the sizes
follow from the models' published shapes. All figures are of the simulated device and exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks.harness import Measurement, Options
from benchmarks.traces import POLICIES, QUICK_POLICIES
from vramx.memory.replay import load_core, open_replay
from vramx.memory.trace import ALLOCATE, Trace

DESCRIPTION = "what weights, gradients and Adam's states of known models hold, by allocator"
SHARES = "everything"

STATES = 2  # of Adam, for each parameter


def transformer(
    element_bytes: int, hidden: int, layers: int, matrices: dict[int, int], rest: tuple[int, ...]
) -> list[int]:
    """Return the bytes of each parameter, in the order in which modules are made.

    matrices: of a layer, how many of how many elements. rest: elements of the tables before them.
    A vector of the hidden size comes behind each matrix: a bias or a norm.
    """
    layer = [elements for size, count in matrices.items() for elements in (size, hidden) * count]
    return [element_bytes * elements for elements in (*rest, *layer * layers)]


# Sources: the models' config.json on the Hugging Face hub.
MODELS: dict[str, Callable[[], list[int]]] = {
    "gpt2_xl": partial(
        transformer, 4, 1600, 48,
        {1600 * 4800: 1, 1600 * 1600: 1, 1600 * 6400: 2}, (50257 * 1600, 1024 * 1600),
    ),
    "vit_g": partial(
        transformer, 4, 1408, 40, {1408 * 1408: 4, 1408 * 6144: 2}, (1408, 257 * 1408, 588 * 1408),
    ),
    "whisper_large": partial(
        transformer, 4, 1280, 64, {1280 * 1280: 6, 1280 * 5120: 2}, (51866 * 1280, 448 * 1280),
    ),
    "qwen2_1_5b": partial(
        transformer, 2, 1536, 28,
        {1536 * 1536: 2, 1536 * 256: 2, 1536 * 8960: 3}, (151936 * 1536,),
    ),
    "gemma2_2b": partial(
        transformer, 2, 2304, 26,
        {2304 * 2048: 2, 2304 * 1024: 2, 2304 * 9216: 3}, (256000 * 2304,),
    ),
}  # fmt: skip


def weights(sizes: list[int]) -> Iterator[int]:
    yield from sizes


def training(sizes: list[int]) -> Iterator[int]:
    """Yield what is there after the first step: gradients come from the last layer on."""
    yield from sizes
    yield from reversed(sizes)
    for size in sizes:
        yield from [size] * STATES


PROGRAMS = {"weights": weights, "training": training}


def cases(options: Options) -> list[str]:
    load_core()
    policies = QUICK_POLICIES if options.quick else POLICIES
    models = list(MODELS)[:2] if options.quick else MODELS
    return [f"{model} {what} {by}" for model in models for what in PROGRAMS for by in policies]


def measure(case: str, _: Options) -> list[Measurement]:
    model, what, policy = case.split()
    replay = open_replay(trace_of(model, what))
    run = replay.run(policy)
    reserved_ratio = run["peak_reserved_bytes"] / replay.peak_live_bytes
    return [
        Measurement("peak_reserved_ratio", "1", [reserved_ratio]),
        Measurement("live_bytes", "B", [float(replay.peak_live_bytes)]),
        Measurement("driver_us", "us", [float(run["driver_us"])]),
    ]


def trace_of(model: str, what: str) -> Trace:
    sizes = np.array(list(PROGRAMS[what](MODELS[model]())), np.uint64)
    count = len(sizes)
    return Trace(
        name=f"{model} {what}",
        op=np.full(count, ALLOCATE, np.uint8),
        id=np.arange(count, dtype=np.uint32),
        size=sizes,
        stream=np.zeros(count, np.uint8),
        time_us=np.arange(count, dtype=np.uint32),
    )
