"""Every way of ours on a small Llama, in every order with what libraries do to a model.

A cell works, or ends in one clear line; restored, it has the gradients of the library alone to the
bit. interactions.py says which, and has the page of the documentation.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import interactions
import pytest
import torch
import torch.distributed as dist
from interactions import EXACT, FIRST, TOLD
from optimize_tools import INT8_NOISE, LAYERS, decoder
from patch_tools import error
from torch import Tensor, nn

import vramx
from vramx.errors import VramxError, VramxWarning

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")

Step = Callable[[], None]
SMALL = vramx.Compression(min_bytes=0)


def llama() -> Any:
    return decoder(transformers, use_cache=False)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (2, 24), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def layer(net: Any) -> Any:
    """Return the class that the layers have, below what libraries make of it."""
    return transformers.models.llama.modeling_llama.LlamaDecoderLayer


def pack(net: Any) -> None:
    for module in list(net.modules()):
        if isinstance(module, layer(net)):
            vramx.compressed_activations(module, min_bytes=0)


def recompute(net: Any) -> None:
    vramx.checkpoint_modules(net, where=layer(net), level=SMALL)


def fuse(net: Any) -> None:
    vramx.optimize(net, "int8", SMALL)


def plan(net: Any) -> None:
    vramx.plan(net, batch(), budget="smallest", levels=["int8"]).apply()


OURS = {"packed": pack, "recomputed": recompute, "fused": fuse, "planned": plan}


def run(net: Any) -> None:
    net(**batch()).loss.backward()


def prepared(net: Any, _: Path) -> tuple[Any, Step]:
    outer = accelerate.Accelerator(cpu=True).prepare(net)
    return outer, lambda: run(outer)


def data_parallel(net: Any, _: Path) -> tuple[Any, Step]:
    outer = nn.parallel.DistributedDataParallel(net)
    return outer, lambda: run(outer)


def sharded(net: Any, _: Path) -> tuple[Any, Step]:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = dist.init_device_mesh("cpu", (1,))
    for block in net.model.layers:
        fsdp.fully_shard(block, mesh=mesh)
    return fsdp.fully_shard(net, mesh=mesh), lambda: run(net)


def compiled(net: Any, _: Path) -> tuple[Any, Step]:
    torch.compiler.reset()
    outer = torch.compile(net, backend="aot_eager")
    return outer, lambda: run(outer)


def copied(net: Any, _: Path) -> tuple[Any, Step]:
    outer = copy.deepcopy(net)
    return outer, lambda: run(outer)


def averaged(net: Any, _: Path) -> tuple[Any, Step]:
    outer = torch.optim.swa_utils.AveragedModel(net)
    return outer, lambda: run(outer)


def trained(net: Any, folder: Path) -> tuple[Any, Step]:
    """With transformers' Trainer, which clears gradients after its one step: they are kept."""

    class Keep(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            kept.extend(p.grad.clone() for p in net.parameters() if p.grad is not None)

    kept: list[Tensor] = []
    rows = [{name: value[i] for name, value in batch().items()} for i in range(2)]

    def step() -> None:
        kept.clear()
        arguments = transformers.TrainingArguments(
            str(folder), max_steps=1, per_device_train_batch_size=2, learning_rate=0.0,
            max_grad_norm=0.0, use_cpu=True, report_to=[], save_strategy="no", optim="sgd",
        )  # fmt: skip
        trainer = transformers.Trainer(
            net, arguments, train_dataset=rows, callbacks=[Keep()], data_collator=lambda _: batch()
        )
        trainer.train()
        for parameter, gradient in zip(net.parameters(), kept, strict=True):
            parameter.grad = gradient

    return net, step


def lightened(net: Any, folder: Path) -> tuple[Any, Step]:
    """With a LightningModule around it."""

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, **rows: Tensor) -> Any:
            return self.net(**rows)

        def training_step(self, rows: Any, _: int) -> Tensor:
            return self.net(**batch()).loss  # type: ignore[no-any-return]

        def on_before_optimizer_step(self, _: Any) -> None:
            kept.extend(p.grad.clone() for p in net.parameters() if p.grad is not None)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.0)

    kept: list[Tensor] = []
    outer = Module()

    def step() -> None:
        kept.clear()
        lightning.Trainer(
            max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        ).fit(outer, torch.utils.data.DataLoader([0]))  # fmt: skip
        for parameter, gradient in zip(net.parameters(), kept, strict=True):
            parameter.grad = gradient

    return outer, step


THEIRS: dict[str, Callable[[Any, Path], tuple[Any, Step]]] = {
    "accelerate": prepared,
    "Trainer": trained,
    "Lightning": lightened,
    "DDP": data_parallel,
    "FSDP2": sharded,
    "compile": compiled,
    "deepcopy": copied,
    "EMA": averaged,
}


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 's'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def gradients(outer: nn.Module, step: Step) -> list[Tensor]:
    outer.zero_grad()
    outer.train()
    step()
    found = [p.grad for p in outer.parameters() if p.grad is not None]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in found]


def refused(change: Callable[[Any], None], net: Any) -> str | None:
    """Make a change; return the line with which it is refused, None if it is made."""
    try:
        change(net)
    except VramxError as error:
        return str(error)
    return None


def test_the_page_has_these_cells() -> None:
    assert tuple(OURS) == tuple(interactions.OURS)
    assert tuple(THEIRS) == tuple(interactions.THEIRS)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("theirs", THEIRS)
@pytest.mark.parametrize("ours", OURS)
def test_cell_works_or_says_why(ours: str, theirs: str, first: str, tmp_path: Path) -> None:
    vramx.manual_seed(0, rank=0)
    exact = gradients(*THEIRS[theirs](llama(), tmp_path))
    net = llama()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if first == "ours":
            OURS[ours](net)
            outer, step = THEIRS[theirs](net, tmp_path)
        else:
            outer, step = THEIRS[theirs](net, tmp_path)
            refusal = refused(OURS[ours], outer)
            if refusal is not None:
                assert "\n" not in refusal
                assert TOLD[ours, theirs] in refusal
    lines = [str(each.message) for each in told if isinstance(each.message, VramxWarning)]
    is_told = first == "theirs" and (ours, theirs) in TOLD
    if is_told and ours == "fused":
        assert TOLD[ours, theirs] in lines[0]
    found = gradients(outer, step)
    assert error(found, exact) < INT8_NOISE
    changed = len(vramx.report(outer).rows)
    if not is_told:
        assert changed >= LAYERS
        assert (error(found, exact) > 0) == ((ours, theirs, first) not in EXACT)
    assert len(vramx.restore(outer)) == changed
    torch.compiler.reset()
    assert all(map(torch.equal, gradients(outer, step), exact))
    assert not vramx.report(outer).rows
