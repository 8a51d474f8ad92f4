"""Results of tanh and sigmoid are packed so that their slopes are right where they saturate.

The slope, 1 - y**2 or y (1 - y), vanishes there. A gradient may be off by three times what it is in
bfloat16, or by 0.05 (a cosine of 0.9987).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compress_tools import worst_cosine
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional

import vramx
from vramx.compression import differences
from vramx.compression.codec import roots
from vramx.compression.codec.mapping import BOUNDED, function_of
from vramx.compression.policy import plans
from vramx.compression.session import PlainCodec

TIMES_BFLOAT16, NEAR = 3, 0.05
MOSTLY_EXACT = 0.999  # what is left is the noise of other factors
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "tanh in place": lambda x: (x * 1).tanh_(),
    "sigmoid in place": lambda x: (x * 1).sigmoid_(),
    "Tanh": nn.Tanh(),
    "tanhshrink": functional.tanhshrink,
    "tanh of a part": lambda x: x[:, ::2].tanh(),
    "logits": lambda x: x.sigmoid() * x.flip(0).sigmoid(),
}
# A step is a part of each factor: where both are next to nothing, the gradient is of a few largest.
TINY = 0.3
# How wide the arguments are spread, and about what.
PLACES = [(scale, shift * scale) for scale in (0.1, 1.0, 3.0, 10.0) for shift in (-4, 0, 4)]


def error(function: Callable[[Tensor], Tensor], place: tuple[float, float]) -> tuple[float, float]:
    """Return how far the gradient is off when packed, and in bfloat16."""
    torch.manual_seed(0)
    vramx.manual_seed(0, rank=0)
    scale, shift = place
    x = torch.randn(64, 256) * scale + shift

    def gradient(dtype: torch.dtype) -> Tensor:
        leaf = x.to(dtype).detach().requires_grad_()
        y = function(leaf)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
        return leaf.grad.double()

    exact = gradient(torch.float64)
    with vramx.compress(min_bytes=0) as stats:
        packed = gradient(torch.float32)
    assert stats.packed.tensors > 0
    off, own = (
        float((found - exact).norm() / exact.norm()) for found in (packed, gradient(torch.bfloat16))
    )
    return off, own


def is_right(packed: float, bfloat16: float, near: float = NEAR) -> bool:
    return packed <= max(near, TIMES_BFLOAT16 * bfloat16)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_slope_that_vanishes_is_as_good_as_in_bfloat16(name: str, place: Any) -> None:
    found = error(FUNCTIONS[name], place)
    near = TINY if name == "logits" and sum(place) < -4 else NEAR
    assert is_right(*found, near), found


@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_results_that_are_packed_as_other_numbers_are_found(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(plans, "function_of", lambda *_: "")
    assert not all(is_right(*error(FUNCTIONS[name], place)) for place in PLACES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_saturated_elements_have_no_gradient_at_all(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([-1e4, 1e4, 0.0, 1.0]).repeat(64).to(dtype).requires_grad_()
    with vramx.compress(min_bytes=0):
        y = FUNCTIONS[name](x)
    y.sum().backward()
    assert x.grad.dtype == dtype
    assert not x.grad.view(-1, 4)[:, :2].any()
    assert x.grad.view(-1, 4)[:, 2:].all()


# What divides by a slope that vanishes.
DIVIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross-entropy of chances": lambda x: functional.binary_cross_entropy(
        x.sigmoid(), torch.full_like(x, 0.3), reduction="none"
    ),
    "logarithm of a chance": lambda x: (x.sigmoid() + 1e-7).log(),
    "density of a squashed distribution": lambda x: (1 - x.tanh().square() + 1e-6).log(),
    "inverse": lambda x: x.tanh().clamp(-1 + 1e-6, 1 - 1e-6).atanh(),
}


def worst_of_divided(name: str) -> float:
    """Return the worst cosine over widths from where hardly any saturate to where most do."""
    found = []
    for width in (1, 3, 5, 10):
        torch.manual_seed(0)
        vramx.manual_seed(0, rank=0)
        x, weights = torch.randn(64, 256).mul_(width).requires_grad_(), torch.randn(64, 256)

        def gradient(**options: Any) -> Tensor:
            with vramx.compress(**options):
                y = DIVIDES[name](x * 1)  # noqa: B023
            return torch.autograd.grad((y * weights).sum(), x)[0]  # noqa: B023

        found.append(worst_cosine([gradient(min_bytes=0)], [gradient(min_bytes="1GiB")]))
    return min(found)


@pytest.mark.parametrize("name", DIVIDES)
def test_what_divides_by_a_slope_has_the_right_gradient(name: str) -> None:
    """Packed as angles, results gave cosines of 0.01 to 0.3: a step is a sixth of what is left."""
    assert worst_of_divided(name) > 0.995


def test_a_step_that_is_no_part_of_the_slope_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "ENDS", plans.ANGLES)
    plans.plans_of.cache_clear()
    # What reads the others' results keeps them exactly, packed or not.
    for name in ("logarithm of a chance", "density of a squashed distribution"):
        assert worst_of_divided(name) < 0.9
    plans.plans_of.cache_clear()


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.RNNCell])
def test_gates_of_a_recurrent_network_are_packed_as_such(kind: Any, monkeypatch: Any) -> None:
    made: list[str] = []
    original = function_of

    def noted(*arguments: Any) -> str:
        made.append(original(*arguments))
        return made[-1]

    monkeypatch.setattr(plans, "function_of", noted)
    network = kind(64, 64)
    with vramx.compress(min_bytes=0):
        network(torch.randn(8, 64))
    assert "TanhBackward0" in made


def test_what_was_written_to_since_is_packed_as_other_numbers() -> None:
    """A later reader of the memory sees what is there then, which need not be a sine."""
    layer, x = nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
    with vramx.compress(min_bytes=0):
        y = x.tanh()
        y.data.mul_(3)
        z = layer(y)
    z.sum().backward()
    slope = (1 - x.detach().tanh().square()) * layer.weight.detach().sum(0)
    expected = 3 * x.detach().tanh().sum(0).expand(64, 64)
    assert worst_cosine([x.grad, layer.weight.grad], [slope, expected]) > 0.999


# Arguments of powers


@pytest.mark.parametrize("power", [torch.square, lambda x: x.pow(2), lambda x: x**3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_arguments_of_powers_have_slopes_of_their_own(power: Any, dtype: torch.dtype) -> None:
    """A step of the root is 1 / 126 of the largest root: of a hundredth of it, 2 x 10 / 126."""
    signs = torch.tensor([1.0, -1.0]).repeat(32)
    x = (torch.logspace(-2, 0, 64) * signs).to(dtype).requires_grad_()
    with vramx.compress(min_bytes=0, group_size=64) as stats:
        y = power(x * 1)
    assert stats.packed.tensors == 1
    (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    exact = torch.autograd.grad(power(x), x, torch.ones_like(y))[0]
    assert torch.equal(found.sign(), exact.sign())
    assert ((found - exact).abs() <= 2 * (2 * 10 / 126 + 2**-7) * exact.abs()).all()


def test_a_power_of_nothing_and_of_infinity() -> None:
    x = torch.zeros(128)
    x[64], x[65] = torch.inf, torch.nan
    x.requires_grad_()
    with vramx.compress(min_bytes=0, group_size=64):
        y = (x * 1).square()
    y.sum().backward()
    assert x.grad[64:66].isnan().all()
    assert not x.grad.nan_to_num(0).any()


def test_powers_that_are_packed_as_other_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MAPPED", BOUNDED)

    def often() -> None:  # noise may round the small ones well, but not each time
        for _ in range(20):
            test_small_arguments_of_powers_have_slopes_of_their_own(torch.square, torch.float32)

    with pytest.raises(AssertionError):
        often()


# Products of products


class LinearAttention(nn.Module):
    """Of rectified features, divided by their sum, which a row of ones beside the values makes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.inner = heads, nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 4, 1)
        state = functional.pad(v / 10, (0, 0, 0, 1), value=1.0) @ k.relu().transpose(-1, -2)
        y = state @ q.relu()
        return y[:, :, :-1] / (y[:, :, -1:] + 1e-15)


