"""Preference training (DPO): a policy beside its frozen reference, on pairs of varying length."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from benchmarks.programs._report import Recorder, sized
from benchmarks.programs.recorded._blocks import Decoder, text

BETA = 0.1


def log_likelihood(model: Decoder, tokens: Tensor, prompt: int) -> Tensor:
    """Return, for each sequence, the sum over what comes after the prompt."""
    logits = model(tokens[:, :-1])[:, prompt - 1 :].float()
    losses = cross_entropy(logits.transpose(1, 2), tokens[:, prompt:], reduction="none")
    return -losses.sum(1)


def margin(model: Decoder, pair: list[Tensor], prompt: int) -> Tensor:
    chosen, rejected = pair
    return log_likelihood(model, chosen, prompt) - log_likelihood(model, rejected, prompt)


def main() -> None:
    recorder = Recorder(warmup=0, timed=14, deterministic=False)
    vocabulary, width, layers, batch = sized((32_000, 1024, 12, 16), (100, 32, 2, 2))
    longest = sized(2048, 64)
    policy = Decoder(vocabulary, width, layers, longest)
    device = recorder.begin()
    policy = policy.to(device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    for _ in range(recorder.steps):
        prompt = recorder.random.randint(8, longest // 4)
        pair = [
            text(vocabulary, batch, recorder.random.randint(prompt + 4, longest // 2), device)
            for _ in range(2)
        ]
        with recorder.step():
            with torch.autocast(device.type, torch.bfloat16):
                with torch.no_grad():
                    expected = margin(reference, pair, prompt)
                found = margin(policy, pair, prompt)
            loss = -logsigmoid(BETA * (found - expected)).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recorder.loss(loss)
    recorder.finish()


if __name__ == "__main__":
    main()
