"""A Llama under torch.compile with CUDA graphs: mode="reduce-overhead"."""

from __future__ import annotations

import torch

from benchmarks.programs._models import llama, tokens, train_llama
from benchmarks.programs._report import Recorder, sized


def main() -> None:
    recorder = Recorder(warmup=6)  # it runs once eagerly and once to record before it replays
    model = llama(recorder, layers=8)
    compiled = torch.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(recorder.steps):
        batch = tokens(sized(16, 2), sized(1536, 16), model.device)
        torch.compiler.cudagraph_mark_step_begin()
        with recorder.step():
            loss = train_llama(compiled, optimizer, batch)
        recorder.loss(loss)
        del loss  # it lies in the graphs' memory, which the next step writes over
    recorder.finish()


if __name__ == "__main__":
    main()
