"""vramx.predict of programs that read values, load batches, step in backward or share storages."""

from __future__ import annotations

import sys
from collections import deque  # which a copy of a step shares, as it does no list
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_tools import Stack
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import vramx
from vramx.errors import UntraceableError
from vramx.planning.fake_reads import Unread

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
WEIGHTS = nn.Linear(64, 64, bias=False)
BYTES = WEIGHTS.weight.nbytes


def peak(step: Any, **options: Any) -> int:
    return vramx.predict(step, policies="live", **options).peak_bytes()


# -- Values that are known -------------------------------------------------------------------------


def test_a_place_in_a_queue_moves_on() -> None:
    queue, place = torch.zeros(8, 4), torch.zeros(1, dtype=torch.long)
    seen = deque[Any]()

    def step() -> None:
        at = int(place)
        queue[at : at + 2] = torch.ones(2, 4, device=queue.device)
        place[0] = (at + 2) % 8
        seen.append(at)

    vramx.predict(step, steps=4)
    assert ([*seen], int(place)) == ([0, 2, 4, 6], 0)


def test_lengths_of_a_batch_are_read() -> None:
    lengths = torch.tensor([2, 5, 1])
    x = torch.zeros(8, 64)
    parts = deque[Any]()

    def step() -> None:
        parts.append([WEIGHTS(part).shape[0] for part in x.split(lengths.tolist())])

    vramx.predict(step, steps=1)
    assert [*parts] == [[2, 5, 1]]


def test_what_a_write_of_unknown_data_spoils_is_not_read() -> None:
    numbers = torch.arange(4)
    view = numbers[1:]

    def step() -> None:
        view.copy_(torch.randint(4, (3,), device=view.device))
        if numbers[2] > 2:
            numbers.zero_()

    with pytest.raises(UntraceableError, match="reads a value of bool"):
        vramx.predict(step, steps=1)
    assert numbers.tolist() == [0, 1, 2, 3]


def test_no_layer_is_dropped_by_a_drawn_number() -> None:
    x = torch.zeros(256, 64)

    def step(share: float = 0.9) -> None:
        y = WEIGHTS(x) if torch.rand([]) >= share else x
        y.sum().backward()

    assert peak(step, steps=1) > BYTES + 2 * x.nbytes


@pytest.mark.parametrize("asks", [torch.isnan, torch.isinf, lambda x: ~torch.isfinite(x)])
def test_numbers_are_taken_for_finite(asks: Any) -> None:
    x = torch.zeros(1 << 17, requires_grad=True)

    def step() -> None:
        if asks(x).any() or not torch.isfinite(x.sum()):
            raise FloatingPointError
        x.sum().backward()

    prediction = vramx.predict(step)
    assert any("finite" in each for each in prediction.assumptions)
    assert prediction.peak_bytes() >= 2 * x.nbytes


def test_a_tensor_of_tensors_is_known_where_all_of_them_are() -> None:
    known, unknown = torch.tensor(3), torch.zeros(1 << 14).sum()
    seen = deque[Any]()

    def step() -> None:
        seen.append(int(torch.tensor([known, known + 1], device="cuda").sum()))
        if torch.tensor([known, (unknown * torch.randn(4)[0]).long()]).sum() > 2:
            seen.append("read")

    with pytest.raises(UntraceableError, match="reads a value of bool"):
        vramx.predict(step)
    assert [*seen] == [7]


def test_transformers_looks_at_a_mask_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = SimpleNamespace(is_tracing=lambda tensor: type(tensor) is not Tensor)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masks)
    mask, seen = torch.ones(4, 2048, dtype=torch.long), deque[Any]()

    def step() -> None:
        known = mask == 1
        seen.extend([masks.is_tracing(known), bool(known.all())])
        seen.append(masks.is_tracing(torch.randint_like(mask, 2)))

    vramx.predict(step, steps=1)
    assert [*seen] == [False, True, True]


# -- Reads that decide nothing ---------------------------------------------------------------------


def test_a_metric_may_count() -> None:
    x, labels = torch.zeros(32, 64), torch.zeros(32, dtype=torch.long)
    said = deque[Any]()

    def step() -> None:
        right = (WEIGHTS(x).argmax(-1) == labels).sum().item()
        said.append(f"{100 * right / len(x):.1f}%")

    prediction = vramx.predict(step, steps=1)
    assert [*said] == ["0.0%"]
    assert any("metric" in each for each in prediction.assumptions)


@pytest.mark.parametrize("use", [range, bool, int, lambda n: n > 1, lambda n: [0][n]])
def test_an_unread_number_decides_nothing(use: Any) -> None:
    with pytest.raises(UntraceableError, match="reads a value of int64"):
        use(2 * Unread("int64") + 1)


@pytest.mark.parametrize(
    "use",
    [
        *(lambda x, n: x * n, lambda x, n: n * x, lambda x, n: n - x, lambda x, n: x + n),
        *(lambda x, n: x / n, lambda x, n: n / (1 + x.exp())),
    ],
)
def test_a_tensor_beside_an_unread_number_is_a_tensor(use: Any) -> None:
    """As a loss is that is divided by how many tokens count."""
    x = torch.zeros(32, 64)
    seen = deque[Any]()

    def step() -> None:
        y = WEIGHTS(x)
        loss = use(y, (y > 0).sum().item())
        seen.append((loss.shape, loss.requires_grad))
        loss.sum().backward()

    vramx.predict(step, steps=1)
    assert [*seen] == [(x.shape, True)]


