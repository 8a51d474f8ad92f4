"""The callbacks in the loops of transformers, Lightning and accelerate, on simulated counters."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated import MIB
from simulated_cuda import Cuda
from torch import nn

from vramx import callbacks
from vramx.errors import MissingDependencyError
from vramx.memory import track

PEAK = "vram_peak_bytes"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    monkeypatch.setattr(track, "_regions", [])
    return Cuda(monkeypatch)


class Recorders:
    """In the place of vramx.memory.record, which needs a GPU."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[Any] = []
        patch.setitem(sys.modules, "vramx.memory.record", SimpleNamespace(record=self._record))

    def _record(self, path: Any, model: Any, optimizer: Any) -> Any:
        self.done.append((path, isinstance(model, nn.Module), optimizer is not None))
        return self._recording()

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        self.done.append("start")
        try:
            yield
        except RuntimeError as error:
            self.done.append(str(error))
            raise
        self.done.append("stop")


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Recorders:
    return Recorders(monkeypatch)


class Spiking(nn.Module):
    """A model whose call takes so many MiB of the simulated device for a moment; at 0 it fails."""

    def __init__(self, cuda: Cuda, sizes: list[int]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.cuda, self.sizes = [cuda], iter(sizes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        size = next(self.sizes)
        if not size:
            raise RuntimeError("as planned")
        self.cuda[0].spike(size * MIB)
        return {"loss": self.layer(x).square().mean()}


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(count)]


# -- transformers ----------------------------------------------------------------------------------


def trainer(model: nn.Module, memory: Any, folder: Path, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = transformers.TrainingArguments(**{**settings, **options})
    return transformers.Trainer(model, arguments, train_dataset=batches(4), callbacks=[memory])


@pytest.mark.parametrize(
    ("options", "has_cuda", "expected"),
    [
        pytest.param({}, True, [2, 8, 4, 6], id="each step"),
        pytest.param({"gradient_accumulation_steps": 2}, True, [8, 6], id="of all its batches"),
        pytest.param({}, False, [], id="without CUDA nothing"),
    ],
)
def test_transformers_logs_the_peak_of_each_step(
    cuda: Cuda, tmp_path: Path, options: dict[str, int], has_cuda: bool, expected: list[int]
) -> None:
    pytest.importorskip("transformers")
    cuda.initialised = has_cuda
    loop = trainer(Spiking(cuda, [2, 8, 4, 6]), callbacks.TransformersMemory(), tmp_path, **options)
    loop.train()
    told = [entry for entry in loop.state.log_history if PEAK in entry]
    assert [entry[PEAK] // MIB for entry in told if "loss" in entry] == expected
    assert bool(told) == has_cuda


def test_transformers_records_its_run(cuda: Cuda, tmp_path: Path, recorders: Recorders) -> None:
    pytest.importorskip("transformers")
    memory = callbacks.TransformersMemory(record=tmp_path / "run.pickle")
    trainer(Spiking(cuda, [2, 8, 4, 6]), memory, tmp_path).train()
    assert memory.highest is not None
    assert memory.highest.peak_bytes == 8 * MIB
    assert recorders.done == [(tmp_path / "run.pickle", True, True), "start", "stop"]
    assert not track._regions


# -- Lightning -------------------------------------------------------------------------------------


def fit(cuda: Cuda, memory: Any, folder: Path, sizes: list[int]) -> Any:
    library = pytest.importorskip("lightning.pytorch")

    class Module(library.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Spiking(cuda, sizes)
            self.logged: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx and PEAK in self.trainer.callback_metrics:
                self.logged.append(float(self.trainer.callback_metrics[PEAK]) // MIB)
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    loop = library.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[memory],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    loop.fit(module, torch.utils.data.DataLoader(batches(4), batch_size=1))
    return module


def test_lightning_logs_the_peak_of_each_batch(
    cuda: Cuda, tmp_path: Path, recorders: Recorders
) -> None:
    pytest.importorskip("lightning.pytorch")
    memory = callbacks.LightningMemory(record="run.pickle")
    module = fit(cuda, memory, tmp_path, [2, 8, 4, 6])
    assert module.logged == [2, 8, 4]
    assert module.trainer.callback_metrics[PEAK] == 6 * MIB
    assert memory.highest.peak_bytes == 8 * MIB
    assert recorders.done == [("run.pickle", True, True), "start", "stop"]


def test_lightning_writes_the_recording_of_a_run_that_fails(
    cuda: Cuda, tmp_path: Path, recorders: Recorders
) -> None:
    pytest.importorskip("lightning.pytorch")
    memory = callbacks.LightningMemory(record="run.pickle")
    with pytest.raises(RuntimeError, match="as planned"):
        fit(cuda, memory, tmp_path, [2, 0])
    assert recorders.done[1:] == ["start", "as planned"]
    assert not track._regions


# -- accelerate ------------------------------------------------------------------------------------


def test_accelerate_tracks_from_call_to_call(cuda: Cuda, recorders: Recorders) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Spiking(cuda, [2, 2, 4])
    memory = callbacks.AccelerateMemory(record="run.pickle")
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerate.hooks.add_hook_to_module(model, memory, append=True)
    seen = []
    for size in (6, 8, 1):
        loss = model(torch.ones(2, 4))["loss"]
        seen += [memory.last.peak_bytes // MIB] if memory.last is not None else []
        accelerator.backward(loss)
        cuda.spike(size * MIB)  # of backward
        optimizer.step()
    accelerate.hooks.remove_hook_from_module(model)
    assert seen == [6, 8]
    assert memory.last is not None
    assert memory.last.peak_bytes == 4 * MIB
    assert memory.figures()[PEAK] == 4 * MIB
    assert recorders.done == [("run.pickle", True, False), "start", "stop"]


# -- all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", callbacks.__all__)
def test_a_library_that_is_missing_is_named_with_its_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = callbacks._LIBRARIES[name]
    for module in [each for each in sys.modules if each.startswith(f"vramx.callbacks.{library}")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(vars(callbacks), name, raising=False)
    for module in (library, f"{library}.pytorch", f"{library}.hooks", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=f"pip install {library}$"):
        getattr(callbacks, name)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'KerasMemory'"):
        callbacks.KerasMemory  # noqa: B018


def test_callbacks_are_there_with_vramx_alone() -> None:
    code = "import vramx; assert 'callbacks' in dir(vramx); print(vramx.callbacks.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "TransformersMemory" in done.stdout
