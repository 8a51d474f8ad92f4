"""Three to ten billion parameters on a small GPU: tokens a second under a limit of memory.

Each row is a model, a limit, how its step is made to fit and an optimizer, and a process of its own
(benchmarks/programs/_train_3b.py) that trains on the standard library's text with the step taken in
backward. The grid of what can be had without vramx is fixed here: Liger's kernels and its loss
without logits, transformers' checkpointing of all, half, a quarter and none of the layers, and two
optimizers with states of 8 bits. A row that runs out of memory says so. A row takes under a minute
on an H200, one of the longest sequence minutes, and under 80 GiB a host of more than 300 GiB.
Needs transformers, liger-kernel, flashoptim and torchao.

The goals: vramx.plan alone reaches 29,000 tokens/s under 24 GiB and 1.1 times the best of the grid,
24,000 under 12 GiB, and 8,500 with the shape of Llama 3.1 8B under 24 GiB.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from benchmarks.harness import Options, Request, RowWriter
from benchmarks.programs._cases import Cases, Figures, Findings, Goal, Sheet, measure
from benchmarks.programs._launch import ALLOCATORS, Started
from vramx.sizes import GIB, format_gib

DESCRIPTION = "training 3 to 10 billion parameters in 24 and 12 GiB, beside the best without (GPU)"
SHARES = "preparation"


# Blocks that are recomputed, their inputs on the host: by vramx, and by Liger and transformers.
RECOMPUTED, OFFLOADED = "recompute_all", "checkpoints"
WINDOW = 4096


class Row(NamedTuple):
    """What one process trains, and how.

    model: "3b", "8b" or "10b". way: "plan", or the share of layers that transformers checkpoints;
        of the longest sequences RECOMPUTED or OFFLOADED.
    optimizer: "flash" has 24 bits of each weight, "flash_offload" too, with its states on the host;
        "torchao" rounds weights stochastically to bfloat16.
    window: how many tokens attention looks back at; 0: all. A step of a million tokens would take
        an hour; the memory is the same.
    """

    model: str
    limit_gib: float
    way: str
    optimizer: str
    window: int = 0

    @property
    def allocator(self) -> str:
        """The better of torch's own for what is not ours."""
        return "vramx" if self.way in ("plan", RECOMPUTED) else "expandable"

    @property
    def grows(self) -> bool:
        """Whether the row asks for the longest sequence."""
        return self.way in (RECOMPUTED, OFFLOADED)


ROWS = {
    "3b_24_all": Row("3b", 24, "1", "flash"),
    "3b_24_half": Row("3b", 24, "0.5", "flash"),
    "3b_24_quarter": Row("3b", 24, "0.25", "flash"),
    "3b_24_none": Row("3b", 24, "0", "flash"),
    "3b_24_half_torchao": Row("3b", 24, "0.5", "torchao"),
    "3b_24_plan": Row("3b", 24, "plan", "flash"),
    "3b_12_all": Row("3b", 12, "1", "flash"),
    "3b_12_plan": Row("3b", 12, "plan", "flash_offload"),
    "8b_24_all": Row("8b", 24, "1", "flash"),
    "3b_8.5_plan": Row("3b", 8.5, "plan", "flash_offload"),
    "8b_24_plan": Row("8b", 24, "plan", "flash_offload"),
    "10b_24_plan": Row("10b", 24, "plan", "flash_offload"),
    "3b_24_longest": Row("3b", 24, RECOMPUTED, "flash_offload"),
    "3b_24_longest_liger": Row("3b", 24, OFFLOADED, "flash"),
    "8b_24_longest": Row("8b", 24, RECOMPUTED, "flash_offload"),
    "8b_24_longest_liger": Row("8b", 24, OFFLOADED, "flash"),
    "3b_80_longest": Row("3b", 80, RECOMPUTED, "flash_offload", WINDOW),
    "3b_80_longest_liger": Row("3b", 80, OFFLOADED, "flash", WINDOW),
    "8b_80_longest": Row("8b", 80, RECOMPUTED, "flash_offload", WINDOW),
    "8b_80_longest_liger": Row("8b", 80, OFFLOADED, "flash", WINDOW),
}
# Tokens a second; under the smallest limit, and for the largest model, to train is enough.
GOALS = {
    "3b_24_plan": 29_000,
    "3b_12_plan": 24_000,
    "3b_8.5_plan": 0,
    "8b_24_plan": 8_500,
    "10b_24_plan": 0,
}
OVER_THE_GRID, TIMES_AS_LONG = 1.1, 2.0
PROCESSES = Cases("_train_3b.py", tuple(ROWS), quick=("3b_24_plan",), limit_s=400.0, noun="row")


def run_all(options: Options, request: Request, writer: RowWriter) -> Findings:
    """Train each requested row, and judge the goals.

    Raises:
        UnavailableError: there is no GPU.
        InvalidValueError: an unknown row.
    """
    rows = PROCESSES.chosen(PROCESSES.requested(options, request))
    job = PROCESSES.job(options, request)
    allocators = {each.name: each for each in ALLOCATORS}

    def start(row: str) -> Started:
        return Started(replace(job(row), allocator=allocators[ROWS[row].allocator]))

    return SHEET.findings(*measure(rows, start, writer))


def goals(figures: Figures) -> list[Goal]:
    """Return row, metric, value and whether the goal is met, for what was measured."""
    found = []
    for name, least in GOALS.items():
        speed = _speed(figures, name)
        if speed is None:
            continue
        found.append((name, "tokens_per_s", speed, speed >= least))
        row = ROWS[name]
        peers = [
            _speed(figures, other)
            for other, peer in ROWS.items()
            if (peer.model, peer.limit_gib) == (row.model, row.limit_gib)
            and not (peer.grows or peer.way == "plan")
        ]
        best = max((peer for peer in peers if peer is not None), default=None)
        if best is not None:
            found.append((name, "of_the_grid", speed / best, speed >= OVER_THE_GRID * best))
        peak = max(figures[name, "peak_reserved_bytes"])
        found.append((name, "peak_reserved_bytes", peak, peak <= row.limit_gib * GIB))
    for name in (name for name, row in ROWS.items() if row.way == RECOMPUTED):
        ours, theirs = (
            max(figures.get((each, "longest_tokens"), [0.0])) for each in (name, f"{name}_liger")
        )
        if ours and theirs:
            times = ours / theirs
            found.append((name, "times_as_long", times, times >= TIMES_AS_LONG))
    return found


def _speed(figures: Figures, name: str) -> float | None:
    values = figures.get((name, "tokens_per_s"))
    return sorted(values)[len(values) // 2] if values else None


SHEET = Sheet(
    "training under a limit of memory",
    ("tokens_per_s", "step_ms", "longest_tokens", "peak_reserved_bytes", "limit_bytes"),
    goals,
    size=format_gib,
)
