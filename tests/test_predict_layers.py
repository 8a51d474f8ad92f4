"""vramx.predict of layers that have kernels of their own: recurrent ones, and sparse embeddings."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import pytest
import torch
from predict_tools import assumes, measured_bytes, peak, training
from torch import nn
from torch._C._profiler import _EventType
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.profiler import ProfilerActivity, profile

import vramx
from vramx.errors import UntraceableError

STEPS, ROWS, WIDTH = 5, 4, 32
STATE_BYTES = ROWS * WIDTH * 4
# What autograd keeps of one step, in states: the gates of input and state, what a kernel saves of
# the gates, and the states that come out. torch's own kernel of an RNN keeps its state alone.
KEPT = {nn.LSTM: 4 + 4 + 4 + 2, nn.GRU: 3 + 3 + 5 + 1, nn.RNN: 1}


def flattened(layer: nn.RNNBase) -> nn.RNNBase:
    """Have all weights lie in one storage, as flatten_parameters() does on a GPU."""
    weights = list(layer.parameters())
    parts = torch.zeros(sum(w.numel() for w in weights)).split([w.numel() for w in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.data = part.view(weight.shape)
    return layer


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("kind", KEPT)
def test_a_layer_keeps_what_torchs_own_kernels_do(kind: Any, nonlinearity: str) -> None:
    options = {"nonlinearity": nonlinearity} if kind is nn.RNN else {}
    layer = flattened(kind(WIDTH, WIDTH, **options))
    x = torch.zeros(STEPS, ROWS, WIDTH)
    there = x.nbytes + sum(weight.nbytes for weight in layer.parameters())
    row = vramx.predict(lambda: layer(x), policies="live", steps=1).row()
    assert row.before_bytes == there
    # Beside each step: the stacked output, and the states before the first and after the last.
    states = (KEPT[kind] + 1) * STEPS + 2 * (2 if kind is nn.LSTM else 1)
    assert row.peak_bytes["live"] == there + states * STATE_BYTES


DEEP = {"num_layers": 2, "bidirectional": True}


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in KEPT), (nn.LSTM, DEEP)], ids=str
)
def test_weights_in_one_storage_count_once(kind: Any, options: Any) -> None:
    layer, x = kind(WIDTH, WIDTH, batch_first=True, **options), torch.zeros(ROWS, STEPS, WIDTH)
    optimizer = torch.optim.AdamW(layer.parameters())

    def step() -> None:
        layer(x)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    apart = peak(step)
    flattened(layer)
    assert peak(step) == apart


@pytest.mark.parametrize(
    ("kind", "options", "lengths"),
    [
        *((kind, options, [1, 5, 5]) for kind in KEPT for options in ({}, DEEP)),
        (nn.LSTM, {}, [5, 3, 1]),  # in order
    ],
    ids=str,
)
def test_packed_rows_take_what_real_steps_do(kind: Any, options: Any, lengths: list[int]) -> None:
    layer, of_each = kind(16, WIDTH, batch_first=True, **options), torch.tensor(lengths)
    x = torch.randn(len(lengths), max(lengths), 16)

    def step() -> None:
        out = layer(pack_padded_sequence(x, of_each, True, enforce_sorted=False))[0]
        padded, found = pad_packed_sequence(out, batch_first=True)
        assert padded.shape[:2] == x.shape[:2]
        assert found.tolist() == lengths
        padded.sum().backward()
        layer.zero_grad()

    assert peak(step, device="cpu") == measured_bytes(step, layer, x, of_each)


# --- sparse gradients -----------------------------------------------------------------------------


WORDS, ENTRIES, COUNT = 5000, 64, 2000
# An int64 says where an element is.
GRADIENT_BYTES = COUNT * (ENTRIES * 4 + 8)


def embedding() -> tuple[nn.Embedding, torch.Tensor]:
    """Return an embedding and words of which none comes twice."""
    return nn.Embedding(WORDS, ENTRIES, sparse=True), torch.randperm(WORDS)[:COUNT].clone()


def taken_bytes(step: Any) -> int:
    """Return the most that a step takes of the host's allocator.

    No mode watches it: torch copies a sparse gradient that one refers to.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    results: Any = profiled.profiler
    events, sizes = [*results.kineto_results.experimental_event_tree()], []
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    return max(itertools.accumulate(size for _, size in sorted(sizes)))


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD]
)
def test_a_step_takes_what_real_ones_do(optimizer: Any) -> None:
    model, words = embedding()
    learner = optimizer(list(model.parameters()), lr=0.1)

    def step() -> None:
        model(words).square().mean().backward()
        learner.step()
        learner.zero_grad()

    prediction = vramx.predict(step, device="cpu", policies="live")
    step()
    states = [x for state in learner.state.values() for x in state.values()]
    there = sum(x.nbytes for x in (model.weight, words, *states) if isinstance(x, torch.Tensor))
    # Numbers on a host are tensors of their own for a moment: up to two at once.
    assert abs(prediction.peak_bytes() - there - taken_bytes(step)) <= 2 * 8
    assert assumes(prediction, "no two elements") == (optimizer is not torch.optim.SGD)


