"""The process that benchmarks/language_model.py starts for each way of keeping activations.

    python _language_model.py WAY [SEED ...]

Trains one GPT for each seed, or for these, on the standard library's sources, all in one model, and
prints one line of JSON for each evaluation: the validation loss of every seed. PROGRAM_SIZE=tiny
takes seconds on a processor. Dropout is 0 and nothing but the way differs between processes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

import vramx
from benchmarks.language_model import SEEDS
from benchmarks.models_gpt import Gpts, Shape, draw_starts, standard_library_text, windows
from benchmarks.programs._report import Recorder, report, sized

STEPS, EVERY = 3000, 250
WARMUP = 300
# Where losses spike, pairs part by chance: then gaps say nothing of what is compared.
LEARNING_RATE = 1.5e-4
VALIDATION_SEED = 99
VALIDATION_BATCHES = 24
# As far as a float32 weight is from its neighbour: what is left of the difference after training
# is chance alone, and no way of keeping activations can be closer to the exact one.
PERTURBATION = 2.0**-23

WAYS: dict[str, dict[str, Any] | None] = {
    "exact": None,
    "exact_again": None,  # from perturbed weights
    "int8_stochastic": {"level": "int8", "rounding": "stochastic"},
    "int8_nearest": {"level": "int8", "rounding": "nearest"},
    "int4_stochastic": {"level": "int4", "rounding": "stochastic"},
    "int4_nearest": {"level": "int4", "rounding": "nearest"},
    "optimised_int8": None,  # swapped blocks instead
}
# The level that vramx.optimize is given, of models with blocks that it knows.
LEVELS = {"optimised_int8": "int8"}


class Trainer:
    """The models of all seeds, their text and their optimizer."""

    def __init__(self, way: str, device: torch.device, seeds: Sequence[int] = SEEDS) -> None:
        self._shape = sized(Shape(), Shape(width=32, layers=2, heads=2, length=16, rows=2))
        self._steps = sized(STEPS, 4, quick=EVERY)
        self._every = sized(EVERY, 2)
        train, validation = standard_library_text(sized(24 << 20, 1 << 20))
        self._train, self._validation = train.to(device), validation.to(device)
        self._starts = draw_starts(self._train, seeds, self._steps, self._shape)
        same = (VALIDATION_SEED,) * len(seeds)  # one set of windows for all
        batches = sized(VALIDATION_BATCHES, 1)
        self._checked = draw_starts(self._validation, same, batches, self._shape)
        self._models = models_for(way, self._shape, seeds)
        if way == "exact_again":
            with torch.no_grad():
                for parameter in self._models.parameters():
                    parameter.mul_(1 + PERTURBATION)
        self._models.to(device)
        is_fused = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            self._models.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=is_fused
        )
        # The tiny tensors of a tiny run are packed as well.
        small: dict[str, Any] = sized({}, {"min_bytes": 1})
        options = WAYS[way]
        self._context: Any = None if options is None else vramx.compress(**options, **small)
        self._device = device
        self._count = len(seeds)

    def run(self, case: str) -> None:
        """Train to the end; report each evaluation and what was packed."""
        for step in range(1, self._steps + 1):
            self._take_step(step)
            if step % self._every == 0:
                report(case, f"validation_loss_at_{step}", "nat", self.evaluate())
        report(case, "parameters", "1", [self._parameters() / self._count])
        if self._context is not None:
            stats = self._context.stats
            report(case, "packed_share", "1", [stats.packed.seen_bytes / stats.saved_bytes])
            report(case, "saved_ratio", "1", [stats.ratio])

    def _take_step(self, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * share_of_rate(step, self._steps, WARMUP)
        tokens, targets = windows(self._train, self._starts[step - 1], self._shape.length)
        context: AbstractContextManager[Any] = self._context or nullcontext()
        self._losses(tokens, targets, context).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _losses(
        self, tokens: Tensor, targets: Tensor, context: AbstractContextManager[Any]
    ) -> Tensor:
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            with context:
                hidden = self._models(tokens)
            return self._models.losses(hidden, targets)

    @torch.no_grad()
    def evaluate(self) -> list[float]:
        """Return the validation loss of each seed."""
        losses = [
            self._losses(*windows(self._validation, starts, self._shape.length), nullcontext())
            for starts in self._checked
        ]
        return list(torch.stack(losses).mean(0).tolist())

    def _parameters(self) -> int:
        return sum(p.numel() for p in self._models.parameters() if p.requires_grad)


def models_for(way: str, shape: Shape, seeds: Sequence[int]) -> Gpts:
    """Return the models of these seeds; every way has the same weights.

    Raises:
        RuntimeError: blocks were not swapped.
    """
    if way not in LEVELS:
        return Gpts(seeds, shape)
    from benchmarks.models_gpt2 import SeparateGpts

    models = SeparateGpts(seeds, shape)
    done = vramx.optimize(models, LEVELS[way])
    if len(done.swapped) != len(seeds) * shape.layers:
        raise RuntimeError(f"only these blocks were swapped:\n{done}")
    return models


def share_of_rate(step: int, steps: int, warmup: int) -> float:
    """Return the learning rate as a share of its highest: up in a line, down in a cosine to 0."""
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def main(way: str, *seeds: str) -> None:
    recorder = Recorder(deterministic=False)
    Trainer(way, recorder.begin(), tuple(map(int, seeds)) or SEEDS).run(way)


if __name__ == "__main__":
    main(*sys.argv[1:])
