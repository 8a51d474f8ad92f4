"""Draws the results of a benchmark: one PNG for each CSV file, beside it or in another folder.

    python -m benchmarks.plot [benchmarks/results/NAME.csv ...] [-o FOLDER]

What is drawn is measured at the commit and on the machine of a file's latest run: of each figure
the last, and only rows that are "ok". The subtitle says where that was. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.fused import BLOCK, OURS
from benchmarks.harness import RESULTS, Measurement, read_csv
from benchmarks.language_model import curve_of
from vramx.sizes import GIB

matplotlib.use("Agg")

from matplotlib import pyplot as plt

Rows = list[dict[str, str]]

PROMISED_RATIO = 1.005
PROMISED_NS = 100.0
PLACE = ("commit", "dirty", "cpu", "gpu", "driver", "torch")


def main(arguments: list[str] | None = None) -> int:
    """Draw the files that are named, or all results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="the folder to write to")
    args = parser.parse_args(arguments)
    for path in args.files or sorted(RESULTS.glob("*.csv")):
        rows = latest(read_csv(path))
        if not rows:
            print(f"{path.name}: no row is ok, nothing to draw", file=sys.stderr)
            continue
        target = (args.output or path.parent) / f"{path.stem}.png"
        draw(rows, target)
        print(target)
    return 0


def latest(rows: Rows) -> Rows:
    """Return the last successful row of each figure, measured where the last run was."""
    if not rows:
        return []
    last = max(rows, key=lambda row: row["date_utc"])
    here = [row for row in rows if all(row[name] == last[name] for name in PLACE)]
    found = {(row["case"], row["metric"]): row for row in here if row["status"] == "ok"}
    return list(found.values())


