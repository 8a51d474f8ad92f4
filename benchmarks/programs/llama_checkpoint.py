"""A Llama of 0.5 B parameters with gradient checkpointing, on long batches of varying length."""

from __future__ import annotations

from benchmarks.programs._models import llama, train
from benchmarks.programs._report import Recorder, sized


def main() -> None:
    recorder = Recorder()
    model = llama(recorder)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    train(recorder, model, sized(16, 2), sized((512, 3072), (8, 32)))


if __name__ == "__main__":
    main()
