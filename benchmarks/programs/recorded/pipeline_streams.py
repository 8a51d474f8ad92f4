"""A language model in three stages on three streams; micro-batches of varying length flow through.

A stage begins when the stage before it has finished with the micro-batch, and activations are
recorded on the stream that reads them. Autograd runs each backward on its forward's stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.programs._report import Recorder, sized
from benchmarks.programs.recorded._blocks import Block, text

STAGES, MICRO_BATCHES = 3, 4


class Stage(nn.Module):
    """Some blocks on a stream of their own, where there are streams."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, max(2, width // 64)) for _ in range(layers))
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, is_causal=True)
        return x

    def working(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def wait_for(self, before: torch.cuda.Stream | None, x: Tensor) -> None:
        if self.stream is not None and before is not None:
            self.stream.wait_stream(before)
            x.record_stream(self.stream)


def run(stages: list[Stage], enter: nn.Module, head: nn.Module, tokens: Tensor) -> Tensor:
    """Send one micro-batch through; return its loss, which lies on the last stream."""
    before = torch.cuda.current_stream() if tokens.is_cuda else None
    x = tokens[:, :-1]
    for index, stage in enumerate(stages):
        stage.wait_for(before, x)
        with stage.working():
            x = stage(enter(x) if index == 0 else x)
            if index == len(stages) - 1:
                stage.wait_for(before, tokens)
                logits = head(x).float().flatten(0, 1)
                return cross_entropy(logits, tokens[:, 1:].flatten())
        before = stage.stream
    raise ValueError("a pipeline has stages")


def main() -> None:
    recorder = Recorder(warmup=0, timed=8, deterministic=False)
    vocabulary, width, layers = sized((16_000, 1280, 6), (100, 32, 1))
    enter, head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
    device = recorder.begin()
    stages = [Stage(width, layers) for _ in range(STAGES)]
    model = nn.ModuleList([enter, *stages, head]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(recorder.steps):
        with recorder.step():
            losses = []
            for _ in range(MICRO_BATCHES):
                length = recorder.random.randint(*sized((256, 1536), (6, 20)))
                tokens = text(vocabulary, sized(6, 2), length, device)
                with torch.autocast(device.type, torch.bfloat16):
                    losses.append(run(stages, enter, head, tokens))
                del tokens
            for loss in losses:
                with stages[-1].working():
                    (loss / MICRO_BATCHES).backward()
            for stage in stages:
                if stage.stream is not None:
                    torch.cuda.current_stream().wait_stream(stage.stream)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recorder.loss(torch.stack([loss.detach() for loss in losses]))
    recorder.finish()


if __name__ == "__main__":
    main()
