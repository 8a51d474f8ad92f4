"""A Llama under torch.compile, in its default mode."""

from __future__ import annotations

import torch

from benchmarks.programs._models import llama, tokens, train_llama
from benchmarks.programs._report import Recorder, sized


def main() -> None:
    recorder = Recorder()
    model = llama(recorder, layers=8)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(recorder.steps):
        batch = tokens(sized(16, 2), sized(1536, 16), model.device)
        with recorder.step():
            loss = train_llama(compiled, optimizer, batch)
        recorder.loss(loss)
    recorder.finish()


if __name__ == "__main__":
    main()
