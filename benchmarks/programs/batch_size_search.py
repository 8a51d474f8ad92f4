"""accelerate looks for the batch size: it begins too large and halves it at each out-of-memory.

Run it under a cap (PROGRAM_CAP_BYTES), or a large GPU may hold even the first.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size

from benchmarks.programs._models import llama, tokens, train_llama
from benchmarks.programs._report import Recorder, sized

LENGTH = sized(1024, 16)
START = sized(256, 8)


class Halving:
    """The batch sizes that are tried."""

    def __init__(self) -> None:
        self.batch_size = START

    def __call__(self) -> int:
        self.batch_size //= 2
        return self.batch_size


def main() -> None:
    recorder = Recorder()
    recorder.begin()
    halving = Halving()

    @find_executable_batch_size(  # type: ignore[untyped-decorator, unused-ignore]
        starting_batch_size=START, reduce_batch_size_fn=halving
    )
    def train(batch_size: int) -> None:
        recorder.restart()
        accelerator = Accelerator()
        model = llama(recorder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(recorder.steps):
            batch = tokens(batch_size, LENGTH, accelerator.device)
            with recorder.step():
                loss = train_llama(model, optimizer, batch)
            recorder.loss(loss)

    train()
    recorder.finish(batch_size=halving.batch_size)


if __name__ == "__main__":
    main()
