"""The norms and their Linears on a GPU: the kernels as compiled, memory, graphs, compilation.

The same kernels are compared with the reference to the bit in an interpreter; here is what only a
GPU shows: fused products, roundings to nearest, many programs, and the memory that is held.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from norm_tools import EXACT, INT4, INT8, norm_of, step_of, torchs_norm
from torch import Tensor

from vramx.compression.codec import random
from vramx.compression.config import Compression
from vramx.nn import reference_norm as reference
from vramx.nn.functional import linears, rms_norm

pytestmark = pytest.mark.gpu

SHAPES = [(4099, 4096), (1001, 5120), (257, 16384), (65, 9216), (3001, 128), (77, 768), (33, 100)]
every_shape = pytest.mark.parametrize(("rows", "hidden"), SHAPES)
every_kind = pytest.mark.parametrize("kind", ["rms", "layer"])


@pytest.fixture(autouse=True)
def seed() -> None:
    random.manual_seed(0, rank=0)
    random.state("cuda")


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32)
    return x.to(dtype).requires_grad_()


def vectors_of(kind: str, hidden: int) -> list[Tensor]:
    return [sample(hidden, seed=seed) for seed in ((2,) if kind == "rms" else (2, 3))]


@every_kind
@every_shape
@pytest.mark.parametrize("keep", [EXACT, INT8, INT4], ids=["exact", "int8", "int4"])
def test_output_is_as_good_as_torchs(kind: str, rows: int, hidden: int, keep: Compression) -> None:
    """Both round once, numbers that differ in float32's last bits: by a unit of bfloat16 at most.

    Where weight and bias cancel those last bits count by themselves: 2**-20 of numbers below 16.
    """
    x, residual = sample(rows, hidden), sample(rows, hidden, seed=1)
    vectors = vectors_of(kind, hidden)
    done = norm_of(kind, x, vectors, residual, keep)
    assert torch.equal(done.residual_sum, x + residual)
    expected = torchs_norm(kind, x + residual, vectors)
    assert torch.allclose(done.y, expected, rtol=2**-7, atol=2**-16)


@every_kind
@every_shape
def test_gradients_are_as_good_as_torchs(kind: str, rows: int, hidden: int) -> None:
    """Against float64: within twice the error of torch's own bfloat16, with what is kept exact."""
    x, residual = sample(rows, hidden), sample(rows, hidden, seed=1)
    vectors = vectors_of(kind, hidden)
    s = (x + residual).detach().requires_grad_()
    dy = sample(rows, hidden, seed=8).detach()
    wide = [v.detach().double().requires_grad_() for v in (s, *vectors)]
    exact = torch.autograd.grad(torchs_norm(kind, wide[0], wide[1:]), wide, dy.double())
    theirs = torch.autograd.grad(torchs_norm(kind, s, vectors), [s, *vectors], dy)
    done = norm_of(kind, x, vectors, residual, EXACT)
    ours = torch.autograd.grad(done.y, [x, *vectors], dy)
    for a, b, right in zip(ours, theirs, exact, strict=True):
        assert (a - right).norm() <= 2 * (b - right).norm() + 1e-12


@every_kind
@every_shape
def test_int8_gradients_are_within_a_step(kind: str, rows: int, hidden: int) -> None:
    """dweight = sum dy n is off by at most sum |dy| step, and its rounding to bfloat16; in float32
    the sums of a few thousand terms are off by far less than a thousandth of their magnitudes."""
    x, vectors = sample(rows, hidden), vectors_of(kind, hidden)
    dy = sample(rows, hidden, seed=8).detach()
    done = norm_of(kind, x, vectors, torch.zeros_like(x), INT8)
    (dweight,) = torch.autograd.grad(done.y, [vectors[0]], dy)
    n, _ = reference.normalise(x.detach().double(), 1e-5, kind == "layer")
    exact, _ = reference.sums(dy.double(), n)
    # A group that straddles rows has at most the step of the greatest of all.
    step = step_of(n) if hidden % 128 == 0 else n.abs().amax() / 126 * torch.ones_like(n)
    bound, _ = reference.sums(dy.double().abs(), step + 1e-3 * n.abs())
    assert ((dweight.double() - exact).abs() <= bound + 2**-8 * exact.abs()).all()


