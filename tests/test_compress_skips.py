"""Which tensors compress() never packs: weights in any shape or type, and what a rule excludes.

A weight is found among what was packed by its elements, in any order: it may have been cast,
transposed or copied on its way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as functional
from compress_tools import Block, input_of, recorded_packs
from policy_tools import SelfAttention, saved_reason
from torch import nn
from torch.nn.utils import parametrizations

import vramx
from vramx.compression.config import Compression
from vramx.compression.hooks import compress
from vramx.compression.policy import weights
from vramx.errors import RecomputationError, UnsupportedTensorError


class LowRank(nn.Module):
    """A frozen weight with a trained low-rank correction beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(8, 64)), nn.Parameter(torch.randn(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
        # Without AVX-512 oneDNN has no LSTM of bfloat16, and torch asks it for one all the same.
        has_bfloat16 = torch.backends.cpu.get_cpu_capability() == "AVX512"
        with torch.backends.mkldnn.flags(enabled=has_bfloat16):
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
        ("block", True, ["derives_from_parameter", "is_weight"]),
        ("frozen", True, ["is_weight"]),
        ("tied", True, ["derives_from_parameter", "is_weight"]),
        ("weight norm", False, ["is_weight"]),
        ("copied", False, ["derives_from_parameter", "is_weight"]),
    ],
)
def test_without_its_rule_a_weight_would_be_packed(
    name: str, cast: bool, rules: list[str], monkeypatch: Any
) -> None:
    for rule in rules:
        monkeypatch.setattr(weights, rule, lambda *_: False)
    torch.manual_seed(0)
    assert packed_weights(MODULES[name](), cast, monkeypatch) != []


# Skip rules


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


def test_sparse_and_nested_tensors_are_kept() -> None:
    x, sparse = input_of(64, 64), torch.eye(64).to_sparse()
    assert "layout" in saved_reason(lambda: torch.sparse.mm(sparse, x))
    nested = torch.nested.as_nested_tensor([x, x[:4]], layout=torch.jagged)
    reasons = saved_reason(nested.sin)
    assert "subclass" in reasons
    assert "packed" not in reasons


def test_a_module_with_sparse_buffers_packs_its_activations() -> None:
    block, x = Block(), torch.randn(2, 8, 64)
    block.register_buffer("neighbours", torch.eye(64).to_sparse())
    expected = block(x)
    vramx.compressed_activations(block, min_bytes=0)
    torch.testing.assert_close(block(x), expected)
    assert vramx.compression_stats(block).packed.tensors > 0


def ragged(*parts: torch.Tensor) -> torch.Tensor:
    """Return attention over parts of unequal lengths: of tensors that have no sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        x = torch.nested.as_nested_tensor(list(parts))
    scores = torch.softmax(torch.matmul(x, x.transpose(1, 2)), -1)
    return torch.nested.to_padded_tensor(torch.matmul(scores, x), 0.0)


def jagged(*parts: torch.Tensor) -> torch.Tensor:
    x = torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)
    return torch.nested.to_padded_tensor((x * 2).sin() * x, 0.0)


# Recomputations are torch's own before that release.
needs_ours = pytest.mark.skipif(torch.__version__ < "2.8", reason="torch's checkpoint refuses them")


@needs_ours
@pytest.mark.parametrize("level", ["keep", Compression(min_bytes=0)], ids=["exact", "int8"])
def test_jagged_tensors_are_not_made_again_but_given(level: Any) -> None:
    leaves = [input_of(3, 8), input_of(5, 8)]
    made = vramx.checkpoint(jagged, *(leaf * 1 for leaf in leaves), level=level)
    with pytest.raises(RecomputationError, match="make it outside of the region"):
        made.sum().backward()

    def block(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin() * x

    x = torch.nested.as_nested_tensor(leaves, layout=torch.jagged)
    found, exact = (
        torch.autograd.grad(y.values().square().sum(), leaves)
        for y in (vramx.checkpoint(block, x, level=level), block(x))
    )
    for one, other in zip(found, exact, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "way",
    [
        "compress",
        pytest.param("checkpoint", marks=needs_ours),
        pytest.param("exact checkpoint", marks=needs_ours),
    ],
)
def test_nested_tensors_without_sizes_are_kept(way: str) -> None:
    leaves = [input_of(3, 8), input_of(5, 8)]
    parts = [leaf * 1 for leaf in leaves]
    expected = torch.autograd.grad(ragged(*parts).square().sum(), leaves, retain_graph=True)
    if way == "compress":
        with compress(min_bytes=0) as stats:
            result = ragged(*parts)
        assert stats.kept["layout"].tensors > 0
    else:
        level: Any = "keep" if way == "exact checkpoint" else Compression(min_bytes=0)
        result = vramx.checkpoint(ragged, *parts, level=level)
    for found, exact in zip(
        torch.autograd.grad(result.square().sum(), leaves), expected, strict=True
    ):
        assert functional.cosine_similarity(found.flatten(), exact.flatten(), 0) > 0.999


class Image(torch.Tensor):
    """Tells of what its elements are, and hands that on, as those of datasets do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, Image):
            found.__dict__["calls"] = 1 + max(
                vars(x).get("calls", 0) for x in args if type(x) is cls
            )
        return found


