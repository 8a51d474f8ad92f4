"""A recomputation changes no cache that the forward pass has changed.

The gradient is that without a checkpoint; what cannot be had so is one error. The caches are
stand-ins with the interface of those of transformers; one test has the library itself.
"""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
import torch
from checkpoint_tools import LEVELS, SMALL, WIDTH, Packs, check_near, packs, quiet, seeds
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import vramx
from vramx.compression.config import Compression
from vramx.errors import RecomputationError, VramxWarning

__all__ = ["packs", "quiet", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "quiet")


class Cache:
    """Keys and values of layers, which come and grow, as transformers 5 has it."""

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if len(self.layers) <= layer:
            self.layers.append(types.SimpleNamespace(keys=keys[:, :0], values=values[:, :0]))
        kept = self.layers[layer]
        kept.keys = torch.cat((kept.keys, keys), 1)
        kept.values = torch.cat((kept.values, values), 1)
        return kept.keys, kept.values

    def get_seq_length(self) -> int:
        return int(self.layers[0].keys.shape[1])


class CrossCache(Cache):
    """The cache of an encoder-decoder, which says of each layer whether it has been computed."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.is_updated = Cache(), dict[int, bool]()


class FixedCache(Cache):
    """A cache of a fixed length, which is written in place."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.keys, self.values = (torch.zeros(2, tokens, WIDTH) for _ in range(2))

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self.keys[:, : keys.shape[1]] = keys
        self.values[:, : values.shape[1]] = values
        return self.keys, self.values


class Decoder(nn.Module):
    """Attention to the tokens and to those in a cache, and to an encoder's where there is one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, past_key_values: Any = None, memory: Any = None) -> Tensor:
        keys, values = past_key_values.update(self.k(x), self.v(x), self.number)
        x = x + F.scaled_dot_product_attention(self.q(x), keys, values)
        return x if memory is None else x + self._cross(x, past_key_values, memory)

    def _cross(self, x: Tensor, cache: Any, memory: Tensor) -> Tensor:
        if cache.is_updated.get(self.number):
            layer = cache.cross.layers[self.number]
            keys, values = layer.keys, layer.values
        else:
            keys, values = cache.cross.update(self.k(memory), self.v(memory), self.number)
            cache.is_updated[self.number] = True
        return F.scaled_dot_product_attention(self.q(x), keys, values)


class Stack(nn.Module):
    """Decoders that share a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Decoder(i) for i in range(3))

    def forward(self, x: Tensor, cache: Any, memory: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, past_key_values=cache, memory=memory)
        return x


def gradient(model: nn.Module, *args: Any) -> Tensor:
    model.zero_grad()
    torch.manual_seed(1)
    leaf = torch.randn(2, 8, WIDTH, requires_grad=True)
    model(leaf * 1.0, *args).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("make", [Cache, CrossCache])
@LEVELS
def test_a_cache_is_filled_once_and_the_gradient_is_right(
    make: type[Cache], level: str | Compression, packs: Packs
) -> None:
    memory = torch.randn(2, 5, WIDTH) if make is CrossCache else None
    model = Stack()
    expected = gradient(model, make(), memory)
    vramx.checkpoint_modules(model, where=Decoder, level=level)
    for _ in range(2):
        cache = make()
        check_near([gradient(model, cache, memory)], [expected], level)
        assert cache.get_seq_length() == 8
    assert len(packs.sizes) == (6 if level != "keep" else 0)


def test_tokens_from_before_are_in_the_recomputation() -> None:
    """A prefix that is trained: the gradient goes through what the cache had before the call."""
    model = Stack()

    def run() -> Tensor:
        cache, prefix = Cache(), torch.ones(2, 3, WIDTH, requires_grad=True)
        for layer in range(3):
            cache.update(prefix.sin(), prefix.cos(), layer)
        assert gradient(model, cache).numel() > 0
        assert cache.get_seq_length() == 11
        return prefix.grad

    expected = run()
    vramx.checkpoint_modules(model, where=Decoder, level="keep")
    torch.testing.assert_close(run(), expected)


