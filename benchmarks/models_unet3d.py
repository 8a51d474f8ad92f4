"""A plain 3-D U-Net for segmentation, as a user writes it, and volumes to segment.

Knows no vramx: it is one of the models that benchmarks/activations.py measures. Deterministic for
a seeded process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool3d, binary_cross_entropy_with_logits

from benchmarks.models_workloads import Batch

BLOB = 5  # voxels of a side of what the task calls one object


class Convolutions(nn.Sequential):
    """Two convolutions with their norms."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv3d(inputs, outputs, 3, padding=1, bias=False),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
            nn.Conv3d(outputs, outputs, 3, padding=1, bias=False),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        )


class UNet3d(nn.Module):
    """`depth` halvings of the resolution, each with twice the channels, and the way back.

    Shape: (batch, 1, side, side, side) to the same; the side is a multiple of 2 ** depth.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(map(Convolutions, [1, *widths[:-2]], widths[:-1]))
        self.pool = nn.MaxPool3d(2)
        self.bottom = Convolutions(widths[-2], widths[-1])
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, stride=2) for a, b in pairs)
        self.merge = nn.ModuleList(Convolutions(2 * b, b) for _, b in pairs)
        self.head = nn.Conv3d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for block in self.down:
            skipped.append(block(x))
            x = self.pool(skipped[-1])
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skipped.pop(), up(x)], 1))
        result: Tensor = self.head(x)
        return result


def draw_volumes(
    large: tuple[int, int], small: tuple[int, int]
) -> Callable[[torch.Generator, bool], Batch]:
    """Return a maker of noise whose objects are where its local mean is high; (batch, side)."""

    def draw(generator: torch.Generator, is_large: bool) -> Batch:
        rows, side = large if is_large else small
        options: dict[str, Any] = {"generator": generator, "device": generator.device}
        x = torch.randn(rows, 1, side, side, side, **options)
        return Batch(x, (avg_pool3d(x, BLOB, 1, BLOB // 2) > 0).float())

    return draw


def voxel_loss(scores: Tensor, batch: Batch) -> Tensor:
    return binary_cross_entropy_with_logits(scores.float(), batch.targets)
