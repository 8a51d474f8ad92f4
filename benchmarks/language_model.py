"""Does compression change what is learnt? A byte-level language model, trained exactly and not.

GPTs of 10 M parameters learn the standard library's sources for 3000 steps, five paired seeds: the
same weights and batches, activations kept exactly, in int8 and in int4, rounded either way, and by
blocks that vramx.optimize has swapped (transformers' GPT-2, with the same weights). Each way is a
process (benchmarks/programs/_language_model.py), or one for each seed where its models are no
single one; all at once on one GPU: time does not matter here.
The verdict is an equivalence test of the paired gaps in validation loss, with margins of a quarter
of what seeds differ by at 8 bits and 0.02 nat at 4. `exact_again` starts one rounding error
away from `exact`: its gaps are what chance alone makes of that. Takes some minutes.
"""

from __future__ import annotations

import re
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.harness import Measurement, Options, Request, RowWriter
from benchmarks.programs import _launch
from benchmarks.programs._cases import Cases, Findings, at_once, by_case
from benchmarks.programs._launch import Outcome

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = "validation loss of a language model, exact and compressed, paired seeds (GPU)"
SHARES = "everything"

WAYS = (
    "exact",
    "exact_again",
    "int8_stochastic",
    "int8_nearest",
    "int4_stochastic",
    "int4_nearest",
    "optimised_int8",
)
PROCESSES = Cases(
    "_language_model.py", WAYS, quick=("exact", "int8_stochastic"), limit_s=600.0, noun="way"
)
SEEDS = (1, 2, 3, 4, 5)
# Its blocks launch for each seed alone: in one process five seeds take five times one's time.
APART = ("optimised_int8",)
SEED_SHARE = 0.25  # of the seeds' standard deviation: the margin at 8 bits
INT4_MARGIN_NAT = 0.02
_AT = re.compile(r"validation_loss_at_(\d+)")

# The 95 % quantile of Student's t for 1, 2, ... degrees of freedom.
QUANTILES_95 = (
    *(6.3138, 2.9200, 2.3534, 2.1318, 2.0150, 1.9432, 1.8946, 1.8595, 1.8331, 1.8125),
    *(1.7959, 1.7823, 1.7709, 1.7613, 1.7531, 1.7459, 1.7396, 1.7341, 1.7291, 1.7247),
)


@dataclass(frozen=True)
class Equivalence:
    """The mean of paired differences, its 90 % interval, and the margin it is to lie within.

    Two one-sided t tests: equivalence is shown, not assumed, and too few or too scattered pairs do
    not pass. Source: D. J. Schuirmann, "A comparison of the two one-sided tests procedure and the
    power approach", 1987.
    """

    mean: float
    low: float
    high: float
    margin: float

    @property
    def is_shown(self) -> bool:
        """Say whether both one-sided tests reject at 5 %: the interval lies within the margin."""
        return -self.margin < self.low and self.is_no_worse

    @property
    def is_no_worse(self) -> bool:
        """Say whether the test rejects at 5 % that the loss is higher by the margin or more."""
        return self.high < self.margin


def compare(differences: Sequence[float], margin: float) -> Equivalence:
    """Compare 2 to 21 paired differences with zero.

    Example:
        >>> compare([0.01, -0.01, 0.02, 0.0], margin=0.05).is_shown
        True
    """
    count = len(differences)
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / count**0.5
    half = QUANTILES_95[count - 2] * error
    return Equivalence(mean, mean - half, mean + half, margin)


Curve = dict[int, list[float]]  # by step: the loss of each seed


