"""Speech recognition: convolutions, an encoder and CTC, on batches of a number of frames."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss

from benchmarks.programs._report import Recorder, sized
from benchmarks.programs.recorded._blocks import Block

MELS, SUBSAMPLING = 80, 4


class Recognizer(nn.Module):
    def __init__(self, width: int, layers: int, letters: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(
            *(nn.Conv1d(MELS, width, 5, stride=2, padding=2), nn.GELU()),
            *(nn.Conv1d(width, width, 5, stride=2, padding=2), nn.GELU()),
        )
        self.blocks = nn.ModuleList(Block(width, max(2, width // 64)) for _ in range(layers))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, letters)

    def forward(self, sound: Tensor, lengths: Tensor) -> Tensor:
        x = self.dropout(self.enter(sound).transpose(1, 2))
        places = torch.arange(x.shape[1], device=x.device)
        mask = (places < lengths[:, None])[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        scores: Tensor = self.head(x)
        return scores.float().log_softmax(-1)


def main() -> None:
    recorder = Recorder(warmup=0, timed=20, deterministic=False)
    width, layers, letters = sized((768, 12, 1024), (32, 2, 12))
    frames, longest = sized((160_000, 2400), (400, 120))
    model = Recognizer(width, layers, letters)
    device = recorder.begin()
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(recorder.steps):
        length = recorder.random.randint(longest // 6, longest) // SUBSAMPLING * SUBSAMPLING
        batch = max(1, frames // length)
        steps = torch.randint(length // 2, length + 1, (batch,)) // SUBSAMPLING
        written = steps // 4  # letters of each sentence
        with recorder.step():
            sound = torch.randn(batch, MELS, length).to(device)
            lengths = steps.to(device)
            targets = torch.randint(1, letters, (batch, int(written.max()))).to(device)
            with torch.autocast(device.type, torch.bfloat16):
                scores = model(sound, lengths)
            loss = ctc_loss(scores.transpose(0, 1), targets, steps, written, zero_infinity=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recorder.loss(loss)
    recorder.finish()


if __name__ == "__main__":
    main()