def test_a_subclass_that_python_alone_knows_of_is_packed_as_a_plain_tensor_is() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.Conv2d(16, 16, 3)),
        *(nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Flatten(2), nn.Linear(196, 32), nn.Tanh()),
        nn.LayerNorm(32),
    )
    found, kept = [], []
    for kind in (torch.Tensor, Image):
        for attention in (False, True):
            torch.manual_seed(1)
            net.zero_grad()
            x = torch.randn(4, 3, 16, 16).as_subclass(kind)
            with compress(min_bytes=0, rounding="nearest") as stats:
                y = net(x)
                y = nn.functional.scaled_dot_product_attention(y, y, y * 2) if attention else y
                y = y.mul_(y.sigmoid())
            assert type(y) is kind
            y.square().sum().backward()
            found.append([p.grad for p in net.parameters()])
            kept.append(stats.packed.kept_bytes)
            assert "subclass" not in stats.kept
    assert kept[2] == kept[0]
    for plain, image in zip(found[:2], found[2:], strict=True):
        for one, other in zip(plain, image, strict=True):
            torch.testing.assert_close(other, one)


def test_a_subclass_that_torch_dispatches_to_is_kept() -> None:
    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    y = torch.randn(32, 64, requires_grad=True)
    with compress(min_bytes=0) as stats:
        torch.mul(y * 1.0, torch.randn(32, 64).as_subclass(Wrapped))
    assert stats.kept["subclass"].tensors == 1


def test_what_a_subclass_makes_of_a_call_is_seen_by_itself() -> None:
    """It computes a linear layer by the reciprocals of its input, small ones beside large ones."""

    class Weight(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is nn.functional.linear:
                return args[0].reciprocal() @ args[1].as_subclass(torch.Tensor).t()
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.logspace(-4, 1, 16 * 64).view(16, 64)[:, torch.randperm(64)].requires_grad_()
    weight = torch.randn(32, 64)
    with compress(min_bytes=0):
        y = nn.functional.linear(x * 1.0, weight.as_subclass(Weight))
    (found,) = torch.autograd.grad(y.sum(), x)
    (exact,) = torch.autograd.grad((x.reciprocal() @ weight.t()).sum(), x)
    torch.testing.assert_close(found, exact)


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


def test_a_subclass_is_asked_about_multi_head_attention_as_such() -> None:
    class Asked(torch.Tensor):
        calls: ClassVar[list[str]] = []

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Asked.calls.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    attention = nn.MultiheadAttention(16, 2)
    x = torch.randn(4, 2, 16).as_subclass(Asked)
    attention(x, x, x)
    expected, Asked.calls = Asked.calls, []
    with compress(min_bytes=0) as stats:
        y, _ = attention(x, x, x)
    assert "multi_head_attention_forward" in expected
    assert Asked.calls == expected
    assert type(y) is Asked
    assert stats.packed.tensors
