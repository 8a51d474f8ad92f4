"""What each remedy costs and saves: the variants of examples/recipes, a process each.

A variant is a function of a script that a user can start, too; the process here
(benchmarks/programs/_recipes.py) imports ahead of its turn and keeps each step's time. A library
that is not installed is a row that names it. benchmarks.documents makes the tables in docs/recipes
of the rows. A case is RECIPE/VARIANT; `--only RECIPE` takes all of a recipe's. One that needs
several GPUs has all that there are. The whole takes some six minutes on an H100.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import ModuleType

from benchmarks.harness import RESULTS, ROOT, Options, Request, RowWriter
from benchmarks.programs._cases import Cases, Findings, Sheet, measure
from benchmarks.programs._launch import Allocator, Job, Started, visible_gpus
from vramx.errors import InvalidValueError
from vramx.sizes import format_gib

DESCRIPTION = "what remedies for a full GPU cost and save: the scripts of examples/recipes (GPU)"
SHARES = "preparation"

SCRIPTS = ROOT / "examples" / "recipes"
PAGES = ROOT / "docs" / "recipes"
ROWS = RESULTS / "recipes.csv"
RECIPES = (
    *("amp", "accumulation", "checkpointing", "small_states", "offload", "lora", "patches_3d"),
    *("dynamic_batches", "evaluation", "several_gpus", "caps", "reinforcement", "folklore"),
)
# What a recipe measures, and its unit: the columns of its table, in this order.
UNITS = {
    "peak_allocated_bytes": "B",
    "peak_reserved_bytes": "B",
    "cap_bytes": "B",
    "fits": "1",
    "step_ms": "ms",
    "parameters_bytes": "B",
    "states_bytes": "B",
    "tokens_per_s": "1/s",
    "padding": "1",
    "bytes_per_s": "B/s",
    "ranks": "1",
    "trainable_before": "1",
    "trainable_after": "1",
}
SHEET = Sheet("recipes", tuple(UNITS)[:5], size=format_gib)
QUICK = (
    *("amp/bf16_autocast_int8", "checkpointing/int8_activations", "offload/states_vramx"),
    "patches_3d/whole_volume_int8",
)
LIMIT_S = 120.0


def script(name: str) -> ModuleType:
    """Import a script of examples/recipes, as it imports its neighbours."""
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    return importlib.import_module(name)


def all_cases() -> list[str]:
    return [f"{recipe}/{variant}" for recipe in RECIPES for variant in script(recipe).VARIANTS]


def run_all(options: Options, request: Request, writer: RowWriter) -> Findings:
    """Run each requested variant.

    Raises:
        UnavailableError: there is no GPU.
        InvalidValueError: an unknown case.
    """
    processes = Cases("_recipes.py", tuple(all_cases()), quick=QUICK, limit_s=LIMIT_S)
    job = processes.job(options, request)
    asked = expanded(processes.requested(options, request), processes.names)
    figures, has_failed = measure(
        processes.chosen(asked), lambda case: Started(prepared(job(case), options)), writer
    )
    return SHEET.findings(figures, has_failed)


def expanded(asked: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    """Return the cases that are asked for, with the name of a recipe as all of its."""
    cases = tuple(known)
    found: list[str] = []
    for name in asked:
        found += [case for case in cases if case.startswith(f"{name}/")] or [name]
    return tuple(found)


def prepared(job: Job, options: Options) -> Job:
    """Return a case's job with the allocator that its variant chooses, and the GPUs it needs."""
    (case,) = job.arguments
    words = (("vramx_allocator", "vramx"), ("expandable_segments", "expandable"))
    allocator = next((name for word, name in words if word in case), "native")
    if case.startswith("several_gpus/"):
        job = replace(job, gpu=",".join(all_gpus(options)))
    return replace(job, allocator=Allocator(allocator))


def all_gpus(options: Options) -> list[str]:
    """Return every GPU that there is from the one asked for on."""
    gpus = visible_gpus(options.device, 1)
    try:
        while True:
            gpus = visible_gpus(options.device, len(gpus) + 1)
    except InvalidValueError:
        return gpus


# --- the tables in the pages ----------------------------------------------------------------------

_HEADINGS = {
    "peak_allocated_bytes": "peak allocated",
    "peak_reserved_bytes": "peak reserved",
    "cap_bytes": "cap",
    "step_ms": "step",
    "parameters_bytes": "parameters",
    "states_bytes": "states",
    "tokens_per_s": "tokens/s",
    "bytes_per_s": "GB/s",
    "ranks": "GPUs",
    "trainable_before": "trainable before",
    "trainable_after": "after",
}

Rows = list[dict[str, str]]


def page_table(recipe: str, rows: Rows) -> list[str]:
    """Return the lines of a recipe's table: of each variant the newest figures, else why none."""
    mine = [row for row in rows if row["case"].startswith(f"{recipe}/")]
    measured = {(row["case"], row["metric"]): row for row in mine if row["status"] == "ok"}
    said = {row["case"]: row["status"] for row in mine if row["status"] != "ok"}
    if not measured:
        return ["Not measured yet."]
    metrics = [metric for metric in UNITS if any(m == metric for _, m in measured)]
    headings = [recipe, *(_HEADINGS.get(metric, metric) for metric in metrics)]
    lines = [f"| {' | '.join(headings)} |", "| --- |" + " ---: |" * len(metrics)]
    for case in dict.fromkeys(row["case"] for row in mine):
        if any(each == case for each, _ in measured):
            shown = [_cell(metric, measured.get((case, metric))) for metric in metrics]
        else:
            shown = [said[case].removeprefix("failed: "), *[""] * (len(metrics) - 1)]
        lines.append(f"| {case.partition('/')[2]} | {' | '.join(shown)} |")
    return [*lines, "", _place(measured.values())]


def _cell(metric: str, row: dict[str, str] | None) -> str:
    if row is None:
        return ""
    value = float(row["median"])
    if metric == "fits":
        return "yes" if value else "no"
    if metric == "bytes_per_s":
        return f"{value / 1e9:.0f}"
    if metric.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    if metric == "step_ms":
        return f"{value:.0f} ms" if value >= 10 else f"{value:.2f} ms"
    return f"{100 * value:.0f} %" if metric == "padding" else f"{value:,.0f}"


def _place(rows: Iterable[dict[str, str]]) -> str:
    places = {
        f"{row['gpu'].split(', ')[0]}, driver {row['driver']}, torch {row['torch']}, "
        f"commit {row['commit'][:8]}"
        for row in rows
    }
    return f"{'; '.join(sorted(places))}; medians, rows in `benchmarks/results/{ROWS.name}`."