def cosine_of_linear_attention() -> float:
    """Return the cosine of the gradient with the exact one, the worst of three seeds."""
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        vramx.manual_seed(seed, rank=0)
        module, x = LinearAttention(64, 4), torch.randn(2, 1024, 64)
        weights = torch.randn(2, 4, 16, 1024)
        gradients = []
        for level in ("keep", "int8"):
            module.zero_grad()
            with vramx.compress(level, min_bytes=0):
                y = module(x)
            (y * weights).sum().backward()
            gradients.append(module.inner.weight.grad)
        found.append(worst_cosine(gradients[:1], gradients[1:]))
    return min(found)


def test_a_product_in_a_product_keeps_what_is_left_of_a_large_row() -> None:
    assert cosine_of_linear_attention() > 0.999


def test_a_large_row_that_costs_the_others_precision_is_found(monkeypatch: Any) -> None:
    monkeypatch.setattr(roots, "_SUMS", frozenset())
    monkeypatch.setattr(plans, "_sums_rows", lambda *_: False)
    plans.plans_of.cache_clear()
    assert cosine_of_linear_attention() < 0.99
    plans.plans_of.cache_clear()


def _normal(x: Tensor) -> Tensor:
    """Return what stands for the normal distribution's integral in losses of diffusion."""
    return (1 + torch.tanh(0.8 * (x + 0.044715 * x.pow(3)))) / 2


