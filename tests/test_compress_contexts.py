"""Contexts of compress(): within each other, on threads, dropped, and what they say."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from compress_tools import Block, gradient, input_of, table
from test_compress import _nothing_is_left

from vramx import errors
from vramx.compression import enclosing
from vramx.compression import stats as stats_module
from vramx.compression.hooks import compress
from vramx.compression.stats import CompressionStats
from vramx.errors import InvalidValueError, VramxWarning
from vramx.sizes import format_size

__all__ = ["_nothing_is_left"]  # a fixture


def test_an_exception_leaves_no_hooks() -> None:
    with pytest.raises(KeyError), compress(min_bytes=0):
        raise KeyError
    with compress(min_bytes=0) as stats:
        pass
    (input_of(64, 64) * 2).tanh()
    assert stats.tensors == 0
    assert not torch._C._is_torch_function_mode_enabled()


@pytest.mark.parametrize("is_told", [True, False], ids=["torch tells", "before 2.8"])
def test_the_innermost_context_decides(is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_told:
        monkeypatch.setattr(enclosing, "_top_hooks", None)
    x = input_of(64, 64)
    with compress(min_bytes=0) as outer:
        x.tanh()
        with compress(min_bytes=0) as inner:
            x.sigmoid()
        with compress(level="keep") as off:
            x.exp()
    assert set(outer.operations) == {"tanh"}
    assert set(inner.operations) == {"sigmoid"}
    assert off.packed.tensors == 0
    assert off.kept["disabled"].tensors == 1


def test_where_saved_tensors_may_be_written_into_they_may() -> None:
    errors._said.clear()
    layer, x = torch.nn.Linear(64, 64), input_of(8, 64)
    expected = layer.weight.detach().sum(0)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        with pytest.warns(VramxWarning, match="allow_mutation"), compress(min_bytes=0):
            y = layer(x)
        with torch.no_grad():
            layer.weight.mul_(2)
        (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_or_anything_to_opt_out_of_nothing_is_pushed(mode: Any) -> None:
    with mode(), compress(min_bytes=0) as stats:
        assert not torch._C._is_torch_function_mode_enabled()
        Block()(torch.randn(2, 8, 64))
    assert stats.tensors == 0
    with compress(level="keep"):
        assert not torch._C._is_torch_function_mode_enabled()


def test_one_context_is_entered_again_and_on_threads_which_are_outside_else() -> None:
    context = compress(min_bytes=0)
    x = input_of(64, 64)

    def work() -> None:
        x.exp().tanh()
        with context:
            x.tanh()

    with context, context:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        x.sigmoid()
    assert context.stats.operations["tanh"].tensors == 4
    assert context.stats.operations["sigmoid"].tensors == 1
    assert "exp" not in context.stats.operations


def test_steps_and_graphs_that_are_dropped_leave_nothing_behind() -> None:
    block, x = Block(), input_of(2, 8, 64)
    gradient(block, x, compress(min_bytes=0))
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(30):
        gradient(block, x, compress(min_bytes=0))
    gc.collect()
    assert len(table()) == 0
    assert len(gc.get_objects()) - before < 30  # not one object a step
    with compress(min_bytes=0):
        y = block(x)
    assert len(table()) > 0
    del y
    assert len(table()) == 0


def test_deterministic_noise_depends_on_the_order_of_steps_only(monkeypatch: Any) -> None:
    block, x = Block(), input_of(4, 16, 64)
    context = compress(min_bytes=0, deterministic=True)
    first, second = gradient(block, x, context), gradient(block, x, context)
    assert not torch.equal(first, second)
    context._entered.steps = 0
    gradient(block, x, compress(min_bytes=0))  # other noise in between
    assert torch.equal(gradient(block, x, context), first)


KNOWN = r"accepted are .keep., .int8., .int4. and a"


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ((), {"levels": "int4"}, "'levels' is not .*did you mean 'level'.*accepted are 'lev"),
        ((), {"level": "int5"}, "level 'int5' .* 'keep', 'int8' and 'int4'"),
        ((4,), {}, f"level 4 is not accepted; {KNOWN}"),
    ],
)
def test_an_option_that_is_not_accepted_raises(given: Any, options: Any, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        compress(*given, **options)


def test_the_summary_says_what_happened() -> None:
    block, x = Block(), input_of(8, 64, 64)
    context = compress(min_bytes=1024)
    gradient(block, x, context)
    text = str(context.stats)
    assert text.startswith("saved ")
    assert "shared; kept: policy" in text
    # The weights, 12 * 64 * 64 numbers, and the norms' weights and biases.
    assert text.endswith(f"params {format_size((12 * 64 * 64 + 4 * 64) * 4)}")
    assert "scaled_dot_product_a" in context.stats.table()
    total = context.stats.packed.kept_bytes + sum(
        tally.kept_bytes for reason, tally in context.stats.kept.items() if reason != "parameter"
    )
    assert total == context.stats.kept_bytes


# -- Counts: of every tensor once, from any thread, whenever they are read ------------------------

THREADS, RECORDS = 4, 3000


def recorded() -> CompressionStats:
    stats = CompressionStats()
    stats.record("linear", "", 200, 100)
    stats.record("linear", "", 200, 100)
    stats.record("gelu", "small", 8, 8)
    stats.record("linear", "parameter", 64, 64)
    stats.record("linear", "", 0, 0, shared_bytes=200)
    return stats


def test_no_count_of_any_thread_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another thread reads, with a sum every few records."""
    monkeypatch.setattr(stats_module, "_MOST_NOTES", 7)
    stats = CompressionStats()
    done = threading.Event()

    def record() -> None:
        for _ in range(RECORDS):
            stats.record("linear", "", 2, 1)

    def read() -> None:
        while not done.is_set():
            assert stats.saved_bytes % 2 == 0

    reader = threading.Thread(target=read)
    threads = [threading.Thread(target=record) for _ in range(THREADS)]
    for thread in (*threads, reader):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    reader.join()
    assert stats.tensors == THREADS * RECORDS


def test_notes_are_bounded() -> None:
    stats = CompressionStats()
    for _ in range(2 * stats_module._MOST_NOTES):
        stats.record("linear", "", 2, 1)
        assert len(stats._notes) < stats_module._MOST_NOTES


def test_counts_are_equal_travel_by_pickle_and_are_reset_with_what_was_not_yet_summed() -> None:
    stats = recorded()
    assert pickle.loads(pickle.dumps(stats)) == recorded()
    stats.record("linear", "", 1, 1)
    assert stats != recorded()
    stats.reset()
    assert stats == CompressionStats()