def test_a_cache_that_is_written_in_place_is_one_error() -> None:
    model = Stack()
    vramx.checkpoint_modules(model.layers[0], where=Decoder, level=SMALL)
    with pytest.raises(RecomputationError, match=r"a FixedCache.*use_cache=False"):
        gradient(model, FixedCache(8))


def test_a_cache_in_training_is_named_once() -> None:
    model = Stack()
    vramx.checkpoint_modules(model, where=Decoder, level="keep")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        gradient(model, Cache())
        gradient(model, Cache())
    (text,) = (str(w.message) for w in seen if w.category is VramxWarning)
    assert "fills a Cache" in text
    assert "use_cache=False" in text


TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DynamicCache": (
        "LlamaForCausalLM", "LlamaDecoderLayer",
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2},
    ),
    "EncoderDecoderCache": (
        "BartForConditionalGeneration", "BartDecoderLayer",
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "max_position_embeddings": 16, "dropout": 0.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_a_cache_of_transformers_is_filled_once(kind: str) -> None:
    library = pytest.importorskip("transformers")
    name, layer, sizes = TRANSFORMERS[kind]
    model = getattr(library, name)
    model = model(model.config_class(vocab_size=64, **sizes)).train()
    ids = torch.randint(4, 60, (2, 12))

    def step() -> tuple[Tensor, Any]:
        model.zero_grad()
        output = model(input_ids=ids, use_cache=True)
        output.logits.square().mean().backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat(grads), output.past_key_values

    expected, _ = step()
    vramx.checkpoint_modules(model, where=lambda m: type(m).__name__ == layer, level=SMALL)
    found, cache = step()
    assert type(cache).__name__ == kind
    check_near([found], [expected])
    assert cache.get_seq_length() == 12


class Features(nn.Module):
    """Reads what a layer of it has put into a container, which it comes by in two ways."""

    def __init__(self, noted: Any, ways: str) -> None:
        super().__init__()
        self.inner, self.ways = nn.Linear(WIDTH, WIDTH), ways
        if "a hook's variable" in ways:
            self.inner.register_forward_hook(lambda *call: noted[0].update(made=call[2]))
        elif "a hook's attribute" in ways:
            self.inner.register_forward_hook(Notes(noted))
        if "an attribute" in ways:
            self.noted = noted

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        noted = self.noted if given is None else given
        y = self.inner(x).tanh()
        if "in place" in self.ways:
            self.noted[0]["made"] = y * 2
        result: Tensor = y * noted[0]["made"]
        return result


class Notes:
    def __init__(self, noted: Any) -> None:
        self.noted = noted

    def __call__(self, module: nn.Module, given: Any, made: Tensor) -> None:
        self.noted[0]["made"] = made


@LEVELS
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(
    "ways",
    [
        "an argument and a hook's variable",
        "an argument and a hook's attribute",
        "an argument and an attribute in place",
        "an attribute and a hook's variable",
        "an attribute and a hook's attribute",
    ],
)
def test_a_container_that_is_had_in_two_ways_is_one(
    ways: str, steps_before: int, level: Any
) -> None:
    def gradients(*, checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        noted: list[dict[str, Tensor]] = [{}]
        net = Features(noted, ways)
        given = [noted] if "an argument" in ways else []
        found = []
        for step in range(3):
            if step == steps_before and checkpointed:
                vramx.checkpoint_modules(net, lambda module: module is net, level=level)
            net.zero_grad()
            net(torch.randn(4, WIDTH, requires_grad=True), *given).square().sum().backward()
            assert net.inner.weight.grad is not None
            found.append(net.inner.weight.grad)
        return found

    expected = gradients(checkpointed=False)
    for found, wanted in zip(gradients(checkpointed=True), expected, strict=True):
        check_near([found], [wanted], level)


@LEVELS
def test_statistics_that_are_given_move_once(level: Any) -> None:
    def normalised(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, training=True).sin()

    x = torch.randn(64, WIDTH, requires_grad=True)
    given, plain = ((torch.zeros(WIDTH), torch.ones(WIDTH)) for _ in range(2))
    normalised(x, *plain).square().sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    vramx.checkpoint(normalised, x, *given, level=level).square().sum().backward()
    assert all(map(torch.equal, given, plain))
    check_near([x.grad], [expected], level)