BIN = 1 / 255
# The chance of a bin about x, of a mean and a scale.
CHANCES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "logistic": lambda x, mean, log: (
        torch.sigmoid((-log).exp() * (x - mean + BIN))
        - torch.sigmoid((-log).exp() * (x - mean - BIN))
    ),
    "logistic by a quotient": lambda x, mean, log: (
        torch.sigmoid((x - mean + BIN) / functional.softplus(log))
        - torch.sigmoid((x - mean - BIN) / functional.softplus(log))
    ),
    "normal": lambda x, mean, log: (
        _normal((x - mean + BIN) * (-log).exp()) - _normal((x - mean - BIN) * (-log).exp())
    ),
    "logistic of one scale": lambda x, mean, log: (
        torch.sigmoid(100 * (x - mean * log + BIN)) - torch.sigmoid(100 * (x - mean * log - BIN))
    ),
    "normal of one scale": lambda x, mean, log: (
        _normal(100 * (x - mean * log + BIN)) - _normal(100 * (x - mean * log - BIN))
    ),
    "logistic of a scale that is multiplied by": lambda x, mean, log: _between(
        torch.sigmoid, x - mean, functional.softplus(log)
    ),
    "normal of a scale that is multiplied by": lambda x, mean, log: _between(
        _normal, x - mean, functional.softplus(log)
    ),
    "tanh of what is learnt": lambda x, mean, log: torch.sub(
        torch.tanh(20 * (mean - log + BIN)), torch.tanh(20 * (mean - log - BIN))
    ),
    "neighbours": lambda x, mean, log: _neighbours(20 * (mean * log)),
}


def _between(function: Callable[[Tensor], Tensor], place: Tensor, scale: Tensor) -> Tensor:
    return function((place + BIN) * scale) - function((place - BIN) * scale)


def _neighbours(place: Tensor) -> Tensor:
    ends = torch.sigmoid(place.unsqueeze(-1) - torch.linspace(-10, 10, 200))
    return ends[..., :-1] - ends[..., 1:]


