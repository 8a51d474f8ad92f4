"""vramx.record on programs of many kinds: none fails, and what is not known is called so."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_optimizers import Odd, step_in_backward
from record_tools import (
    WIDTH,
    category_of,
    features,
    loss_of,
    path,
    recording,
    residuals,
    states_of,
    storage_bytes,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from vramx.memory import categories as names
from vramx.memory import record
from vramx.memory.snapshot import Snapshot

__all__ = ["path"]


def test_sparse_gradients_are_gradients(path: Path) -> None:
    model = nn.EmbeddingBag(1000, WIDTH, mode="sum", sparse=True)
    with recording(path, model) as seen:
        model(torch.randint(1000, (8, 4))).sum().backward()
        seen.now()
    assert model.weight.grad is not None
    parts = [model.weight.grad._indices(), model.weight.grad._values()]
    assert seen.found()[names.GRADIENTS] == storage_bytes(parts)


def test_states_in_lists_are_states(path: Path) -> None:
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)
    x = torch.randn(32, WIDTH)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    with recording(path, model) as seen:
        optimizer.step(closure)
        optimizer.step(closure)
        seen.now()
        expected = storage_bytes(states_of(optimizer))
        optimizer.step(closure)
    assert seen.found()[names.OPTIMIZER] == expected


def test_states_that_are_replaced_in_every_step_are_states(path: Path) -> None:
    def replacing(_: Any, state: Any, group: Any, grad: torch.Tensor) -> torch.Tensor:
        state["average"] = state.get("average", 0) * 0.9 + grad
        return torch.zeros_like(grad)

    model = residuals()
    optimizer = Odd(model.parameters(), replacing)
    with recording(path, model, optimizer) as seen:
        train(model, optimizer, features)
        seen.now()
        expected = storage_bytes(states_of(optimizer))
        train(model, optimizer, features)
    assert seen.found()[names.OPTIMIZER] == expected


def test_gradients_that_are_stepped_in_backward_are_gradients(path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for parameter in model.parameters():
        step_in_backward(parameter, torch.optim.SGD([parameter], lr=0.1))
    with recording(path, model) as seen:
        loss_of(model(*features()[0])).backward()
    snapshot = seen.snapshot()
    chosen = snapshot.allocations.category == snapshot.categories.index(names.GRADIENTS)
    assert snapshot.allocations.size[chosen].sum() == storage_bytes(model.parameters())


@pytest.mark.parametrize("has_model", [True, False])
def test_targets_of_a_loss_module_are_inputs(has_model: bool, path: Path) -> None:
    model, criterion = nn.Linear(WIDTH, 10), nn.CrossEntropyLoss()
    with recording(path, model if has_model else None) as seen:
        x, target = torch.randn(32, WIDTH), torch.randint(10, (32,))
        loss = criterion(model(x), target)
        seen.now()
        loss.backward()
    found = seen.found()
    assert found[names.INPUTS] == storage_bytes([x, target])


def test_a_reentrant_checkpoint_keeps_its_result(path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    model = Model()
    x = torch.randn(32, WIDTH, requires_grad=True)
    with recording(path, model) as seen:
        out = model(x)
        seen.now()
        out.sum().backward()
    assert seen.found()[names.ACTIVATIONS] == 3 * storage_bytes([x])


def test_what_the_program_drops_is_gone(path: Path) -> None:
    model = residuals()
    optimizer = torch.optim.AdamW(model.parameters())
    with recording(path, model, optimizer):
        train(model, optimizer, features)
        dropped = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
        dropped += [weakref.ref(each) for each in model.modules()]
        del model, optimizer
        gc.collect()
        assert [each() for each in dropped] == [None] * len(dropped)
    assert Snapshot.load(path).has_categories


def test_a_module_that_is_replaced_is_gone_and_the_new_one_has_no_path(path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    with recording(path, model) as seen:
        old = weakref.ref(model[0].weight)
        model[0] = nn.Linear(WIDTH, 2 * WIDTH)
        gc.collect()
        assert old() is None
        out = model(*features()[0])
        seen.now()
    assert seen.found()[names.PARAMETERS] == storage_bytes(model.parameters())
    assert "(Linear)" in seen.snapshot().labels
    del out


def test_threads_that_train_beside_each_other_do_not_fail(path: Path) -> None:
    models = [residuals() for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    trainings = zip(models, optimizers, strict=True)
    threads = [threading.Thread(target=train, args=(*each, features)) for each in trainings]
    with recording(path, nn.ModuleList(models), optimizers):
        torch.zeros(4)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    snapshot = Snapshot.load(path)
    assert not (snapshot.allocations.category == 0).any()


def test_no_thread_looks_at_gradients_that_another_may_let_go(path: Path) -> None:
    """Once several run backward, each sees its optimizer's own as that steps."""
    models = [nn.Linear(48, 48), nn.Linear(40, 40)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]

    def backward(model: nn.Linear) -> None:
        model(torch.ones(2, model.in_features)).sum().backward()

    with recording(path, nn.ModuleList(models), optimizers) as seen:
        other = threading.Thread(target=backward, args=(nn.Linear(8, 8),))
        other.start()
        other.join()
        backward(models[0])
        backward(models[1])
        optimizers[0].step()
        seen.now()
    gradients = [p.grad for p in models[0].parameters()]
    assert seen.found()[names.GRADIENTS] == storage_bytes(gradients)


def test_function_transforms_and_exports_run_while_recording(path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(4, 8)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).sum()

    with recording(path, model):
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
    with recording(path):
        with pytest.raises(ZeroDivisionError):
            Failing.apply(x).sum().backward()
        late = torch.empty(100_003, dtype=torch.uint8)
    assert category_of(Snapshot.load(path), 100_003)[0] == names.UNKNOWN
    del late


def test_models_that_follow_each_other_are_known_as_the_first_was(path: Path) -> None:
    """Optimizers come to lie where those of models before them did."""

    def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = residuals()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, features)
        return model, optimizer

    with recording(path) as seen:
        for _ in range(4):
            trained()
        model, optimizer = trained()
        (active,) = record._active
        known = active._observer._known
        assert known.keys() == set(map(id, model.parameters()))
        loss_of(model(*features()[0])).backward()
        seen.now()
    assert seen.found()[names.OPTIMIZER] == storage_bytes(states_of(optimizer))
    assert seen.found()[names.GRADIENTS] == storage_bytes([p.grad for p in model.parameters()])
