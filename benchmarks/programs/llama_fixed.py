"""A Llama of 0.5 B parameters, the same shapes every step."""

from __future__ import annotations

from benchmarks.programs._models import llama, train
from benchmarks.programs._report import Recorder, sized


def main() -> None:
    recorder = Recorder()
    train(recorder, llama(recorder), sized(8, 2), sized((1536, 1536), (16, 16)))


if __name__ == "__main__":
    main()
