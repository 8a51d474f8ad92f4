"""GraphSAGE on sampled subgraphs: every batch has another number of nodes and edges.

It does not repeat bit for bit: its sums over neighbours are atomic additions, and the repeatable
kind sorts every element, in much more memory than a user's program takes.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GraphSAGE

from benchmarks.programs._report import Recorder, sized

FEATURES, CLASSES = 256, 47


def sample(
    recorder: Recorder, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return features, edges and labels of a subgraph, of the sizes that neighbour sampling has."""
    seeds = sized(20_000, 50)
    nodes = seeds + recorder.random.randint(*sized((60_000, 180_000), (50, 150)))
    edges = nodes * recorder.random.randint(6, 11)
    features = torch.randn(nodes, FEATURES, device=device)
    edge_index = torch.randint(0, nodes, (2, edges), device=device)
    return features, edge_index, torch.randint(0, CLASSES, (seeds,), device=device)


def main() -> None:
    recorder = Recorder(deterministic=False)
    model = GraphSAGE(FEATURES, sized(512, 32), num_layers=3, out_channels=CLASSES, dropout=0.2)
    device = recorder.begin()
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(recorder.steps):
        features, edge_index, labels = sample(recorder, device)
        with recorder.step():
            scores = model(features, edge_index)[: len(labels)]
            loss = cross_entropy(scores, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recorder.loss(loss)
        del features, edge_index, labels, scores
    recorder.finish()


if __name__ == "__main__":
    main()
