"""compress() beside the rest of torch: checkpoints, other hooks, compilers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
import torch
from compress_tools import Attention, Block, gradient, held_bytes, recorded_packs, relative_error
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import vramx
from vramx.compression import enclosing, hooks
from vramx.compression.hooks import compress
from vramx.errors import VramxWarning


def input_of(*shape: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(*shape, requires_grad=True) * 1.0


class Checkpointed(nn.Module):
    """A block whose forward is a checkpoint, with or without compression within."""

    def __init__(self, *, reentrant: bool = False, inside: bool = False) -> None:
        super().__init__()
        self.block = Block()
        self.reentrant = reentrant
        self.context = compress(min_bytes=0) if inside else contextlib.nullcontext()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            with self.context:
                return self.block(x)

        return checkpoint(region, x, use_reentrant=self.reentrant)


# Checkpoints


def test_inside_a_checkpoint_it_steps_aside_and_says_so_once() -> None:
    hooks._warn_of_checkpoint.cache_clear()
    module, x = Checkpointed(inside=True), input_of(4, 16, 64)
    with pytest.warns(VramxWarning, match="does nothing"):
        found = gradient(module, x)
    assert torch.equal(found, gradient(module.block, x))
    assert module.context.stats.tensors == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient(module, x)


def test_inside_a_checkpoint_nothing_but_the_input_is_held() -> None:
    module, x = Checkpointed(inside=True), input_of(8, 64, 64)
    module(x)
    taken, y = held_bytes(lambda: module(x).sum())
    assert taken < 0.1 * x.numel() * 4  # the input is the caller's
    del y


def test_without_the_detection_the_checkpoint_would_keep_everything(monkeypatch: Any) -> None:
    monkeypatch.setattr(enclosing, "in_checkpoint", lambda: False)
    with pytest.raises(AssertionError):
        test_inside_a_checkpoint_nothing_but_the_input_is_held()


@pytest.mark.parametrize("reentrant", [False, True])
def test_around_a_checkpoint_its_input_is_kept(reentrant: bool) -> None:
    """The region computes with it again, and may compare or round what it finds."""
    module, x = Checkpointed(reentrant=reentrant), input_of(4, 16, 64)
    exact = gradient(module, x)
    context = compress(min_bytes=0)
    assert torch.equal(gradient(module, x, context), exact)
    assert context.stats.packed.tensors == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_around_a_checkpoint_its_input_is_packed_if_a_policy_says_so(
    reentrant: bool, monkeypatch: Any
) -> None:
    module, x = Checkpointed(reentrant=reentrant), input_of(4, 16, 64)
    exact = gradient(module, x)
    policy = {"checkpoint": "int8", "CheckpointFunction": "int8"}
    with recorded_packs(monkeypatch) as packed:
        found = gradient(module, x, compress(min_bytes=0, policy=policy))
    assert len(packed) == 1
    assert torch.equal(packed[0], x.detach().flatten())
    assert 0 < relative_error(found, exact) < 0.05


def test_dropout_is_recomputed_alike() -> None:
    module, x = Checkpointed(), input_of(4, 16, 64)
    module.block.dropout.p = 0.3
    assert relative_error(gradient(module, x, compress(min_bytes=0)), gradient(module, x)) < 0.05


def test_a_context_within_a_checkpoint_within_a_context() -> None:
    hooks._warn_of_checkpoint()
    module, x = Checkpointed(inside=True), input_of(4, 16, 64)
    outer = compress(min_bytes=0, policy={"checkpoint": "int8"})
    gradient(module, x, outer)
    assert outer.stats.packed.tensors == 1
    assert module.context.stats.tensors == 0


# Other hooks


def test_inside_of_save_on_cpu_ours_are_innermost() -> None:
    block, x = Block(), input_of(4, 16, 64)
    with torch.autograd.graph.save_on_cpu(), compress(min_bytes=0) as stats:
        block(x)
    assert stats.packed.tensors > 0


def test_hooks_inside_of_ours_are_left_alone() -> None:
    x = input_of(8, 8)
    with compress(min_bytes=0) as stats, torch.autograd.graph.save_on_cpu():
        x.sin()
    assert stats.tensors == 0


def test_where_hooks_are_forbidden_it_does_nothing() -> None:
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        compress(min_bytes=0) as stats,
    ):
        input_of(8, 8).sin()
    assert stats.tensors == 0


# Scaling, accumulation, sharing


def test_a_gradient_scaler_sees_an_overflow() -> None:
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = layer.weight.detach().clone()
    x = input_of(8, 64)
    with torch.no_grad():
        x[3, 5] = float("inf")
    with compress(min_bytes=0):
        y = layer(x)
    # The loss is finite: only what was saved knows of the overflow.
    scaler.scale(y.nan_to_num(0, 0, 0).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() < 4.0


def test_a_layer_that_is_called_twice_gets_both_gradients() -> None:
    layer, x = nn.Linear(64, 64), input_of(8, 64)
    twice = nn.Sequential(layer, nn.Tanh(), layer)
    assert relative_error(gradient(twice, x, compress(min_bytes=0)), gradient(twice, x)) < 0.05


def test_gradients_accumulate_over_forward_passes() -> None:
    layer, one, two = nn.Linear(64, 64), input_of(8, 64), input_of(8, 64) * 3
    with compress(min_bytes=0):
        losses = [layer(one).sum(), layer(two).sum()]
    for loss in losses:
        loss.backward()
    expected = (one + two).detach().sum(0).expand(64, 64)
    assert layer.weight.grad is not None
    assert relative_error(layer.weight.grad, expected) < 0.05


# Compilers


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def breaks() -> int:
    return len(torch._dynamo.utils.counters["graph_break"])


# What the hooks see of a graph does not say what its backward does; a user may know.
PACKED_GRAPHS = {"CompiledFunction": "int8"}


@pytest.mark.usefixtures("_fresh_compiler")
def test_what_a_compiled_block_saves_is_kept() -> None:
    compiled, x = torch.compile(Attention(), backend="aot_eager"), input_of(2, 8, 64)
    exact = gradient(compiled, x)
    context = compress(min_bytes=0)
    assert torch.equal(gradient(compiled, x, context), exact)
    assert "unknown" in context.stats.kept


@pytest.mark.usefixtures("_fresh_compiler")
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


@pytest.mark.usefixtures("_fresh_compiler")
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


@pytest.mark.usefixtures("_fresh_compiler")
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


@pytest.mark.usefixtures("_fresh_compiler")
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


@pytest.mark.usefixtures("_fresh_compiler")
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
@pytest.mark.usefixtures("_fresh_compiler")
def test_inside_a_full_graph_it_says_what_to_do() -> None:
    model = nn.Sequential(vramx.compressed_activations(Block(), min_bytes=0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"put torch\.compile inside of it"):
        torch.compile(model, backend="eager", fullgraph=True)(input_of(4, 16, 64))

    def function(x: torch.Tensor) -> torch.Tensor:
        with compress(min_bytes=0):
            return x.sin()

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"put torch\.compile inside of it"):
        torch.compile(function, backend="eager", fullgraph=True)(input_of(8, 8))


@pytest.mark.usefixtures("_fresh_compiler")
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
