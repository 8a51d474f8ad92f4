"""The Linear and cross entropy that hold no logits: results, gradients, chunks and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted_nn import Evaluated, evaluate, interpreted_nn
from language_model_tools import sizes_made
from nn_elementwise_tools import differs, gradients, leaves, sample
from norm_tools import error
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from vramx.compression.hooks import compress
from vramx.errors import FirstDerivativeOnlyError
from vramx.nn import loss_chunks, operators_loss
from vramx.nn.loss import linear_cross_entropy

CLASSES, TOKENS, WIDTH = 37, 21, 16
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"logit_softcap": 5.0},
    {"label_smoothing": 0.3, "logit_softcap": 2.0},
]


def both(
    inputs: list[Tensor], incoming: Tensor | None = None, defect: str = "", **options: Any
) -> tuple[Evaluated, Evaluated]:
    """Return what the kernel and what the composite make of a call."""
    incoming = torch.ones(()) if incoming is None else incoming
    call = ("loss.linear_cross_entropy", inputs, incoming, options)
    return interpreted_nn().function(*call, defect=defect), evaluate(*call)


def targets_of(tokens: int = TOKENS, classes: int = CLASSES) -> Tensor:
    targets = torch.randint(classes, (tokens,), generator=torch.Generator().manual_seed(tokens))
    targets[::6] = -100
    return targets


def inputs_of(dtype: torch.dtype, tokens: int = TOKENS, classes: int = CLASSES) -> list[Tensor]:
    return [
        sample(tokens, WIDTH, dtype=dtype),
        sample(classes, WIDTH, seed=1, dtype=dtype) / 4,
        sample(classes, seed=2, dtype=dtype),
    ]


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor, *, targets: Tensor, reduction: str = "mean",
    label_smoothing: float = 0.0, logit_softcap: float | None = None,
) -> Tensor:  # fmt: skip
    logits = F.linear(hidden, weight, bias)
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    return F.cross_entropy(logits, targets, reduction=reduction, label_smoothing=label_smoothing)


def ours(*tensors: Tensor, targets: Tensor, **options: Any) -> Tensor:
    hidden, weight, bias = tensors
    return linear_cross_entropy(hidden, weight, targets, bias, **options)


def incoming_of(reduction: str) -> Tensor:
    return sample(TOKENS, seed=5) if reduction == "none" else torch.tensor(-1.7)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [1, 8, 100])
def test_float64_is_torchs(reduction: str, options: dict[str, Any], chunk: int) -> None:
    inputs, incoming = inputs_of(torch.float64), incoming_of(reduction).double()
    options = {**options, "targets": targets_of(), "reduction": reduction}
    expected = plain(*inputs, **options)
    assert differs(ours(*inputs, **options, chunk=chunk), expected, 1e-13) <= 1
    found = gradients(lambda *t: ours(*t, **options, chunk=chunk), inputs, incoming)
    exact = gradients(lambda *t: plain(*t, **options), inputs, incoming)
    for a, b in zip(found, exact, strict=True):
        assert differs(a, b, 1e-13) <= 1


def plain_gradients(
    inputs: list[Tensor], incoming: Tensor, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Return torch's gradients in float64, and in the inputs' type."""
    wide = [x.double() for x in inputs]
    exact = gradients(lambda *t: plain(*t, **options), wide, incoming.double())
    return exact, gradients(lambda *t: plain(*t, **options), inputs, incoming.to(inputs[0].dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_narrow_types_are_as_near_to_float64_as_torch_is(reduction: str, dtype: Any) -> None:
    """Twice torch's own error, in one chunk: more round the weight's gradient more often."""
    inputs = inputs_of(dtype, tokens=256)
    options = {"targets": targets_of(256), "reduction": reduction}
    incoming = torch.ones(256) if reduction == "none" else torch.ones(())
    exact, torchs = plain_gradients(inputs, incoming, **options)
    found = gradients(lambda *t: ours(*t, **options), inputs, incoming)
    for a, b, c in zip(found, torchs, exact, strict=True):
        assert a.dtype == dtype
        assert error(a, c) <= 2 * error(b, c)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_memory_that_holds_nan_does_not_reach_the_gradients(dtype: torch.dtype) -> None:
    """37 classes leave three elements behind each row, which products on some processors read."""
    inputs, options = inputs_of(dtype, tokens=256), {"targets": targets_of(256)}
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch fills new memory with NaN then
    try:
        assert torch.empty(1, dtype=dtype).isnan()
        logits = loss_chunks.empty_logits(inputs[0], 256, CLASSES)
        found = gradients(lambda *t: ours(*t, **options), inputs, torch.ones(()))
    finally:
        torch.use_deterministic_algorithms(was)
    behind = logits.as_strided((256, logits.stride(0) - CLASSES), logits.stride(), CLASSES)
    assert not behind.any()
    assert all(each.isfinite().all() for each in found)


def test_small_gradients_survive_in_float16() -> None:
    """A mean over many tokens would push them below 2**-24 if it were taken before the products."""
    inputs = inputs_of(torch.float16, tokens=4096, classes=512)
    inputs[1] *= 0.01
    options = {"targets": targets_of(4096, 512)}
    scale = torch.tensor(1024.0)  # as a gradient scaler's
    (found, *_) = gradients(lambda *t: ours(*t, **options), inputs, scale)
    (exact, *_), _ = plain_gradients(inputs, scale, **options)
    assert error(found, exact) < 0.01


COMPARED = [
    [sample(7, WIDTH), sample(33, WIDTH, seed=1) / 4, targets_of(7, 33)],
    [sample(7, WIDTH), sample(4096 + 33, WIDTH, seed=1) / 4, targets_of(7, 4096 + 33)],
    # Extreme logits.
    [torch.eye(4) * 1e4, torch.eye(4) * torch.tensor([1.0, 1e4, -1e4, 1e30]), torch.arange(4)],
]


@pytest.mark.parametrize("inputs", COMPARED, ids=["small", "large", "extreme"])
@pytest.mark.parametrize("options", [*OPTIONS, {"reduction": "none", "chunk": 4}])
def test_kernel_is_the_composite(options: dict[str, Any], inputs: list[Tensor]) -> None:
    incoming = sample(len(inputs[0]), seed=3) if "reduction" in options else torch.tensor(1.3)
    found, expected = both(inputs, incoming, **options)
    assert differs(found.result, expected.result) <= 1
    for a, b in zip(found.gradients[:2], expected.gradients[:2], strict=True):
        assert differs(a, b) <= 1


def test_class_that_is_ruled_out_does_no_harm() -> None:
    bias = torch.tensor([0.5, -torch.inf, 1.0, 0.0, -torch.inf])
    inputs = [sample(3, WIDTH), sample(5, WIDTH, seed=1), torch.tensor([0, 2, 3]), bias]
    exact = plain(inputs[0], inputs[1], bias, targets=inputs[2])
    for found in both(inputs):
        assert differs(found.result, exact) <= 1
        assert found.gradients[0].isfinite().all()
        assert found.gradients[3][[1, 4]].tolist() == [0, 0]


def test_missing_cap_would_be_seen() -> None:
    inputs = [sample(7, WIDTH), sample(33, WIDTH, seed=1), targets_of(7, 33)]
    found, expected = both(inputs, defect="no cap", logit_softcap=2.0)
    assert differs(found.result, expected.result) > 1


def test_target_that_is_no_class_gives_nan() -> None:
    inputs = [sample(3, WIDTH), sample(5, WIDTH, seed=1), torch.tensor([1, 5, -1])]
    for found in both(inputs, torch.ones(3), reduction="none"):
        assert found.result.isnan().tolist() == [False, True, True]
        assert found.gradients[0].isnan().any(1).tolist() == [False, True, True]


def test_logits_are_never_held() -> None:
    """Nothing inside the operator has more elements than a chunk's logits."""
    hidden, weight, _ = inputs_of(torch.float32, tokens=512, classes=64)
    body = operators_loss.loss_and_gradients.implementation
    targets, settings = targets_of(512, 64), [-100.0, 0.0, 0.0, 32.0]
    with sizes_made() as sizes:
        body(hidden, weight, None, targets, settings, [True, True, False], True)
    assert max(sizes) == max(32 * 64, 512 * WIDTH)
    with sizes_made() as sizes:
        plain(hidden, weight, torch.zeros(64), targets=targets)
    assert max(sizes) == 512 * 64  # what the mode would have seen


def test_chunks_by_default_hold_2048_tokens_or_512_mib() -> None:
    def chunk(tokens: int, classes: int) -> int:
        rows = torch.empty(tokens, 8, dtype=torch.bfloat16, device="meta")
        return loss_chunks.chunk_tokens(rows, torch.empty(classes, 8, device="meta"), 0)

    assert chunk(8192, 128_000) == 2048
    assert chunk(6000, 32_000) == 2048
    assert chunk(4100, 32_000) == 1408  # three of about equal size
    assert chunk(8192, 512_000) * 512_000 * 2 <= 512 << 20
    assert chunk(100, 1 << 30) == 128


def test_shapes_with_batches_are_taken() -> None:
    hidden, weight, _ = inputs_of(torch.float64, tokens=24)
    targets = targets_of(24)
    expected = linear_cross_entropy(hidden, weight, targets, reduction="none").view(4, 6)
    batch = hidden.view(4, 6, WIDTH), weight, targets.view(4, 6)
    assert torch.equal(linear_cross_entropy(*batch, reduction="none"), expected)


def test_mean_of_ignored_tokens_is_nan_and_harmless_and_no_tokens_pass() -> None:
    hidden, weight = leaves(*inputs_of(torch.float32)[:2])
    value = linear_cross_entropy(hidden, weight, torch.full((TOKENS,), -100))
    value.backward()
    assert value.isnan()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    linear_cross_entropy(hidden[:0], weight, targets_of(0), reduction="sum").backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_enclosing_compression_leaves_the_gradients_alone() -> None:
    """They are kept where activations are, and must not be rounded as those are."""
    inputs = leaves(*inputs_of(torch.float32, tokens=64))
    with compress(level="int4", min_bytes=1):
        inside = ours(*inputs, targets=targets_of(64))
    found = torch.autograd.grad(inside, inputs)
    expected = torch.autograd.grad(ours(*inputs, targets=targets_of(64)), inputs)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivative_is_refused(reduction: str) -> None:
    inputs = leaves(*inputs_of(torch.float32))
    value = ours(*inputs, targets=targets_of(), reduction=reduction).sum()
    with pytest.raises(FirstDerivativeOnlyError, match=r"functional\.linear"):
        torch.autograd.grad(value, inputs, create_graph=True)


def test_autocast_casts_as_linear_does() -> None:
    inputs = leaves(*inputs_of(torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = ours(*inputs, targets=targets_of())
        expected = plain(*inputs, targets=targets_of())
    value.backward()
    assert value.dtype == torch.float32
    assert (
        value - expected
    ).detach().abs() <= 2.0**-7 * expected.detach()  # a bfloat16 logit's unit
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in inputs)
