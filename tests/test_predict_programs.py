"""vramx.predict of programs that load batches, step in backward, share storages or compile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from odd_optimizers import step_in_backward
from plan_tools import Stack
from predict_tools import assumes, peak, training
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import vramx
from vramx.errors import UntraceableError

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
WEIGHTS = nn.Linear(64, 64, bias=False)
BYTES = WEIGHTS.weight.nbytes


# -- Batches ---------------------------------------------------------------------------------------


class Numbered(Dataset[Tensor]):
    """Reads what cannot be read without data."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((64,), float(torch.tensor([index]).numpy()[0]))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_in_the_step_gives_batches(workers: int) -> None:
    loader = DataLoader(Numbered(), batch_size=16, shuffle=True, num_workers=workers)
    generator = torch.get_rng_state()

    def step() -> None:
        for batch in loader:
            WEIGHTS(batch.to(WEIGHTS.weight.device)).sum().backward()

    # The weight, its gradient and another one, a batch, its result and the gradient of that.
    assert peak(step, steps=1) >= 3 * BYTES + 16 * 64 * 4
    assert torch.equal(torch.get_rng_state(), generator)


def test_an_iterator_of_the_program_is_not_advanced() -> None:
    batches = iter(DataLoader(TensorDataset(torch.arange(128.0).view(2, 64)), batch_size=1))
    begun = endless(DataLoader(TensorDataset(torch.arange(128.0).view(2, 64)), batch_size=1))
    numbers = iter(range(9))

    def step() -> None:
        next(numbers)
        for source in (batches, begun):
            (batch,) = next(source)
            WEIGHTS(batch.to(WEIGHTS.weight.device)).sum().backward()

    vramx.predict(step, steps=2)
    assert torch.equal(next(batches)[0], torch.arange(64.0)[None])
    assert type(next(begun)[0]) is Tensor
    assert next(numbers) == 0


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def test_a_trainer_that_has_what_cannot_be_copied_is_followed() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.lock, self.model = threading.Lock(), nn.Linear(64, 64)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.count = 0

        def __call__(self) -> None:
            with self.lock:
                self.count += 1
                self.optimizer.zero_grad()
                self.model(torch.ones(4, 64)).sum().backward()
                self.optimizer.step()

    trainer = Trainer()
    before = trainer.model.weight.detach().clone()
    assert vramx.predict(trainer, device="cpu").peak_bytes() > 2 * before.nbytes
    assert torch.equal(trainer.model.weight, before)
    assert trainer.count == 0


def test_a_stream_of_batches_that_ends_is_one_error() -> None:
    batches = iter([torch.zeros(4, 64)])
    with pytest.raises(UntraceableError, match="StopIteration"):
        vramx.predict(lambda: WEIGHTS(next(batches).to(WEIGHTS.weight.device)))


# -- Hooks and storages ----------------------------------------------------------------------------


def test_a_step_in_backward_is_counted() -> None:
    model, x = Stack(3), torch.randn(4, 8)
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}
    for parameter, optimizer in optimizers.items():
        step_in_backward(parameter, optimizer)
    weights = sum(p.nbytes for p in model.parameters())
    assert peak(lambda: model(x).mean().backward()) >= 3 * weights
    assert not any(each.state for each in optimizers.values())


def test_tensors_of_one_storage_share_one() -> None:
    whole = torch.zeros(1 << 12)
    alias, half = whole.detach(), whole.view(torch.int32)[: 1 << 11]
    prediction = vramx.predict(lambda: whole[:1] + alias[:1] + half[:1])
    assert prediction.row().before_bytes == whole.nbytes


# -- Layers whose kernels read data ----------------------------------------------------------------


@pytest.mark.parametrize("library", [__name__, "torch.nn.modules.linear"])
def test_a_function_that_a_module_holds_reads_the_copies_of_its_weights(library: str) -> None:
    """As a head does that is tied to an embedding, in a library or not."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 64)
            self.head = lambda x: x @ self.embedding.weight.t()
            self.head.__module__ = library

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embedding(x))

    tied, tokens = Tied(), torch.arange(64)

    def step() -> None:
        tied.zero_grad()
        tied(tokens).square().sum().backward()

    assert peak(step) >= 4 * 64 * 64 * 4
    assert tied.embedding.weight.grad is None


def test_ctc_is_followed() -> None:
    x = torch.randn(50, 4, 20, requires_grad=True)
    targets = torch.randint(1, 20, (4, 10))
    lengths = torch.full((4,), 50), torch.full((4,), 10)

    def step() -> None:
        nn.functional.ctc_loss(x.log_softmax(-1), targets, *lengths).backward()

    # Probabilities, the forward variables of twice the targets and one, and two gradients.
    assert peak(step, steps=1) >= 3 * x.nbytes + 4 * 50 * 21 * 4


def test_unique_finds_no_element_twice() -> None:
    x = torch.zeros(1 << 14, dtype=torch.long)
    prediction = vramx.predict(lambda: torch.unique(x, return_inverse=True), steps=1)
    assert prediction.peak_bytes() >= 3 * x.nbytes
    assert assumes(prediction, "unique")


def test_a_step_that_is_not_on_the_gpu_is_told_of() -> None:
    def elsewhere() -> None:
        WEIGHTS.cpu()(torch.ones(8, 64)).sum().backward()

    for step in (lambda: torch.ones(8).sum(), elsewhere):
        assert "nothing that the step makes" in vramx.predict(step).assumptions[0]


@pytest.mark.skipif(RELEASE < (2, 11), reason="no mode follows it in torch before 2.11")
def test_flex_attention_makes_no_scores() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    q = torch.zeros(2, 4, 512, 16, requires_grad=True)

    def step() -> None:
        flex(q, q, q, score_mod=lambda score, _b, _h, i, j: score - (i - j).abs()).sum().backward()

    prediction = vramx.predict(step, steps=1)
    scores = 2 * 4 * 512 * 512 * 4
    assert 3 * q.nbytes <= prediction.peak_bytes() < scores
    assert assumes(prediction, "flex_attention")


def test_what_torch_jit_compiled_is_one_clear_line() -> None:
    script = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
    with pytest.raises(UntraceableError, match="has compiled cannot run"):
        vramx.predict(training(script, torch.zeros(4, 64)))


@pytest.mark.parametrize("name", ["silu", "mish"])
def test_what_is_one_kernel_on_a_gpu_is_one_without(name: str) -> None:
    x, function = torch.zeros(1 << 16, requires_grad=True), getattr(nn.functional, name)
    # In backward x and its gradient, and scalars: no copies between the two.
    assert 2 * x.nbytes <= peak(lambda: function(x).sum().backward(), steps=1) < 2.1 * x.nbytes


@pytest.mark.parametrize("keeps", [False, True])
def test_views_of_a_weight_that_was_stepped_since_may_be_kept(keeps: bool) -> None:
    """Torch says of them neither whether they are leaves nor what made them."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 32))

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.weight.chunk(2)
            if keeps:
                self.halves = one, other
            return torch.tanh(x @ one) + x @ other

    model, x = Halves(), torch.randn(16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    found = [vramx.predict(step, device="cpu").peak_bytes() for _ in range(2) if step() is None]
    assert found[0] == found[1]
    # The weight, its gradient, and halves of it; the batch, and results of its size.
    assert 2 * model.weight.nbytes < found[0] < 4 * model.weight.nbytes + 6 * x.nbytes
