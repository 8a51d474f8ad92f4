"""A Llama of 0.5 B parameters on batches of varying length, as text has it."""

from __future__ import annotations

from benchmarks.programs._models import llama, train
from benchmarks.programs._report import Recorder, sized


def main() -> None:
    recorder = Recorder()
    train(recorder, llama(recorder), sized(8, 2), sized((256, 2048), (8, 32)))


if __name__ == "__main__":
    main()
