"""The kernels of vramx.nn on tensors of more elements than an int32 counts.

Both ends of a tensor, with what lies around element 2**31, must have the bits that these rows have
as a tensor of their own: an offset that has wrapped reads or writes elsewhere, or faults. New
tensors are filled with NaN before they are written. Packs round to nearest, for noise depends on an
element's number. A test takes up to 40 GiB and a second or two, most of it to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from norm_tools import EXACT, NEAREST, error
from torch import Tensor

from vramx.compression.codec.reference import philox
from vramx.compression.config import Compression
from vramx.kernels import cross_entropy_launch, elementwise_launch, norm_launch
from vramx.nn import functional as nn
from vramx.nn.dropout import _dropout
from vramx.nn.keeping import fused_layout, spec_of

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

GPU = "cuda:0"
LIMIT = 1 << 31
NEEDED_BYTES = 48 << 30
EDGE = 16  # rows, or samples: how many lie beyond the limit
ENDS = (slice(0, EDGE), slice(-2 * EDGE, None))
WIDTH, CLASSES = 4096, 1 << 17
ROUNDED = 2.0**-8  # of a number, by one rounding to bfloat16 at most
WORD = 0xFFFFFFFF

Results = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill what torch.empty() gives with NaN, or with the largest integer."""
    if torch.cuda.mem_get_info()[0] < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES >> 30} GiB of free GPU memory")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def sample(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(seed)
    return torch.empty(shape, dtype=torch.bfloat16, device=GPU).normal_(generator=generator)


