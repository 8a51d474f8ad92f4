"""A diffusion U-Net on pictures of several aspect ratios, with an average of its weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

from benchmarks.programs._report import Recorder, sized
from benchmarks.programs.recorded._blocks import Block

# Height and width of latents of about one area, as buckets of pictures have them.
BUCKETS = ((64, 64), (56, 72), (72, 56), (48, 80), (80, 48), (40, 96), (96, 40), (32, 128))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(8, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1)
        )
        self.time = nn.Linear(time, outside)
        self.second = nn.Sequential(
            nn.GroupNorm(8, outside), nn.SiLU(), nn.Conv2d(outside, outside, 3, padding=1)
        )
        self.skip = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(x) + self.time(time)[:, :, None, None]
        result: Tensor = self.second(hidden) + self.skip(x)
        return result


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        widths, time = (width, 2 * width, 2 * width), 4 * width
        self.time = nn.Sequential(nn.Linear(1, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(4, width, 3, padding=1)
        ways = list(zip((width, *widths), widths, strict=False))
        self.down = nn.ModuleList(Residual(a, b, time) for a, b in ways)
        self.middle = nn.ModuleList(Block(widths[-1], 4) for _ in range(2))
        self.up = nn.ModuleList(Residual(2 * b, a, time) for a, b in reversed(ways))
        self.leave = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        time, x, kept = self.time(when[:, None]), self.enter(x), []
        for layer in self.down:
            kept.append(layer(x, time))
            x = nn.functional.avg_pool2d(kept[-1], 2)
        height, width = x.shape[2:]
        sequence = x.flatten(2).transpose(1, 2)
        for block in self.middle:
            sequence = block(sequence)
        x = sequence.transpose(1, 2).unflatten(2, (height, width))
        for layer in self.up:
            beside = kept.pop()
            larger = interpolate(x, size=beside.shape[2:], mode="nearest")
            x = layer(torch.cat([larger, beside], 1), time)
        result: Tensor = self.leave(x)
        return result


def main() -> None:
    recorder = Recorder(warmup=0, timed=28, deterministic=False)
    model = UNet(sized(256, 8))
    device = recorder.begin()
    model = model.to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(recorder.steps):
        height, width = recorder.random.choice(BUCKETS)
        shape = sized((64, 4, height, width), (1, 4, height // 4, width // 4))
        with recorder.step():
            clean, noise = torch.randn(shape).to(device), torch.randn(shape, device=device)
            when = torch.rand(shape[0], device=device)
            amount = when[:, None, None, None]
            with torch.autocast(device.type, torch.bfloat16):
                guess = model((1 - amount) * clean + amount * noise, when)
            loss = mse_loss(guess.float(), noise - clean)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.01)
        recorder.loss(loss)
    recorder.finish()


if __name__ == "__main__":
    main()
