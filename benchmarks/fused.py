"""Swapped blocks against other ways to keep less: bytes, peak, time and gradients of whole stacks.

Each case is a model and a process of its own (benchmarks/programs/_fused.py); in it the ways take
steps in turn: eager, vramx.optimize at each level, torch's checkpoints, torch.compile with and
without a memory budget, and Liger where it is installed; models but Llama have the most important
of these. A way that cannot run is a row that says why. `python -m benchmarks.plot
benchmarks/results/fused.csv` draws bytes against time. The Llama stack takes under 150 s on an
H200, the others a minute each.

The goals, on the Llama stack, in bytes per token and hidden unit that a block keeps: int8 at most
12.3 in 1.03 of Liger's time and less than eager's; recompute_mlp 5.0 in 1.17 of Liger's;
recompute_all 1.1 in the time of Liger with checkpoints. Gradients of 8 bits, of recomputation and
of exact kernels have a cosine of 0.999 with eager's in every case, or lie no more than twice as far
from eager's as those of Liger or of torch.compile, which round at other places than eager does.
With adapters at every linear layer of frozen weights, in bfloat16 or in 4 bits, int8 keeps at least
3.7 times less than eager and takes no more than its time; recompute_mlp, which takes two products
of three of the feed-forward part again, keeps 9 times less.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness import Measurement, Options, Request, RowWriter
from benchmarks.programs import _cases
from benchmarks.programs._cases import Cases, Figures, Findings, cells, lay_out, lines_of, names_in

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = "swapped blocks against Liger, checkpoints and torch.compile: memory, time (GPU)"
SHARES = "preparation"

CASES = ("llama", "lora", "lora_undropped", "qlora", "gpt2", "vit", "convnext", "cnn")
PROCESSES = Cases("_fused.py", CASES, quick=("llama",), limit_s=300.0)
COSINE_GOAL = 0.999
OURS = ("keep", "int8", "int8_nearest", "int4", "recompute_mlp", "recompute_all")
FAITHFUL = tuple(way for way in OURS if way != "int4")  # what rounds no more than 8 bits do
EXACT = ("liger", "compile")
BLOCK = "block_kept_per_token_hidden"


class Goal(NamedTuple):
    """A figure and the most it may be; of a baseline's where there is one."""

    case: str
    metric: str
    most: float
    baseline: str | None = None


GOALS = (
    Goal("llama int8", BLOCK, 12.3),
    Goal("llama int8", "step_ms", 1.03, "llama liger"),
    Goal("llama int8", "step_ms", 1.0, "llama eager"),
    Goal("llama recompute_mlp", BLOCK, 5.0),
    Goal("llama recompute_mlp", "step_ms", 1.17, "llama liger"),
    Goal("llama recompute_all", BLOCK, 1.1),
    Goal("llama recompute_all", "step_ms", 1.0, "llama liger_checkpoint"),
    *(
        Goal(f"{case} int8", metric, most, f"{case} eager")
        for case in ("lora", "lora_undropped", "qlora")
        for metric, most in ((BLOCK, 1 / 3.7), ("step_ms", 1.0))
    ),
    *(
        Goal(f"{case} recompute_mlp", BLOCK, 1 / 9, f"{case} eager")
        for case in ("lora", "lora_undropped", "qlora")
    ),
)


class Verdict(NamedTuple):
    """What was measured for a goal; no values where it could not be."""

    goal: Goal
    values: list[float]
    is_met: bool


def run_all(options: Options, request: Request, writer: RowWriter) -> Findings:
    """Take steps of the chosen models in every way, judge the goals and write their ratios.

    Raises:
        UnavailableError: there is no GPU.
        InvalidValueError: an unknown case.
    """
    figures, has_failed = PROCESSES.measure(options, request, writer)
    verdicts = judge(figures)
    write_ratios(verdicts, writer)
    is_good = not has_failed and all(found.is_met for found in verdicts)
    return [table(figures, verdicts), *summary(verdicts)], is_good


def judge(figures: Figures) -> list[Verdict]:
    """Return what became of each goal of the cases that were run; not measured is not met."""
    cases = {case.split()[0] for case, _ in figures}
    verdicts = [_verdict(goal, figures) for goal in GOALS if goal.case.split()[0] in cases]
    for (case, metric), values in figures.items():
        model, way = case.split()
        if metric == "gradient_cosine" and way in FAITHFUL:
            least = _least_cosine(model, figures)
            verdicts.append(Verdict(Goal(case, metric, least), values, values[0] >= least))
    return verdicts


def _least_cosine(model: str, figures: Figures) -> float:
    """Return the cosine that gradients must have, for how far exact ones are from eager's."""
    found = [figures.get((f"{model} {way}", "gradient_cosine"), []) for way in EXACT]
    known = [values[0] for values in found if values]
    # The distance of two directions goes with the root of 1 - cosine.
    return min(COSINE_GOAL, 1 - 2**2 * (1 - max(known, default=1.0)))


def _verdict(goal: Goal, figures: Figures) -> Verdict:
    values = figures.get((goal.case, goal.metric), [])
    if goal.baseline is not None:
        theirs = figures.get((goal.baseline, goal.metric), [])
        # Round by round, for the ways took turns; nothing where one of the two was not measured.
        values = [a / b for a, b in zip(values, theirs, strict=False)]
    return Verdict(goal, values, bool(values) and median(values) <= goal.most)


def write_ratios(verdicts: Sequence[Verdict], writer: RowWriter) -> None:
    """Write the ratios of the goals that compare two ways, one value a round."""
    for goal, values, _ in verdicts:
        if goal.baseline is not None and values:
            name = f"{goal.case} against {goal.baseline.split()[1]}"
            metric = "step_ratio" if goal.metric == "step_ms" else f"{goal.metric}_ratio"
            ratio = Measurement(metric, "1", values)
            writer.write(name, [ratio, Measurement("goal", "1", [goal.most])])


def summary(verdicts: Sequence[Verdict]) -> list[str]:
    """Say what became of each goal, a line each."""
    told = []
    for goal, values, is_met in verdicts:
        sign = ">=" if goal.metric == "gradient_cosine" else "<="
        against = f" against {goal.baseline.split()[1]}" if goal.baseline else ""
        value = median(values) if values else None
        name = f"{goal.case}{against}"
        told.append(_cases.Verdict(name, goal.metric, value, f"{sign} {goal.most:.4g}", is_met))
    return lines_of(told)


SHOWN = (BLOCK, "kept_bytes", "peak_bytes", "step_ms", "step_ratio", "host_ms", "gradient_cosine")


def table(figures: Figures, verdicts: Sequence[Verdict]) -> Table:
    """Lay the figures out, one line for each way of a model."""
    lines = {case: cells(figures, case, SHOWN) for case in names_in(figures)}
    missed = [(goal.case, goal.metric) for goal, _, is_met in verdicts if not is_met]
    return lay_out("blocks and stacks, all ways in one process", SHOWN, lines, missed)
