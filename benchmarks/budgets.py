"""vramx.plan in users' own training loops: is any budget exceeded, and would another plan do more.

Each case is a process of its own (benchmarks/programs/_budgets.py): one model, and five budgets
from the smallest possible to what the fastest step needs. Each plan is applied in a loop with
AdamW, whose states do not exist when it is planned. Beside it arrangements made by hand take the
same steps: one level for all blocks, the first blocks at a smaller level than the others, and the
plan with one block changed. Those that stay within the budget, too, are its rivals; steps are taken
in turns and compared turn by turn. Needs transformers and torchvision; without peft adapters are
stand-ins for its.

The goals: no peak of the loop exceeds its budget, and no rival is more than 1 % faster.
"""

from __future__ import annotations

from benchmarks.harness import Options, Request, RowWriter
from benchmarks.programs._cases import Cases, Figures, Findings, Goal, Sheet, cases_with
from vramx.sizes import format_gib

DESCRIPTION = "vramx.plan in training loops: 30 budgets of six models, and plans made by hand (GPU)"
SHARES = "preparation"

CASES = ("llama", "gpt2", "llama_lora", "experts", "resnet", "bert")
PROCESSES = Cases("_budgets.py", CASES, quick=("llama",), limit_s=400.0)
FASTER_GOAL = 1.01
BUDGETS = cases_with("budget_bytes")


def run_all(options: Options, request: Request, writer: RowWriter) -> Findings:
    """Plan the chosen models, train them as planned and by hand, and judge the goals.

    Raises:
        UnavailableError: there is no GPU.
        InvalidValueError: an unknown case.
    """
    return SHEET.findings(*PROCESSES.measure(options, request, writer))


def goals(figures: Figures) -> list[Goal]:
    """Return case, metric, value and whether the goal is met, for what was measured."""
    found = []
    for case in BUDGETS(figures):
        peak = figures.get((case, "peak_bytes"), [float("nan")])[0]
        ratio = peak / figures[case, "budget_bytes"][0]
        found.append((case, "peak_of_budget", ratio, ratio <= 1))
        ratio = figures.get((case, "of_best_rival"), [float("nan")])[0]
        found.append((case, "of_best_rival", ratio, ratio <= FASTER_GOAL))
    return found


SHEET = Sheet(
    "plans in training loops, beside plans made by hand",
    ("budget_bytes", "peak_bytes", "before_bytes", "step_ms", "of_best_rival", "rivals"),
    goals,
    size=format_gib,
    lines=BUDGETS,
)
