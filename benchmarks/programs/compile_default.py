"""A Llama under torch.compile, in its default mode."""

from __future__ import annotations

import torch

from benchmarks.programs._models import llama, train
from benchmarks.programs._report import Recorder, sized


def main() -> None:
    recorder = Recorder()
    model = torch.compile(llama(recorder, layers=8))
    train(recorder, model, sized(16, 2), sized((1536, 1536), (16, 16)))


if __name__ == "__main__":
    main()
