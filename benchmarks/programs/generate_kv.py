"""Generation with a growing key-value cache, for batches and prompts of varying size."""

from __future__ import annotations

import torch

from benchmarks.programs._models import llama, tokens
from benchmarks.programs._report import Recorder, sized

NEW_TOKENS = sized(16, 4)


def main() -> None:
    recorder = Recorder(timed=24)  # the host sets its pace, and hosts are uneven
    model = llama(recorder).eval()
    for _ in range(recorder.steps):
        batch = recorder.random.randint(*sized((32, 64), (1, 3)))
        length = recorder.random.randint(*sized((512, 2048), (4, 16)))
        prompt = tokens(batch, length, model.device)
        with recorder.step(), torch.inference_mode():
            text = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        recorder.loss(text[:, length:])
    recorder.finish()


if __name__ == "__main__":
    main()
