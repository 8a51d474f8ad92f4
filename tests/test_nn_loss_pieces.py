"""Rows of logits in pieces: how they are cut, and what the kernel makes of several."""

from __future__ import annotations

import pytest
import torch
from interpreted_nn import interpreted_nn
from nn_elementwise_tools import CLOSE, differs, sample
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vramx.kernels import cross_entropy_launch as launch
from vramx.kernels.cross_entropy_launch import Cut, LossOptions
from vramx.nn import reference_elementwise as reference

IGNORED = -100
OPTIONS = [LossOptions(IGNORED, 0.0, None), LossOptions(IGNORED, 0.3, 2.0)]


def logits_of(
    classes: int, stride: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    return torch.empty(0, stride or classes, dtype=dtype, device="meta")[:, :classes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("classes", [1, 7, 8, 1000, 8192, 8193, 50257, 128256, 262144, 1_000_003])
def test_pieces_hold_the_row_and_none_is_empty(classes: int, dtype: torch.dtype) -> None:
    width = 16 // dtype.itemsize
    for stride in (classes, classes + 1, classes + 8):
        cut = launch.cut(logits_of(classes, stride, dtype))
        shift = width - 1 if cut.shifted else 0  # at most, before a row's first logit
        size = cut.tiles * cut.warps * 32 * width
        assert (cut.pieces - 1) * size < classes + shift <= cut.pieces * size
        assert cut.tiles <= 8
        assert cut.warps in ((1, 2, 4) if cut.pieces == 1 else (4,))


@pytest.mark.parametrize(
    ("classes", "stride", "shifted"),
    [(50304, 50304, False), (50304, 50312, False), (50304, 50305, True), (50257, 50264, True)],
)
def test_rows_are_shifted_unless_whole_accesses_have_them(
    classes: int, stride: int, shifted: bool
) -> None:
    assert launch.cut(logits_of(classes, stride)).shifted is shifted


@pytest.mark.parametrize(("processors", "pieces"), [(16, 32), (64, 128), (132, 128)])
def test_a_row_has_no_more_pieces_than_run_at_once(
    processors: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two for each multiprocessor, and one for each thread."""
    monkeypatch.setattr(launch, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(launch, "_is_known_triton", lambda: True)
    with FakeTensorMode():
        whole = torch.empty(1, pieces * 8192, dtype=torch.bfloat16, device="cuda")
        more = torch.empty(1, pieces * 8192 + 1, dtype=torch.bfloat16, device="cuda")
    assert launch.fits(whole)
    assert not launch.fits(more)
    monkeypatch.setattr(launch, "_is_known_triton", lambda: False)
    assert not launch.fits(whole)


def test_mail_has_a_box_for_each_two_pieces() -> None:
    plain, smoothed = OPTIONS
    logits = torch.empty(5, 50304, dtype=torch.bfloat16, device="meta")
    pieces = launch.cut(logits).pieces
    assert pieces > 1
    for options, messages in ((plain, 1), (smoothed, 2)):
        mail = launch.new_mail(logits, options)
        assert (mail.shape, mail.dtype) == ((5, messages, pieces, pieces), torch.int64)
    assert launch.new_mail(logits[:, :1000], plain) is None


WRONG = 2  # the row whose target is no class
# Of what is rounded once, to the other side where arithmetic differs.
UNIT = {torch.float32: CLOSE, torch.float16: 2.0**-10}
CASES = [
    # Of whole accesses; of rows that begin anywhere, some of whose last pieces are an edge alone,
    # in which targets are; of rows with a column of another tensor between them.
    (500, 500, torch.float32, Cut(2, 2, 1, False)),
    (385, 385, torch.float32, Cut(4, 1, 1, True)),
    (513, 514, torch.float32, Cut(3, 2, 1, True)),
    (600, 601, torch.float16, Cut(3, 1, 1, True)),
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "all"])
@pytest.mark.parametrize(("classes", "stride", "dtype", "cut"), CASES)
def test_pieces_give_what_the_whole_row_does(
    classes: int, stride: int, dtype: torch.dtype, cut: Cut, options: LossOptions
) -> None:
    (losses, gradients), expected = in_pieces(classes, stride, dtype, cut, options)
    assert losses.isnan().tolist() == [i == WRONG for i in range(6)]
    assert torch.equal(gradients.isnan(), losses.isnan()[:, None].expand(gradients.shape))
    right = ~losses.isnan()
    assert differs(losses[right], expected[0][right]) <= 1
    assert differs(gradients[right], expected[1][right], UNIT[dtype]) <= 1


def test_sums_added_up_as_if_of_one_base_would_be_seen() -> None:
    found, expected = in_pieces(*CASES[0], OPTIONS[0], defect="sums of other bases")
    assert differs(found[0][:WRONG], expected[0][:WRONG]) > 1


def in_pieces(
    classes: int, stride: int, dtype: torch.dtype, cut: Cut, options: LossOptions, defect: str = ""
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Return losses and weighted gradients of six rows: the kernel's, and float64's.

    One counts for nothing, one has no class, others' targets are the first and last class.
    """
    logits = (sample(6, stride) * 3).to(dtype)[:, :classes]
    targets = torch.tensor([0, IGNORED, classes, classes - 1, classes // 2, classes - 2])
    weights = sample(6, seed=2)
    losses, gradients = reference.cross_entropy(
        logits.double(), targets, options.ignored, options.smoothing, options.cap
    )
    call = "run", logits, targets, options, cut, weights
    found = interpreted_nn().loss_in_pieces(*call, defect=defect)
    return found, (losses.float(), (gradients * weights[:, None]).to(dtype))


@pytest.mark.parametrize("smoothed", [False, True])
def test_each_piece_receives_all_mail_and_leaves_none(smoothed: bool) -> None:
    """Maxima of 0, of -0 and of none; sums of what is 0 but one, to the same bits for all."""
    found = torch.tensor([[0.0, 1.0, -3.0], [-0.0, 2.0, 0.0], [-torch.inf, 0.0, 0.0], [5, 3, 1.5]])
    received, mail = interpreted_nn().loss_in_pieces("exchange", found, smoothed)
    total = (found[:, 1] * torch.exp(found[:, 0] - 5)).sum()
    expected = torch.stack([torch.tensor(5.0), total, torch.tensor(-1.5 if smoothed else 0.0)])
    torch.testing.assert_close(received[0], expected)
    assert all(torch.equal(each, received[0]) for each in received)
    assert not mail.any()
