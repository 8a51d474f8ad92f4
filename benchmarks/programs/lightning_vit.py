"""A vision transformer of timm trained by Lightning, whose DeviceStatsMonitor asks for memory
statistics before and after every batch.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import Any

import pytorch_lightning as lightning
import timm
import torch
from pytorch_lightning.callbacks import Callback, DeviceStatsMonitor
from pytorch_lightning.loggers import CSVLogger
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from benchmarks.programs._report import Recorder, sized

BATCH = sized(256, 2)
CLASSES = 100


class Classifier(lightning.LightningModule):
    """The model with its loss and optimiser."""

    def __init__(self) -> None:
        super().__init__()
        name = sized("vit_base_patch16_224", "vit_tiny_patch16_224")
        self.model = timm.create_model(name, pretrained=False, num_classes=CLASSES)

    def training_step(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        loss = cross_entropy(self.model(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Steps(Callback):
    """Hands each batch to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open = ExitStack()

    def on_train_batch_start(self, *_: Any) -> None:
        self._open.enter_context(self._recorder.step())

    def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
        self._open.close()
        self._recorder.loss(outputs["loss"])


def main() -> None:
    recorder = Recorder()
    model = Classifier()
    # The same pictures again and again; drawing new ones would take longer than a step.
    images = torch.randn(BATCH, 3, 224, 224)
    data = TensorDataset(images, torch.randint(0, CLASSES, (BATCH,)))
    loader: Any = DataLoader(ConcatDataset([data] * recorder.steps), batch_size=BATCH)
    device = recorder.begin()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            max_steps=recorder.steps,
            precision="bf16-mixed",
            deterministic=True,
            logger=CSVLogger(folder),
            log_every_n_steps=1,
            callbacks=[Steps(recorder), DeviceStatsMonitor()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader)
    recorder.finish()


if __name__ == "__main__":
    main()
