"""The fuzz of activation compression, a short one; `python -m tests.fuzz` is the long one.

With each planted fault it must fail: a test that sees none of them would see no fault of ours.
"""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import compare
from tests.fuzz.compare import FaultError, check
from tests.fuzz.directed import PROGRAMS, program, setting
from tests.fuzz.faults import FAULTS, ONLY_WITH_CUDA
from tests.fuzz.run import UnusableError
from tests.fuzz.search import search
from vramx.compression.codec.mapping import BOUNDED
from vramx.compression.policy import plans, policy
from vramx.recompute.elements import Elements

SEED = 20
HERE = FAULTS | (ONLY_WITH_CUDA if torch.cuda.is_available() else {})


pytestmark = pytest.mark.usefixtures("one_thread")


def test_random_programs_have_the_gradients_that_they_have_without_packing() -> None:
    found = search(30, SEED)

    assert not found.fault, f"seed {SEED}\n{found}"
    assert found.checked >= 30


@pytest.mark.parametrize("name", HERE)
def test_a_planted_fault_is_found(name: str) -> None:
    check(*PROGRAMS[name])
    with HERE[name].plant(), pytest.raises(FaultError):
        check(*PROGRAMS[name])


def test_each_fault_has_aprogram() -> None:
    assert set(PROGRAMS) == {*FAULTS, *ONLY_WITH_CUDA}


def test_random_programs_find_a_fault_too() -> None:
    fault = FAULTS["packs the tensors of unknown Functions"]
    with fault.plant():
        found = search(100, SEED, names=fault.names, shrink=False)
    assert found.fault, f"seed {SEED}: {found.checked} programs ran as if nothing were wrong"


def test_gradients_that_are_short_have_a_cosine() -> None:
    short = torch.tensor([3e-12, 4e-12])
    assert compare._cosine(short, 2 * short) == pytest.approx(1)
    assert compare._cosine(short, short.flip(0)) == pytest.approx(0.96)
    assert compare._cosine(short, 0 * short) == 0


# Programs that have failed, in their smallest form.


def test_a_mean_of_many_deviations_before_a_norm() -> None:
    """bfloat16 rounds the input of the norm, and normalises what it has rounded; a packed input
    was off by many deviations from the mean that the norm had saved."""
    lines = ("h = self.a(h) + 300", "h = h + self.b(h.transpose(1, 2)).transpose(1, 2)")
    source = program(("nn.Linear(64, 64)", "nn.InstanceNorm1d(64, affine=True)"), lines)
    check(source, setting())
    with FAULTS["packs inputs of norms as other numbers"].plant(), pytest.raises(FaultError):
        check(source, setting())


def test_a_factor_that_is_repeated_over_columns() -> None:
    """In a group with the largest scale the smallest is next to nothing."""
    lines = ("h = h * torch.logspace(-2, 2, 64).to(h)", "h = self.a(h.transpose(1, 2))")
    check(program(("nn.BatchNorm1d(64)",), lines), setting())


EINSUM = "torch.einsum('...i,...i->...i', {}, h)"


POWERS = {
    "square": ".square().square().square()",
    "product with itself": " * 1.5",
    "power": ".pow(3).pow(3)",
}


