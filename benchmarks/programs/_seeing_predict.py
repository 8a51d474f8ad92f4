"""The process that benchmarks/seeing.py starts for one row of a prediction, or to measure it.

    python _seeing_predict.py MODEL ROW said       without a GPU: what vramx.predict says
    python _seeing_predict.py MODEL ROW held       with one: what it takes

A row is one of the ways to write a training, or a level of vramx.plan at which the plain one runs.
Prints a line of JSON with the bytes. What is said has the workspaces of cuBLAS, which vramx.predict
has beside its peak.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.programs._report import SEED, Recorder, report
from benchmarks.programs._seeing_models import PREDICTED, WAYS, Training
from vramx.planning.blocks import find_blocks
from vramx.planning.predict import predict_made
from vramx.planning.words import apply_words

STEPS = 3
SAID = ("said_bytes", "said_allocated_bytes", "said_reserved_bytes")
HELD = ("held_bytes", "held_allocated_bytes", "held_reserved_bytes")


def main(name: str, row: str, what: str) -> None:
    case = f"predict {name} {row}"
    if what == "said":
        for metric, said in zip(SAID, said_bytes(name, row), strict=True):
            report(case, metric, "B", [said])
        return
    recorder = Recorder(deterministic=False)
    import transformers  # noqa: F401  ahead of the turn: it takes seconds

    recorder.begin()
    for metric, held in zip(HELD, held_bytes(name, row), strict=True):
        report(case, metric, "B", [held])


def said_bytes(name: str, row: str) -> tuple[int, int, int]:
    """Return what a user without a GPU is told of a step, in the order of SAID."""
    levels = None if row in WAYS else [row]
    prediction = predict_made(
        lambda: made(name, row).step, levels=levels, policies=("live", "native")
    )
    workspaces = sum(n for what, n in prediction.beside.items() if "cuBLAS" in what)
    peaks = (
        prediction.peak_bytes("live"),
        prediction.allocated_bytes("native"),
        prediction.peak_bytes("native"),
    )
    requested, allocated, reserved = (peak + workspaces for peak in peaks)
    return requested, allocated, reserved


def held_bytes(name: str, row: str) -> tuple[int, int, int]:
    """Return the peaks of the first steps, in the order of HELD.

    A block of torch's own allocator may be a mebibyte larger than what was asked for.
    """
    torch.manual_seed(SEED)
    training = made(name, row)
    if row not in WAYS:
        apply_words(training.model, dict.fromkeys(find_blocks(training.model), row))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        training.step()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    requested, allocated, reserved = (
        stats[f"{what}_bytes.all.peak"] for what in ("requested", "allocated", "reserved")
    )
    return requested, allocated, reserved


def made(name: str, row: str) -> Training:
    return PREDICTED[name](row if row in WAYS else "eager")


if __name__ == "__main__":
    main(*sys.argv[1:4])
