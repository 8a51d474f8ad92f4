"""Compression around, and inside of, what torch.compile makes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from compress_tools import relative_error
from torch import fx, nn
from torch._dynamo.utils import counters

import vramx
from vramx.compression import graph
from vramx.compression.config import Compression
from vramx.compression.graph import compressed_graphs
from vramx.compression.policy import graph_policy
from vramx.errors import UnsupportedTorchError
from vramx.recompute import inputs

SMALL = Compression(min_bytes=0)
WIDTH = 128
inlines = pytest.mark.skipif(
    graph._hook_context is None, reason="this torch does not say what hooks are inlined for"
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH), nn.SiLU())


def gradients(model: Any, call: Any, x: torch.Tensor, within: Any = None) -> torch.Tensor:
    """Return all gradients of `call`, run in a context, as one vector."""
    model.zero_grad()
    with within or contextlib.nullcontext():
        y = call(x)
    y.square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def error_of(model: Any, call: Any, x: torch.Tensor, program: Any = None) -> float:
    """Return the error of what a compiled call's gradients are with codes."""
    found = gradients(model, call, x, compressed_graphs(SMALL))
    return relative_error(found, gradients(model, program or model, x))


def saved_dtypes(y: torch.Tensor) -> list[torch.dtype]:
    return [tensor.dtype for tensor in y.grad_fn.saved_tensors]


# A step of 8 bits is 1/127 of a group's largest value, some 3 standard deviations of 128 normal
# ones; rounding by chance errs by sqrt(1/6) of it: 1 % of a value, and so of a gradient that is
# linear in it. At 4 bits a step is 1/15 of the range of 64, some 5 standard deviations: 14 %.
@inlines
@pytest.mark.parametrize(("bits", "bound"), [(8, 0.02), (4, 0.2)])
def test_a_whole_graph_keeps_codes(bits: int, bound: float) -> None:
    model, x = net(), torch.randn(64, WIDTH)
    compiled = torch.compile(model, backend="aot_eager")
    options = Compression(level=f"int{bits}", min_bytes=0)
    found = gradients(model, compiled, x, compressed_graphs(options))
    assert 0 < relative_error(found, gradients(model, model, x)) < bound
    with compressed_graphs(options):
        dtypes = saved_dtypes(compiled(x))
    assert dtypes.count(torch.uint8) == 3, "two inputs of activations, and one of a linear layer"


