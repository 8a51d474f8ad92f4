"""torch.compile, with CUDA graph trees among it, equals eager work.

Data are small integers, so the compiled program must agree with the eager one bit for bit, whatever
it fuses and in whichever order it adds. Each shape runs often enough to pass the warm-up, the
recording and the replays of a graph.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpu.tools import MIB, block, holds, integer_network, integers

pytestmark = pytest.mark.gpu

WIDTH = 64
ROWS = (16, 48)
ROUNDS = 4


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def result_of(network: torch.nn.Module, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what a call gives, and where gradients are on what its backward pass does."""
    network.zero_grad(set_to_none=True)
    y = call(x)
    if not y.requires_grad:
        return [y]
    y.sum().backward()
    return [parameter.grad.clone() for parameter in network.parameters()]


def check(mode: str | None, *, training: bool = False) -> None:
    network = integer_network(WIDTH)
    compiled = torch.compile(network, mode=mode, dynamic=False)
    mine = [block(2 * MIB, 5) for _ in range(4)]
    with torch.set_grad_enabled(training):
        for round_ in range(ROUNDS):
            for rows in ROWS:
                x = integers(rows, WIDTH, seed=round_)
                expected = result_of(network, network, x)
                torch.compiler.cudagraph_mark_step_begin()
                found = result_of(network, compiled, x)
                assert all(map(torch.equal, found, expected))
                mine.append(block(rows * WIDTH * 4, 5))
    assert all(holds(tensor, 5) for tensor in mine)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("training", [False, True])
def test_compiled_work_equals_eager(training: bool, mode: str | None) -> None:
    check(mode, training=training)


def test_reduce_overhead_did_replay_graphs() -> None:
    """Without this the tests above could pass on a compiler that had given up on graphs."""
    from torch._inductor import cudagraph_trees

    network = integer_network(WIDTH)
    compiled = torch.compile(network, mode="reduce-overhead", dynamic=False)
    x = integers(ROWS[0], WIDTH)
    with torch.no_grad():
        for _ in range(ROUNDS):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x)
    manager = cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager
    assert manager is not None
    assert manager.new_graph_id().id > 0


def test_the_history_may_be_on_while_graphs_are_recorded() -> None:
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=10_000)
    try:
        check("reduce-overhead")
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def test_compiled_programs_give_their_memory_back() -> None:
    def used() -> int:
        torch._dynamo.reset()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    before = used()
    check("reduce-overhead")
    assert used() <= before
