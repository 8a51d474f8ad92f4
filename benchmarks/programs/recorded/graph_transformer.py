"""A graph transformer: attention over all pairs of nodes with a bias of each pair, N varies."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, l1_loss

from benchmarks.programs._report import Recorder, sized

FEATURES, RADII = 32, 16


class PairBlock(nn.Module):
    """Attention whose scores are kept for the next layer's, as those of molecules are."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, pairs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = (
            self.qkv(self.norms[0](x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
            .unbind()
        )
        pairs = pairs + query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
        weights = pairs.masked_fill(~mask, -1e4).softmax(-1)
        y = dropout(weights, 0.1, self.training) @ value
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x)), pairs


class GraphTransformer(nn.Module):
    radii: Tensor

    def __init__(self, width: int, layers: int, heads: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.bias = nn.Sequential(nn.Linear(RADII, 32), nn.GELU(), nn.Linear(32, heads))
        self.blocks = nn.ModuleList(PairBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 1)
        self.register_buffer("radii", torch.linspace(0, 4, RADII))

    def forward(self, nodes: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        distance = torch.cdist(places, places)[..., None]
        pairs = self.bias(torch.exp(-((distance - self.radii) ** 2))).permute(0, 3, 1, 2)
        x = self.enter(nodes)
        for block in self.blocks:
            x, pairs = block(x, pairs, mask[:, None, None, :])
        result: Tensor = (self.head(x).squeeze(-1) * mask).sum(1) / mask.sum(1)
        return result


def main() -> None:
    recorder = Recorder(warmup=0, timed=22, deterministic=False)
    model = GraphTransformer(*sized((512, 8), (32, 2)))
    device = recorder.begin()
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(recorder.steps):
        counts = [recorder.random.randint(*sized((200, 1400), (3, 8))) for _ in range(sized(8, 2))]
        with recorder.step():
            longest = torch.tensor(counts).to(device)
            nodes = torch.randn(len(counts), max(counts), FEATURES).to(device)
            places = torch.randn(len(counts), max(counts), 3).to(device)
            mask = torch.arange(max(counts), device=device) < longest[:, None]
            with torch.autocast(device.type, torch.bfloat16):
                guess = model(nodes, places, mask)
            loss = l1_loss(guess.float(), (nodes[..., 0] * mask).sum(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recorder.loss(loss)
    recorder.finish()


if __name__ == "__main__":
    main()
