"""ResNet-50 on images whose resolution changes, with cudnn.benchmark: many sizes of workspace.

It does not repeat bit for bit: cudnn.benchmark picks its algorithms by the clock. The repeatable
ones alone would be another program, and they need other workspaces.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torchvision.models import resnet50

from benchmarks.programs._report import Recorder, sized

CLASSES = 1000
RESOLUTIONS = sized((256, 160, 288, 192, 224), (64, 96, 32, 64, 96))


def main() -> None:
    # A pass over all resolutions before the timed steps: cuDNN tries its algorithms once a shape.
    recorder = Recorder(warmup=len(RESOLUTIONS), timed=15, deterministic=False)
    torch.backends.cudnn.benchmark = True
    model = resnet50(num_classes=CLASSES)
    device = recorder.begin()
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(recorder.steps):
        side = RESOLUTIONS[step % len(RESOLUTIONS)]
        images = torch.randn(sized(160, 2), 3, side, side, device=device)
        images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(0, CLASSES, (len(images),), device=device)
        with recorder.step():
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recorder.loss(loss)
    recorder.finish()


if __name__ == "__main__":
    main()
