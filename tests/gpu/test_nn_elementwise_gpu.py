"""Elementwise functions, rotary and the loss on a GPU: kernels against float64, and memory.

In the interpreter a kernel has the composite's bytes (tests/test_nn_*.py). Here the compiler's own
arithmetic is measured, at the sizes of a model.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nn_elementwise_tools import gradients, leaves, sample
from norm_tools import EXACT, error, step_of
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from vramx.compression.config import Compression
from vramx.nn import reference_elementwise as reference
from vramx.nn.activation import gelu, silu
from vramx.nn.dropout import _dropout, dropout, dropout_add
from vramx.nn.glu import geglu, swiglu
from vramx.nn.keeping import decode, spec_of
from vramx.nn.loss import linear_cross_entropy
from vramx.nn.relu import relu
from vramx.nn.rotary import rotary
from vramx.nn.unit_linear import gelu_linear, glu_linear

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Of torch's own arithmetic in the type: a unit of rounding, and a few of float32's for exp.
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def on_gpu(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return sample(*shape, seed=seed, dtype=dtype).to(GPU)


def swiglu_of(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@every_dtype
@pytest.mark.parametrize("shape", [(512, 4096), (37, 1000), (3,)])
@pytest.mark.parametrize(
    ("function", "plain"),
    [
        (swiglu, swiglu_of),
        (geglu, lambda gate, up: F.gelu(gate) * up),
        (
            lambda g, u, **k: geglu(g, u, "tanh", **k),
            lambda g, u: F.gelu(g, approximate="tanh") * u,
        ),
    ],
    ids=["swiglu", "geglu", "tanh"],
)
def test_gated_units(
    function: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Within a unit without packing; with int8 within the codec's bound."""
    inputs = [on_gpu(*shape, dtype=dtype), on_gpu(*shape, seed=1, dtype=dtype)]
    incoming = on_gpu(*shape, seed=2, dtype=dtype)
    gate, up = wide = [tensor.double() for tensor in inputs]
    exact = [plain(*wide), *gradients(plain, wide, incoming.double())]
    found = [function(*inputs, keep=EXACT)]
    found += gradients(lambda g, u: function(g, u, keep=EXACT), inputs, incoming)
    for a, b in zip(found, exact, strict=True):
        allowed = UNIT[dtype] * b.abs() + 2.0**-20 * b.abs().max() + 2.0**-24
        assert ((a.double() - b).abs() <= allowed).all()
    dgate, dup = gradients(function, inputs, incoming)
    size, of_gate, of_up = incoming.double().abs(), step_of(gate.cpu()), step_of(up.cpu())
    of_gate, of_up = of_gate.to(GPU), of_up.to(GPU)
    bounds = 1.2 * of_up + 0.8 * of_gate * (up.abs() + of_up), 1.2 * of_gate
    for a, b, bound in zip((dgate, dup), exact[1:], bounds, strict=True):
        allowed = size * bound + 2 * UNIT[dtype] * b.abs() + 2.0**-20 * b.abs().max() + 2.0**-24
        assert ((a.double() - b).abs() <= allowed).all()


