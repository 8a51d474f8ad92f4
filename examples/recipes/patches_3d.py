"""3-D volumes in patches: training on crops, inference by a sliding window.

python patches_3d.py [--variant NAME] [--small]
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F  # noqa: N812
from common import Figures, Place, adamw, main, measure
from torch import Tensor, nn

import vramx

# Edges, on a GPU and small. No small level is 2 cubed: there oneDNN's weight gradient in bfloat16
# reads memory that nobody wrote (torch 2.6 to 2.15, with AVX512_BF16).
VOLUME = (192, 16)
PATCH = (96, 12)


def whole_volume(place: Place) -> Figures:
    return trained(place, UNet(place), crop=place.sized(*VOLUME))


def patches(place: Place) -> Figures:
    return trained(place, UNet(place), crop=place.sized(*PATCH))


def whole_volume_int8(place: Place) -> Figures:
    model = vramx.compressed_activations(UNet(place))
    return trained(place, model, crop=place.sized(*VOLUME))


def inference_whole(place: Place) -> Figures:
    return inferred(place, lambda model, volume: model(volume))


def inference_window(place: Place) -> Figures:
    size = place.sized(*PATCH)
    return inferred(place, lambda model, volume: sliding_window(volume, size, model))


def inference_window_monai(place: Place) -> Figures:
    from monai.inferers import sliding_window_inference

    size = place.sized(*PATCH)
    return inferred(
        place,
        lambda model, volume: sliding_window_inference(volume, (size,) * 3, 1, model, overlap=0.5),
    )


def sliding_window(volume: Tensor, size: int, model: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean of what the model says of cubes that overlap by half."""
    total, count = torch.zeros(()), torch.zeros(())
    starts = [sorted({*range(0, n - size, size // 2), n - size}) for n in volume.shape[2:]]
    for x, y, z in product(*starts):
        cube = (..., slice(x, x + size), slice(y, y + size), slice(z, z + size))
        said = model(volume[cube])
        if not total.ndim:
            shape = (*said.shape[:2], *volume.shape[2:])
            total, count = said.new_zeros(shape), said.new_zeros(shape)
        total[cube] += said
        count[cube] += 1
    return total / count


def trained(place: Place, model: nn.Module, crop: int) -> Figures:
    optimizer = adamw(model)
    generator = torch.Generator().manual_seed(0)
    volume, labels = example(place)

    def step(_index: int) -> Tensor:
        room = volume.shape[-1] - crop + 1
        x, y, z = (int(torch.randint(room, (), generator=generator)) for _ in range(3))
        cube = (..., slice(x, x + crop), slice(y, y + crop), slice(z, z + crop))
        with place.autocast():
            loss = F.cross_entropy(model(volume[cube]), labels[cube])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return measure(place, step, place.sized(6, 2))


def inferred(place: Place, infer: Callable[[nn.Module, Tensor], Tensor]) -> Figures:
    model = UNet(place).eval()
    volume, labels = example(place)

    def step(_index: int) -> Tensor:
        with torch.inference_mode(), place.autocast():
            return F.cross_entropy(infer(model, volume), labels)

    return measure(place, step, place.sized(6, 2))


def example(place: Place) -> tuple[Tensor, Tensor]:
    """Return one volume of noise with a ball in it, and where the ball is."""
    size = place.sized(*VOLUME)
    axis = torch.linspace(-1, 1, size, device=place.device)
    x, y, z = torch.meshgrid(axis, axis, axis, indexing="ij")
    labels = ((x**2 + y**2 + z**2) < 0.4).long()[None]
    generator = torch.Generator(place.device).manual_seed(0)
    noise = torch.randn(labels.shape, generator=generator, device=place.device)
    return (labels + 0.5 * noise)[:, None], labels


class UNet(nn.Module):
    """Two levels of the usual 3-D U-Net."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        width = place.sized(32, 4)
        with place.device:
            torch.manual_seed(0)
            self.first = convolutions(1, width)
            self.second = convolutions(width, 2 * width)
            self.lowest = convolutions(2 * width, 4 * width)
            self.up_second = nn.ConvTranspose3d(4 * width, 2 * width, 2, stride=2)
            self.back_second = convolutions(4 * width, 2 * width)
            self.up_first = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
            self.back_first = convolutions(2 * width, width)
            self.head = nn.Conv3d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(F.max_pool3d(first, 2))
        lowest = self.lowest(F.max_pool3d(second, 2))
        second = self.back_second(torch.cat([self.up_second(lowest), second], dim=1))
        first = self.back_first(torch.cat([self.up_first(second), first], dim=1))
        return self.head(first)


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv3d(channels, outputs, 3, padding=1), nn.InstanceNorm3d(outputs)]
        layers.append(nn.LeakyReLU(0.01))
    return nn.Sequential(*layers)


VARIANTS = {
    "whole_volume": whole_volume,
    "whole_volume_int8": whole_volume_int8,
    "patches": patches,
    "inference_whole": inference_whole,
    "inference_window": inference_window,
    "inference_window_monai": inference_window_monai,
}

if __name__ == "__main__":
    main(VARIANTS, __doc__)
