"""Modules of torch.fx, each of which has a class of its own, are changed and restored as others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import vramx

X = torch.randn(8, 16)


def traced() -> fx.GraphModule:
    layers = (nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    return fx.symbolic_trace(nn.Sequential(*layers))


def pack(module: nn.Module) -> None:
    vramx.compressed_activations(module, min_bytes=0)


def recompute(module: nn.Module) -> None:
    vramx.checkpoint_modules(module, lambda each: each is module, level="keep")


CHANGES = pytest.mark.parametrize("change", [pack, recompute])


def learned(module: nn.Module) -> list[Tensor]:
    module.zero_grad()
    module(X).sum().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@CHANGES
def test_a_graph_that_is_edited_after_a_change_runs_and_stays_changed(
    change: Callable[[nn.Module], None],
) -> None:
    module = traced()
    original = type(module)
    change(module)
    (tanh,) = (node for node in module.graph.nodes if node.target == "1")
    tanh.op, tanh.target = "call_function", torch.relu
    module.recompile()
    first, last = module.get_submodule("0"), module.get_submodule("2")
    expected = last(first(X).relu())
    assert torch.equal(module(X), expected)
    module(X).sum().backward()
    assert len(vramx.restore(module)) == 1
    assert type(module) is original
    module.recompile()
    assert torch.equal(module(X), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@CHANGES
def test_a_copy_of_a_graph_is_changed_alike_and_has_its_own_weights(
    change: Callable[[nn.Module], None], copied: Callable[[Any], Any]
) -> None:
    module = traced()
    change(module)
    other = copied(module)
    with torch.no_grad():
        other.get_parameter("0.weight").mul_(2)
    plain = traced()
    plain.load_state_dict(other.state_dict())
    torch.testing.assert_close(learned(other), learned(plain), rtol=0.05, atol=0.05)
    assert len(vramx.restore(other)) == 1
    assert len(vramx.restore(module)) == 1


class Switches(fx.GraphModule):
    """Has a graph for training and another for evaluation, as torchvision's extractors."""

    def train(self, mode: bool = True) -> Switches:
        super().train(mode)
        if hasattr(self, "_graph"):
            self.graph = self.graph
        return self


def test_a_graph_that_is_set_at_each_change_of_mode_is_packed_after_it() -> None:
    root = traced()
    module = Switches(root, root.graph)
    pack(module)
    module.eval()
    module.train()
    learned(module)
    assert vramx.compression_stats(module).packed.tensors > 0
