"""The fuzz of activation compression, a short one; `python -m tests.fuzz` is the long one.

With each planted fault it must fail: a test that sees none of them would see no fault of ours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from tests.fuzz import compare
from tests.fuzz.compare import FaultError, check
from tests.fuzz.directed import program, setting
from tests.fuzz.faults import FAULTS, ONLY_WITH_CUDA
from tests.fuzz.run import UnusableError
from tests.fuzz.search import search
from tests.fuzz.settings import Setting
from vramx.compression.codec.mapping import BOUNDED
from vramx.compression.policy import plans, policy
from vramx.recompute.elements import Elements
from vramx.recompute.unbounded import Unbounded

SEED = 20
HERE = FAULTS | (ONLY_WITH_CUDA if torch.cuda.is_available() else {})


pytestmark = pytest.mark.usefixtures("one_thread")


def test_random_programs_have_the_gradients_that_they_have_without_packing() -> None:
    found = search(30, SEED)

    assert not found.fault, f"seed {SEED}\n{found}"
    assert found.checked >= 30


@pytest.mark.parametrize("name", HERE)
def test_a_planted_fault_is_found(name: str) -> None:
    check(*HERE[name].program)
    with HERE[name].plant(), pytest.raises(FaultError):
        check(*HERE[name].program)


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


# Programs that have failed, in their smallest form: each is right, and wrong without decisions.

Decision = tuple[Any, str, Any]
NO_MAPPING: Decision = (plans, "_MAPPED", BOUNDED)
NO_LOOK: Decision = (Elements, "look_at", lambda *_: None)
NO_SUMS: Decision = (Unbounded, "look_at", lambda *_: None)
NO_POWER: Decision = (plans, "is_power", lambda _: False)
NO_FACTOR: Decision = (policy, "graph_of_factor", lambda *_: (False, False))
NO_MEAN_NORM: Decision = (plans, "MEAN_NORMS", frozenset())

LINEAR = "nn.Linear(64, 64)"
WIDE = "h = self.a(h) * torch.logspace(-1, 1, 64).to(h)"
OFF = "h = self.a(h) + {} * torch.linspace(-1, 1, 64).to(h)"
VARIANCE = "h = (h - h.mean(1, True)) * (h.var(1, keepdim=True) + 1e-6).rsqrt()"
SQUARES = "h = h * ((h * h).mean(1, True) + 1e-6).rsqrt()"
EINSUM = "torch.einsum('...i,...i->...i', {}, h)"


class Failed(NamedTuple):
    source: str
    how: Setting
    decisions: tuple[Decision, ...] = ()


def packed(
    *lines: str, modules: tuple[str, ...] = (LINEAR,), decisions: tuple[Decision, ...] = ()
) -> Failed:
    return Failed(program(modules, lines), setting(), decisions)


def recomputed(region: str, before: str, *after: str) -> Failed:
    """A region that only elements of its input count in which are small beside their group."""
    outer = (before, "h = pieces.api.checkpoint(self.b, h)", *after)
    decisions = (NO_LOOK, NO_SUMS)
    return Failed(program((LINEAR, "Region()"), outer, (region,)), setting(style="none"), decisions)


def in_a_graph(norm: str) -> Failed:
    modules = (LINEAR, "torch.compile(Region(), backend='aot_eager')")
    lines = (WIDE.replace("-1, 1", "-2, 2"), "with pieces.api.graphs():", "    h = self.b(h)")
    return Failed(program(modules, lines, (norm, "h = h * h.sigmoid()")), setting(style="none"))


def power(of: str, *products: str) -> Failed:
    """What a logarithm needs of a power spans more decades than a step of a packed number does."""
    lines = (f"h = (self.a(h) * 2){of}", *products, "h = (h.abs() + 1e-6).log()")
    return packed(*lines, decisions=(NO_POWER, NO_FACTOR))


# And how large its input is: all of the gradient comes from elements that a step is large beside.
SATURATED = {
    "h.tanh()": 60,
    "h.sigmoid()": 100,
    "torch.erf(h)": 60,
    "(h * 2).mT.tanh().mT": 30,
    "h.double().tanh()": 60,
}
BENT = ("F.gelu(h)", "F.silu(h)", "F.softplus(h)", "h * h", "h.pow(3)", "F.silu(h) * h")
PRODUCTS = ("F.silu(h) * h", "torch.addcmul(h * 0, F.silu(h), h)", EINSUM.format("F.silu(h)"))
FAILED: dict[str, Failed] = {
    # bfloat16 rounds the input of the norm, and normalises what it has rounded; a packed input was
    # off by many deviations from the mean that the norm had saved.
    "a mean of many deviations before a norm": packed(
        "h = self.a(h) + 300", "h = h + self.b(h.transpose(1, 2)).transpose(1, 2)",
        modules=(LINEAR, "nn.InstanceNorm1d(64, affine=True)"), decisions=(NO_MEAN_NORM,),
    ),
    # In a group with the largest scale the smallest is next to nothing.
    "a factor that is repeated over columns": packed(
        "h = h * torch.logspace(-2, 2, 64).to(h)", "h = self.a(h.transpose(1, 2))",
        modules=("nn.BatchNorm1d(64)",),
    ),
    "a square of a square": power(".square().square().square()"),
    "a product with itself": power(" * 1.5", *["h = h * h"] * 3),
    "a power of a power": power(".pow(3).pow(3)"),
    # A logarithm needs what is small beside its group.
    "a square that is written as a sum": packed(
        "h = self.a(h)", f"h = ({EINSUM.format('h')} + 1e-3).log()", decisions=(NO_MAPPING,)
    ),
    "a square of what another operation has packed": packed(
        "h = self.a(h)", "h = self.b(h) + (h.square() + 1e-4).log()", modules=(LINEAR,) * 2
    ),
    **{
        f"a norm that is written out, {name}": packed(columns, norm, "h = h * h.sigmoid()")
        for name, columns, norm in (
            ("of wide columns", WIDE, VARIANCE), ("off", OFF.format(450), VARIANCE),
            ("of squares", WIDE, SQUARES),
        )
    },
    **{f"a norm in a graph, {norm}": in_a_graph(norm) for norm in (VARIANCE, SQUARES)},
    # Its first run alone rounds otherwise, as torch has it.
    "a function of torchscript": Failed(
        program((LINEAR,), ("h = pieces.scripted(self.a(h))",)),
        setting(style="module", training=False, exact=True),
    ),
    **{
        f"a region that its input saturates, {line}": recomputed(
            f"h = {line}.to(h.dtype)", f"h = self.a(h) * {size}"
        )
        for line, size in SATURATED.items()
    },
    **{
        f"a region that bends its input, {line} of {name}": recomputed(
            f"h = {line}", before, "h = h.tanh()"
        )
        for line in BENT
        for name, before in (
            ("far columns", OFF.format(100)), ("a square", "h = (self.a(h) * 10).square()"),
        )
    },
    **{
        f"a product of which only small elements count, {product}": packed(
            OFF.format(30), f"h = ({product}).tanh()", decisions=(NO_MAPPING,)
        )
        for product in PRODUCTS
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_a_program_that_failed_is_right_and_wrong_without_the_decision(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, how, decisions = FAILED[name]
    check(source, how)
    for place, decision, wrong in decisions:
        monkeypatch.setattr(place, decision, wrong)
    plans.plans_of.cache_clear()
    if decisions:
        with pytest.raises(FaultError):
            check(source, how)


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