def beyond(*row: int, seed: int = 0) -> Tensor:
    """Return EDGE rows, or samples, more than have LIMIT elements."""
    return sample(LIMIT // torch.Size(row).numel() + EDGE, *row, seed=seed)


def at_ends(x: Tensor, seed: int = 9) -> Tensor:
    """Return numbers at both ends and zeros between: the sums over rows are then theirs alone."""
    result = torch.zeros_like(x)
    for end in ENDS:
        result[end] = sample(*x[end].shape, seed=seed)
    return result


def leaves(tensors: Sequence[Tensor], part: slice | None = None) -> list[Tensor]:
    parts = [x.detach() if part is None else x.detach()[part].clone() for x in tensors]
    return [x.requires_grad_() for x in parts]


def assert_same_at_ends(found: Sequence[Tensor], run: Callable[[slice], Sequence[Tensor]]) -> None:
    for end in ENDS:
        assert all(torch.equal(a[end], b) for a, b in zip(found, run(end), strict=True))


def compare(
    function: Callable[..., Results],
    inputs: Sequence[Tensor],
    incoming: Sequence[Tensor],
    vectors: Sequence[Tensor] = (),
    partial_roundings: int = 0,
) -> None:
    """Compare results and gradients at the ends; those of vectors, which all rows add to, too.

    These are rounded to bfloat16 once in each run, by 2**-8 of them, after a sum in float32 of some
    dozen terms below 16, each rounded by 2**-24 of the sum. Where the partial sums are rounded as
    well, `partial_roundings` times, so are parts of a random sum: by 2**-9 of it each, one with
    another, and independently.
    """

    def run(part: slice | None) -> tuple[list[Tensor], list[Tensor]]:
        rows = leaves(inputs, part)
        results = function(*rows)
        weights = incoming if part is None else [dy[part] for dy in incoming]
        found = torch.autograd.grad(results, [*rows, *vectors], list(weights))
        return [*(y.detach() for y in results), *found[: len(rows)]], list(found[len(rows) :])

    found, sums = run(None)
    parts = {end.start: run(end) for end in ENDS}
    assert_same_at_ends(found, lambda end: parts[end.start][0])
    for i, total in enumerate(sums):
        terms = [of_end[i].float() for _, of_end in parts.values()]
        if partial_roundings:
            runs = len(ENDS) + 1
            bound = (runs * (1 + partial_roundings)) ** 0.5 * 2.0**-9
            assert error(total, sum(terms)) < bound
            continue
        bound = ROUNDED * (total.float().abs() + sum(term.abs() for term in terms)) + 2.0**-12
        assert ((total.float() - sum(terms)).abs() <= bound).all()


ELEMENTWISE = {
    "gelu int8": (1, partial(nn.gelu, keep=NEAREST)),
    "gelu exact": (1, partial(nn.gelu, keep=EXACT)),
    "silu int8": (1, partial(nn.silu, keep=NEAREST)),
    "swiglu int8": (2, partial(nn.swiglu, keep=NEAREST)),
    "swiglu exact": (2, partial(nn.swiglu, keep=EXACT)),
    "relu": (1, nn.relu),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions(name: str) -> None:
    count, function = ELEMENTWISE[name]
    inputs = [beyond(WIDTH, seed=i) for i in range(count)]
    compare(lambda *rows: (function(*rows),), inputs, [at_ends(inputs[0])])


def test_value_beside_the_gradient_of_gelu() -> None:
    x, dy = beyond(WIDTH), beyond(WIDTH, seed=1)

    def run(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        layout = fused_layout(x.numel(), spec_of(NEAREST))
        assert layout is not None
        buffer = x.new_empty(layout.buffer_bytes, dtype=torch.uint8)
        dx, y = torch.empty_like(x), torch.empty_like(x)
        elementwise_launch.activation(x, y, buffer, layout, "gelu", None)
        elementwise_launch.activation_backward(dy, buffer, dx, y.fill_(torch.nan), layout, "gelu")
        return dx, y

    assert_same_at_ends(run(x, dy), lambda end: run(x[end].contiguous(), dy[end].contiguous()))


@pytest.mark.parametrize("adds", [False, True], ids=["alone", "residual"])
def test_dropout(adds: bool) -> None:
    """The mask is a function of the element's number: noise_halves(), from another block on."""
    x, kept = beyond(WIDTH), 40000
    residual = beyond(WIDTH, seed=1) if adds else None
    key = torch.tensor([-5, 1 << 40], device=GPU)
    y = _dropout(x, residual, key, kept)
    for end in ENDS:
        rows = range(len(x))[end]
        block = torch.arange(rows[0] * WIDTH // 8, (rows[-1] + 1) * WIDTH // 8, device=GPU)
        words = philox(
            [block & WORD, block >> 32, block * 0, key[1] & WORD],
            [key[0] & WORD, (key[0] >> 32) & WORD],
        )
        halves = torch.stack([half for w in words for half in (w & 0xFFFF, w >> 16)], 1)
        scaled = x[end].double() * (65536 / kept)
        expected = torch.where(halves.view(x[end].shape) < kept, scaled, 0.0)
        if residual is not None:
            expected += residual[end]
        # Once rounded, with a margin for float32's last bits.
        assert torch.allclose(y[end].double(), expected, rtol=ROUNDED, atol=2.0**-16)


NORMS = {
    "rms int8": (nn.rms_norm, WIDTH, NEAREST),
    "layer exact": (nn.layer_norm, WIDTH, EXACT),
    "rms long rows exact": (nn.rms_norm, 4 * WIDTH, EXACT),
    "layer long rows int8": (nn.layer_norm, 4 * WIDTH, NEAREST),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_with_a_residual(name: str) -> None:
    norm, hidden, keep = NORMS[name]
    x, residual = beyond(hidden), beyond(hidden, seed=1)
    vectors = leaves([sample(hidden, seed=i) for i in range(2, 3 if norm is nn.rms_norm else 4)])

    def run(x: Tensor, residual: Tensor) -> Results:
        done = norm(x, *vectors, eps=1e-5, residual=residual, keep=keep)
        return done.y, done.residual_sum

    compare(run, (x, residual), (at_ends(x), x), vectors)


@pytest.mark.parametrize("keep", [NEAREST, EXACT], ids=["int8", "exact"])
def test_output_of_a_norm_again(keep: Compression) -> None:
    x, weight = beyond(WIDTH), sample(WIDTH, seed=2)

    def run(x: Tensor) -> Tensor:
        kept = nn.rms_norm(x, weight, keep=keep).kept
        buffer, group = (kept.buffer, 128) if keep.packs else (kept.buffer.view(x.dtype), 0)
        y = torch.empty_like(x)
        norm_launch.norm_output(
            norm_launch.Kept(buffer, None, group), norm_launch.Affine(weight, None), y
        )
        return y

    x.requires_grad_()
    assert_same_at_ends([run(x)], lambda end: [run(x[end].detach().clone().requires_grad_())])


def test_rotary_embedding_with_heads_far_apart() -> None:
    """A block of 8 heads spans 2**31 elements, and the ninth head lies beyond it."""
    tokens, size = LIMIT >> 10, 128
    q, k = sample(1, 9, tokens, size), sample(1, 1, tokens, size, seed=1)
    angles = torch.arange(tokens, device=GPU)[:, None] * 0.001 + torch.arange(size, device=GPU)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    dq = sample(*q.shape, seed=2)

    def run(part: slice) -> Results:
        rows = [x[:, :, part].contiguous().requires_grad_() for x in (q, k)]
        turned = nn.rotary(*rows, cos[part], sin[part])
        return (*turned, *torch.autograd.grad(turned[0], rows[0], dq[:, :, part].contiguous()))

    found = run(slice(None))
    for end in ENDS:
        for a, b in zip(found, run(end), strict=True):
            assert torch.equal(a[:, :, end], b)


def test_cross_entropy_and_its_gradient() -> None:
    logits = beyond(CLASSES)
    targets = torch.randint(CLASSES, (len(logits),), device=GPU)
    options = cross_entropy_launch.LossOptions(-100, 0.0, None)

    def run(logits: Tensor, targets: Tensor) -> Tensor:
        losses = torch.empty(len(logits), device=GPU)
        mail = cross_entropy_launch.new_mail(logits, options)
        rows = cross_entropy_launch.LossRows(targets, losses, mail)
        cross_entropy_launch.cross_entropy(logits, rows, options, True)
        return losses

    parts = [(logits[end].clone(), targets[end]) for end in ENDS]
    found = run(logits, targets)
    for end, (part, of_part) in zip(ENDS, parts, strict=True):
        assert torch.equal(found[end], run(part, of_part))
        assert torch.equal(logits[end], part)


def test_loss_in_one_chunk_is_that_in_many() -> None:
    """Logits are rounded to bfloat16, of products that two kernels may sum in two orders: a logit
    in some hundred differs by 2**-8 of it, a loss of 12 by far less than 2**-12 of it in the mean
    of 16000. A gradient is of probabilities that differ as the logits do, rounded by 2**-9."""
    rows = LIMIT // CLASSES + EDGE
    hidden, weight = leaves([sample(rows, 64), sample(CLASSES, 64, seed=1) / 8])
    targets = torch.randint(CLASSES, (rows,), device=GPU)

    def run(chunk: int) -> Results:
        loss = nn.linear_cross_entropy(hidden, weight, targets, chunk=chunk)
        return (loss.detach(), *torch.autograd.grad(loss, [hidden, weight]))

    (found, dhidden, dweight), expected = run(rows), run(max(1, rows // 16))
    assert torch.allclose(found, expected[0], rtol=2.0**-12)
    for end in ENDS:
        assert error(dhidden[end], expected[1][end]) < 2.0**-7
    # Of the sum over 16 chunks, which is rounded 16 times.
    assert error(dweight, expected[2]) < 16**0.5 * 2.0**-7


# How the kernels find a channel, an image of that kind, and what follows the norm.
CHANNELS = {
    "long": ((64, 64, 64), torch.contiguous_format, "relu"),
    "short": ((512, 14, 14), torch.contiguous_format, "silu"),
    "rows": ((64, 16, 16), torch.channels_last, "relu"),
    "blocks": ((128, 16, 16), torch.channels_last, "silu"),
}


@pytest.mark.parametrize("positions", CHANNELS)
def test_norms_by_channel(positions: str) -> None:
    shape, order, activation = CHANNELS[positions]
    keep = EXACT if positions == "blocks" else NEAREST
    x = beyond(*shape).contiguous(memory_format=order)
    vectors = leaves([sample(shape[0], seed=i) for i in (2, 3)])
    mean, var = sample(shape[0], seed=4).float(), sample(shape[0], seed=5).float().exp()
    residual = [torch.empty_like(x).copy_(x.flip(1))] if activation == "relu" else []

    def run(x: Tensor, *residual: Tensor) -> Results:
        done = nn.batch_norm(
            x, mean, var, *vectors, activation=activation, residual=next(iter(residual), None),
            keep=keep,
        )  # fmt: skip
        return (done.y,)

    # Positions in a row are summed by torch, whose block of 512 threads adds by ten shuffles, and
    # rounds to the type of its input at each (Float2 of ATen/native/cuda/Normalization.cuh).
    roundings = 0 if order == torch.channels_last else 10
    compare(run, (x, *residual), (at_ends(x),), vectors, partial_roundings=roundings)


def test_statistics_of_a_batch() -> None:
    """Sums in float32 of 2**24 terms of order 1, in blocks: right to 2**-12 with much to spare."""
    x = beyond(128, 16, 16).contiguous(memory_format=torch.channels_last)
    x[-EDGE:] += 1000 * torch.arange(128, device=GPU)[:, None, None]  # which must be counted
    mean, var = torch.zeros(128, device=GPU), torch.ones(128, device=GPU)
    y = nn.batch_norm(x, mean, var, training=True, momentum=1.0, keep=NEAREST).y
    count = x.numel() // 128
    exact = sum(part.double().sum((0, 2, 3)) for part in x.split(256)) / count
    square = sum(
        (part.double() - exact[:, None, None]).square().sum((0, 2, 3)) for part in x.split(256)
    )
    assert torch.allclose(mean.double(), exact, rtol=2.0**-12, atol=2.0**-12)
    assert torch.allclose(var.double(), square / (count - 1), rtol=2.0**-12)
    for end in ENDS:
        expected = nn.batch_norm(x[end].clone(), mean, var, keep=NEAREST).y
        assert torch.allclose(y[end], expected, rtol=2.0**-7, atol=2.0**-10)