def run_all(options: Options, request: Request, writer: RowWriter) -> Findings:
    """Train in the chosen ways, and test whether all are equivalent to exact.

    Raises:
        UnavailableError: there is no GPU.
        InvalidValueError: an unknown way.
    """
    ways = chosen(PROCESSES.requested(options, request))
    job = PROCESSES.job(options, request)

    def train(way: str, stop: threading.Event) -> Outcome:
        whole = job(way)
        if way not in APART:
            return _launch.run(whole, stop)
        jobs = [replace(whole, arguments=(way, str(seed))) for seed in SEEDS]
        return merged(at_once(jobs, lambda one: _launch.run(one, stop), stop))

    curves, has_failed = train_all(ways, train, writer)
    verdicts = judge(curves)
    write_verdicts(verdicts, curves, writer)
    is_good = not has_failed and all(
        found.is_shown for way, found in verdicts.items() if way != "exact_again"
    )
    return [table(verdicts)], is_good


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Return the ways of these names, or all; the exact one is always among them.

    Raises:
        InvalidValueError: a name is unknown.
    """
    return tuple(dict.fromkeys(("exact", *PROCESSES.chosen(names))))


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Return what one process for all seeds would have said; their values in the seeds' order."""
    status = next((found.status for found in outcomes if not found.is_ok), "ok")
    alike = zip(*(found.reports for found in outcomes), strict=False)  # one may have failed
    reports = ({**same[0], "values": [v for one in same for v in one["values"]]} for same in alike)
    return Outcome(status, tuple(reports), max(found.wall_s for found in outcomes))


def train_all(
    ways: Sequence[str],
    train: Callable[[str, threading.Event], Outcome],
    writer: RowWriter,
) -> tuple[dict[str, Curve], bool]:
    """Train in all ways at once; return the curves, and whether a process failed."""
    stop = threading.Event()
    outcomes = dict(zip(ways, at_once(ways, lambda way: train(way, stop), stop), strict=True))
    curves = {}
    for way, outcome in outcomes.items():
        measurements = by_case(outcome).get(way, [])
        if measurements:
            writer.write(way, measurements)
        if outcome.is_ok:
            curves[way] = curve_of(measurements)
        else:
            writer.write(way, [], outcome.status)
    return curves, len(curves) < len(ways)


def curve_of(measurements: Sequence[Measurement]) -> Curve:
    found = [(_AT.fullmatch(item.metric), item.values) for item in measurements]
    return {int(match[1]): values for match, values in found if match}


def final(curve: Curve) -> list[float]:
    """Return the last validation loss of each seed."""
    return curve[max(curve)]


def judge(curves: Mapping[str, Curve]) -> dict[str, Equivalence]:
    """Test each way's final losses for equivalence with the exact ones; none without those."""
    if "exact" not in curves:
        return {}
    exact = final(curves["exact"])
    seed_margin = SEED_SHARE * statistics.stdev(exact)
    verdicts = {}
    for way, curve in curves.items():
        if way != "exact":
            gaps = [a - b for a, b in zip(final(curve), exact, strict=True)]
            verdicts[way] = compare(gaps, INT4_MARGIN_NAT if "int4" in way else seed_margin)
    return verdicts


def write_verdicts(
    verdicts: Mapping[str, Equivalence], curves: Mapping[str, Curve], writer: RowWriter
) -> None:
    """Write the gaps of each way, their interval and what came of the test."""
    for way, found in verdicts.items():
        exact = final(curves["exact"])
        gaps = [a - b for a, b in zip(final(curves[way]), exact, strict=True)]
        writer.write(
            f"{way} against exact",
            [
                Measurement("gap", "nat", gaps),
                Measurement("gap_low", "nat", [found.low]),
                Measurement("gap_high", "nat", [found.high]),
                Measurement("margin", "nat", [found.margin]),
                Measurement("is_equivalent", "1", [float(found.is_shown)]),
            ],
        )


def table(verdicts: Mapping[str, Equivalence], asked: str = "is_shown") -> Table:
    """Lay the verdicts out, one line a way, with what is asked of them."""
    from vramx.cli import common

    rows = []
    for way, found in verdicts.items():
        interval = f"{found.low:+.5f} to {found.high:+.5f}"
        shown = "ok" if getattr(found, asked) else "not shown"
        rows.append([way, f"{found.mean:+.5f}", interval, f"{found.margin:.5f}", shown])
    verdict = "equivalent" if asked == "is_shown" else "no worse"
    columns = ("!activations", ">gap", ">90 % interval", ">margin", verdict)
    return common.table(columns, rows, title="gap in validation loss to exact activations, nat")
