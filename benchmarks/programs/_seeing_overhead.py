"""The process that benchmarks/seeing.py starts to time a training with and without a recording.

    python _seeing_overhead.py PROGRAM

Some steps are taken without and some with vramx.record, in turn, so that what slows the machine
slows both; before all of them come steps of a process that has never recorded. Of `small_layers`,
whose steps wait for the host, steps with torch's own history are in turn as well, as torch's
documentation starts it and with the stacks of Python alone, which a recording has too; a turn is
short and its fastest step counts, for what else a host does at times is more than what a recording
adds.
Starting a recording and writing its file is not timed. Prints a line of JSON for each figure.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

import vramx
from benchmarks.programs._report import SEED, Recorder, in_turn, report, sized, synchronize
from benchmarks.programs._seeing_models import MANY, Training, gpt2, llama, resnet50, small_layers

HOST_BOUND = "small_layers"
ROUNDS, STEPS = sized(9, 2, quick=3), sized(4, 1)
ROUNDS_OF_HOST_BOUND, STEPS_OF_HOST_BOUND = sized(40, 2), sized(10, 4)
WARM_UP = sized(4, 1)
TRAININGS: dict[str, Callable[[], Training]] = {
    "llama_amp": lambda: llama("amp", MANY),
    "gpt2_amp": lambda: gpt2("amp", MANY),
    "resnet50": resnet50,
    "small_layers": small_layers,
}
_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")

CALL = nn.Module.__call__

Way = Callable[[], AbstractContextManager[Any]]


def main(name: str) -> None:
    case = f"overhead {name}"
    recorder = Recorder(deterministic=False)
    with contextlib.suppress(ImportError):  # ahead of the turn: they take seconds
        import torchvision
        import transformers  # noqa: F401

        del torchvision
    recorder.begin()
    torch.manual_seed(SEED)
    training = TRAININGS[name]()
    step_ms, rounds, count = mean_step_ms, ROUNDS, STEPS
    if name == HOST_BOUND:
        step_ms, rounds, count = fastest_step_ms, ROUNDS_OF_HOST_BOUND, STEPS_OF_HOST_BOUND
    mean_step_ms(training, WARM_UP)
    report(case, "never_ms", "ms", [step_ms(training, count) for _ in range(rounds)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pickle"
        ways: dict[str, Way] = {
            "off": contextlib.nullcontext,
            "on": lambda: vramx.record(path, training.model, training.optimizer),
        }
        if name == HOST_BOUND:
            ways["history"] = history
            ways["history_python"] = lambda: history(stacks="python")
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for way in in_turn(ways, rounds):
            with ways[way]():
                training.step()  # what the first one sets up is no step's
                taken[way].append(step_ms(training, count))
        events = events_of_a_step(path, count)
    for way, values in taken.items():
        report(case, f"{way}_ms", "ms", values)
    report(case, "events", "1", [events])
    hooks = sum(len(getattr(modules, name)) for name in _HOOKS)
    report(case, "hooks_left", "1", [hooks + (nn.Module.__call__ is not CALL)])


def fastest_step_ms(training: Training, count: int) -> float:
    return min(mean_step_ms(training, 1) for _ in range(count))


def mean_step_ms(training: Training, count: int) -> float:
    synchronize()
    start_s = time.perf_counter()
    for _ in range(count):
        training.step()
    synchronize()
    return 1000 * (time.perf_counter() - start_s) / count


@contextlib.contextmanager
def history(**arguments: Any) -> Any:
    """torch's own history, with stacks of Python and C++ if nothing else is said."""
    torch.cuda.memory._record_memory_history(**arguments)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def events_of_a_step(path: Path, count: int) -> float:
    """Return how many allocations and frees a step has, of the last recording."""
    snapshot = vramx.Snapshot.load(path)
    return snapshot.event_count / (count + 1)


if __name__ == "__main__":
    main(sys.argv[1])
