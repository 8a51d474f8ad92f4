"""vramx.predict of programs that read values: those that are known, and those that are not."""

from __future__ import annotations

import copy
import sys
from collections import deque  # which a copy of a step shares, as it does no list
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from predict_tools import assumes, peak
from torch import Tensor, nn

import vramx
from vramx.errors import UntraceableError
from vramx.planning.fake_reads import Unread

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
WEIGHTS = nn.Linear(64, 64, bias=False)
BYTES = WEIGHTS.weight.nbytes


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


def test_a_copy_of_a_model_counts_on_by_itself() -> None:
    """As in federated training, or where a step takes an average of weights."""
    norm, x = nn.BatchNorm1d(64), torch.zeros(8, 64)
    seen = deque[Any]()

    def step() -> None:
        copied = copy.deepcopy(norm)
        copied(x).sum().backward()
        state = copy.deepcopy(copied.state_dict())
        seen.append((int(norm.num_batches_tracked), int(state["num_batches_tracked"])))

    vramx.predict(step, steps=1)
    assert [*seen] == [(0, 1)]


def test_lengths_of_a_batch_are_read() -> None:
    lengths = torch.tensor([2, 5, 1])
    x, parts = torch.zeros(8, 64), deque[Any]()

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


def test_tensors_that_are_one_are_equal_and_those_of_another_shape_are_not() -> None:
    """Kernels of Gaussian processes ask whether both of their arguments are the same points."""
    points, numbers = torch.zeros(8, 64), torch.arange(4)
    seen = deque[bool]()

    def step() -> None:
        y = WEIGHTS(points)
        seen.extend(
            [torch.equal(y, y[:]), torch.equal(y, y[1:]), torch.equal(numbers, numbers + 1)]
        )
        seen.extend([torch.allclose(y, y), torch.allclose(numbers, numbers + 1, atol=2.0)])
        if len(seen) > 5:
            torch.allclose(y, y + 1)

    vramx.predict(step, steps=1)
    assert [*seen] == [True, False, False, True, True]
    with pytest.raises(UntraceableError, match=r"reads a value of bool.*test_predict_values"):
        vramx.predict(step, steps=1)


def test_no_layer_is_dropped_by_a_drawn_number() -> None:
    x = torch.zeros(256, 64)

    def step(share: float = 0.9) -> None:
        y = WEIGHTS(x) if torch.rand([]) >= share else x
        y.sum().backward()

    assert peak(step, steps=1) > BYTES + 2 * x.nbytes


@pytest.mark.parametrize(
    "asks", [torch.isnan, torch.isinf, lambda x: ~torch.isfinite(x), lambda x: x != x]
)
def test_numbers_are_taken_for_finite(asks: Any) -> None:
    x = torch.zeros(1 << 17, requires_grad=True)

    def step() -> None:
        if asks(x).any() or not torch.isfinite(x.sum()):
            raise FloatingPointError
        x.sum().backward()

    prediction = vramx.predict(step)
    assert assumes(prediction, "finite")
    assert prediction.peak_bytes() >= 2 * x.nbytes


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_search_for_anomalies_finds_none() -> None:
    x = torch.zeros(1 << 17, requires_grad=True)

    def step() -> None:
        with torch.autograd.detect_anomaly():
            x.sum().backward()

    assert vramx.predict(step).peak_bytes() >= 2 * x.nbytes


def test_a_number_may_be_written_into_a_log() -> None:
    log = deque[str]()

    def step() -> None:
        loss, known = WEIGHTS(torch.ones(1, 64)).sum(), torch.tensor(3)
        log.append(f"{loss:.2f} {known:d} {loss > 0}")

    vramx.predict(step, steps=1, device="cpu")
    assert [*log] == ["0.00 3 False"]


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
    x, labels, said = torch.zeros(32, 64), torch.zeros(32, dtype=torch.long), deque[str]()

    def step() -> None:
        right = (WEIGHTS(x).argmax(-1) == labels).sum().item()
        said.append(f"{100 * right / len(x):.1f}%")

    prediction = vramx.predict(step, steps=1)
    assert [*said] == ["0.0%"]
    assert assumes(prediction, "metric")


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
    x, seen = torch.zeros(32, 64), deque[Any]()

    def step() -> None:
        y = WEIGHTS(x)
        loss = use(y, (y > 0).sum().item())
        seen.append((loss.shape, loss.requires_grad))
        loss.sum().backward()

    vramx.predict(step, steps=1)
    assert [*seen] == [(x.shape, True)]


def test_no_value_is_known_of_a_tensor_beside_an_unread_number() -> None:
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
    x, seen = torch.zeros(4, 64), deque[Any]()

    def step() -> None:
        with torch.no_grad():
            seen.append(WEIGHTS(x).cpu().numpy())

    prediction = vramx.predict(step, steps=1)
    assert (seen[0].shape, seen[0].dtype.name, seen[0].sum()) == ((4, 64), "float32", 0)
    assert assumes(prediction, "numpy")


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_an_operation_takes_within_is_seen_without_autograd(mode: Any) -> None:
    x = torch.zeros(1 << 10, 64)

    def step() -> float:
        with mode():
            return torch.einsum("ij,kj->", x, x.double().float()).sum().item()

    first = peak(step, device="cpu", steps=1)
    assert first == peak(step, device="cpu", steps=1) >= 4 * x.nbytes
