"""The process that benchmarks/loss_parity.py starts for each recipe and seed.

    python _loss_parity.py WAY SEED

Trains a Llama of 76 million parameters on the standard library's sources, a token for each byte,
for 500 steps at a rate of 1e-5, and prints one line of JSON for each evaluation. At that rate a
step moves most weights by less than bfloat16 can tell. PROGRAM_SIZE=tiny takes seconds on a
processor, with torch's AdamW for all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import vramx
from benchmarks.models_configs import llama_config
from benchmarks.models_gpt import Shape, draw_starts, standard_library_text, windows
from benchmarks.programs._language_model import PERTURBATION, VALIDATION_SEED
from benchmarks.programs._report import Recorder, report, sized
from benchmarks.programs._train_3b import BETAS, RATE, PerParameter

MODEL = sized((256, (768, 12, 2048, 12, 4)), (256, (64, 2, 128, 4, 2)))
STEPS, EVERY = sized((500, 100), (4, 2), quick=(100, 50))
TEXT = sized(Shape(length=256, rows=8), Shape(length=16, rows=2))
VALIDATION_BATCHES = sized(12, 1)


class Recipe(NamedTuple):
    """How a model is trained: its weights' type, its optimizer's word and its blocks' level."""

    dtype: torch.dtype
    optimizer: str
    level: str | None = None


_HALF = torch.bfloat16
RECIPES = {
    "exact": Recipe(torch.float32, "adamw"),
    "exact_again": Recipe(torch.float32, "adamw"),  # from perturbed weights
    "flash_int8": Recipe(_HALF, "flash", "int8"),
    "flash_recompute_mlp": Recipe(_HALF, "flash", "recompute_mlp"),
    "flash_recompute_all": Recipe(_HALF, "flash", "recompute_all"),
    "torchao_int8": Recipe(_HALF, "torchao", "int8"),
    "nearest": Recipe(_HALF, "adamw"),
}


def main(way: str, seed: str) -> None:
    recorder = Recorder(deterministic=False)
    device = recorder.begin()
    recipe = RECIPES[way]
    torch.manual_seed(int(seed))
    model = build(recipe, device)
    if way == "exact_again":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + PERTURBATION)
    if recipe.level is not None:
        done = vramx.optimize(model, recipe.level)
        assert len(done.swapped) > MODEL[1][1], done
    optimizer = optimizer_of(recipe.optimizer, model)
    texts = standard_library_text(sized(24 << 20, 1 << 20))
    train, validation = (each.to(device) for each in texts)
    starts = draw_starts(train, (int(seed),), STEPS, TEXT)
    checked = draw_starts(validation, (VALIDATION_SEED,), VALIDATION_BATCHES, TEXT)
    loss = loss_of(model, recipe, device)
    for step in range(1, STEPS + 1):
        loss(train, starts[step - 1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            with torch.no_grad():
                found = [loss(validation, each) for each in checked]
            report(way, f"validation_loss_at_{step}", "nat", [float(torch.stack(found).mean())])


def build(recipe: Recipe, device: torch.device) -> Any:
    """Return a model whose weights are the same for each recipe, but for their type.

    They are numbers of bfloat16, as those of a checkpoint are. Weights that are rounded for each
    product show nothing of the first steps if they start there, whoever keeps their other bits.
    """
    from transformers import AutoModelForCausalLM

    config = llama_config(*MODEL, max_position_embeddings=TEXT.length)
    config.use_cache = False
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(device, _HALF).to(recipe.dtype).train()


def loss_of(model: Any, recipe: Recipe, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    wide = recipe.dtype == torch.float32

    def loss(text: Tensor, starts: Tensor) -> Tensor:
        tokens = windows(text, starts, TEXT.length)[0].flatten(0, -2)
        with torch.autocast(device.type, _HALF) if wide else nullcontext():
            found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return loss


def optimizer_of(word: str, model: nn.Module) -> Any:
    if word == "flash" and torch.cuda.is_available():
        from flashoptim import FlashAdamW

        return FlashAdamW(model.parameters(), lr=RATE, betas=BETAS)
    if word == "torchao" and torch.cuda.is_available():
        return PerParameter(model)
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS)


if __name__ == "__main__":
    main(*sys.argv[1:])
