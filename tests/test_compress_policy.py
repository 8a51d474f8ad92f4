"""Which tensors are packed: parameters never, exact where backward needs it, the rest by policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from compress_tools import Attention, Block, recorded_packs
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

from vramx.compression import policy
from vramx.compression.config import Compression
from vramx.compression.hooks import compress
from vramx.compression.operations import OperationMode
from vramx.errors import UnsupportedTensorError


def input_of(*shape: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(*shape, requires_grad=True) * 1.0


class LowRank(nn.Module):
    """A frozen weight with a trained low-rank correction beside it."""

    def __init__(self, merged: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(8, 64)), nn.Parameter(torch.randn(64, 8))
        self.merged = merged

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.merged:
            return functional.linear(x, self.base.weight + self.b @ self.a * 0.5, self.base.bias)
        return self.base(x) + functional.linear(functional.linear(x, self.a), self.b) * 0.5


class Tied(nn.Module):
    """An output projection with the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x[..., 0].detach().abs().mul(10).long() % 50
        y = self.layer(self.embedding(tokens) + x)
        return y @ self.embedding.weight.t()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class Copied(nn.Module):
    """A weight that is written into a buffer, as autocast does with a recurrent network's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(64 * 64, 1).copy_(self.weight.view(-1, 1))
        return (x * 2) @ buffer.view(64, 64).t()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.ConvTranspose2d(8, 4, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.reshape(-1, 4, 8, 8))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def frozen(make: Callable[[], nn.Module]) -> nn.Module:
    return make().requires_grad_(False)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "block": Block,
    "frozen": lambda: nn.Sequential(frozen(Block), nn.Linear(64, 64)),
    "frozen convolution": lambda: nn.Sequential(frozen(Images), nn.Flatten(), nn.Linear(256, 4)),
    "low rank": LowRank,
    "tied": Tied,
    "recurrent": Recurrent,
    "copied": Copied,
    "images": Images,
    "attention": SelfAttention,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(64, 64)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(64, 64)),
}


def packed_weights(module: nn.Module, cast: bool, monkeypatch: Any) -> list[torch.Tensor]:
    """Return what was packed in a forward pass that has the elements of a weight, in any order."""
    weights = list(module.parameters())
    weights += [
        w for m in module.modules() if isinstance(w := getattr(m, "weight", None), torch.Tensor)
    ]
    x = input_of(4, 16, 64)
    with (
        recorded_packs(monkeypatch) as packed,
        torch.autocast("cpu", torch.bfloat16, enabled=cast),
        compress(min_bytes=16) as stats,
    ):
        module(x)
    assert stats.packed.tensors > 0
    found = []
    for elements in packed:
        data = elements.float().sort().values
        for weight in weights:
            same = weight.detach().to(elements.dtype).float().flatten().sort().values
            if data.shape == same.shape and torch.equal(data, same):
                found.append(elements)
    return found


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODULES)
def test_no_weight_is_ever_packed(name: str, cast: bool, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    assert packed_weights(MODULES[name](), cast, monkeypatch) == []


@pytest.mark.parametrize(
    ("name", "cast", "rules"),
    [
        ("block", True, ["_derives_from_parameter", "_is_weight"]),
        ("frozen", True, ["_is_weight"]),
        ("tied", True, ["_derives_from_parameter", "_is_weight"]),
        ("weight norm", False, ["_is_weight"]),
        ("copied", False, ["_derives_from_parameter", "_is_weight"]),
    ],
)
def test_without_its_rule_a_weight_would_be_packed(
    name: str, cast: bool, rules: list[str], monkeypatch: Any
) -> None:
    for rule in rules:
        monkeypatch.setattr(policy, rule, lambda *_: False)
    torch.manual_seed(0)
    assert packed_weights(MODULES[name](), cast, monkeypatch) != []


def test_a_weight_merged_with_its_adapter_is_kept(monkeypatch: Any) -> None:
    module, x = LowRank(merged=True), input_of(4, 16, 64)
    merged = (module.base.weight + module.b @ module.a * 0.5).detach()
    with recorded_packs(monkeypatch) as packed, compress(min_bytes=16):
        module(x)
    assert not any(torch.equal(p, merged.flatten()) for p in packed)


def test_a_buffer_of_the_module_is_kept_where_the_module_is_known() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table[:32]

    import vramx

    x = input_of(32, 64)
    module = Scaled()
    with compress(min_bytes=0) as stats:
        module(x)
    assert stats.packed.tensors == 1
    vramx.compressed_activations(module, min_bytes=0)(x)
    assert vramx.compression_stats(module).kept["parameter"].tensors == 1


# Skip rules


def saved_reason(function: Callable[[], Any], **options: Any) -> dict[str, int]:
    with compress(**{"min_bytes": 0, **options}) as stats:
        function()
    found = {reason: tally.tensors for reason, tally in stats.kept.items()}
    return found | ({"packed": stats.packed.tensors} if stats.packed.tensors else {})


def test_each_rule_says_why() -> None:
    x = input_of(32, 64)
    index = torch.zeros(32, 64, dtype=torch.long)
    half, complex_x = x.double() * 1, torch.complex(x, x)
    assert saved_reason(lambda: x.gather(1, index))["integer"] == 1
    assert saved_reason(x.tanh, min_bytes=1 << 20) == {"small": 1}
    assert saved_reason(half.tanh) == {"dtype": 1}
    assert saved_reason(complex_x.tanh) == {"dtype": 1}
    assert saved_reason(x.detach().requires_grad_().sin) == {"leaf": 1}
    assert saved_reason(lambda: torch.softmax(x, -1)) == {"policy": 1}
    assert saved_reason(x.tanh) == {"packed": 1}
    assert saved_reason(x.sin) == {"policy": 1}
    assert saved_reason(lambda: x.masked_fill(x > 0, 0.0)) == {"packed": 1}


def test_sparse_tensors_are_kept() -> None:
    x = input_of(64, 64)
    sparse = torch.eye(64).to_sparse()
    assert "layout" in saved_reason(lambda: torch.sparse.mm(sparse, x))


def test_nested_tensors_are_kept() -> None:
    parts = [input_of(8, 64), input_of(4, 64)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    reasons = saved_reason(nested.sin)
    assert "subclass" in reasons
    assert "packed" not in reasons


def test_a_tensor_subclass_is_kept_and_its_gradient_right() -> None:
    class Tagged(torch.Tensor):
        pass

    x = input_of(32, 64).as_subclass(Tagged)
    with compress(min_bytes=0) as stats:
        y = x.sin()
    assert stats.kept["subclass"].tensors == 1
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(torch.Tensor(found), x.cos().detach().as_subclass(torch.Tensor))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: (x.double() * 1).sin(), r"sin saves a tensor of size \(8, 8\).*float64"),
        (lambda x: torch.complex(x, x).sin(), "sin saves a tensor.*complex64; accepted are"),
    ],
)
def test_strict_names_the_tensor_and_the_rule(function: Any, words: str) -> None:
    x = input_of(8, 8)
    with compress(min_bytes=0, strict=True), pytest.raises(UnsupportedTensorError, match=words):
        function(x)


def test_strict_does_not_mind_what_is_never_packed() -> None:
    block, x = Block(), input_of(2, 8, 64)
    with compress(min_bytes=1024, strict=True):
        block(x)


# Policies by operation


def kept_elements(function: Callable[[], Any], **options: Any) -> int:
    with compress(min_bytes=0, **options) as stats:
        function()
    return stats.kept["policy"].kept_bytes // 4 if "policy" in stats.kept else 0


def test_q_and_k_are_kept_and_v_is_packed() -> None:
    q, k, v = (input_of(2, 4, 16, 8) * i for i in (1, 2, 3))
    attention = functional.scaled_dot_product_attention
    with compress(min_bytes=0) as stats:
        attention(q, k, v)
    assert stats.kept["policy"].tensors == 2
    assert stats.packed.tensors == 2  # v and the output
    with compress(min_bytes=0) as stats:
        attention(value=v, key=k, query=q)
    assert stats.kept["policy"].tensors == 2


def test_q_and_k_are_kept_where_autocast_casts_them() -> None:
    q, k, v = (input_of(2, 4, 16, 8) * i for i in (1, 2, 3))
    with torch.autocast("cpu", torch.bfloat16), compress(min_bytes=0) as stats:
        functional.scaled_dot_product_attention(q, k, v)
    assert stats.kept["policy"].tensors == 2


def test_q_and_k_are_kept_inside_of_multi_head_attention() -> None:
    module, x = SelfAttention(), input_of(4, 16, 64)
    with compress(min_bytes=0) as stats:
        module(x)
    assert stats.operations["scaled_dot_product_attention"].tensors >= 4
    assert stats.kept["policy"].kept_bytes == 2 * x.numel() * 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_mask": torch.randn(32, 24)},
        {"attn_mask": torch.rand(32, 24) > 0.5},
        {"dropout_p": 0.1},
        {"is_causal": True},
    ],
    ids=["plain", "bias", "mask", "dropout", "causal"],
)
@pytest.mark.parametrize("length", [24, 16], ids=["", "as long as a head is wide"])
def test_of_attention_by_products_only_the_value_is_packed(
    options: dict[str, Any], length: int, monkeypatch: Any
) -> None:
    q, k, v = input_of(2, 4, 32, 16), input_of(2, 4, length, 16) * 2, input_of(2, 4, length, 16) * 3
    if "attn_mask" in options:
        options = {"attn_mask": options["attn_mask"][:, :length]}
    with (
        sdpa_kernel(SDPBackend.MATH),
        recorded_packs(monkeypatch) as packed,
        compress(min_bytes=0) as stats,
    ):
        functional.scaled_dot_product_attention(q, k, v, **options)
    assert [p.numel() for p in packed] == [v.numel()]
    assert torch.equal(packed[0], v.detach().flatten())
    assert stats.tensors >= 5  # it has saved the weights, twice, and copies of query and key


def test_queries_and_keys_that_attention_copies_are_kept_without_a_gradient_too() -> None:
    q, k, v = (input_of(2, 4, 16, 16) * i for i in (1, 2, 3))
    with sdpa_kernel(SDPBackend.MATH), compress(min_bytes=0) as stats:
        functional.scaled_dot_product_attention(q.detach(), k.detach(), v)
        functional.scaled_dot_product_attention(q, k.detach(), v.detach())
    assert stats.packed.kept_bytes <= 1.02 * v.numel()  # the value, in the second call alone


def test_a_float_mask_of_attention_is_kept() -> None:
    """It holds infinities, of which a whole group would become NaN."""
    q, k, v = (input_of(2, 4, 32, 16) * i for i in (1, 2, 3))
    mask = torch.zeros(32, 32).masked_fill(torch.rand(32, 32) > 0.5, -torch.inf)
    mask.fill_diagonal_(0)
    with compress(min_bytes=0) as stats:
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert stats.packed.tensors == 2
    assert bool(torch.autograd.grad(y.sum(), q)[0].isfinite().all())


def test_weights_of_attention_that_is_written_out_are_kept_once(monkeypatch: Any) -> None:
    q, k, v = (input_of(2, 4, 32, 16) * i for i in (1, 2, 3))
    with recorded_packs(monkeypatch) as packed, compress(min_bytes=0) as stats:
        (q @ k.mT).softmax(-1) @ v
    assert stats.kept["policy"].kept_bytes == 2 * 4 * 32 * 32 * 4
    assert stats.kept["held"].tensors == 1
    assert sorted(p.numel() for p in packed) == [q.numel()] * 3


def test_the_logsumexp_of_attention_is_kept() -> None:
    q, k, v = (input_of(2, 4, 16, 64) * i for i in (1, 2, 3))
    with compress(min_bytes=0) as stats:
        functional.scaled_dot_product_attention(q, k, v)
    assert stats.kept["statistic"].tensors == 1
    assert stats.kept["statistic"].kept_bytes == 2 * 4 * 16 * 4


def test_a_rule_for_a_position_goes_before_the_rule_of_its_operation() -> None:
    x, y = input_of(32, 64), input_of(32, 64) * 2
    with compress(min_bytes=0, policy={"mul": "keep", "mul:1": 4}) as stats:
        x * y
    assert stats.kept["policy"].tensors == stats.packed.tensors == 1
    assert stats.packed.kept_bytes < 0.6 * x.numel()


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


def test_an_autograd_function_has_the_name_of_its_class() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, y = ctx.saved_tensors
            return grad * y, grad * x

    x, y = input_of(32, 64), input_of(32, 64) * 2
    with compress(min_bytes=0, policy={"Doubled:0": "keep"}) as stats:
        Doubled.apply(x, y)
    assert set(stats.operations) == {"Doubled"}
    assert stats.kept["policy"].tensors == stats.packed.tensors == 1


def test_what_no_mode_sees_is_kept() -> None:
    @torch.jit.script
    def function(x: torch.Tensor) -> torch.Tensor:
        return 1.0 / (x * 2.0).exp()

    x = input_of(64, 64)
    assert set(saved_reason(lambda: function(x))) == {"policy"}


def test_operators_of_other_libraries_are_packed() -> None:
    with torch.library._scoped_library("vramx_test", "FRAGMENT") as library:
        library.define("scaled_by(Tensor x, Tensor y) -> Tensor")
        library.impl("scaled_by", lambda x, y: x.detach() * y.detach(), "CPU")
        torch.library.register_autograd(
            "vramx_test::scaled_by",
            lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            lib=library,
        )
        assert saved_reason(lambda: torch.ops.vramx_test.scaled_by(input_of(8, 8), input_of(8, 8)))[
            "packed"
        ]


# Where backward needs exact values


def test_the_gradient_of_relu_is_exact_and_keeps_a_bit_an_element() -> None:
    x = input_of(64, 64)
    expected = torch.autograd.grad(torch.relu(x).sum(), x, retain_graph=True)[0]
    for function in (torch.relu, functional.relu, lambda t: functional.relu(t * 1, inplace=True)):
        with compress(min_bytes=0) as stats:
            y = function(x)
        assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], expected)
        assert stats.kept_bytes == 64 * 64 // 8


def test_leaky_relu_is_exact() -> None:
    x = input_of(64, 64)
    with compress(min_bytes=0):
        y = functional.leaky_relu(x, 0.1)
    expected = torch.where(x > 0, 1.0, 0.1)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_a_packed_relu_would_lose_gradients() -> None:
    x = input_of(64, 64)
    with compress(min_bytes=0, policy={"relu": 8}):
        y = torch.relu(x)
    found = torch.autograd.grad(y.sum(), x)[0]
    assert bool(((found == 0) & (x > 0)).any())


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
    monkeypatch.setattr("vramx.compression.exactness.needs_exact", lambda *_: False)
    with pytest.raises(AssertionError):
        test_what_compares_divides_or_inverts_is_exact(name)


def test_a_square_is_packed_and_a_root_is_not() -> None:
    x = input_of(32, 64).abs()
    assert saved_reason(lambda: x**2) == {"packed": 1}
    assert saved_reason(lambda: x**0.5) == {"policy": 1}


# Operations


def test_an_argument_is_found_through_views_and_casts() -> None:
    x = input_of(4, 16, 64)
    layer = nn.Linear(64, 64)
    found = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        operation = mode.current(1)
        assert operation is not None
        match = operation.match(tensor)
        assert match is not None
        found.append((operation.name, match.argument.position, match.memory, match.cast))
        return tensor.detach()

    mode = OperationMode()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), mode:
        layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
    assert sorted(found[:2]) == [("linear", 0, True, False), ("linear", 1, True, False)]
    assert sorted(found[2:]) == [("linear", 0, False, True), ("linear", 1, False, True)]


def test_rules_do_not_depend_on_the_order_of_a_policy() -> None:
    one = Compression(policy={"mul": "keep", "mul:1": 4})
    other = Compression(policy={"mul:1": 4, "mul": "keep"})
    assert one == other
    x, y = input_of(32, 64), input_of(32, 64) * 2
    for options in (one, other):
        with compress(options, min_bytes=0) as stats:
            x * y
        assert stats.packed.tensors == 1


def test_projections_of_attention_count_under_their_operation() -> None:
    with compress(min_bytes=0) as stats:
        Attention()(input_of(2, 8, 64))
    assert set(stats.operations) == {"linear", "scaled_dot_product_attention"}
