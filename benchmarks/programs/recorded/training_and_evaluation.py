"""A vision transformer: small training batches, and now and then a large evaluation of two models.

The evaluation has other pictures than the training, takes them in larger batches, and keeps what it
found until its end.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from benchmarks.programs._report import Recorder, sized
from benchmarks.programs.recorded._blocks import Block

CLASSES, PATCH = 1000, 16


class VisionTransformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn(1, width, 10, 10) / 50)
        self.blocks = nn.ModuleList(Block(width, max(2, width // 64)) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures)
        x = x + interpolate(self.positions, size=x.shape[2:], mode="bilinear")
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x.mean(1))
        return scores


def evaluate(model: nn.Module, device: torch.device) -> Tensor:
    """Return the accuracy over some large batches, the last of them not full."""
    found, wanted = [], []
    for batch in sized((512, 512, 512, 200), (4, 3)):
        side = sized(224, 64)
        pictures = torch.randn(batch, 3, side, side, device=device)
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16):
            found.append(model(pictures).float().softmax(-1))
        wanted.append(torch.randint(0, CLASSES, (batch,), device=device))
    return (torch.cat(found).argmax(-1) == torch.cat(wanted)).float().mean()


def main() -> None:
    recorder = Recorder(warmup=0, timed=18, deterministic=False)
    model = VisionTransformer(*sized((768, 12), (32, 2)))
    device = recorder.begin()
    model = model.to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch, side = sized((256, 160), (2, 64))
    for step in range(recorder.steps):
        with recorder.step():
            pictures = torch.randn(batch, 3, side, side).to(device)
            labels = torch.randint(0, CLASSES, (batch,)).to(device)
            with torch.autocast(device.type, torch.bfloat16):
                scores = model(pictures)
            loss = cross_entropy(scores.float(), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)
            if step % sized(6, 2) == sized(6, 2) - 1:
                model.eval()
                accuracies = [evaluate(each, device) for each in (model, average)]
                loss = loss.detach() + torch.stack(accuracies).sum()
                model.train()
        recorder.loss(loss)
    recorder.finish()


if __name__ == "__main__":
    main()
