"""vramx.predict: the peak of a step that is not run, against steps that are."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import pytest
import torch
from plan_tools import Skipping, Stack, rows
from predict_tools import measured_bytes, peak, training
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vramx
from vramx.planning.predict import CONTEXT_BYTES, CUBLAS_BYTES
from vramx.planning.recording import BACKWARD, FORWARD, OPTIMIZER

OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "one by one": functools.partial(torch.optim.AdamW, foreach=False),
}
STEP_COUNTER_BYTES = 4  # of AdamW, a parameter


def encoder() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))
    return nn.Sequential(nn.Linear(8, 32), *layers)


class Recurrent(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        result: Tensor = super().forward(x)[0]
        return result


class Checkpointed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


MODELS: dict[str, tuple[Any, Any]] = {
    "perceptrons": (Stack, lambda: rows(64)),
    "convolutions": (Skipping, lambda: torch.randn(2, 1, 32, 32)),
    "transformer": (encoder, lambda: torch.randn(4, 8, 8)),
    "recurrent": (lambda: Recurrent(8, 16, 2, batch_first=True), lambda: torch.randn(4, 6, 8)),
    "checkpointed": (Checkpointed, lambda: rows(64)),
}


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [*((kind, "AdamW") for kind in MODELS), *(("perceptrons", name) for name in OPTIMIZERS)],
)
def test_a_prediction_is_what_real_steps_take(kind: str, optimizer: str) -> None:
    make, sample = MODELS[kind]
    model, x = make(), sample()
    learner = OPTIMIZERS[optimizer](model.parameters())
    step = training(model, x, learner)
    predicted = peak(step, device="cpu")
    counters = STEP_COUNTER_BYTES * len(list(model.parameters()))
    real = measured_bytes(step, model, x)
    # A host's steps are counted by numbers that torch.tensor() makes where no mode sees it.
    assert real <= predicted <= real + (counters if "AdamW" in repr(type(learner)) else 0)


@pytest.mark.parametrize("gradients", ["fresh", "accumulated", "stepped"])
def test_a_model_is_predicted_in_the_loop_of_a_plan(gradients: str) -> None:
    model, x = Stack(2), rows(64)
    learner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"optimizer": learner, "gradients": gradients}
    predicted = peak(model, x, device="cpu", **options)
    plan = vramx.plan(model, x, levels=("left",), **options)
    # A plan counts neither the batch nor what the loop holds of a step while it ends.
    assert abs(predicted - x.nbytes - plan.measured_bytes) <= 0.03 * plan.measured_bytes


def test_what_a_step_replaces_is_gone() -> None:
    model, x, is_begun = nn.Linear(64, 64, bias=False), torch.randn(4, 64), [False]
    learner = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        model(x).sum().backward()
        learner.step()
        learner.zero_grad()
        if not is_begun[0]:
            learner.state = defaultdict(dict)
        is_begun[0] = True

    predicted = peak(step, device="cpu")
    real = measured_bytes(step, model, x)
    assert real <= predicted <= real + STEP_COUNTER_BYTES


LOSSES = {
    "mse": functools.partial(nn.functional.mse_loss),
    "mse summed": functools.partial(nn.functional.mse_loss, reduction="sum"),
    "mse each": lambda x, y: nn.functional.mse_loss(x, y, reduction="none").mean(),
    "smooth l1": nn.functional.smooth_l1_loss,
    "huber": nn.functional.huber_loss,
    "bce": lambda x, y: nn.functional.binary_cross_entropy(x.sigmoid(), y),
    "soft margin": nn.functional.soft_margin_loss,
    "gaussian": lambda x, y: nn.functional.gaussian_nll_loss(x, y, y),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_number_of_a_loss_takes_what_torch_makes_it_in(name: str) -> None:
    x, y = torch.randn(64, 16, requires_grad=True), torch.rand(64, 16)

    def step() -> None:
        LOSSES[name](x, y).backward()
        x.grad = None

    assert peak(step, device="cpu") == measured_bytes(step, nn.Module(), x, y)


# -- On a GPU that is not there --------------------------------------------------------------------


def test_a_model_of_the_meta_device_is_predicted_as_one_with_data() -> None:
    def predicted(model: nn.Module) -> dict[str, int]:
        learner = torch.optim.AdamW(model.parameters())
        return dict(vramx.predict(model, rows(64), optimizer=learner).row().peak_bytes)

    with torch.device("meta"):
        empty = Stack(2)
    assert predicted(empty) == predicted(Stack(2))


def test_autocast_casts_as_on_a_gpu() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), torch.zeros(1024, 64)
    held = []

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        held.append((y.dtype, model[0](x).dtype, y.device.type))
        assert y.dtype == torch.float32  # of a norm, on a GPU
        with torch.autocast("cuda", torch.bfloat16):
            assert model[0](x).dtype == torch.bfloat16
        y.sum().backward()

    vramx.predict(step, policies="live")
    assert held == []  # it was a copy that held something


def attending(x: Tensor, mask: Tensor | None = None) -> None:
    y = nn.functional.scaled_dot_product_attention(x, x, x, mask)
    y.float().sum().backward()


@pytest.mark.parametrize("masked", [False, True], ids=["flash", "efficient"])
def test_attention_makes_no_scores(masked: bool) -> None:
    tokens = 2048
    x = torch.zeros(1, 4, tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool) if masked else None
    scores = 4 * tokens * tokens * x.itemsize
    masks = 0 if mask is None else 3 * mask.numel() * x.itemsize  # itself, and what is added
    assert vramx.predict(attending, x, mask).peak_bytes() < scores + masks


def test_a_checkpoint_under_autocast_is_computed_again_as_it_was() -> None:
    x = rows(4096)

    def step(model: nn.Module) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().mean()
        loss.backward()

    assert peak(step, Checkpointed(4)) < peak(step, Stack(4)) * 0.6


def test_the_second_step_is_in_a_prediction() -> None:
    model = nn.Linear(256, 256, bias=False)
    step = training(model, torch.zeros(2048, 256), torch.optim.AdamW(model.parameters()))
    first, both = (peak(step, steps=n) for n in (1, 2))
    assert both - first == 2 * 256 * 256 * 4


def test_a_peak_has_its_place() -> None:
    wide = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 8)))
    row = vramx.predict(wide, torch.zeros(4096, 8)).row()
    assert row.phase in (FORWARD, BACKWARD)
    assert row.module.startswith("1")
    learner = torch.optim.AdamW(wide.parameters())
    assert vramx.predict(wide, torch.zeros(1, 8), optimizer=learner).row().phase == OPTIMIZER


def test_what_is_beside_a_peak_is_not_in_it() -> None:
    prediction = vramx.predict(Stack(2), rows(64))
    beside = 2 * CUBLAS_BYTES + CONTEXT_BYTES
    assert sum(prediction.beside.values()) == beside
    assert prediction.needed_bytes("live") == prediction.peak_bytes() + beside
    assert prediction.peak_bytes() < CUBLAS_BYTES