def test_gradients_that_add_up_are_joined_one_to_another() -> None:
    model, words = embedding()

    def step(count: int) -> None:
        for _ in range(count):
            model(words).square().mean().backward()
        model.zero_grad()

    assert peak(step, 3, steps=1) == peak(step, 1, steps=1) + 2 * GRADIENT_BYTES


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_have_a_gradient_of_each_word(mode: str) -> None:
    bag = nn.EmbeddingBag(WORDS, ENTRIES, sparse=True, mode=mode)
    words = torch.randint(0, WORDS, (COUNT // 20, 20))
    held = deque[int]()  # which a copy of a step shares, as it does no list

    def step() -> None:
        bag(words).sum().backward()
        assert bag.weight.grad is not None
        held.append(bag.weight.grad._nnz())

    assert peak(step, steps=1) >= bag.weight.nbytes + words.nbytes + GRADIENT_BYTES
    assert [*held] == [COUNT]


def test_a_sparse_tensor_that_is_taken_for_empty_is_told_of() -> None:
    bag = nn.EmbeddingBag(WORDS, ENTRIES, sparse=True, mode="sum")
    words = torch.randint(0, WORDS, (COUNT // 20, 20))
    prediction = vramx.predict(training(bag, words), device="cpu", steps=1)
    # On a host the words' bags are found within the kernel of the gradient.
    assert assumes(prediction, "is taken for empty")


@pytest.mark.parametrize("made_before", [False, True])
def test_a_sparse_matrix_of_known_places_is_counted(made_before: bool) -> None:
    """As the adjacency of a graph; it is small enough for its values to be known.

    The kernel's own copy of the edges in order is not seen.
    """
    places, linear = torch.randint(0, 200, (2, 8000)), nn.Linear(ENTRIES, 4096)
    x, values = torch.randn(200, ENTRIES), torch.ones(8000)
    given = torch.sparse_coo_tensor(places, values, (200, 200)) if made_before else None

    def step() -> None:
        edges = torch.sparse_coo_tensor(places, values, (200, 200)) if given is None else given
        (edges @ linear(x)).square().sum().backward()

    there = sum(each.nbytes for each in (places, values, x, *linear.parameters()))
    predicted = peak(step, device="cpu", steps=1)
    assert predicted - there == pytest.approx(taken_bytes(step), rel=0.05)


@pytest.mark.parametrize(
    "product", [torch.mm, torch.sparse.mm, torch.matmul, lambda a, x: torch.mm(a.t(), x)]
)
def test_a_product_with_a_sparse_matrix_is_predicted_on_a_gpu(product: Any) -> None:
    edges, linear, x = torch.eye(200).to_sparse(), nn.Linear(ENTRIES, 64), torch.ones(200, ENTRIES)

    def step() -> None:
        product(edges, linear(x)).sum().backward()

    assert peak(step, steps=1) == peak(step, device="cpu", steps=1)


def test_a_sparse_buffer_that_no_step_reads_is_counted_alone() -> None:
    """As Whisper has, of the heads that align."""
    model = nn.Linear(8, 8)
    model.register_buffer("heads", torch.eye(8).to_sparse())
    without = nn.Linear(8, 8)
    x = torch.ones(4, 8)
    elements = model.heads.indices().nbytes + model.heads.values().nbytes
    assert peak(model, x, steps=1) == peak(without, x, steps=1) + elements


@pytest.mark.parametrize("layout", ["to_sparse_csr", "to_sparse_csc"])
def test_a_sparse_tensor_of_the_program_is_said_to_be_one(layout: str) -> None:
    matrix, x = getattr(torch.eye(8), layout)(), torch.ones(8, 8, requires_grad=True)
    with pytest.raises(UntraceableError, match="accepted are strided tensors"):
        vramx.predict(lambda: (matrix @ x).sum().backward())
