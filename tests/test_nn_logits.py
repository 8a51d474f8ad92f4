"""The stand-in for logits: what it remembers, what it is made for, and what passes it by."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_model_tools import told_anew
from optimize_tools import ROUNDING, error
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils import _pytree as pytree

from vramx.errors import LogitsNotMadeError, VramxWarning
from vramx.nn.logits import Logits

__all__ = ["told_anew"]  # a fixture
pytestmark = pytest.mark.usefixtures("told_anew")

ROWS, TOKENS, WIDTH, CLASSES = 2, 6, 16, 11


def inputs_of(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, TOKENS, WIDTH), (CLASSES, WIDTH), (CLASSES,)
    made = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    hidden, weight, bias = (each.requires_grad_() for each in made)
    return hidden, weight, bias


def detached() -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, bias = inputs_of()
    return hidden.detach(), weight.detach(), bias.detach()


def targets() -> Tensor:
    found = torch.randint(0, CLASSES, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    found[0, 3] = -100
    return found


def loss_of(logits: Any, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), targets().view(-1), **options)


def shifted(logits: Any) -> Tensor:
    rows = logits[..., :-1, :].contiguous().view(-1, CLASSES)
    return F.cross_entropy(rows, targets()[..., 1:].reshape(-1))


def loss_of_second(logits: Any) -> Tensor:
    return F.cross_entropy(logits[0], targets()[1])


BESIDE = torch.linspace(-1, 1, CLASSES)
REMEMBERED: dict[str, Callable[[Any], Tensor]] = {
    "mean": loss_of,
    "sum": lambda x: loss_of(x.float(), reduction="sum") / 7,
    "none": lambda x: loss_of(x, reduction="none").square().sum(),
    "smoothing": lambda x: loss_of(x, label_smoothing=0.1),
    "ignored": lambda x: F.cross_entropy(
        x.view(-1, CLASSES), targets().view(-1).clamp(min=0), ignore_index=0
    ),
    "shift": shifted,
    "cap": lambda x: loss_of(2.0 * torch.tanh(x / 2.0)),
    "cap of multiples": lambda x: loss_of((x * 0.5).tanh().mul(3)),
    "bias of a buffer": lambda x: loss_of((x + BESIDE[None]) * 0.5),
    "added": lambda x: loss_of(torch.add(x, BESIDE)),
    "negative multiple": lambda x: loss_of(x.div(-4)),
    "casts": lambda x: loss_of(x.to(torch.float32).to(x.device).to("cpu", torch.float32)),
    "rows": lambda x: F.cross_entropy(x[:, 2], targets()[:, 2]),
    "mask": lambda x: F.cross_entropy(x[targets() >= 0], targets()[targets() >= 0]),
    "mask of a shift": lambda x: F.cross_entropy(
        x[..., :-1, :][targets()[..., 1:] >= 0].contiguous(),
        targets()[..., 1:][targets()[..., 1:] >= 0],
    ),
    "mask of texts": lambda x: loss_of_second(x[torch.tensor([False, True])]),
    "reshaped": lambda x: F.cross_entropy(
        torch.reshape(x, (ROWS * TOKENS, CLASSES)), targets().view(-1)
    ),
}


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", REMEMBERED)
def test_losses_are_computed_without_logits(name: str, with_bias: bool) -> None:
    hidden, weight, bias = inputs_of()
    terms = (hidden, weight, bias) if with_bias else (hidden, weight)
    logits = Logits.of(hidden, weight, bias if with_bias else None)
    loss, expected = (REMEMBERED[name](x) for x in (logits, F.linear(*terms)))
    assert not logits.is_made
    assert loss.dtype == expected.dtype
    found = torch.autograd.grad(loss, terms)
    exact = torch.autograd.grad(expected, terms)
    for a, b in zip((loss, *found), (expected, *exact), strict=True):
        assert error(a.detach(), b.detach()) < ROUNDING


def test_a_bias_that_is_written_after_it_was_added_is_in_the_loss_as_it_was() -> None:
    hidden, weight, _ = detached()
    losses = []
    for logits in (Logits.of(hidden, weight, None), F.linear(hidden, weight)):
        beside = BESIDE.clone()
        added = logits + beside
        beside.mul_(5)
        losses.append(loss_of(added))
    assert error(*losses) < ROUNDING


def test_what_a_mask_or_a_bias_was_is_in_logits_that_are_made_later() -> None:
    hidden, weight, _ = detached()
    found = list[Tensor]()
    for logits in (Logits.of(hidden, weight, None, tells=False), F.linear(hidden, weight)):
        mask, beside = targets() >= 0, BESIDE.clone()
        chosen = (logits + beside)[mask]
        mask.fill_(False)
        beside.mul_(5)
        found.append(chosen.exp())
    assert torch.equal(*found)


MADE_FOR: dict[str, Callable[[Any], Tensor]] = {
    "weights": lambda x: loss_of(x, weight=torch.linspace(1, 2, CLASSES)),
    "probabilities": lambda x: F.cross_entropy(x[:, 0], torch.full((ROWS, CLASSES), 1 / CLASSES)),
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), targets()),
    "log_softmax": lambda x: x.log_softmax(-1)[..., 0].sum(),
    "temperature": lambda x: loss_of(x / torch.tensor(2.0)),
    "mask of classes": lambda x: x[x.detach() > 0].sum(),
    "some classes": lambda x: x[..., 2:5].exp().sum(),
    "one class": lambda x: x[:, :, 1].sum(),
    "cap twice": lambda x: loss_of(x.tanh().tanh()),
    "wider": lambda x: loss_of(x.double()).float(),
    "other rows": lambda x: x.view(CLASSES, -1).tanh().sum(),
    "tensor first": lambda x: (torch.ones(CLASSES) * x).sum(),
    "number first": lambda x: loss_of(1 - x),
    "in a list": lambda x: torch.cat([x, x]).sum(),
    "in place": lambda x: loss_of(x.clone().mul_(2)),
    "cap in place": lambda x: loss_of(torch.tanh(x).clone().clamp_(-0.5, 0.5)),
    "power": lambda x: (x**2).sum(),
    "bias of a multiple": lambda x: loss_of(x * 2.0 + BESIDE),
    "bias of rows": lambda x: loss_of(x + BESIDE[:TOKENS, None]),
    "wider bias": lambda x: loss_of(x + BESIDE.double()).float(),
    "number": lambda x: loss_of(x + 1),
    "other logits": lambda x: loss_of(x + x),
}


@pytest.mark.parametrize("name", MADE_FOR)
def test_any_other_use_makes_the_logits_and_says_so(name: str) -> None:
    terms = inputs_of()
    with pytest.warns(VramxWarning, match="of a language model's logits in training"):
        loss = MADE_FOR[name](Logits.of(*terms))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        MADE_FOR[name](Logits.of(*terms))
    expected = MADE_FOR[name](F.linear(*terms))
    assert torch.equal(loss, expected)
    found, exact = torch.autograd.grad(loss, terms), torch.autograd.grad(expected, terms)
    assert all(map(torch.equal, found, exact))


@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
def test_what_is_written_is_seen_where_logits_share_memory() -> None:
    def run(x: Any) -> list[Tensor]:
        view, row, copied = x.view(-1, CLASSES), x[0], x * 2
        x[..., 0] = 5.0
        row *= 3
        return [view + 0, row + 0, copied + 0, x + 0]

    terms = detached()
    assert all(map(torch.equal, run(Logits.of(*terms)), run(F.linear(*terms))))


@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
def test_logits_that_are_first_used_without_grad_mode_have_a_gradient_all_the_same() -> None:
    terms = inputs_of()
    logits = Logits.of(*terms)
    with torch.no_grad():
        accuracy = logits.argmax(-1)
    assert torch.equal(accuracy, F.linear(*terms).argmax(-1))
    assert all(g is not None for g in torch.autograd.grad(logits.square().sum(), terms))


def test_what_is_known_of_logits_is_said_without_making_them() -> None:
    hidden, weight, bias = inputs_of()
    logits, expected = Logits.of(hidden, weight, bias), F.linear(hidden, weight, bias)
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout"):
        assert getattr(logits, name) == getattr(expected, name)
    for name in ("size", "dim", "numel", "element_size", "is_floating_point", "stride"):
        assert getattr(logits, name)() == getattr(expected, name)()
    assert logits.size(-1) == CLASSES
    assert len(logits) == ROWS
    assert "(2, 6, 11)" in repr(logits)
    assert not hasattr(logits, "no_such_thing")
    assert not logits.is_made


def test_what_backward_would_leave_is_an_error_with_the_way_out() -> None:
    logits = Logits.of(*inputs_of())
    for name in ("grad", "retain_grad", "register_hook"):
        with pytest.raises(LogitsNotMadeError, match=r'\{"lm_head": "left"'):
            getattr(logits, name)


def test_weight_whose_memory_is_given_back_is_an_error() -> None:
    hidden, weight, bias = inputs_of()
    logits = Logits.of(hidden, weight, bias)
    loss_of(logits)
    weight.untyped_storage().resize_(0)  # as FSDP does after the forward pass
    with pytest.raises(LogitsNotMadeError, match="sharded again"):
        logits.made()


def test_logits_of_a_weight_that_was_written_into_since_are_told_of() -> None:
    for writes in (False, True):
        terms = detached()
        logits = Logits.of(*terms, tells=False) * 2
        if writes:
            terms[1].mul_(2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            logits.argmax(-1)
        assert [writes] * len(told) == ["optimizer.step()" in str(each.message) for each in told]
        assert len(told) == writes


@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
def test_mistakes_raise_what_torch_does() -> None:
    logits: Any = Logits.of(*inputs_of())
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        logits.view(-1, CLASSES + 2)
    with pytest.raises(IndexError, match="too many indices"):
        logits[0, 0, :, 0]


def test_results_with_a_stand_in_pass_through_what_wraps_models() -> None:
    """DDP, FSDP and accelerate look for tensors in results, and cast those of half precision."""
    distributed: Any = pytest.importorskip("torch.nn.parallel.distributed")
    logits = Logits.of(*inputs_of(torch.bfloat16))
    result = {"loss": loss_of(logits), "logits": logits}
    leaves, structure = pytree.tree_flatten(result)
    assert pytree.tree_unflatten(leaves, structure)["logits"] is logits
    assert list(distributed._find_tensors(result)) == [result["loss"]]
    as_float = pytree.tree_map(lambda x: x.float() if hasattr(x, "dtype") else x, result)
    assert as_float["logits"].dtype == torch.float32
    assert not as_float["logits"].is_made
    assert not logits.is_made


@pytest.mark.filterwarnings("ignore::vramx.errors.VramxWarning")
def test_copies_and_files_have_the_tensor() -> None:
    terms = detached()
    buffer = io.BytesIO()
    torch.save({"logits": Logits.of(*terms)}, buffer)
    buffer.seek(0)
    expected = F.linear(*terms)
    assert torch.equal(torch.load(buffer)["logits"], expected)
    copied: Any = copy.deepcopy(Logits.of(*terms))
    assert torch.equal(copied, expected)
