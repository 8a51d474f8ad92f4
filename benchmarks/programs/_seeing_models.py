"""The trainings that benchmarks/seeing.py looks at, as their users write them: models of
transformers and torchvision, on whatever device is current, with random weights and batches.

Nothing is downloaded. A library is imported by the function that needs it. PROGRAM_SIZE=tiny makes
all of them small enough for a processor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.models_configs import gpt2_config, llama_config
from benchmarks.programs._report import sized

VOCABULARY = sized(32_000, 512)
CLASSES = 1000
TEXT = sized((8, 512), (2, 32))  # sequences and tokens
MANY = sized((48, 512), (2, 32))  # as many as let a GPU set the pace
IMAGES = sized((96, 224), (2, 64))  # and pixels a side
WAYS = ("eager", "amp", "checkpoint")


@dataclass
class Training:
    """A model, its optimizer and a step: forward, backward, the optimizer's step, zeroing."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], Tensor]


def llama(way: str = "eager", text: tuple[int, int] = TEXT) -> Training:
    from transformers import LlamaForCausalLM

    sizes = sized((1024, 12, 2816, 16, 4), (64, 2, 128, 4, 2))
    config = llama_config(VOCABULARY, sizes, max_position_embeddings=1024)
    return language_model(LlamaForCausalLM(config), way, text)


def gpt2(way: str = "eager", text: tuple[int, int] = TEXT) -> Training:
    from transformers import GPT2LMHeadModel

    config = gpt2_config(VOCABULARY, *sized((1024, 12, 16), (64, 2, 4)))
    return language_model(GPT2LMHeadModel(config), way, text)


def resnet50() -> Training:
    from torchvision.models import resnet18, resnet50

    count, side = IMAGES
    model = sized(resnet50, resnet18)(num_classes=CLASSES).to(_device()).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(count, 3, side, side, device=_device())
    labels = torch.randint(0, CLASSES, (count,), device=_device())
    return _training(model, optimizer, lambda: cross_entropy(model(images), labels), False)


def small_layers() -> Training:
    """Return the training of many layers so small that the GPU waits for the host."""
    width = 64
    parts = [(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(40)]
    model = nn.Sequential(*(layer for part in parts for layer in part)).to(_device())
    rows = torch.randn(32, width, device=_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return _training(model, optimizer, lambda: model(rows).square().mean(), False)


def language_model(model: Any, way: str, text: tuple[int, int]) -> Training:
    """Return the training of a causal language model in one of WAYS, by AdamW."""
    model = model.to(_device()).train()
    if way == "checkpoint":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, VOCABULARY, text, device=_device())
    return _training(
        model, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss, way == "amp"
    )


def _training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], Tensor],
    is_mixed: bool,
) -> Training:
    device = _device()
    # From torch's own first scale, 65536, on the first steps overflow and are left out.
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=is_mixed)

    def step() -> Tensor:
        with torch.autocast(device, torch.float16, enabled=is_mixed):
            loss = loss_of()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, optimizer, step)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# --- what sums are made of ------------------------------------------------------------------------


def llama_int8() -> Training:
    import vramx

    training = llama("eager")
    vramx.optimize(training.model, "int8")
    return training


SUMMED: dict[str, Callable[[], Training]] = {
    "llama": llama,
    "llama_amp": lambda: llama("amp"),
    "llama_checkpoint": lambda: llama("checkpoint"),
    "llama_int8": llama_int8,
    "resnet50": resnet50,
    "gpt2": gpt2,
}
PREDICTED: dict[str, Callable[[str], Training]] = {"llama": llama, "gpt2": gpt2}