@pytest.mark.parametrize("name", POWERS)
def test_a_power_of_a_power(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a logarithm needs of them spans more decades than a step of a packed number does."""
    products = ["h = h * h"] * 3 if name == "product with itself" else []
    lines = (f"h = (self.a(h) * 2){POWERS[name]}", *products, "h = (h.abs() + 1e-6).log()")
    source = program(("nn.Linear(64, 64)",), lines)
    check(source, setting())
    monkeypatch.setattr(plans, "is_power", lambda _: False)
    plans.plans_of.cache_clear()
    monkeypatch.setattr(policy, "graph_of_factor", lambda *_: (False, False))
    with pytest.raises(FaultError):
        check(source, setting())


def test_a_square_that_is_written_as_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logarithm needs what is small beside its group."""
    lines = ("h = self.a(h)", f"h = ({EINSUM.format('h')} + 1e-3).log()")
    source = program(("nn.Linear(64, 64)",), lines)
    check(source, setting())
    monkeypatch.setattr(plans, "_MAPPED", BOUNDED)
    plans.plans_of.cache_clear()
    with pytest.raises(FaultError):
        check(source, setting())


def test_a_square_of_what_another_operation_has_packed() -> None:
    lines = ("h = self.a(h)", "h = self.b(h) + (h.square() + 1e-4).log()")
    check(program(("nn.Linear(64, 64)",) * 2, lines), setting())


WIDE = "h = self.a(h) * torch.logspace(-1, 1, 64).to(h)"
OFF = "h = self.a(h) + 300 * torch.linspace(-1.5, 1.5, 64).to(h)"
VARIANCE = "h = (h - h.mean(1, True)) * (h.var(1, keepdim=True) + 1e-6).rsqrt()"
SQUARES = "h = h * ((h * h).mean(1, True) + 1e-6).rsqrt()"


@pytest.mark.parametrize(("columns", "norm"), [(WIDE, VARIANCE), (OFF, VARIANCE), (WIDE, SQUARES)])
def test_a_norm_that_is_written_out(columns: str, norm: str) -> None:
    lines = (columns, norm, "h = h * h.sigmoid()")
    check(program(("nn.Linear(64, 64)",), lines), setting())


@pytest.mark.parametrize("norm", [VARIANCE, SQUARES])
def test_a_norm_that_is_written_out_in_a_graph(norm: str) -> None:
    source = program(
        ("nn.Linear(64, 64)", "torch.compile(Region(), backend='aot_eager')"),
        (WIDE.replace("-1, 1", "-2, 2"), "with pieces.api.graphs():", "    h = self.b(h)"),
        (norm, "h = h * h.sigmoid()"),
    )
    check(source, setting(style="none"))


def test_gradients_that_float32_has_not_are_not_compared() -> None:
    """Of an attention that looks at one key alone nothing is left but what rounding leaves."""
    lines = (
        "q, k, v = (self.a(h * 500) * 500).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)",
        "h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)",
    )
    try:
        check(program(("nn.Linear(64, 192)",), lines), setting(learns_input=False))
    except UnusableError:
        pytest.skip("this machine's torch has no finite attention of such scores")


def test_a_function_of_torchscript_has_one_result() -> None:
    """Its first run alone rounds otherwise, as torch has it."""
    lines = ("h = pieces.scripted(self.a(h))",)
    evaluated = setting(style="module", training=False, exact=True)
    check(program(("nn.Linear(64, 64)",), lines), evaluated)


SATURATED = ("h.tanh()", "h.sigmoid()", "torch.erf(h)", "(h * 2).mT.tanh().mT", "h.double().tanh()")


@pytest.mark.parametrize("line", SATURATED)
def test_a_region_whose_input_saturates_it(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the gradient comes from elements that a step of the largest is large beside."""
    source = program(
        ("nn.Linear(64, 64)", "Region()"),
        ("h = self.a(h) * 100", "h = pieces.api.checkpoint(self.b, h)"),
        (f"h = {line}.to(h.dtype)",),
    )
    check(source, setting(style="none"))
    monkeypatch.setattr(Elements, "look_at", lambda *_: None)
    with pytest.raises(FaultError):
        check(source, setting(style="none"))


WIDE_OFF = "h = self.a(h) + 100 * torch.linspace(-1, 1, 64).to(h)"
SQUARED = "h = (self.a(h) * 10).square()"
BENT = ("F.gelu(h)", "F.silu(h)", "F.softplus(h)", "h * h", "h.pow(3)", "F.silu(h) * h")


@pytest.mark.parametrize("before", [WIDE_OFF, SQUARED])
@pytest.mark.parametrize("line", BENT)
def test_a_region_that_bends_its_input(
    line: str, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows the region leaves only elements that are small beside their group."""
    source = program(
        ("nn.Linear(64, 64)", "Region()"),
        (before, "h = pieces.api.checkpoint(self.b, h)", "h = h.tanh()"),
        (f"h = {line}",),
    )
    check(source, setting(style="none"))
    monkeypatch.setattr(Elements, "look_at", lambda *_: None)
    with pytest.raises(FaultError):
        check(source, setting(style="none"))


PRODUCTS = ("F.silu(h) * h", "torch.addcmul(h * 0, F.silu(h), h)", EINSUM.format("F.silu(h)"))


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_of_which_only_small_elements_count(
    product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = WIDE_OFF.replace("100", "30")
    source = program(("nn.Linear(64, 64)",), (columns, f"h = ({product}).tanh()"))
    check(source, setting())
    monkeypatch.setattr(plans, "_MAPPED", BOUNDED)
    plans.plans_of.cache_clear()
    with pytest.raises(FaultError):
        check(source, setting())
