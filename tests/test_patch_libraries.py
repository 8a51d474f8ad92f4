"""Libraries around and below what vramx changed: accelerate, Lightning, parametrize.

Whole models that they train are in test_patch_libraries_table.py.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from patch_tools import OPTIONS, Plain, inputs, train
from torch import nn
from torch.nn.utils import parametrize

import vramx
from vramx.errors import VramxWarning


@pytest.fixture
def accelerate() -> Any:
    return pytest.importorskip("accelerate")


def test_prepared_model_gets_new_options_and_keeps_them_unwrapped(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    net = accelerator.prepare(vramx.compressed_activations(Plain(), **OPTIONS))
    train(net)
    assert vramx.compression_stats(net).packed.tensors > 0
    vramx.compressed_activations(net, level="int4", **OPTIONS)
    net = accelerator.unwrap_model(net, keep_fp32_wrapper=False)
    train(net)
    assert vramx.compression_stats(net).packed.tensors > 0
    assert [row.done for row in vramx.report(net).rows] == ["packed in int4"]
    vramx.restore(net)
    assert "forward" not in vars(net)


@pytest.mark.parametrize("first", ["ours", "accelerate"])
@pytest.mark.parametrize("gone_first", ["ours", "accelerate"])
def test_hooked_module(accelerate: Any, first: str, gone_first: str) -> None:
    hooks = accelerate.hooks
    block = Plain()
    steps = [
        lambda: vramx.compressed_activations(block, **OPTIONS),
        lambda: hooks.add_hook_to_module(block, hooks.ModelHook()),
    ]
    for step in steps if first == "ours" else reversed(steps):
        step()
    twin = copy.deepcopy(block)
    train(twin)
    assert vramx.compression_stats(twin).packed.tensors > 0
    assert all(p.grad is None for p in block.parameters())
    if gone_first == "ours":
        assert len(vramx.restore(block)) == 1
        train(block)
        hooks.remove_hook_from_module(block)
    else:
        hooks.remove_hook_from_module(block)
        train(block)
        assert vramx.compression_stats(block).packed.tensors > 0
        assert len(vramx.restore(block)) == 1
    train(block)
    vramx.restore(block)
    assert type(block) is Plain
    assert block.forward.__func__ is Plain.forward


@pytest.mark.parametrize("what", ["whole", "part", "forward"])
def test_module_of_lightning(what: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Plain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            result = self(batch) if what == "forward" else self.net(batch)
            return result.square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

    module = Module()
    vramx.compressed_activations(module.net if what == "part" else module, **OPTIONS)
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, torch.utils.data.DataLoader(list(inputs()), batch_size=2))
    texts = [str(each.message) for each in told if isinstance(each.message, VramxWarning)]
    assert len(texts) == (what == "whole")
    assert (vramx.compression_stats(module).packed.tensors > 0) == (what != "whole")
    assert len(vramx.restore(module)) == 1


def test_parametrized_weight_comes_and_goes_over_ours() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    layer = vramx.compressed_activations(nn.Linear(16, 16), **OPTIONS)
    parametrize.register_parametrization(layer, "weight", Doubled())
    train(nn.Sequential(nn.Linear(16, 16), layer))
    assert vramx.compression_stats(layer).packed.tensors > 0
    parametrize.remove_parametrizations(layer, "weight")
    assert len(vramx.restore(layer)) == 1
    assert type(layer) is nn.Linear
