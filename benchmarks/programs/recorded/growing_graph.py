"""A graph network on a graph that grows: every step brings nodes and edges, the peak is the end."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.programs._report import Recorder, sized

FEATURES = 64


class Convolution(nn.Module):
    """Messages of the neighbours, weighted by what both ends say, and their mean."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.own, self.message = nn.Linear(inside, outside), nn.Linear(inside, outside)
        self.gate = nn.Linear(2 * inside, 1)
        self.norm = nn.LayerNorm(outside)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        gates = self.gate(torch.cat([x[source], x[target]], 1)).sigmoid()
        messages = self.message(x)[source] * gates
        total = torch.zeros(len(x), messages.shape[1], dtype=messages.dtype, device=x.device)
        total = total.index_add(0, target, messages)
        count = torch.bincount(target, minlength=len(x)).clamp(min=1)[:, None]
        result: Tensor = self.norm(self.own(x) + total / count).relu()
        return result


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (FEATURES, width, width, width)
        self.layers = nn.ModuleList(Convolution(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return x


def arrive(nodes: int, new: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the features of new nodes, and edges from all nodes to them and among the others."""
    edges = torch.randint(0, nodes + new, (2, 6 * new))
    edges[1, : 3 * new] = torch.randint(nodes, nodes + new, (3 * new,))
    return torch.randn(new, FEATURES).to(device), edges.to(device)


def main() -> None:
    recorder = Recorder(warmup=0, timed=110, deterministic=False)
    model = Network(sized(192, 16))
    device = recorder.begin()
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    features, edges = arrive(0, sized(20_000, 20), device)
    for _ in range(recorder.steps):
        new = recorder.random.randint(*sized((800, 3000), (5, 20)))
        with recorder.step():
            more_features, more_edges = arrive(len(features), new, device)
            known = model(torch.cat([features, more_features]), edges)  # without the new edges
            source, target = more_edges
            absent = torch.randint(0, len(known), target.shape, device=device)
            scores = torch.stack(
                [(known[source] * known[each]).sum(1) for each in (target, absent)]
            )
            is_edge = torch.tensor([[1.0], [0.0]], device=device).expand_as(scores)
            loss = binary_cross_entropy_with_logits(scores, is_edge)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            features = torch.cat([features, more_features])
            edges = torch.cat([edges, more_edges], 1)
        recorder.loss(loss)
    recorder.finish()


if __name__ == "__main__":
    main()
