"""A LightningModule whose network keeps its activations in int8, and its memory in Lightning's log.

What it shows: `vramx.compressed_activations` goes on the network inside the LightningModule, whose
forward is what training calls, and not on the module itself, of which Lightning calls
`training_step`. `LightningMemory` logs the exact peak of each batch as `vram_peak_bytes`.
What to expect: on a GPU the same training runs exactly and then in int8, and the highest peaks are
compared: the second is lower by about a third. On a CPU the packing is the same and its counts
are printed (of float32, where a GPU has bfloat16).
Needs: lightning. Half a minute on a GPU.

    python examples/lightning_module.py
"""

from __future__ import annotations

import argparse
import gc
import logging

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vramx
from vramx.callbacks import LightningMemory


class Classifier(lightning.LightningModule):
    """A convolutional network with residual blocks of plain torch."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            *(Residual(width) for _ in range(depth)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.network(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(functional.gelu(self.conv1(self.norm(x))))


def main() -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Lightning with activations in int8")
    parser.add_argument("--batch", type=int, default=64 if has_gpu else 8)
    parser.add_argument("--side", type=int, default=128 if has_gpu else 32, help="of an image")
    parser.add_argument("--steps", type=int, default=10 if has_gpu else 3)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if has_gpu:
        vramx.install_allocator()  # before anything uses the GPU
        exact, _ = train(args, level="keep")
        gc.collect()  # a trainer and its callbacks refer to each other
        torch.cuda.empty_cache()
    packed, model = train(args, level="int8")
    print(vramx.compression_stats(model))  # summed over the steps
    if has_gpu:
        print(f"exact: {exact}")
        print(f"int8: {packed}")
        print(f"saved at the peak: {(exact.peak_bytes - packed.peak_bytes) / 2**20:,.0f} MiB")


def train(args: argparse.Namespace, level: str) -> tuple[vramx.Tracked, Classifier]:
    """Fit a fresh module at a level; return the batch with the highest peak, and the module."""
    lightning.seed_everything(0, verbose=False)
    has_gpu = torch.cuda.is_available()
    model = Classifier(width=64 if has_gpu else 16, depth=6 if has_gpu else 2)
    if level != "keep":
        # Tensors below min_bytes stay as they are; the default of 1 MiB would be all on a CPU.
        options = {} if has_gpu else {"min_bytes": "16KiB"}
        vramx.compressed_activations(model.network, level, **options)
    images = torch.rand(args.batch * 2, 3, args.side, args.side)
    data = TensorDataset(images, (images.mean((1, 2, 3)) * 1e4).long() % 10)
    memory = LightningMemory()
    trainer = lightning.Trainer(
        max_steps=args.steps,
        callbacks=[memory],
        precision="bf16-mixed" if has_gpu else "32-true",
        accelerator="gpu" if has_gpu else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, args.batch, shuffle=True))
    print(f"{level}: loss {trainer.callback_metrics['loss']:.3f} after {trainer.global_step} steps")
    assert memory.highest is not None
    return memory.highest, model


if __name__ == "__main__":
    main()
