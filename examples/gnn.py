"""A graph network on sampled subgraphs that grow: what is reserved beside what is allocated.

What it shows: each batch is a subgraph of another number of nodes and edges, most larger than all
before. torch's allocator keeps the blocks of the old sizes, which no new tensor fits into, and
reserves more and more memory than is allocated; vramx joins the pieces.
What to expect: the run first predicts, without a GPU, what it would reserve under each allocator,
with `vramx.predict`; on a GPU it then trains, and prints what was allocated and reserved. vramx's
reserved memory is within about 1 % of what is allocated; with `--native` torch's own allocator is
left in place, for comparison.
Needs: torch. With torch_geometric installed its GraphSAGE is trained, else one of plain torch.

    python examples/gnn.py
    python examples/gnn.py --native
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import vramx

FEATURES, CLASSES = 128, 10


class MeanSage(nn.Module):
    """Each node with the mean of its neighbours, three times: GraphSAGE in plain torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = (FEATURES, width, width, CLASSES)
        self.own = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))
        self.others = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        ones = nodes.new_ones(len(target), 1)
        degree = nodes.new_zeros(len(nodes), 1).index_add(0, target, ones).clamp(min=1)
        for i, (own, others) in enumerate(zip(self.own, self.others, strict=True)):
            sums = torch.zeros_like(nodes).index_add(0, target, nodes[source])
            nodes = own(nodes) + others(sums / degree)
            nodes = relu(nodes) if i < 2 else nodes
        return nodes


def main() -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="a graph network on subgraphs that grow")
    parser.add_argument("--nodes", type=int, default=100_000 if has_gpu else 1_000, help="at first")
    parser.add_argument("--steps", type=int, default=40 if has_gpu else 12)
    parser.add_argument("--native", action="store_true", help="leave torch's own allocator")
    args = parser.parse_args()
    if has_gpu and not args.native:
        vramx.install_allocator()  # before anything uses the GPU

    torch.manual_seed(0)
    model = network(256 if has_gpu else 32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sizes = subgraphs(args.nodes, args.steps)

    def train(device: str) -> None:
        for nodes, edges in sizes:
            features = torch.randn(nodes, FEATURES, device=device)
            index = torch.randint(0, nodes, (2, edges), device=device)
            labels = torch.randint(0, CLASSES, (nodes,), device=device)
            loss = cross_entropy(model(features, index), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del features, index, labels, loss

    print(vramx.predict(lambda: train("cuda"), steps=1))
    device = "cuda" if has_gpu else "cpu"
    model.to(device)
    with vramx.track("training", synchronize=True) as memory:
        train(device)
    print(memory)
    if has_gpu:
        lost = memory.peak_reserved_bytes - memory.peak_bytes
        allocator = "vramx" if vramx.allocator_installed() else "torch's allocator"
        print(
            f"{allocator}: {lost / 2**20:,.0f} MiB reserved beyond what was allocated at the peak"
        )


def network(width: int) -> nn.Module:
    if importlib.util.find_spec("torch_geometric"):
        from torch_geometric.nn import GraphSAGE

        return GraphSAGE(FEATURES, width, num_layers=3, out_channels=CLASSES)
    return MeanSage(width)


def subgraphs(nodes: int, steps: int) -> list[tuple[int, int]]:
    """Return numbers of nodes and edges, as sampling with ever more neighbours has them."""
    choose = random.Random(0)
    counts = [int(nodes * (1 + step / steps) * choose.uniform(0.9, 1.1)) for step in range(steps)]
    return [(count, count * choose.randint(6, 9)) for count in counts]


if __name__ == "__main__":
    main()
