"""CUDA graphs: what a graph uses stays the graph's, whatever is allocated and freed around it.

Data are small integers, so a replay must equal the same work done eagerly bit for bit.
"""

from __future__ import annotations

import pytest
import torch

from gpu import tools
from gpu.tools import MIB, block, holds, integer_network, integers, settle

pytestmark = pytest.mark.gpu

WIDTH = 128


def work(x, weight):
    """Return something that needs memory of several sizes in between."""
    hidden = [(x @ weight).relu() for _ in range(3)]
    return sum(hidden) + x.repeat(4, 1)[: x.shape[0]]


def captured(weight, pool=None):
    """Capture `work` and return the graph, its input and its output."""
    static_input = torch.zeros(WIDTH, WIDTH, device="cuda")
    graph, output = tools.captured(lambda: work(static_input, weight), pool=pool)
    return graph, static_input, output


def check_replays(graph, static_input, output, weight) -> None:
    for seed in range(1, 4):
        x = integers(WIDTH, WIDTH, seed=seed)
        static_input.copy_(x)
        graph.replay()
        assert torch.equal(output, work(x, weight))


def test_replays_equal_eager_work() -> None:
    weight = integers(WIDTH, WIDTH)
    check_replays(*captured(weight), weight)


def test_what_is_allocated_around_a_capture_is_not_touched_by_replays() -> None:
    weight = integers(WIDTH, WIDTH)
    before = [block(2 * MIB, 3) for _ in range(8)]
    del before[::2]
    graph, static_input, output = captured(weight)
    after = [block(size, 5) for size in (512, WIDTH * WIDTH * 4, 2 * MIB) for _ in range(16)]
    check_replays(graph, static_input, output, weight)
    assert all(holds(tensor, 3) for tensor in before)
    assert all(holds(tensor, 5) for tensor in after)


def test_memory_that_is_freed_in_a_capture_stays_the_graphs() -> None:
    """A temporary's memory has no owner in Python any more, yet every replay writes to it."""
    static_input = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        temporary = static_input + 1
        begin, size = temporary.data_ptr(), temporary.numel()
        output = temporary * 2
        del temporary
    taken = [block(size, 5) for _ in range(32)]
    assert all(abs(tensor.data_ptr() - begin) >= size for tensor in taken)
    static_input.fill_(10)
    graph.replay()
    assert holds(output, 22)
    assert all(holds(tensor, 5) for tensor in taken)


def test_a_tensor_freed_during_a_capture_that_was_made_before_it_is_safe() -> None:
    static_input = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
    outside = [block(2 * MIB, 3) for _ in range(4)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = static_input + 1
        outside.clear()
    static_input.fill_(10)
    graph.replay()
    assert holds(output, 11)


def test_graphs_share_a_pool() -> None:
    """Replayed in the order of their capture, as torch asks of graphs that share one."""
    weight, second_weight = integers(WIDTH, WIDTH), integers(WIDTH, WIDTH, seed=9)
    graph, static_input, output = captured(weight)
    second = captured(second_weight, pool=graph.pool())
    x = integers(WIDTH, WIDTH, seed=4)
    for target in (static_input, second[1]):
        target.copy_(x)
    graph.replay()
    first_result = output.clone()
    second[0].replay()
    assert torch.equal(first_result, work(x, weight))
    assert torch.equal(second[2], work(x, second_weight))


def test_a_deleted_graph_gives_its_memory_back() -> None:
    settle()
    held = torch.cuda.memory_reserved()
    static_input = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = static_input.repeat(256) + 1
    graph.replay()
    assert torch.cuda.memory_reserved() >= held + 256 * MIB
    del graph, output, static_input
    settle()
    assert torch.cuda.memory_reserved() <= held


def test_capturing_and_deleting_again_and_again_leaks_nothing() -> None:
    weight = integers(WIDTH, WIDTH)
    held = []
    for _ in range(5):
        check_replays(*captured(weight), weight)
        # cuBLAS keeps a workspace for each stream that it was called on; a capture has a new one.
        torch._C._cuda_clearCublasWorkspaces()
        settle()
        held.append(torch.cuda.memory_reserved())
    assert held[-1] == held[1]


def test_statistics_include_what_graphs_hold() -> None:
    before = torch.cuda.memory_allocated()
    static_input = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = static_input + 1
    assert torch.cuda.memory_allocated() - before >= 64 * MIB
    segments = torch.cuda.memory_snapshot()
    assert sum(each["total_size"] for each in segments) == torch.cuda.memory_reserved()
    assert sum(each["allocated_size"] for each in segments) == torch.cuda.memory_allocated()
    pool = [each for each in segments if tuple(each["segment_pool_id"]) == tuple(graph.pool())]
    assert sum(each["allocated_size"] for each in pool) >= 32 * MIB
    pieces = {piece["address"] for segment in pool for piece in segment["blocks"]}
    assert output.data_ptr() in pieces


def test_graphed_callables_train_as_the_plain_ones_do() -> None:
    plain, graphed = integer_network(WIDTH), integer_network(WIDTH)
    sample = torch.zeros(16, WIDTH, device="cuda", requires_grad=True)
    call = torch.cuda.make_graphed_callables(graphed, (sample,))
    for seed in range(3):
        x = integers(16, WIDTH, seed=seed)
        inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
        results = plain(inputs[0]), call(inputs[1])
        for result in results:
            result.sum().backward()
        assert torch.equal(*results)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for ours, theirs in zip(graphed.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        # As torch asks of a loop with graphed callables: their gradients live in the graph.
        for network in (plain, graphed):
            network.zero_grad(set_to_none=True)
        assert holds(block(WIDTH * WIDTH * 4, 7), 7)