class Gated(nn.Module):
    """A gated unit of one product, as many language models have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = x.chunk(2, -1)
        return nn.functional.silu(gate) * value


@inlines
@pytest.mark.parametrize(
    ("activation", "width", "dtype"),
    [
        (nn.SiLU, 256, torch.float32),
        (nn.SiLU, 256, torch.bfloat16),
        (nn.GELU, 256, torch.float32),
        (Gated, 512, torch.bfloat16),
    ],
)
def test_what_a_compiler_takes_apart_keeps_codes(
    activation: type[nn.Module], width: int, dtype: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, width), activation(), nn.Linear(256, WIDTH)).to(dtype)
    x = torch.randn(64, WIDTH, dtype=dtype)
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")
    # Beside the 1 % of 8 bits, that of bfloat16, which torch rounds to after each operation.
    assert 0 < error_of(model, compiled, x) < 0.02
    with compressed_graphs(SMALL):
        dtypes = saved_dtypes(compiled(x))
    assert dtypes.count(torch.uint8) == 2, "the activation's argument and its result"
    assert dtypes.count(dtype) == 2, "the input and the second weight"


@inlines
def test_without_the_context_a_graph_is_exact_again() -> None:
    model, x = net(), torch.randn(64, WIDTH)
    compiled = torch.compile(model, backend="aot_eager")
    exact = gradients(model, compiled, x)
    gradients(model, compiled, x, compressed_graphs(SMALL))
    assert torch.equal(gradients(model, compiled, x), exact)


@inlines
def test_noise_is_new_in_every_step_and_the_same_for_a_seed() -> None:
    model, x = net(), torch.randn(64, WIDTH)
    compiled = torch.compile(model, backend="aot_eager")

    def step() -> torch.Tensor:
        return gradients(model, compiled, x, compressed_graphs(SMALL))

    step()  # numbers for the tensors of a graph are given while it is traced
    vramx.manual_seed(1)
    first, second = step(), step()
    vramx.manual_seed(1)
    assert torch.equal(step(), first)
    assert not torch.equal(second, first)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@inlines
def test_sizes_that_change_compile_once_more_and_no_oftener() -> None:
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    for rows in (64, 48, 80):
        assert error_of(model, compiled, torch.randn(rows, WIDTH)) < 0.02
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
@inlines
def test_a_size_that_a_tensor_has_twice_may_change() -> None:
    linear = nn.Linear(WIDTH, WIDTH)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        return nn.functional.gelu(y @ y.mT)

    compiled = torch.compile(program, backend="aot_eager", dynamic=True)
    for rows in (32, 48):
        assert 0 < error_of(linear, compiled, torch.randn(rows, WIDTH), program) < 0.02


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BATCHED: dict[str, Product] = {
    "bmm": lambda h, w: torch.bmm(h, w.t().expand(len(h), -1, -1)),
    "baddbmm": lambda h, w: torch.baddbmm(torch.zeros(1), h, w.t()[None].repeat(len(h), 1, 1)),
    "matmul": lambda h, w: h @ w.t()[None],
    "einsum": lambda h, w: torch.einsum("bsi,oi->bso", h, w),
}


class Unscaled(nn.Module):
    """A layer whose weight undoes the scale of its columns: 1e4 beside 0.05."""

    def __init__(self, rank: int, product: Product = nn.functional.linear) -> None:
        super().__init__()
        self.product = product
        self.first, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(64, WIDTH))
        self.register_buffer("scale", torch.where(torch.arange(WIDTH) % 4 == 0, 1e4, 0.05))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x.view(x.shape[:1] + (1,) * (self.rank - 2) + x.shape[1:])) * self.scale
        return self.product(h, self.weight / self.scale)


@inlines
@pytest.mark.parametrize("rank", [2, 3])
def test_columns_that_a_weight_undoes_the_scale_of_are_kept(rank: int) -> None:
    model, x = Unscaled(rank), torch.randn(64, WIDTH)
    assert error_of(model, torch.compile(model, backend="aot_eager"), x) < 1e-3


@inlines
@pytest.mark.parametrize("name", BATCHED)
def test_columns_are_kept_in_batches_of_products(name: str) -> None:
    model, x = Unscaled(3, BATCHED[name]), torch.randn(64, WIDTH)
    assert error_of(model, torch.compile(model, backend="aot_eager"), x) < 1e-3


@inlines
def test_small_tensors_and_statistics_are_kept() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    compiled = torch.compile(model, backend="aot_eager")
    with compressed_graphs(SMALL):
        y = compiled(torch.randn(64, WIDTH))
        saved = y.grad_fn.saved_tensors
    assert [tuple(t.shape) for t in saved if t.shape[-1] == 1] == [(64, 1), (64, 1)]
    torch._dynamo.reset()
    with compressed_graphs(Compression(min_bytes=64 * WIDTH * 4 + 1)):
        assert torch.uint8 not in saved_dtypes(compiled(torch.randn(64, WIDTH)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q * 1.5, k * 1.5, v * 1.5)
        return self.out(y.transpose(1, 2).flatten(2)).log_softmax(-1)


@inlines
def test_logits_are_kept_exactly() -> None:
    """Keep the log-softmax and all that attention saves: v and y must be of each other."""
    model, x = Attention(), torch.randn(4, 32, WIDTH)
    compiled = torch.compile(model, backend="aot_eager")
    with compressed_graphs(SMALL):
        y = compiled(x)
    saved = y.grad_fn.saved_tensors
    exact = [tuple(t.shape) for t in saved if t.dtype == torch.float32 and t.dim() > 2]
    assert exact.count((4, 4, 32, 32)) == 4, exact
    assert (4, 32, 64) in exact, "the log-softmax"


def backward_graph(function: Any) -> fx.Node:
    """Return the placeholder of a graph that stands for a backward of it."""
    traced = fx.experimental.proxy_tensor.make_fx(function)(torch.randn(4, 4))
    return next(iter(traced.graph.nodes))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: (x - 1.0).to(torch.float64).exp(), True),
        (lambda x: (x * 0.125 - 1.0).exp(), True),
        (lambda x: torch.ones(4, 4) / x, True),
        (lambda x: torch.where(x > 0, 1.0, 0.0), True),
        (lambda x: (x * x * -0.5).exp(), False),  # of a gelu: its error does not grow
        (lambda x: x / 3.0, False),
        (lambda x: torch.ones(4, 4) @ x, False),
        (lambda x: x.sigmoid() * x, False),
        (lambda x: x / (1 + (-x).exp()), False),  # a silu, as a compiler takes it apart
        (lambda x: torch.ones(4, 4) / (1 + (-x).exp()), False),
        (lambda x: torch.ones(2) / (1 + (-x[:, :2]).exp()), True),  # a gate is kept
        (lambda x: (-x).exp() / (1 + (-x).exp()), True),
        (lambda x: (1 + (-x).exp()) * x, True),
        (lambda x: x / (x.sum() + (-x).exp()), True),
        (lambda x: torch.cat([x, x]).exp(), True),
        (lambda x: torch.cat([x, x]) * 2.0, False),
        (lambda x: x.atan(), True),  # nothing is known of it here
        (lambda x: (x**2).sum(), False),
        (lambda x: x**0.5, True),
        (lambda x: x[0].unsqueeze(0).expand(3, 4).t().clone().view(12).log(), True),
    ],
)
def test_what_an_error_would_be_multiplied_in_is_exact(function: Any, expected: bool) -> None:
    assert graph_policy.is_exact(backward_graph(function)) is expected


@inlines
def test_operations_between_graphs_are_exact_and_leave_no_cycle() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    with compressed_graphs(SMALL):
        y = x.exp().sin()
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp().cos() * x.detach().exp())


@inlines
def test_hooks_of_equal_options_are_the_same_so_that_graphs_are_reused() -> None:
    assert graph.hooks(Compression(level="int4")) is graph.hooks(Compression(level="int4"))


def test_a_torch_that_cannot_inline_hooks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_hook_context", None)
    with pytest.raises(UnsupportedTorchError, match="block by block"):
        compressed_graphs(level="int4", group_size=512)  # that no other test asks for


def test_a_torch_without_that_module_cannot_inline_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("torch._functorch._aot_autograd")
    monkeypatch.setitem(sys.modules, f"{package.__name__}.graph_compile", None)
    monkeypatch.delattr(package, "graph_compile", raising=False)
    assert graph._find_hook_context() is None


def test_a_context_that_is_not_enabled_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_hook_context", None)
    with compressed_graphs(level="keep"):
        pass


@inlines
@pytest.mark.slow
def test_inductor_gives_the_gradient() -> None:
    model, x = net(), torch.randn(64, WIDTH)
    compiled = torch.compile(model)
    assert 0 < error_of(model, compiled, x) < 0.02
    with compressed_graphs(SMALL):
        assert torch.uint8 in saved_dtypes(compiled(x))


def test_a_checkpoint_of_a_compiled_block_keeps_its_input_exactly(monkeypatch: Any) -> None:
    """What a compiler made of a block is not seen."""
    packed: list[int] = []
    pack = inputs.pack
    monkeypatch.setattr(inputs, "pack", lambda x, *rest: packed.append(x.numel()) or pack(x, *rest))
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    leaf = torch.randn(64, WIDTH, requires_grad=True)
    found = gradients(model, lambda x: vramx.checkpoint(compiled, x * 1.0, level=SMALL), leaf)
    assert packed == []
    torch.testing.assert_close(found, gradients(model, model, leaf))


@pytest.mark.parametrize("wrapped", [False, True], ids=["call", "modules"])
def test_a_checkpoint_within_a_full_graph_is_torchs_own(wrapped: bool) -> None:
    model, x = net(), torch.randn(64, WIDTH, requires_grad=True)
    exact = gradients(model, model, x)
    if wrapped:
        vramx.checkpoint_modules(model, where=nn.Sequential, level=SMALL)
    call = model if wrapped else lambda x: vramx.checkpoint(model, x, level=SMALL)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(model, compiled, x), exact)
