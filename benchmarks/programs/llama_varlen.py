"""A Llama of 0.5 B parameters on batches of varying length, as text has it."""

from __future__ import annotations

import torch

from benchmarks.programs._models import llama, tokens, train_llama
from benchmarks.programs._report import Recorder, sized


def main() -> None:
    recorder = Recorder()
    model = llama(recorder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(recorder.steps):
        length = recorder.random.randint(*sized((256, 2048), (8, 32)))
        batch = tokens(sized(8, 2), length, model.device)
        with recorder.step():
            loss = train_llama(model, optimizer, batch)
        recorder.loss(loss)
    recorder.finish()


if __name__ == "__main__":
    main()