def test_sums_do_not_change_from_run_to_run() -> None:
    x, weight = sample(4099, 4096), sample(4096, seed=2)
    dy = sample(4099, 4096, seed=8).detach()
    y = rms_norm(x, weight).y
    first, second = (torch.autograd.grad(y, weight, dy, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@every_kind
@pytest.mark.parametrize("hidden", [64, 1024, 9216])
@pytest.mark.parametrize("of_sum", [False, True])
def test_rows_may_be_those_of_a_batch(kind: str, hidden: int, of_sum: bool) -> None:
    x, vectors = sample(4, 33, hidden), vectors_of(kind, hidden)
    dy, dsum = (sample(4, 33, hidden, seed=seed).detach() for seed in (8, 9))
    found = []
    for shape in ((4, 33), (132,)):
        rows = x.detach().view(*shape, hidden).requires_grad_()
        done = norm_of(kind, rows, vectors, torch.zeros_like(rows), EXACT)
        outputs = [done.y, done.residual_sum] if of_sum else [done.y]
        gradients = [each.view_as(rows) for each in (dy, dsum)][: len(outputs)]
        found.append(torch.autograd.grad(outputs, [rows, *vectors], gradients))
    assert torch.equal(found[0][0].flatten(0, 1), found[1][0])
    assert all(map(torch.equal, found[0][1:], found[1][1:]))


@every_kind
def test_linears_gradients_are_near_torchs(kind: str) -> None:
    """int8's noise is about 0.9 % of a weight's gradient, bfloat16's roundings half of that."""
    rows, hidden = 2048, 1024
    x, residual = sample(rows, hidden), sample(rows, hidden, seed=1)
    vectors, weights = vectors_of(kind, hidden), [sample(n, hidden, seed=n) for n in (512, 128)]
    every = [x, residual, *vectors, *weights]

    def fused() -> tuple[Tensor, ...]:
        done = norm_of(kind, x, vectors, residual, INT8)
        return (*linears(done, weights), done.residual_sum)

    def plain() -> tuple[Tensor, ...]:
        s = x + residual
        y = torchs_norm(kind, s, vectors)
        return (*(functional.linear(y, weight) for weight in weights), s)

    for a, b in zip(_gradients(fused, every), _gradients(plain, every), strict=True):
        assert (a - b).float().norm() <= 0.02 * b.float().norm()


def _gradients(function: object, every: list[Tensor]) -> tuple[Tensor, ...]:
    outputs = function()  # type: ignore[operator]
    weights = [sample(*o.shape, seed=30 + i).detach() for i, o in enumerate(outputs)]
    return torch.autograd.grad(outputs, every, weights)


def test_a_replayed_graph_draws_new_noise() -> None:
    x, weight = sample(256, 1024), sample(1024, seed=2)
    rms_norm(x, weight)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = rms_norm(x, weight).kept.buffer
    graph.replay()
    first = kept.clone()
    graph.replay()
    assert not torch.equal(kept, first)


@pytest.mark.slow
def test_inductor_compiles_without_a_break() -> None:
    x, residual, vector = sample(256, 1024), sample(256, 1024, seed=1), sample(1024, seed=2)
    weights = [sample(512, 1024, seed=3), sample(128, 1024, seed=4)]

    def block() -> tuple[Tensor, ...]:
        done = rms_norm(x, vector, 1e-5, residual)
        return (*linears(done, weights), done.residual_sum)

    compiled = torch.compile(block, fullgraph=True)
    every = [x, residual, vector, *weights]
    for a, b in zip(_gradients(compiled, every), _gradients(block, every), strict=True):
        assert (a - b).float().norm() <= 0.03 * b.float().norm()
