"""Activation compression on models that nobody wrote for it: memory, time, gradients and losses.

Each case is a process of its own (benchmarks/programs/_activations.py), which has one GPU to
itself; in it, the ways of keeping activations alternate. The long trainings come last, all at once:
time does not matter there. Rows are written as soon as a process has ended, or all trainings have,
and one that fails is a row that says why. Takes some minutes.

The goals: most of what is saved is packed and gradients point where the exact ones do (a cosine of
0.999 at 8 bits); a transformer keeps 1.8 times fewer bytes; for int8, one that is 4096 wide takes
1.08 times as long, others and a ResNet 1.15; a checkpoint keeps 0.524 of torch's bytes in 1.01 of
its time; offload as far as the link is free leaves 0.6 of the bytes on the device in 1.05 of the
time, and the part of any offload's copying that is hidden is foretold to a tenth; and the mean loss
after training is no farther above the exact one than seeds are from each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median, median_high

from benchmarks.harness import Options, Request, RowWriter
from benchmarks.programs._cases import (
    Cases,
    Figures,
    Findings,
    Goal,
    Sheet,
    measure,
    measure_together,
)
from benchmarks.programs._launch import Started

DESCRIPTION = "activation compression on models of other libraries: memory, time, accuracy (GPU)"
SHARES = "preparation"

MODELS = ("llama", "gpt2", "bert", "vit", "plainvit", "cnn", "unet3d", "gnn")
TRAININGS = tuple(f"{model}_training" for model in MODELS)
CASES = (*MODELS, "llama_checkpoint", "llama_offload", *TRAININGS)
NARROW = ("gpt2", "bert", "vit", "plainvit")  # transformers that a host may be too slow for
PROCESSES = Cases("_activations.py", CASES, quick=("llama",), limit_s=240.0)
COSINE_GOAL = 0.999
FORECAST_GOAL = 0.1  # of what is measured
PACKED_GOAL = 0.5
# Of one way against another, the first against the second: metric, the most of it.
RATIO_GOALS = {
    **{f"{name} int8 exact": {"kept_bytes": 1 / 1.8, "step_ms": 1.15} for name in NARROW},
    "cnn int8 exact": {"step_ms": 1.15},
    "llama int8 exact": {"kept_bytes": 1 / 1.8, "step_ms": 1.08},
    # 1.047 bytes of 2
    "llama_checkpoint int8_inputs torch": {"kept_per_block": 0.524, "step_ms": 1.01},
    "llama_offload int8_offload int8": {"kept_bytes": 0.6, "step_ms": 1.05},
}
# Of two seeds' losses, half differ by more than this many of their standard deviations.
SEED_DEVIATIONS = 0.95


def run_all(options: Options, request: Request, writer: RowWriter) -> Findings:
    """Train the chosen models in every way of keeping activations, and judge the goals.

    Raises:
        UnavailableError: there is no GPU.
        InvalidValueError: an unknown case.
    """
    cases = PROCESSES.chosen(PROCESSES.requested(options, request))
    job = PROCESSES.job(options, request)
    in_turn = [case for case in cases if case not in TRAININGS]
    figures, has_failed = measure(in_turn, lambda case: Started(job(case)), writer)
    trainings = [case for case in cases if case in TRAININGS]
    trained, has_failed_too = measure_together(trainings, job, writer)
    return SHEET.findings({**figures, **trained}, has_failed or has_failed_too)


def goals(figures: Figures) -> list[Goal]:
    """Return case, metric, value and whether the goal is met, for what was measured."""
    found = []
    for (case, metric), values in figures.items():
        if metric == "gradient_cosine" and "int8" in case:
            found.append((case, metric, values[0], values[0] >= COSINE_GOAL))
        if metric == "packed_share":
            found.append((case, metric, values[0], values[0] >= PACKED_GOAL))
        if metric == "hidden_predicted":
            hidden = figures[case, "hidden_measured"][0]
            is_met = abs(values[0] - hidden) <= FORECAST_GOAL * hidden
            found.append((case, metric, values[0], is_met))
        if metric == "loss_gap_same_seed":
            spread = figures[case.replace("int8", "exact"), "loss_seed_deviation"][0]
            gap = fmean(values)
            found.append((case, metric, gap, gap <= SEED_DEVIATIONS * spread))
    return [*found, *ratio_goals(figures)]


def ratio_goals(figures: Figures) -> Iterator[Goal]:
    """Yield the same for the goals that compare two ways."""
    for names, most in RATIO_GOALS.items():
        model, way, other = names.split()
        case, baseline = f"{model} {way}", f"{model} {other}"
        for metric, goal in most.items():
            if (case, metric) in figures and (baseline, metric) in figures:
                ratio = median(figures[case, metric]) / median(figures[baseline, metric])
                yield case, metric, ratio, ratio <= goal


SHEET = Sheet(
    "activations kept exactly and compressed",
    (
        *("kept_bytes", "kept_ratio", "peak_bytes", "step_ms", "step_ratio"),
        *("device_ms", "host_ms", "host_us_per_packed", "gradient_cosine", "loss_trained"),
        *("hidden_predicted", "hidden_measured"),
    ),
    goals,
    median_high,
)
