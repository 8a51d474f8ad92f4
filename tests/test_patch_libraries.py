"""Libraries around and below what vramx changed: accelerate, Lightning, DDP, FSDP2, parametrize."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patch_tools import OPTIONS, OURS, Plain, gradients, inputs, is_equal, model, train
from torch import nn
from torch.nn.utils import parametrize

import vramx
from vramx.errors import VramxWarning

# -- accelerate ------------------------------------------------------------------------------------


@pytest.fixture
def accelerate() -> Any:
    return pytest.importorskip("accelerate")


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("first", ["ours", "accelerate"])
def test_prepared_model(accelerate: Any, ours: str, first: str) -> None:
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    net = model()
    if first == "ours":
        OURS[ours](net)
    net = accelerator.prepare(net)
    if first == "accelerate":
        OURS[ours](net)
    done = [row.done for row in vramx.report(net).rows]
    assert len(done) == (1 if ours == "fused" else 2)
    assert [row.note for row in vramx.report(net).rows] == [""] * len(done)
    train(net)
    assert len(vramx.restore(net)) == len(done)
    plain = accelerator.unwrap_model(net, keep_fp32_wrapper=False)
    assert is_equal(gradients(plain), gradients(model()))


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


# -- Lightning -------------------------------------------------------------------------------------


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
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, torch.utils.data.DataLoader(list(inputs()), batch_size=2))
    texts = [str(each.message) for each in told if isinstance(each.message, VramxWarning)]
    assert len(texts) == (what == "whole")
    assert (vramx.compression_stats(module).packed.tensors > 0) == (what != "whole")
    assert len(vramx.restore(module)) == 1


# -- torch -----------------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("ours", OURS)
def test_model_within_data_parallelism(ours: str) -> None:
    net = model()
    exact = gradients(net)
    OURS[ours](net)
    outer = nn.parallel.DistributedDataParallel(net)
    done = [row.done for row in vramx.report(outer).rows]
    assert len(done) == (1 if ours == "fused" else 2)
    assert not is_equal(gradients(outer), exact)
    assert len(vramx.restore(outer)) == len(done)
    assert is_equal(gradients(outer), exact)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("first", ["ours", "fully_shard"])
def test_sharded_model(ours: str, first: str) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("this torch's fully_shard does not run on a CPU")
    mesh = dist.init_device_mesh("cpu", (1,))
    net = model()
    exact = gradients(net)
    if first == "ours":
        OURS[ours](net)
    for block in net:
        fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(net, mesh=mesh)
    if first == "fully_shard":
        if ours == "fused":
            pytest.skip("a block of a class of FSDP's is of no known family, as the report says")
        OURS[ours](net)

    def full(net: nn.Module) -> list[torch.Tensor]:
        return [gradient.full_tensor() for gradient in gradients(net)]  # type: ignore[attr-defined]

    done = [row.done for row in vramx.report(net).rows]
    assert len(done) == (1 if ours == "fused" else 2)
    assert not is_equal(full(net), exact)
    assert len(vramx.restore(net)) == len(done)
    assert is_equal(full(net), exact)


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
