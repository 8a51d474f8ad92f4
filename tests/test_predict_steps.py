"""vramx.predict: which steps are followed, what is assumed of them, what is left as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_tools import Stack, rows
from predict_tools import assumes, peak, training
from test_nn_operators import FUNCTIONS, inputs
from torch import Tensor, nn
from uncollected import nothing_waits_for_the_collector

import vramx
from vramx.compression.config import Compression
from vramx.compression.fakes import fakes_are_plain
from vramx.errors import UntraceableError
from vramx.nn.relu import relu
from vramx.nn.rotary import rotary

# -- What is followed, and what is left as it was --------------------------------------------------


class Trainer:
    def __init__(self) -> None:
        self.model = Stack(2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batches = [rows(64)]

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x).mean()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.loss(self.batches[0]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


SHARED = Trainer()


def step_of_the_module() -> None:
    helped()


def helped() -> None:
    SHARED.step()


def test_a_step_is_followed_wherever_its_model_is() -> None:
    trainer, times = Trainer(), None

    def closure() -> None:
        trainer.step(times or 1)

    def argument(model: nn.Module, x: Tensor, learner: Any = trainer.optimizer) -> None:
        model(x).mean().backward()
        learner.step()
        learner.zero_grad()

    programs: list[Any] = [
        *((trainer.step,), (closure,), (step_of_the_module,)),
        (functools.partial(trainer.step, times=1),),
        (functools.partial(argument, trainer.model, trainer.batches[0]),),
        (argument, trainer.model, trainer.batches[0]),
    ]
    assert len({peak(*program) for program in programs}) == 1


def test_nothing_is_changed() -> None:
    trainer = Trainer()
    trainer.model.eval()
    available, backward = torch.cuda.is_available, torch.autograd._engine_run_backward
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    generator = torch.get_rng_state()
    vramx.predict(trainer.step, levels=("left", "int8", "recompute_all"))
    assert all(map(torch.equal, trainer.model.parameters(), weights))
    assert all(p.grad is None and type(p) is nn.Parameter for p in trainer.model.parameters())
    assert not trainer.optimizer.state
    assert not trainer.model.training
    assert "no module" in str(vramx.report(trainer.model)) or not vramx.report(trainer.model).rows
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.cuda.is_available is available
    assert torch.autograd._engine_run_backward is backward
    trainer.step()  # real tensors go on
    assert trainer.optimizer.state


def test_states_that_exist_are_counted() -> None:
    trainer = Trainer()
    new = vramx.predict(trainer.step, steps=1)
    trainer.step()
    begun = vramx.predict(trainer.step, steps=1)
    weights = sum(p.nbytes for p in trainer.model.parameters())
    assert begun.row().before_bytes - new.row().before_bytes == 2 * weights


def test_what_a_step_makes_on_the_gpu_needs_none() -> None:
    layer = nn.Linear(64, 64, bias=False)

    def step() -> None:
        layer(torch.tensor([[1.0] * 64] * 128, device="cuda")).sum().backward()

    # In forward: the weight, the batch, the result and its sum.
    expected = 64 * 64 * 4 + 2 * 128 * 64 * 4 + 4
    assert peak(step, steps=1) == expected


def test_a_step_may_ask_what_the_gpu_is() -> None:
    layer = nn.Linear(64, 64)

    def step() -> None:
        gpu = torch.cuda.get_device_properties(0)
        assert (gpu.major, gpu.minor) == torch.cuda.get_device_capability()
        assert gpu.name == torch.cuda.get_device_name() == "NVIDIA H100"
        free, total = torch.cuda.mem_get_info()
        assert free == total == gpu.total_memory
        layer(torch.ones(gpu.multi_processor_count, 64, device="cuda"))
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        with torch.cuda.nvtx.range(torch.cuda.memory_summary()):
            torch.cuda.ipc_collect()
        if hasattr(torch.accelerator, "memory_allocated"):  # torch 2.9
            torch.accelerator.synchronize()
            assert torch.accelerator.memory_allocated() == 0

    assert peak(step) > 132 * 64 * 4


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x)).sum()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_tied_weights_that_are_moved_stay_tied(device: str) -> None:
    def step() -> None:
        model = Tied().to(device).bfloat16()
        assert model.head.weight is model.words.weight
        assert len(list(model.parameters())) == 1
        model(torch.zeros(8, dtype=torch.long, device=device)).backward()

    peak(step, steps=1, device=device)


class Imitating:
    """A wrapper around an optimizer that passes for one of its class, as Lightning Fabric's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self.__class__ = type(f"Imitating{kind.__name__}", (Imitating, kind), {})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(self) -> None:
        self.optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def test_an_optimizer_in_a_wrapper_is_that_optimizer() -> None:
    model, x = Stack(2), rows(16)
    plain = torch.optim.AdamW(model.parameters())
    assert peak(training(model, x, Imitating(plain))) == peak(training(model, x, plain))
    assert not plain.state


