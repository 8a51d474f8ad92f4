"""What compress() does with the tensors of an operation: packed, kept, or exact, by its policy.

Attention is in test_compress_attention.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from child_processes import python
from compress_tools import input_of
from policy_tools import apply_has_a_frame, functions_have_names, saved_reason
from torch import nn

from vramx import errors
from vramx.compression.hooks import compress
from vramx.compression.policy.exactness import needs_exact
from vramx.compression.policy.operations import OperationMode

# Policies by operation


def test_a_rule_for_a_position_goes_before_the_rule_of_its_operation() -> None:
    x, y = input_of(32, 64), input_of(32, 64) * 2
    with compress(min_bytes=0, policy={"mul": "keep", "mul:1": "int4"}) as stats:
        x * y
    assert stats.kept["policy"].tensors == stats.packed.tensors == 1
    assert stats.packed.kept_bytes < 0.6 * x.numel()


@pytest.mark.parametrize("rows", [2, 32])
def test_a_factor_that_is_repeated_is_kept(rows: int) -> None:
    """Its columns differ in scale by more than a group has steps, and it is small."""
    x, scale = input_of(rows, 64), torch.logspace(-2, 2, 64).requires_grad_() * 1
    with compress(min_bytes=0) as stats:
        y = x * scale
    (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert stats.kept["statistic"].tensors >= 1
    assert torch.equal(found, torch.autograd.grad((x * scale).sum(), x)[0])


def test_a_number_has_no_groups_in_which_a_reciprocal_changes() -> None:
    x = input_of(32, 64)
    with compress(min_bytes=0):
        y = x.sum() * (1 / (x.mean() + 1))
    (found,) = torch.autograd.grad(y, x, retain_graph=True)
    (exact,) = torch.autograd.grad(x.sum() * (1 / (x.mean() + 1)), x)
    # Two numbers, each off by less than the step of a group of its own.
    assert torch.allclose(found, exact, rtol=4 * 1.0079 / 127)


def test_operators_methods_and_functions_have_one_name() -> None:
    x, y = input_of(32, 64), input_of(32, 64) * 2
    with compress(min_bytes=0) as stats:
        _ = x * y, x.mul(y), torch.mul(x, y), x.clone().mul_(y), x.clone().__imul__(y)
    assert set(stats.operations) == {"mul"}


def test_masks_follow_their_own_rule() -> None:
    x = input_of(64, 64)
    mask = x > 0
    with compress(min_bytes=0, policy={"masked_fill:mask": "keep"}) as stats:
        x.masked_fill(mask, 0.0)
    assert stats.kept["policy"].tensors == 1
    with compress(min_bytes=0) as stats:
        x.masked_fill(mask, 0.0)
    assert stats.packed.kept_bytes == 64 * 64 // 8


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


@functions_have_names
def test_an_autograd_function_has_the_name_of_its_class() -> None:
    x, y = input_of(32, 64), input_of(32, 64) * 2
    assert saved_reason(lambda: Doubled.apply(x, y), policy={"Doubled": "int8"}) == {"packed": 2}
    with compress(min_bytes=0, policy={"Doubled": "int8", "Doubled:0": "keep"}) as stats:
        Doubled.apply(x, y)
    assert set(stats.operations) == {"Doubled"}
    if apply_has_a_frame:
        assert stats.kept["policy"].tensors == stats.packed.tensors == 1
    else:  # which of them is the first argument is not known
        assert stats.kept["unknown"].tensors == 2


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        row, column = x.norm(dim=-1), x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(x, row, column, x * 2)
        return x / column

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad


@functions_have_names
def test_statistics_that_an_autograd_function_makes_are_kept() -> None:
    x = input_of(4, 32, 64)
    found = saved_reason(lambda: Norm.apply(x), policy={"Norm": "int8"})
    assert found == {"packed": 2, "statistic": 2}


def test_what_no_mode_sees_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())

    @torch.jit.script
    def function(x: torch.Tensor) -> torch.Tensor:
        return 1.0 / (x * 2.0).exp()

    x = input_of(64, 64)
    with pytest.warns(match="an operation that has no name is not known .* TorchScript"):
        assert set(saved_reason(lambda: function(x))) == {"unknown"}


def test_operators_of_other_libraries_are_kept_unless_a_policy_names_them() -> None:
    with torch.library._scoped_library("vramx_test", "FRAGMENT") as library:
        library.define("scaled_by(Tensor x, Tensor y) -> Tensor")
        library.impl("scaled_by", lambda x, y: x.detach() * y.detach(), "CPU")
        torch.library.register_autograd(
            "vramx_test::scaled_by",
            lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            lib=library,
        )

        def call() -> torch.Tensor:
            return torch.ops.vramx_test.scaled_by(input_of(8, 8), input_of(8, 8))

        assert saved_reason(call) == {"unknown": 2}
        assert saved_reason(call, policy={"scaled_by:1": "int8"}) == {"unknown": 1, "packed": 1}


# Where backward needs exact values


def test_the_gradient_of_relu_is_exact_and_keeps_a_bit_an_element() -> None:
    x = input_of(64, 64)
    expected = torch.autograd.grad(torch.relu(x).sum(), x, retain_graph=True)[0]
    for function in (torch.relu, functional.relu, lambda t: functional.relu(t * 1, inplace=True)):
        with compress(min_bytes=0) as stats:
            y = function(x)
        assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], expected)
        assert stats.kept_bytes == 64 * 64 // 8


def _rows(x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(len(x)) % 8)[:, None].expand(x.shape)


EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "div": lambda x: 1 / (x.abs() + 1e-4),
    "log": lambda x: (x.abs() + 1e-4).log(),
    "sqrt": lambda x: (x.abs() + 1e-4).sqrt(),
    "amax": lambda x: (x * 1).amax(-1),
    "maximum": lambda x: torch.maximum(x * 1, x * 2),
    "clamp": lambda x: (x * 1).clamp(-0.5, 0.5),
    "abs": lambda x: (x * 1).abs(),
    "prod": lambda x: (x * 1 + 2).prod(-1),
    "pow": lambda x: (x.abs() + 1e-4) ** 0.5,
    "mse_loss": lambda x: functional.mse_loss(x * 1, x * 1.001),
    "log_softmax": lambda x: (x * 1).log_softmax(-1),
    "hardtanh": lambda x: functional.hardtanh(x * 1),
    "rsqrt": lambda x: (x.abs() + 1e-4).rsqrt(),
    "norm of order 1": lambda x: (x * 1).norm(1, -1),
    "largest norm": lambda x: (x * 1).norm(float("inf"), -1),
    "scatter_reduce": lambda x: torch.zeros(8, 64).scatter_reduce(0, _rows(x), x * 1, "amax"),
    "index_reduce": lambda x: torch.zeros(8, 64).index_reduce(0, _rows(x)[:, 0], x * 1, "amax"),
    "exponential with a base": lambda x: 2 ** (x * 1),
    "linalg_inv": lambda x: torch.linalg.inv(x[:, :32] + 8 * torch.eye(32)),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_compares_divides_or_inverts_is_exact(name: str) -> None:
    x = input_of(32, 64)
    weights = torch.linspace(-1, 1, EXACT[name](x).numel())
    expected = torch.autograd.grad((EXACT[name](x).flatten() * weights).sum(), x, retain_graph=True)
    with compress(min_bytes=0):
        y = EXACT[name](x)
    found = torch.autograd.grad((y.flatten() * weights).sum(), x, retain_graph=True)
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("name", ["div", "amax", "log", "prod", "rsqrt", "largest norm"])
def test_packed_it_would_be_far_off(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("vramx.compression.policy.exactness.needs_exact", lambda *_: False)
    with pytest.raises(AssertionError):
        test_what_compares_divides_or_inverts_is_exact(name)


def test_an_argument_is_found_through_views_and_casts() -> None:
    x = input_of(4, 16, 64)
    layer = nn.Linear(64, 64)
    found = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        operation = mode.current(1)
        match = operation.match(tensor)
        found.append((operation.name, match.position, match.memory, match.cast))
        return tensor.detach()

    mode = OperationMode()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), mode:
        layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
    assert sorted(found[:2]) == [("linear", 0, True, False), ("linear", 1, True, False)]
    assert sorted(found[2:]) == [("linear", 0, False, True), ("linear", 1, False, True)]


# Every differentiable operation that torch's own tests know has the right gradient by default

_CHILD = Path(__file__).with_name("operations_child.py")
_LIMIT_S = 120
# At 8 bits a value is off by less than a step, which is at most (1 + 2^-7) / 126 of the largest in
# its group: scales are rounded up to 8 bits. Samples are uniform, so the largest is sqrt(3) times
# the root of their mean square. Backward multiplies two saved values at most, and the slopes of
# what it puts them through change by less than 1.13 times what they do (GELU's second derivative).
BOUND = 2 * 1.13 * 3**0.5 * (1 + 2**-7) / 126
# In 2.13 some 500 are differentiable by all their arguments; half of them save nothing.
_AT_LEAST = 400


# Whose gradients are not finite, or wrong, when they are packed.
_NOT_FINITE = ["norm.inf", "scatter_reduce.amax"]
_WRONG = ["digamma", "log1p", "log", "nn.functional.normalize", "grid_sampler_2d"]


def answers() -> dict[str, Any]:
    root = str(_CHILD.parents[1])
    environment = os.environ | {"PYTHONPATH": root}
    done = python(str(_CHILD), *_NOT_FINITE, *_WRONG, cwd=root, env=environment, timeout=_LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_gradients_are_right_and_some_would_not_be_if_more_were_packed() -> None:
    found = answers()
    assert found["operations"] >= _AT_LEAST
    packed = found["packed"]
    assert len(packed) > 50
    assert [name for name, (_, lost) in packed.items() if lost] == []
    assert {name: e for name, (e, _) in packed.items() if e > BOUND} == {}
    forced = found["forced"]
    assert [name for name in _NOT_FINITE if not forced[name][1]] == []
    assert [name for name in _WRONG if forced[name][0] <= BOUND] == []


@pytest.mark.parametrize(
    ("name", "args", "exact"),
    [
        ("pow", (None, 2), False),
        ("pow", (None, 0.5), True),
        ("pow", (None, 1.5), True),  # its slope has a root
        ("pow", (2, None), True),  # an exponential
        ("elu", (None,), False),
        ("elu", (None, 2.0), True),
        ("softplus", (None, 100), True),
        ("scatter_reduce", (None, 0, None, None, "sum"), False),
        ("scatter_reduce", (None, 0, None, None, "amax"), True),
        ("norm", (None, 2), True),
        ("an operation of the next release", (), True),
    ],
)
def test_it_depends_on_the_arguments(name: str, args: tuple[Any, ...], exact: bool) -> None:
    assert needs_exact(name, args, {}) is exact
