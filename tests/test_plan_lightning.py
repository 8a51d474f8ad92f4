"""vramx.plan of a LightningModule: its training_step is the step, without a trainer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plan_tools import EXACT, LEVELS, PACKED_ROWS, Stack, counted_time
from torch import Tensor, nn

import vramx
from vramx.errors import InvalidValueError
from vramx.planning.meters import HostMeter

lightning = pytest.importorskip("lightning.pytorch")

__all__ = ["counted_time"]
pytestmark = pytest.mark.usefixtures("counted_time")


class Regression(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = Stack(3)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Trained(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] / self.trainer.world_size


class ByHand(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Unconfigured(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3 / self.trainer.max_epochs)


def batch() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(PACKED_ROWS // 4, 8), torch.randn(PACKED_ROWS // 4, 16)]


def peak_of_fit(module: Any, rows: list[Tensor], steps: int = 3) -> int:
    """Return the peak of the training by Lightning's own loop."""
    module = copy.deepcopy(module)
    data = torch.utils.data.DataLoader([0] * steps, collate_fn=lambda _: rows)
    meter = HostMeter(module)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with meter.watching():
        trainer.fit(module, data)
    return meter.peak_bytes()


@pytest.mark.filterwarnings("ignore")
def test_no_budget_is_exceeded_in_lightnings_own_loop() -> None:
    module, rows = Regression(), batch()
    widest = vramx.plan(module, rows, levels=LEVELS)
    smallest = widest.with_budget(rows, "smallest")
    assert widest.added_bytes == pytest.approx(
        8 * sum(p.numel() for p in module.parameters()), rel=0.01
    )
    assert "AdamW" in str(widest)
    assert "log" not in vars(module)
    for budget in (smallest.measured_bytes, widest.measured_bytes):
        plan = widest.with_budget(rows, budget).apply()
        peak = peak_of_fit(module, rows)
        plan.undo()
        assert 0.97 * plan.measured_bytes <= peak <= plan.measured_bytes * (1 + EXACT)
        assert plan.measured_bytes <= budget


def test_what_needs_a_trainer_is_said() -> None:
    with pytest.raises(InvalidValueError, match="Trained needs a trainer; give the sample as"):
        vramx.plan(Trained(), batch(), levels=LEVELS)
    with pytest.raises(InvalidValueError, match="ByHand optimises by hand"):
        vramx.plan(ByHand(), batch(), levels=LEVELS)
    plan = vramx.plan(Unconfigured(), batch(), levels="left")
    assert plan.added_bytes == 0
    assert "no optimizer was counted: configure_optimizers() did not run" in str(plan)


def test_a_function_is_the_step_where_it_is_given() -> None:
    x, y = batch()
    plan = vramx.plan(
        Trained(), lambda m: nn.functional.mse_loss(m.net(x), y), levels="left", gradients="fresh"
    )
    assert set(plan.words) == {"net.blocks.0", "net.blocks.1", "net.blocks.2"}


def test_a_prediction_has_the_optimizers_that_the_module_makes() -> None:
    options: dict[str, Any] = {"device": "cpu", "policies": "live"}
    model = Regression()
    sample = [each[:4] for each in batch()]
    with_states = vramx.predict(model, sample, **options)
    given = vramx.predict(model, sample, optimizer=torch.optim.AdamW(model.parameters()), **options)
    assert with_states.peak_bytes() == given.peak_bytes()
    none = vramx.predict(Unconfigured(), sample, **options)
    assert none.peak_bytes() < with_states.peak_bytes()
    assert any("configure_optimizers() did not run" in text for text in none.assumptions)