def draw(rows: Rows, target: Path) -> None:
    """Draw one run into a PNG, in the way that suits its benchmark."""
    painters: dict[str, Callable[[Rows], Any]] = {
        "traces": draw_traces,
        "core": draw_core,
        "fused": draw_fronts,
        "language_model": draw_curves,
    }
    figure = painters.get(rows[0]["benchmark"], draw_bars)(rows)
    first = rows[0]
    where = first["gpu"] if first["gpu"] not in ("none", "unknown") else first["cpu"]
    dirty = " + changes" if first["dirty"] == "yes" else ""
    commands = {row["command"] for row in rows}
    command = first["command"] if len(commands) == 1 else f"vramx bench {first['benchmark']}"
    figure.suptitle(
        f"{command}\n{where}, torch {first['torch']}, {first['commit']}{dirty}",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(target, dpi=150)
    plt.close(figure)


def draw_traces(rows: Rows) -> Any:
    """Bars of the two ratios: one group for each trace, one bar for each policy."""
    metrics = ("peak_reserved_ratio", "min_capacity_ratio")
    figure, axes = plt.subplots(len(metrics), 1, figsize=(11, 7), squeeze=False)
    for axis, metric in zip(axes[:, 0], metrics, strict=True):
        _grouped_bars(axis, [row for row in rows if row["metric"] == metric])
        axis.axhline(PROMISED_RATIO, color="black", linewidth=0.8, linestyle="--")
        axis.set_ylim(bottom=1.0)
        axis.set_ylabel(f"{metric.removesuffix('_ratio').replace('_', ' ')} / peak live")
    return figure


def _grouped_bars(axis: Any, rows: Rows) -> None:
    values = {tuple(row["case"].rsplit(" ", 1)): float(row["median"]) for row in rows}
    traces = list(dict.fromkeys(trace for trace, _ in values))
    policies = list(dict.fromkeys(policy for _, policy in values))
    width = 0.8 / max(1, len(policies))
    for index, policy in enumerate(policies):
        present = [n for n, trace in enumerate(traces) if (trace, policy) in values]
        heights = [values[traces[n], policy] for n in present]
        axis.bar([n + index * width for n in present], heights, width, label=policy)
    axis.set_xticks([n + 0.4 - width / 2 for n in range(len(traces))], traces, fontsize=8)
    axis.legend(fontsize=8)


def draw_core(rows: Rows) -> Any:
    """Time of one operation: over live blocks as a curve, by sizes and threads as bars."""
    timed = [row for row in rows if row["metric"] == "ns_per_operation"]
    figure, (curve, bars) = plt.subplots(1, 2, figsize=(11, 4.5))
    live = sorted((int(row["case"][5:]), row) for row in timed if row["case"].startswith("live="))
    counts = [count for count, _ in live]
    curve.plot(counts, [float(row["median"]) for _, row in live], marker="o")
    low, high = ([float(row[end]) for _, row in live] for end in ("p10", "p90"))
    curve.fill_between(counts, low, high, alpha=0.25)
    curve.set_xscale("log")
    curve.set_xlabel("live blocks")
    curve.set_ylabel("ns for one allocate or free")
    _horizontal_bars(bars, [row for row in timed if not row["case"].startswith("live=")])
    curve.axhline(PROMISED_NS, color="black", linewidth=0.8, linestyle="--")
    curve.set_ylim(bottom=0)
    return figure


def draw_fronts(rows: Rows) -> Any:
    """Bytes kept against time: one picture for each model, a point for each way to keep less."""
    models = list(dict.fromkeys(row["case"].split()[0] for row in rows))
    figure, axes = plt.subplots(1, len(models), figsize=(1 + 6 * len(models), 5.5), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        points, axis_label = _points([row for row in rows if row["case"].split()[0] == model])
        ours = {way: point for way, point in points.items() if way in OURS}
        for way, point in points.items():
            axis.scatter(*point, color="tab:orange" if way in ours else "tab:blue", s=25)
            offset = (4, -9) if way in ours else (4, 4)
            axis.annotate(way, point, offset, textcoords="offset points", fontsize=7)
        front = pareto_front(ours.values())
        axis.plot([x for x, _ in front], [y for _, y in front], color="tab:orange", linewidth=1)
        axis.set_title(model, fontsize=9)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel(axis_label)
        axis.set_ylabel("step, ms (median)")
        axis.margins(0.15)
    return figure


def _points(rows: Rows) -> tuple[dict[str, tuple[float, float]], str]:
    """Return what each way of one model keeps and takes, and what the first of the two is."""
    figures = {(row["case"].split(" ", 1)[1], row["metric"]): float(row["median"]) for row in rows}
    metric, unit, meaning = "kept_bytes", float(GIB), "GiB kept after forward"
    if any(metric == BLOCK for _, metric in figures):
        metric, unit, meaning = BLOCK, 1.0, "bytes that a block keeps per token and hidden unit"
    points = {
        way: (kept / unit, figures[way, "step_ms"])
        for (way, found), kept in figures.items()
        if found == metric and (way, "step_ms") in figures
    }
    return points, meaning


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other is left of and below, from left to right.

    Example:
        >>> pareto_front([(1, 9), (2, 9), (3, 5)])
        [(1, 9), (3, 5)]
    """
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def draw_curves(rows: Rows) -> Any:
    """Losses over steps, means of the seeds, and their gaps to the exact ones: a line a way."""
    measured: dict[str, list[Measurement]] = {}
    for row in rows:
        values = [float(value) for value in row["samples"].split()]
        measured.setdefault(row["case"], []).append(Measurement(row["metric"], row["unit"], values))
    found = {way: curve_of(measurements) for way, measurements in measured.items()}
    curves = {way: curve for way, curve in found.items() if curve}
    figure, (losses, gaps) = plt.subplots(1, 2, figsize=(11, 4.5))
    exact = curves.get("exact", {})
    for way, curve in curves.items():
        steps = sorted(curve)
        losses.plot(steps, [statistics.fmean(curve[step]) for step in steps], label=way)
        shared = [step for step in steps if step in exact and way != "exact"]
        pairs = [list(zip(curve[step], exact[step], strict=True)) for step in shared]
        means = [statistics.fmean(a - b for a, b in pair) for pair in pairs]
        gaps.plot(shared, means, label=way)
    losses.set_ylabel("validation loss, nat a byte, mean of the seeds")
    gaps.set_ylabel("gap to exact, nat")
    gaps.axhline(0.0, color="black", linewidth=0.8)
    for axis in (losses, gaps):
        axis.set_xlabel("step")
        axis.legend(fontsize=8)
    return figure


def draw_bars(rows: Rows) -> Any:
    """Bars with their spread, one picture for each metric: for a benchmark with no own picture."""
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    height = 1 + 0.3 * len(rows) + 0.5 * len(metrics)
    figure, axes = plt.subplots(len(metrics), 1, figsize=(10, height), squeeze=False)
    for axis, metric in zip(axes[:, 0], metrics, strict=True):
        _horizontal_bars(axis, [row for row in rows if row["metric"] == metric])
    return figure


def _horizontal_bars(axis: Any, rows: Rows) -> None:
    values = [float(row["median"]) for row in rows]
    spread = [
        [value - float(row["p10"]) for value, row in zip(values, rows, strict=True)],
        [float(row["p90"]) - value for value, row in zip(values, rows, strict=True)],
    ]
    axis.barh([row["case"] for row in rows], values, xerr=spread)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    if rows:
        axis.set_xlabel(f"{rows[0]['metric']} [{rows[0]['unit']}]")


if __name__ == "__main__":
    sys.exit(main())