def test_a_read_float_is_assumed() -> None:
    model = Stack(1)
    prediction = vramx.predict(lambda: model(rows(4).to("cuda")).sum().item())
    assert "0.0" in prediction.assumptions[0]


def test_a_step_that_saves_spoils_no_file(tmp_path: Path) -> None:
    """There are no data to write; the file is another run's, until the program runs."""
    model, file = Stack(1), tmp_path / "model.pt"
    file.write_bytes(b"weights")

    def step() -> None:
        model(rows(4).to("cuda")).sum().backward()
        torch.save(model.state_dict(), file)

    assert assumes(vramx.predict(step), "torch.save")
    assert file.read_bytes() == b"weights"


def test_a_mask_selects_all_at_most() -> None:
    x = torch.zeros(1 << 16, requires_grad=True)
    prediction = vramx.predict(lambda: x[x > 0].sum().backward(), steps=1)
    assert assumes(prediction, "mask")
    assert prediction.peak_bytes() >= 2 * x.nbytes


def test_bins_are_as_many_as_are_asked_for() -> None:
    values = torch.zeros(8, dtype=torch.int64)
    nodes = torch.zeros(1 << 16, requires_grad=True)

    def step() -> None:
        degree = torch.bincount(values, minlength=len(nodes))
        assert degree.dtype is torch.int64
        (nodes * degree).sum().backward()

    prediction = vramx.predict(step, steps=1)
    assert assumes(prediction, "minlength")
    # Nodes, bins of eight bytes, which backward keeps, and a gradient.
    assert prediction.peak_bytes() >= nodes.nbytes + 8 * len(nodes) + nodes.nbytes


def test_no_kernel_is_launched_on_tensors_without_data() -> None:
    q, k = (torch.randn(2, 4, 16, 32, requires_grad=True) for _ in "qk")
    angles = torch.randn(16, 32)

    def step() -> None:
        turned = rotary(q, k, angles.cos(), angles.sin())
        sum(each.sum() for each in turned).backward()

    # Turned q and k beside them, at least.
    assert peak(step) >= 4 * q.nbytes


# Of the others some make a tensor in the step, which would be on the host.
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if "mask" not in n and "given" not in n])
def test_fused_functions_are_predicted(name: str) -> None:
    """With the noise of their packs, of which there is no seed where nothing is launched."""
    x, weight = inputs()
    found = peak(lambda: FUNCTIONS[name](x, weight, Compression()).sum().backward())
    assert found >= 2 * (x.nbytes + weight.nbytes)


def test_what_has_data_is_computed_meanwhile() -> None:
    """A small block of each class is tried on the host, and is left if its gradient is wrong."""
    x = torch.linspace(-1, 1, 64).requires_grad_()
    with fakes_are_plain():
        relu(x * 2).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2.0 * (x > 0))


def test_a_scaler_is_followed() -> None:
    model, x = Stack(1), rows(64)
    learner = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step() -> None:
        scaler.scale(model(x).sum()).backward()
        scaler.step(learner)
        scaler.update()

    assert peak(step) > sum(p.nbytes for p in model.parameters())


def of_a_model(**options: Any) -> None:
    trainer = Trainer()
    vramx.predict(trainer.model, rows(64), optimizer=trainer.optimizer, **options)


def of_a_step_that_fails() -> None:
    trainer = Trainer()

    def step() -> None:
        trainer.loss(rows(64))
        raise ZeroDivisionError

    with pytest.raises(UntraceableError):
        vramx.predict(step)


@pytest.mark.parametrize(
    "predict",
    [of_a_model, functools.partial(of_a_model, gradients="stepped"), of_a_step_that_fails],
)
def test_a_prediction_leaves_nothing_to_the_collector(predict: Callable[[], Any]) -> None:
    predict()
    with nothing_waits_for_the_collector():
        predict()
