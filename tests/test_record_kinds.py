"""vramx.record on programs of many kinds: none fails, and what is not known is called so."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_history import CpuHistory
from record_tools import (
    WIDTH,
    by_category,
    features,
    loss_of,
    recorder,
    residuals,
    storage_bytes,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from vramx.memory import categories as names
from vramx.memory.holders import category_tree
from vramx.memory.snapshot import Snapshot


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.pickle"


def states(optimizer: Any) -> list[torch.Tensor]:
    return [
        leaf
        for state in optimizer.state.values()
        for leaf in torch.utils._pytree.tree_leaves(dict(state))
        if isinstance(leaf, torch.Tensor)
    ]


def test_sparse_gradients_are_gradients(path: Path) -> None:
    model, source = nn.EmbeddingBag(1000, WIDTH, mode="sum", sparse=True), CpuHistory()
    with recorder(path, source, model):
        model(torch.randint(1000, (8, 4))).sum().backward()
        moment = len(source.entries) - 1
    assert model.weight.grad is not None
    parts = [model.weight.grad._indices(), model.weight.grad._values()]
    assert by_category(Snapshot.load(path), moment)[names.GRADIENTS] == storage_bytes(parts)


def test_states_in_lists_are_states(path: Path) -> None:
    model, source = nn.Linear(WIDTH, 1), CpuHistory()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)
    x = torch.randn(32, WIDTH)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    with recorder(path, source, model):
        optimizer.step(closure)
        optimizer.step(closure)
        moment = len(source.entries) - 1
        expected = storage_bytes(states(optimizer))
        optimizer.step(closure)
    assert by_category(Snapshot.load(path), moment)[names.OPTIMIZER] == expected


def test_states_that_are_replaced_in_every_step_are_states(path: Path) -> None:
    class Replacing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                before = self.state[parameter].get("average", 0)
                self.state[parameter]["average"] = before * 0.9 + parameter.grad

    model, source = residuals(), CpuHistory()
    optimizer = Replacing(model.parameters())
    with recorder(path, source, model, optimizer):
        train(model, optimizer, features)
        moment = len(source.entries) - 1
        expected = storage_bytes(states(optimizer))
        train(model, optimizer, features)
    assert by_category(Snapshot.load(path), moment)[names.OPTIMIZER] == expected


def test_gradients_that_are_stepped_in_backward_are_gradients(path: Path) -> None:
    model, source = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), CpuHistory()

    def step_of(parameter: nn.Parameter) -> Any:
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(_: torch.Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_of(parameter))
    with recorder(path, source, model):
        loss_of(model(*features()[0])).backward()
    snapshot = Snapshot.load(path)
    chosen = snapshot.allocations.category == snapshot.categories.index(names.GRADIENTS)
    assert snapshot.allocations.size[chosen].sum() == storage_bytes(model.parameters())


@pytest.mark.parametrize("has_model", [True, False])
def test_targets_of_a_loss_module_are_inputs(has_model: bool, path: Path) -> None:
    model, source, criterion = nn.Linear(WIDTH, 10), CpuHistory(), nn.CrossEntropyLoss()
    with recorder(path, source, model if has_model else None):
        x, target = torch.randn(32, WIDTH), torch.randint(10, (32,))
        loss = criterion(model(x), target)
        moment = len(source.entries) - 1
        loss.backward()
    found = by_category(Snapshot.load(path), moment)
    assert found[names.INPUTS] == storage_bytes([x, target])


def test_modules_without_a_model_go_by_their_class(path: Path) -> None:
    source = CpuHistory()
    with recorder(path, source):
        out = residuals()(*features()[0])
        moment = len(source.entries) - 1
    tree = category_tree(Snapshot.load(path), moment)
    (kept,) = (node for frame, node in tree.children.items() if frame.name == names.ACTIVATIONS)
    assert {"(Linear)", "(GELU)"} <= {frame.name for frame in kept.children}
    del out


def test_a_reentrant_checkpoint_keeps_its_result(path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    model, source = Model(), CpuHistory()
    x = torch.randn(32, WIDTH, requires_grad=True)
    with recorder(path, source, model):
        out = model(x)
        moment = len(source.entries) - 1
        out.sum().backward()
    assert by_category(Snapshot.load(path), moment)[names.ACTIVATIONS] == 3 * storage_bytes([x])


def test_what_the_program_drops_is_gone(path: Path) -> None:
    model = residuals()
    optimizer = torch.optim.AdamW(model.parameters())
    with recorder(path, CpuHistory(), model, optimizer):
        train(model, optimizer, features)
        dropped = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
        dropped += [weakref.ref(each) for each in model.modules()]
        del model, optimizer
        gc.collect()
        assert [each() for each in dropped] == [None] * len(dropped)
    assert Snapshot.load(path).has_categories


def test_a_module_that_is_replaced_is_gone_and_the_new_one_has_no_path(path: Path) -> None:
    model, source = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), CpuHistory()
    with recorder(path, source, model):
        old = weakref.ref(model[0].weight)
        model[0] = nn.Linear(WIDTH, 2 * WIDTH)
        gc.collect()
        assert old() is None
        out = model(*features()[0])
        moment = len(source.entries) - 1
    snapshot = Snapshot.load(path)
    found = by_category(snapshot, moment)
    assert found[names.PARAMETERS] == storage_bytes(model.parameters())
    assert "(Linear)" in snapshot.labels
    del out


def test_threads_that_train_beside_each_other_do_not_fail(path: Path) -> None:
    models = [residuals() for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    threads = [
        threading.Thread(target=train, args=(model, optimizer, features))
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    with recorder(path, CpuHistory(), nn.ModuleList(models), optimizers):
        torch.zeros(4)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    snapshot = Snapshot.load(path)
    assert not (snapshot.allocations.category == 0).any()


def test_function_transforms_and_exports_run_while_recording(path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(4, 8)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).sum()

    with recorder(path, CpuHistory(), model):
        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        traced = torch.jit.trace(model, x)
        assert torch.equal(traced(x), model(x))
    assert per_sample["0.weight"].shape == (4, 8, 8)
    assert Snapshot.load(path).has_categories


def test_a_backward_that_fails_is_over(path: Path) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    x = torch.randn(8, requires_grad=True)
    with recorder(path, CpuHistory()):
        with pytest.raises(ZeroDivisionError):
            Failing.apply(x).sum().backward()
        late = torch.empty(100_003, dtype=torch.uint8)
    snapshot = Snapshot.load(path)
    (number,) = (snapshot.allocations.size == 100_003).nonzero()[0]
    assert snapshot.categories[snapshot.allocations.category[number]] == names.UNKNOWN
    del late
