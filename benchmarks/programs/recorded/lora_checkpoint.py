"""Adapters of low rank on a frozen model in bfloat16, blocks checkpointed, lengths vary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.programs._report import Recorder, sized
from benchmarks.programs.recorded._blocks import Decoder, text

RANK = 16


class Adapted(nn.Module):
    """A frozen linear layer with an adapter beside it, in float32."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)
        self.dropout = nn.Dropout(0.05)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        added = self.up(self.down(self.dropout(x).float()))
        result: Tensor = self.frozen(x) + added.to(x.dtype)
        return result


def adapt(model: nn.Module) -> list[Tensor]:
    """Put an adapter beside each linear layer of the blocks; return what is trained."""
    model.requires_grad_(False)
    trained: list[Tensor] = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "head" and not isinstance(module, Adapted):
                adapted = Adapted(child)
                setattr(module, name, adapted)
                trained += [adapted.down.weight, adapted.up.weight]
    return trained


def main() -> None:
    recorder = Recorder(warmup=0, timed=12, deterministic=False)
    vocabulary, width, layers, longest = sized((32_000, 2048, 16, 2048), (100, 32, 2, 64))
    model = Decoder(vocabulary, width, layers, longest).to(torch.bfloat16)
    trained = adapt(model)
    model.is_checkpointed = True
    device = recorder.begin()
    model = model.to(device)
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for _ in range(recorder.steps):
        length = recorder.random.randint(longest // 16, longest - 1)
        with recorder.step():
            tokens = text(vocabulary, sized(16, 2), length + 1, device)
            logits = model(tokens[:, :-1]).float()
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recorder.loss(loss)
    recorder.finish()


if __name__ == "__main__":
    main()