@every_dtype
@pytest.mark.parametrize("function", [gelu, silu, relu], ids=["gelu", "silu", "relu"])
def test_activations(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x, incoming = on_gpu(37, 1000, dtype=dtype), on_gpu(37, 1000, seed=1, dtype=dtype)
    plain = getattr(F, function.__name__)
    exact = plain(x.double())
    allowed = UNIT[dtype] * exact.abs() + 2.0**-20 * exact.abs().max()
    assert ((function(x).double() - exact).abs() <= allowed).all()
    (found,) = gradients(function, [x], incoming)
    (slope,) = gradients(plain, [x.double()], incoming.double())
    curvature = 0.0 if function is relu else 0.8
    step = step_of(x.cpu()).to(GPU)
    allowed = incoming.double().abs() * curvature * step + 2 * UNIT[dtype] * slope.abs() + 2.0**-18
    assert ((found.double() - slope).abs() <= allowed).all()


@pytest.mark.parametrize("keep", [Compression(), Compression(level="int4")], ids=["int8", "int4"])
def test_down_projection_differentiates_at_what_was_decoded(keep: Compression) -> None:
    """dz, z and each result are rounded to bfloat16 once: 2**-9 of each element."""
    shapes = [(2048, 1024), (2048, 1024), (512, 1024), (512,)]
    inputs = leaves(*(on_gpu(*s, seed=i, dtype=torch.bfloat16) for i, s in enumerate(shapes)))
    incoming = on_gpu(2048, 512, seed=9, dtype=torch.bfloat16)
    packs: list[Tensor] = []

    def watch(tensor: Tensor) -> Tensor:
        packs.extend([tensor] if tensor.dtype == torch.uint8 else [])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(watch, lambda tensor: tensor):
        result = glu_linear(*inputs, keep=keep)
    found = torch.autograd.grad(result, inputs, incoming)
    spec = spec_of(keep)
    decoded = [decode(pack, shapes[0], torch.float32, spec).double() for pack in packs]
    weight, bias = (tensor.detach().double() for tensor in inputs[2:])
    exact = gradients(
        lambda gate, up, w, b: F.linear(swiglu_of(gate, up), w, b),
        [*decoded, weight, bias],
        incoming.double(),
    )
    for a, b in zip(found, exact, strict=True):
        assert error(a, b) <= 3 * 2.0**-9


@every_dtype
def test_dropout_is_the_composites(dtype: torch.dtype) -> None:
    x, residual = on_gpu(37, 1001, dtype=dtype), on_gpu(37, 1001, seed=1, dtype=dtype)
    key = torch.tensor([-5, 1 << 40], device=GPU)
    assert torch.equal(
        _dropout(x, None, key, 40000) == 0, reference.dropout(x, None, key, 40000) == 0
    )
    found, expected = _dropout(x, residual, key, 40000), reference.dropout(x, residual, key, 40000)
    assert torch.allclose(found.double(), expected.double(), rtol=2 * UNIT[dtype], atol=2.0**-20)


def test_dropout_in_a_cuda_graph_draws_anew() -> None:
    x = torch.ones(4096, device=GPU)
    dropout_add(x, x, 0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dropout(x, 0.5)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(y.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@every_dtype
@pytest.mark.parametrize("classes", [32000, 50257])
def test_loss(classes: int, dtype: torch.dtype) -> None:
    hidden = on_gpu(300, 256, dtype=dtype)
    weight = on_gpu(classes, 256, seed=1, dtype=dtype) / 16
    targets = torch.randint(classes, (300,), device=GPU)
    targets[::7] = -100
    incoming = torch.tensor(1.3, device=GPU)

    def plain(h: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w).float(), targets)

    def wide(h: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), targets)

    exact = gradients(wide, [hidden.double(), weight.double()], incoming.double())
    torchs = gradients(plain, [hidden, weight], incoming)
    found = gradients(lambda h, w: linear_cross_entropy(h, w, targets), [hidden, weight], incoming)
    for a, b, c in zip(found, torchs, exact, strict=True):
        assert error(a, c) <= 2 * error(b, c) + 2.0**-20


def test_loss_takes_a_chunk_of_memory() -> None:
    """8192 tokens of 64000 classes: their logits in bfloat16 alone are 1000 MiB."""
    hidden, weight = leaves(
        on_gpu(8192, 256, dtype=torch.bfloat16), on_gpu(64000, 256, dtype=torch.bfloat16)
    )
    targets = torch.randint(64000, (8192,), device=GPU)
    linear_cross_entropy(hidden[:128], weight, targets[:128]).backward()
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, targets, chunk=512).backward()
    gradients_bytes = 2 * (hidden.numel() + weight.numel())
    chunk_bytes = 512 * 64000 * 2
    # Gradients as they are summed and as they are scaled; and a few small tensors.
    assert torch.cuda.max_memory_allocated() - before < chunk_bytes + 2 * gradients_bytes + (
        4 << 20
    )


def test_nothing_waits_for_the_device() -> None:
    gate, up = leaves(*(on_gpu(64, 256, seed=i, dtype=torch.bfloat16) for i in (0, 1)))
    weight = on_gpu(32, 256, dtype=torch.bfloat16)
    targets = torch.randint(32, (64,), device=GPU)

    def step() -> None:
        z = dropout_add(relu(swiglu(gate, up)), gelu(gate), 0.1)
        (linear_cross_entropy(z, weight, targets) + gelu_linear(up, weight).sum()).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- Rotary embedding ------------------------------------------------------------------------------

BATCH, HEADS, KEY_HEADS, TOKENS = 2, 32, 8, 1025
# A sum of two products in float32, rounded once; |x cos| + |x sin| <= 1.5 of the largest |x|.
OF_TURNS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}


@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("dtype", OF_TURNS, ids=lambda dtype: str(dtype)[6:])
def test_turned_heads_and_gradients_are_rounded_once(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k = (
        normal(BATCH, TOKENS, heads, size).to(dtype).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KEY_HEADS)
    )
    angles = normal(BATCH, 1, TOKENS, size)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    exact = rotary(*wide, cos.double(), sin.double())
    found = rotary(q, k, cos, sin)
    incoming = [normal(*x.shape).to(dtype) for x in found]
    gradients = torch.autograd.grad(found, [q, k], incoming)
    of_exact = torch.autograd.grad(exact, wide, [g.double() for g in incoming])
    for ours, theirs in zip((*found, *gradients), (*exact, *of_exact), strict=True):
        assert ours.dtype == dtype
        bound = OF_TURNS[dtype] * theirs.abs() + 2.0**-20 * theirs.abs().max()
        assert ((ours - theirs).abs() <= bound).all()


def test_compiled_rotary_is_the_same() -> None:
    torch.compiler.reset()
    q = torch.randn(2, 4, 16, 64, device="cuda", requires_grad=True)
    angles = torch.randn(16, 64, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    compiled = torch.compile(lambda q: rotary(q, q, cos, sin)[0], fullgraph=True)
    assert torch.allclose(compiled(q), rotary(q, q, cos, sin)[0], atol=1e-5)
