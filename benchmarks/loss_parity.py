"""Do the recipes for small memory learn what float32 weights with exact activations learn?

A Llama of 76 million parameters learns the standard library's sources for 500 steps at a rate of
1e-5, at which a step moves most weights by less than bfloat16 can tell: five paired seeds, each
recipe with the same weights and batches as `exact`, which is float32 weights under autocast with
torch's AdamW. All start from numbers of bfloat16, as from a checkpoint: a start between them is
some steps ahead, for whatever keeps more bits of a weight than it computes with. The recipes have
bfloat16 weights: FlashOptim's AdamW with 24 bits of each, torchao's of 8 bits with stochastic
rounding, blocks at vramx's levels. None may be worse by the margin of language_model.py, and
`nearest`, rounded to the nearest, has to be: else the test could not tell.
Each recipe and seed is a process (benchmarks/programs/_loss_parity.py). Needs transformers,
flashoptim and torchao; takes some minutes.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from benchmarks.harness import Options, Request, RowWriter
from benchmarks.language_model import SEEDS, judge, merged, table, train_all, write_verdicts
from benchmarks.programs import _launch
from benchmarks.programs._cases import Cases, Findings, at_once
from benchmarks.programs._launch import Outcome

DESCRIPTION = "validation loss of recipes for small memory beside float32's, paired seeds (GPU)"
SHARES = "everything"

FAILS = "nearest"
WAYS = (
    *("exact", "exact_again", "flash_int8", "flash_recompute_mlp", "flash_recompute_all"),
    *("torchao_int8", FAILS),
)
PROCESSES = Cases("_loss_parity.py", WAYS, quick=("exact", "flash_int8"), limit_s=600.0, noun="way")
AT_ONCE = 12  # processes, which keep a core each busy


def run_all(options: Options, request: Request, writer: RowWriter) -> Findings:
    """Train by the chosen recipes, and test whether all but `nearest` are no worse than exact.

    Raises:
        UnavailableError: there is no GPU.
        InvalidValueError: an unknown way.
    """
    ways = tuple(dict.fromkeys(("exact", *PROCESSES.chosen(PROCESSES.requested(options, request)))))
    job, turns = PROCESSES.job(options, request), threading.Semaphore(AT_ONCE)
    seeds = SEEDS[:2] if options.quick else SEEDS

    def train(way: str, stop: threading.Event) -> Outcome:
        def one(seed: int) -> Outcome:
            with turns:
                return _launch.run(replace(job(way), arguments=(way, str(seed))), stop)

        return merged(at_once(seeds, one, stop))

    curves, has_failed = train_all(ways, train, writer)
    verdicts = judge(curves)
    write_verdicts(verdicts, curves, writer)
    is_good = not has_failed and all(
        found.is_no_worse != (way == FAILS)
        for way, found in verdicts.items()
        if way != "exact_again"
    )
    return [table(verdicts, "is_no_worse")], is_good
