"""compress() around, inside of and beside what compilers make."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
import torch
from compress_tools import Attention, Block, gradient, input_of, recorded_packs, relative_error
from policy_tools import apply_has_a_frame
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import vramx
from vramx.compression.hooks import compress


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def breaks() -> int:
    return len(torch._dynamo.utils.counters["graph_break"])


# What the hooks see of a graph does not say what its backward does; a user may know.
PACKED_GRAPHS = {"CompiledFunction": "int8"}
weights_are_seen = pytest.mark.skipif(
    not apply_has_a_frame, reason="from torch 2.14 on weights of a graph are not told: all is kept"
)


def test_what_a_compiled_block_saves_is_kept() -> None:
    compiled, x = torch.compile(Attention(), backend="aot_eager"), input_of(2, 8, 64)
    exact = gradient(compiled, x)
    context = compress(min_bytes=0)
    assert torch.equal(gradient(compiled, x, context), exact)
    assert "unknown" in context.stats.kept


@weights_are_seen
def test_compiled_blocks_inside_a_context_stay_one_graph_each() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    block, x = Block(), input_of(4, 16, 64)
    compiled = torch.compile(block, backend=counter)
    exact = gradient(block, x)
    for _ in range(3):
        context = compress(min_bytes=0, policy=PACKED_GRAPHS)
        found = gradient(compiled, x, context)
    assert counter.frame_count == 1
    assert breaks() == 0
    assert context.stats.packed.tensors > 3
    assert 0 < relative_error(found, exact) < 0.05


@weights_are_seen
@pytest.mark.parametrize("cast", [False, True])
def test_of_a_compiled_block_activations_are_packed_and_weights_are_not(
    cast: bool, monkeypatch: Any
) -> None:
    block = Block()
    compiled = torch.compile(block, backend="aot_eager")
    x = input_of(1, 2, 64)  # all activations together are smaller than a weight
    with (
        recorded_packs(monkeypatch) as packed,
        torch.autocast("cpu", torch.bfloat16, enabled=cast),
        compress(min_bytes=0, policy=PACKED_GRAPHS) as stats,
    ):
        compiled(x)
    assert stats.packed.tensors > 3
    assert "statistic" not in stats.kept
    weights = {p.numel() for p in block.parameters() if p.dim() == 2}
    assert not [p for p in packed if p.numel() in weights]


def test_a_graph_inside_a_context_has_nothing_of_ours() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([node.op.split("_")[0] for node in graph.graph.nodes])
        return graph.forward

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x) * x.shape[0]

    torch.compile(function, backend=backend)(input_of(8, 8))
    torch._dynamo.reset()
    with compress(min_bytes=0):
        torch.compile(function, backend=backend)(input_of(8, 8))
    assert graphs[0] == graphs[1]


def test_eager_parts_between_graphs_compile_nothing_of_ours() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(x)
        torch._dynamo.graph_break()
        return y.softmax(-1) * y

    counts = []
    for context in (contextlib.nullcontext(), compress(min_bytes=0)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        with context:
            y = torch.compile(function, backend=counter)(input_of(8, 8))
        y.sum().backward()
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]


@pytest.mark.slow
@weights_are_seen
@pytest.mark.parametrize("how", ["instance", "class", "whole"])
def test_a_compressed_module_compiles_within(how: str) -> None:
    class Wrapped(Block):
        pass

    options = {"min_bytes": 0, "policy": PACKED_GRAPHS}
    model = nn.Sequential(Wrapped(), Wrapped())
    targets = {"instance": list(model), "class": [Wrapped], "whole": [model]}[how]
    x = input_of(4, 16, 64)
    exact = gradient(model, x)
    for target in targets:
        vramx.compressed_activations(target, **options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    gradient(compiled, x)
    counts = [vramx.compression_stats(t).packed.tensors for t in targets]
    found = gradient(compiled, x)
    again = [vramx.compression_stats(t).packed.tensors for t in targets]
    assert counter.frame_count == 1  # two blocks of one class share their graph
    assert again == [2 * count for count in counts]
    assert min(counts) > 0
    assert 0 < relative_error(found, exact) < 0.05


@pytest.mark.skipif(
    "reason" not in signature(torch.compiler.disable).parameters,
    reason="this torch does not say why a graph may not go on",
)
def test_inside_a_full_graph_it_says_what_to_do() -> None:
    model = nn.Sequential(vramx.compressed_activations(Block(), min_bytes=0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"put torch\.compile inside of it"):
        torch.compile(model, backend="eager", fullgraph=True)(input_of(4, 16, 64))

    def function(x: torch.Tensor) -> torch.Tensor:
        with compress(min_bytes=0):
            return x.sin()

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"put torch\.compile inside of it"):
        torch.compile(function, backend="eager", fullgraph=True)(input_of(8, 8))


def test_a_context_within_a_compiled_function_works_with_a_graph_break() -> None:
    context = compress(min_bytes=0)

    def function(x: torch.Tensor) -> torch.Tensor:
        with context:
            y = x.tanh()
        return y * 2

    x = input_of(8, 8)
    y = torch.compile(function, backend="aot_eager")(x)
    assert context.stats.packed.tensors == 1
    (found,) = torch.autograd.grad(y.sum(), x)
    assert relative_error(found, 2 - 2 * x.detach().tanh().square()) < 0.05


def test_a_trace_within_a_context_has_nothing_of_ours() -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(4, 8)
    with warnings.catch_warnings(), vramx.compress(min_bytes=0):
        warnings.simplefilter("ignore")  # the tracer is deprecated in newer releases
        traced = torch.jit.trace(module, x)
    assert torch.allclose(traced(x), module(x))
    assert str(traced.inlined_graph).count("aten::") == 2


def test_tracing_and_exporting_pass_through() -> None:
    module = vramx.compressed_activations(Block(), min_bytes=0)
    x = torch.randn(2, 8, 64)
    with torch.no_grad():
        exact = module(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer is deprecated in newer releases
        traced = torch.jit.trace(module, x)
    assert torch.allclose(traced(x), exact, atol=1e-6)
    exported = torch.export.export(module, (x,), strict=False)
    assert torch.allclose(exported.module()(x), exact, atol=1e-6)
    assert vramx.compression_stats(module).tensors == 0
