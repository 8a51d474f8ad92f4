"""Click prediction from embedding bags of varying size: sparse gradients beside dense ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.programs._report import Recorder, sized

WIDTH, NUMBERS = 64, 13
Bags = list[tuple[Tensor, Tensor]]


class Recommender(nn.Module):
    """Bags and numbers become vectors of one width; their products say whether one clicks."""

    def __init__(self, large: int, small: int, tables: int) -> None:
        super().__init__()
        self.sparse = nn.ModuleList(
            nn.EmbeddingBag(large, WIDTH, mode="sum", sparse=True) for _ in range(tables)
        )
        self.dense = nn.ModuleList(
            nn.EmbeddingBag(small, WIDTH, mode="mean") for _ in range(tables)
        )
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 256), nn.ReLU(), nn.Linear(256, WIDTH))
        pairs = (2 * tables + 1) * tables
        self.top = nn.Sequential(
            *(nn.Linear(pairs + WIDTH, 512), nn.ReLU()),
            *(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)),
        )

    def forward(self, numbers: Tensor, bags: Bags) -> Tensor:
        first = self.bottom(numbers)
        tables = [*self.sparse, *self.dense]
        found = [table(*bag) for table, bag in zip(tables, bags, strict=True)]
        vectors = torch.stack([first, *found], 1)
        products = vectors @ vectors.transpose(1, 2)
        rows, columns = torch.triu_indices(len(found) + 1, len(found) + 1, 1)
        scores: Tensor = self.top(torch.cat([products[:, rows, columns], first], 1))
        return scores.squeeze(1)


def draw_bags(
    recorder: Recorder, batch: int, items: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return indices and offsets: a popular item comes often, and some bags are long."""
    sizes = torch.randint(1, recorder.random.randint(4, sized(40, 6)), (batch,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)[:-1]])
    popular = torch.rand(int(sizes.sum())).pow(3) * items
    return popular.long().to(device), offsets.to(device)


def main() -> None:
    recorder = Recorder(warmup=0, timed=50, deterministic=False)
    large, small, tables, batch = sized((1_000_000, 20_000, 8, 16_384), (200, 50, 2, 16))
    model = Recommender(large, small, tables)
    device = recorder.begin()
    model = model.to(device)
    sparse = list(model.sparse.parameters())
    dense = [each for name, each in model.named_parameters() if not name.startswith("sparse")]
    optimizers = torch.optim.SparseAdam(sparse, lr=1e-3), torch.optim.AdamW(dense, lr=1e-3)
    for _ in range(recorder.steps):
        with recorder.step():
            bags = [
                draw_bags(recorder, batch, items, device)
                for items in [large] * tables + [small] * tables
            ]
            numbers = torch.randn(batch, NUMBERS).to(device)
            clicks = torch.randint(0, 2, (batch,)).to(device).float()
            loss = binary_cross_entropy_with_logits(model(numbers, bags), clicks)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        recorder.loss(loss)
    recorder.finish()


if __name__ == "__main__":
    main()