def test_of_a_tensor_beside_an_unread_number_no_value_is_known() -> None:
    x, count = torch.zeros(32, 64), torch.tensor(3)

    def step() -> None:
        if count * WEIGHTS(x).argmax().item() > 2:
            raise AssertionError

    with pytest.raises(UntraceableError, match="reads a value of bool"):
        vramx.predict(step, steps=1)


@pytest.mark.parametrize(
    "use",
    [
        *(lambda x, n: x[n], lambda x, n: x[0, n], lambda x, n: x.select(0, n)),
        *(lambda x, n: torch.arange(n), lambda x, n: torch.full((2,), n)),
    ],
)
def test_an_unread_number_that_torch_is_given_is_named(use: Any) -> None:
    x = torch.zeros(32, 64)

    def step() -> None:
        y = WEIGHTS(x)
        use(y, y.argmax().item())

    with pytest.raises(UntraceableError, match=r"depends on data, and is read by item\(\)"):
        vramx.predict(step, steps=1)


def test_arrays_are_zeros_of_the_same_kind() -> None:
    x = torch.zeros(4, 64)
    seen = deque[Any]()

    def step() -> None:
        with torch.no_grad():
            seen.append(WEIGHTS(x).cpu().numpy())

    prediction = vramx.predict(step, steps=1)
    assert (seen[0].shape, seen[0].dtype.name, seen[0].sum()) == ((4, 64), "float32", 0)
    assert any("numpy" in each for each in prediction.assumptions)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_an_operation_takes_within_is_seen_without_autograd(mode: Any) -> None:
    x = torch.zeros(1 << 10, 64)

    def step() -> float:
        with mode():
            return torch.einsum("ij,kj->", x, x.double().float()).sum().item()

    assert peak(step, device="cpu", steps=1) == peak(step, device="cpu", steps=1)
    assert peak(step, device="cpu", steps=1) >= 4 * x.nbytes


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


# -- Hooks and storages ----------------------------------------------------------------------------


def test_a_step_in_backward_is_counted() -> None:
    model, x = Stack(3), torch.randn(4, 8)
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def learn(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(learn) for p in model.parameters()]
    weights = sum(p.nbytes for p in model.parameters())
    assert peak(lambda: model(x).mean().backward()) >= 3 * weights
    assert not any(each.state for each in optimizers.values())
    for handle in handles:
        handle.remove()


def test_tensors_of_one_storage_share_one() -> None:
    whole = torch.zeros(1 << 12)
    alias, half = whole.detach(), whole.view(torch.int32)[: 1 << 11]

    def step() -> Tensor:
        return whole[:1] + alias[:1] + half[:1]

    assert vramx.predict(step).row().before_bytes == whole.nbytes


# -- Layers whose kernels read data ----------------------------------------------------------------


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
    assert any("unique" in each for each in prediction.assumptions)


def test_a_step_that_is_not_on_the_gpu_is_told_of() -> None:
    def elsewhere() -> None:
        WEIGHTS.cpu()(torch.ones(8, 64)).sum().backward()

    for step in (lambda: torch.ones(8).sum(), elsewhere):
        assert "nothing that the step makes" in vramx.predict(step).assumptions[0]


def test_a_stream_of_batches_that_ends_is_one_error() -> None:
    batches = iter([torch.zeros(4, 64)])

    def step() -> None:
        WEIGHTS(next(batches).to(WEIGHTS.weight.device))

    with pytest.raises(UntraceableError, match="StopIteration"):
        vramx.predict(step)


@pytest.mark.skipif(RELEASE < (2, 11), reason="no mode follows it in torch before 2.11")
def test_flex_attention_makes_no_scores() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    q = torch.zeros(2, 4, 512, 16, requires_grad=True)

    def step() -> None:
        flex(q, q, q, score_mod=lambda score, _b, _h, i, j: score - (i - j).abs()).sum().backward()

    prediction = vramx.predict(step, steps=1)
    scores = 2 * 4 * 512 * 512 * 4
    assert 3 * q.nbytes <= prediction.peak_bytes() < scores
    assert any("flex_attention" in each for each in prediction.assumptions)


def test_what_torch_jit_compiled_is_one_clear_line() -> None:
    script = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
    x = torch.zeros(4, 64)
    with pytest.raises(UntraceableError, match="has compiled cannot run"):
        vramx.predict(lambda: script(x).sum().backward())


@pytest.mark.parametrize("name", ["silu", "mish"])
def test_what_is_one_kernel_on_a_gpu_is_one_without(name: str) -> None:
    x = torch.zeros(1 << 16, requires_grad=True)

    def step() -> None:
        getattr(nn.functional, name)(x).sum().backward()

    # In backward x and its gradient, and scalars: no copies between the two.
    assert 2 * x.nbytes <= peak(step, steps=1) < 2.1 * x.nbytes