@pytest.mark.parametrize("name", CHANCES)
def test_slopes_that_are_taken_from_one_another_leave_the_right_gradient(name: str) -> None:
    """Packed results gave cosines of 0.34 to 0.72."""

    def gradients(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        leaves = [torch.randn(64, 256).mul_(0.3).requires_grad_() for _ in range(2)]
        with vramx.compress(**options):
            mean, log = (leaf * 1 for leaf in leaves)
            chance = CHANCES[name](torch.rand(64, 256) * 2 - 1, mean, log)
            (-chance.clamp(min=1e-12).log()).sum().backward()
        return [leaf.grad for leaf in leaves]

    exact = gradients(min_bytes="1GiB")
    assert worst_cosine(gradients(min_bytes=0), exact) > MOSTLY_EXACT


def test_gates_and_written_out_gelus_are_packed_as_before() -> None:
    x = torch.randn(64, 256, requires_grad=True)
    weight = torch.randn(256, 256)
    for function in (torch.sigmoid, torch.tanh, _normal):
        with vramx.compress(min_bytes=0) as stats:
            function(x @ weight)
        assert "policy" not in stats.kept


def test_ends_that_are_packed_until_they_are_taken_from_one_another_are_found(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(differences, "keep", lambda *_: None)
    with pytest.raises(AssertionError):
        test_slopes_that_are_taken_from_one_another_leave_the_right_gradient(
            "tanh of what is learnt"
        )


def test_what_was_packed_of_two_ends_goes_when_they_are_kept() -> None:
    x = torch.randn(64, 256, requires_grad=True)
    with vramx.compress(min_bytes=0) as stats, recorded_payloads() as made:
        ends = (x + 1).tanh(), (x - 1).tanh()
        assert [each() is not None for each in made] == [True, True]
        between = ends[0] - ends[1]
        assert [each() is not None for each in made] == [False, False]
    assert stats.kept_bytes == 2 * x.nbytes
    (found,) = torch.autograd.grad(between.sum(), x)
    y, z = (x.detach() + 1).tanh(), (x.detach() - 1).tanh()
    torch.testing.assert_close(found, z * z - y * y)


@contextlib.contextmanager
def recorded_payloads() -> Iterator[list[weakref.ref[Any]]]:
    """Give a list of what is packed."""
    made: list[weakref.ref[Any]] = []
    original = PlainCodec.encode

    def encode(*arguments: Any) -> Any:
        payload = original(*arguments)
        made.append(weakref.ref(payload))
        return payload

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainCodec, "encode", encode)
        yield made


def test_a_result_that_is_taken_from_something_else_stays_packed() -> None:
    x = torch.randn(64, 256, requires_grad=True)
    with vramx.compress(min_bytes=0) as stats:
        y = x.sigmoid()
        made = 1 - y, y - x, x - y, y - 0.5, y - y.detach()
    assert "policy" not in stats.kept
    del made


def test_a_result_that_was_written_to_is_not_kept() -> None:
    """The graph has what was packed; torch would refuse, and so it did not depend on it."""
    x = torch.randn(64, 256, requires_grad=True)
    with vramx.compress(min_bytes=0):
        y, z = x.sigmoid(), (x + 1).sigmoid()
        y.mul_(2)
        between = y - z
    (found,) = torch.autograd.grad(between.sum(), x)
    one, other = x.detach().sigmoid(), (x.detach() + 1).sigmoid()
    expected = 2 * one * (1 - one) - other * (1 - other)
    assert worst_cosine([found], [expected]) > 0.99


def test_what_a_number_less_a_logarithm_multiplies_is_kept() -> None:
    x = torch.rand(64, 256, requires_grad=True)
    other = 2 - (x * 1).log()
    with vramx.compress(min_bytes=0) as stats:
        (x * 1).mul(other)
    assert stats.kept["policy"].tensors == 2  # the logarithm, too


def _entropy(chances: Tensor, logarithms: Tensor) -> Tensor:
    return -(chances * logarithms).sum(-1)


ENTROPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "torch's": lambda x: Categorical(logits=x).entropy(),
    "by hand": lambda x: _entropy(x.softmax(-1), x.softmax(-1).log()),
    "in bits": lambda x: _entropy(x.softmax(-1), (x.softmax(-1) + 1e-8).log2()),
    "by einsum": lambda x: torch.einsum("bv,bv->b", x.softmax(-1), x.softmax(-1).log()),
    "scores less their logsumexp": lambda x: _entropy(
        x.softmax(-1), (x - x.logsumexp(-1)[:, None]).clamp(min=-99)
    ),
    "of two": lambda x: (
        _entropy(x.sigmoid(), x.sigmoid().log())
        + _entropy(1 - x.sigmoid(), torch.log1p(-x.sigmoid()))
    ),
}


@pytest.mark.parametrize("name", ENTROPIES)
def test_entropies_of_nearly_even_chances_have_the_right_gradient(name: str) -> None:
    """As of a policy at the start. Packed logarithms gave cosines of 0.3 to 0.9."""
    x = torch.randn(64, 256).mul_(0.01).requires_grad_()

    def gradient(**options: Any) -> list[Tensor]:
        with vramx.compress(**options):
            entropy = ENTROPIES[name](x * 1)
        return list(torch.autograd.grad(entropy.mean(), x))

    assert worst_cosine(gradient(min_bytes=0), gradient(min_bytes="1GiB")) > MOSTLY_EXACT
