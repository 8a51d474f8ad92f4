"""The kernel of cross entropy on a GPU: rows that several programs share, in every option.

In the interpreter programs run one after another, so that rows have one piece there; here they have
up to two for each multiprocessor.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vramx.kernels import cross_entropy_launch as launch

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
IGNORED = -100
PLAIN = launch.LossOptions(IGNORED, 0.0, None)
OPTIONS = {
    "plain": PLAIN,
    "smoothed": launch.LossOptions(IGNORED, 0.1, None),
    "capped": launch.LossOptions(IGNORED, 0.0, 5.0),
    "smoothed and capped": launch.LossOptions(IGNORED, 0.3, 2.0),
}
# Of one rounding, to 8 or 11 binary digits; and of float32's arithmetic: of exponents up to 2**8,
# which are off by 2**-17 then.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}
ARITHMETIC = 2.0**-16
SMALLEST = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24, torch.float32: 2.0**-126}

# One piece; several, of whole accesses; rows that begin anywhere; and many pieces.
SIZES = (10, 1000, 32000, 50257, 128256, 300001)
every_size = pytest.mark.parametrize("classes", SIZES)
OTHERS = [name for name in OPTIONS if name != "plain"]


def rows_of(
    logits: Tensor, targets: Tensor, options: launch.LossOptions = PLAIN
) -> launch.LossRows:
    losses = torch.full((len(logits),), 77.0, device=GPU)
    return launch.LossRows(targets, losses, launch.new_mail(logits, options))


class Problem:
    """Logits of 24 rows: one counts for nothing, two have no class, two begin or end in -inf."""

    def __init__(self, classes: int, dtype: torch.dtype = torch.bfloat16, rows: int = 24) -> None:
        torch.manual_seed(classes)
        self.logits = (torch.randn(rows, classes, device=GPU) * 3).to(dtype)
        self.targets = torch.randint(classes, (rows,), device=GPU)
        self.targets[1:6] = torch.tensor([IGNORED, classes, -1, classes - 1, 0])
        self.logits[6, : classes // 2] = self.logits[7, classes // 2 + 1 :] = -torch.inf
        self.targets[6], self.targets[7] = classes - 1, 0

    def run(
        self, options: launch.LossOptions = PLAIN, gradient: Tensor | bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return losses and what is in place of the logits."""
        logits = self.logits.clone()
        rows = self.rows(logits, options)
        launch.cross_entropy(logits, rows, options, gradient)
        assert rows.mail is None or not rows.mail.any()
        return rows.losses, logits

    def rows(self, logits: Tensor, options: launch.LossOptions = PLAIN) -> launch.LossRows:
        return rows_of(logits, self.targets, options)

    def exact(self, options: launch.LossOptions) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses and gradients in float64, by the formulas of cross_entropy.py.

        And the sum of the magnitudes of what a gradient is a difference of.
        """
        classes, cap = self.logits.shape[1], options.cap
        logits = self.logits.double()
        capped = logits if cap is None else cap * torch.tanh(logits / cap)
        counts = self.targets != IGNORED
        right = (self.targets >= 0) & (self.targets < classes)
        own = self.targets.where(right, 0)[:, None]
        log_sum = capped.logsumexp(1, keepdim=True)
        losses = log_sum[:, 0] - (1 - options.smoothing) * capped.gather(1, own)[:, 0]
        if options.smoothing:
            losses -= options.smoothing / classes * capped.sum(1)
        missing = torch.full_like(capped, options.smoothing / classes)
        missing.scatter_add_(1, own, torch.full_like(log_sum, 1 - options.smoothing))
        shares = (capped - log_sum).exp()
        gradients, magnitudes = shares - missing, shares + missing
        if cap is not None:
            gradients *= 1 - (capped / cap) ** 2
        losses[~right] = gradients[~right] = torch.nan
        losses[~counts] = gradients[~counts] = 0
        return losses, gradients, magnitudes


def assert_near(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor, Tensor]) -> None:
    # A sum of logits is of magnitudes that cancel: absolute, of losses of some ten.
    losses, gradients = found
    torch.testing.assert_close(losses.double(), exact[0], rtol=2e-6, atol=2e-5, equal_nan=True)
    dtype = gradients.dtype
    near = ROUNDING[dtype] * exact[1].abs() + ARITHMETIC * exact[2] + SMALLEST[dtype]
    away = (gradients.double() - exact[1]).abs()
    assert torch.equal(away.isnan(), exact[1].isnan())
    assert bool((away <= near)[~away.isnan()].all())


@pytest.mark.parametrize(
    ("name", "dtype", "classes"),
    [
        *(("plain", dtype, classes) for dtype in ROUNDING for classes in SIZES),
        *((name, torch.bfloat16, classes) for name in OTHERS for classes in SIZES),
        *((name, torch.float32, 50257) for name in OTHERS),
    ],
    ids=str,
)
def test_losses_and_gradients(name: str, dtype: torch.dtype, classes: int) -> None:
    problem = Problem(classes, dtype)
    if name != "plain":
        problem.logits[6:8] = 1.0  # a smoothed loss of -inf is infinite
    assert_near(problem.run(OPTIONS[name]), problem.exact(OPTIONS[name]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_class_is_certain(dtype: torch.dtype) -> None:
    logits = torch.arange(5.0, device=GPU).to(dtype)[:, None]
    rows = rows_of(logits, torch.tensor([0, 0, 0, IGNORED, 1], device=GPU))
    launch.cross_entropy(logits, rows, PLAIN, True)
    assert rows.losses[:4].tolist() == logits[:4, 0].tolist() == [0] * 4
    assert bool(rows.losses[4].isnan() & logits[4, 0].isnan())


def test_large_logits_are_subtracted_before_they_are_rounded() -> None:
    """Equal ones share; a product with log2(e) first would be off by units of 10**8 then."""
    for size in (1e4, 1e8, 1e30):
        logits = torch.full((4, 50257), -size, device=GPU)
        logits[:, 7] = logits[:, 40000] = size
        rows = rows_of(logits, torch.full((4,), 7, device=GPU))
        launch.cross_entropy(logits, rows, PLAIN, True)
        expected = torch.zeros_like(logits)
        expected[:, 7], expected[:, 40000] = -0.5, 0.5
        torch.testing.assert_close(logits, expected, rtol=2e-6, atol=0)


@every_size
def test_weights_are_factors_of_the_gradients(classes: int) -> None:
    problem = Problem(classes)
    weights = torch.randn(len(problem.logits), device=GPU)
    losses, gradients, magnitudes = problem.exact(PLAIN)
    factors = weights.double()[:, None]
    exact = losses, gradients * factors, magnitudes * factors.abs()
    assert_near(problem.run(PLAIN, weights), exact)


@every_size
def test_losses_alone_leave_the_logits(classes: int) -> None:
    problem = Problem(classes)
    losses, logits = problem.run(PLAIN, False)
    assert torch.equal(logits, problem.logits)
    assert torch.equal(losses.nan_to_num(), problem.run()[0].nan_to_num())


@pytest.mark.parametrize(("columns", "first"), [(50257, 0), (50304, 0), (50304, 8), (50304, 3)])
def test_what_is_beside_rows_is_left_alone(columns: int, first: int) -> None:
    """Views of a wider tensor, which begin at a multiple of 16 bytes and not."""
    problem = Problem(50000)
    wide = torch.full((24, columns), 7.0, dtype=torch.bfloat16, device=GPU)
    view = wide[:, first : first + 50000]
    view.copy_(problem.logits)
    rows = problem.rows(view)
    launch.cross_entropy(view, rows, PLAIN, True)
    assert_near((rows.losses, view), problem.exact(PLAIN))
    assert bool((wide[:, :first] == 7).all())
    assert bool((wide[:, first + 50000 :] == 7).all())


# -- Programs that wait for each other -------------------------------------------------------------


def sums(problem: Problem, logits: Tensor, losses: Tensor) -> list[Tensor]:
    """Return what any change of a bit would show in, but by a rare chance."""
    bits = logits.view(torch.int16)
    weights = torch.arange(logits.shape[1], device=GPU) * 31 % 9973
    return [(part * weights).sum() for part in bits.split(64)] + [losses.view(torch.int32).sum()]


def repeats(classes: int, calls: int) -> list[list[Tensor]]:
    """Call many times over the same logits, of more rows than are in flight, and the same mail."""
    problem = Problem(classes, rows=1500)
    logits = problem.logits.clone()
    rows = problem.rows(logits)
    seen = []
    for _ in range(calls):
        logits.copy_(problem.logits)
        launch.cross_entropy(logits, rows, PLAIN, True)
        seen.append(sums(problem, logits, rows.losses))
    assert rows.mail is not None
    assert not rows.mail.any()
    return seen


@pytest.mark.parametrize("classes", [50257, 128256])
def test_every_run_gives_the_same_bits(classes: int) -> None:
    first, *others = repeats(classes, 20)
    assert all(torch.equal(a, b) for each in others for a, b in zip(first, each, strict=True))


def test_streams_do_not_disturb_each_other() -> None:
    problem = Problem(128256, rows=1500)
    expected = problem.run()
    streams = [torch.cuda.Stream() for _ in range(4)]
    many = [problem.logits.clone() for _ in streams]
    rows = [problem.rows(logits) for logits in many]
    torch.cuda.synchronize()
    for stream, logits, of_logits in zip(streams, many, rows, strict=True):
        with torch.cuda.stream(stream):
            launch.cross_entropy(logits, of_logits, PLAIN, True)
    torch.cuda.synchronize()
    for logits, of_logits in zip(many, rows, strict=True):
        assert torch.equal(of_logits.losses.nan_to_num(), expected[0].nan_to_num())
        assert torch.equal(logits.view(torch.int16), expected[1].view(torch.int16))


def test_a_graph_may_be_replayed() -> None:
    problem = Problem(128256)
    expected = problem.run()
    logits = problem.logits.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = problem.rows(logits)
        launch.cross_entropy(logits, rows, PLAIN, True)
    for _ in range(3):
        logits.copy_(problem.logits)
        graph.replay()
        assert torch.equal(logits.view(torch.int16), expected[1].view(torch.int16))


def test_a_row_of_most_pieces_passes() -> None:
    """Two programs for each multiprocessor, but one for each thread of a program at most."""

    def logits_of(classes: int) -> Tensor:
        return torch.empty(0, classes, dtype=torch.bfloat16, device=GPU)

    most = min(2 * torch.cuda.get_device_properties(GPU).multi_processor_count, 128)
    assert launch.fits(logits_of(most * 8192))
    assert not launch.fits(logits_of(most * 8192 + 1))
    problem = Problem(most * 8192, rows=9)
    assert_near(problem.run(), problem.exact(PLAIN))
