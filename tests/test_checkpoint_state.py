"""A recomputation changes nothing that the forward pass has changed already.

Caches, counters and lists in arguments, and buffers of modules, are as after one forward pass; the
gradient is that without a checkpoint. What cannot be had so is one error. The caches are stand-ins
with the interface of those of transformers; one test has the library itself, where it is installed.
"""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checkpoint_tools import SMALL, WIDTH, Packs, activation, packs, seeds
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import vramx
from vramx.compression.config import Compression
from vramx.errors import RecomputationError, VramxWarning
from vramx.recompute import objects

__all__ = ["packs", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds", "_quiet")


@pytest.fixture
def _quiet() -> Iterator[None]:
    objects._warn_of_cache.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VramxWarning)
        yield


# -- Caches ---------------------------------------------------------------------------------------


class Layer:
    """Keys and values of one layer, which grow."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.keys, self.values = keys, values
        else:
            self.keys = torch.cat((self.keys, keys), 1)
            self.values = torch.cat((self.values, values), 1)
        return self.keys, self.values


class Cache:
    """A cache that makes its layers as they come, as transformers 5 has it."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer:
            self.layers.append(Layer())
        return self.layers[layer].update(keys, values)

    def get_seq_length(self, layer: int = 0) -> int:
        keys = self.layers[layer].keys if len(self.layers) > layer else None
        return 0 if keys is None else keys.shape[1]


class CrossCache:
    """The cache of an encoder-decoder, which says of each layer whether it has been computed."""

    def __init__(self) -> None:
        self.own, self.cross = Cache(), Cache()
        self.is_updated: dict[int, bool] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self.own.update(keys, values, layer)

    def get_seq_length(self, layer: int = 0) -> int:
        return self.own.get_seq_length(layer)


class FixedCache(Cache):
    """A cache of a fixed length, which is written in place."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.layers = [Layer()]
        self.layers[0].keys = torch.zeros(2, tokens, WIDTH)
        self.layers[0].values = torch.zeros(2, tokens, WIDTH)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        for kept, new in ((self.layers[layer].keys, keys), (self.layers[layer].values, values)):
            assert kept is not None
            kept[:, : new.shape[1]] = new
        return super().update(keys[:, :0], values[:, :0], layer)


class Decoder(nn.Module):
    """Attention to the tokens and to those in a cache, and to an encoder's where there is one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, past_key_values: Any = None, memory: Any = None) -> Tensor:
        keys, values = self.k(x), self.v(x)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.number)
        x = x + F.scaled_dot_product_attention(self.q(x), keys, values)
        return x if memory is None else x + self._cross(x, past_key_values, memory)

    def _cross(self, x: Tensor, cache: Any, memory: Tensor) -> Tensor:
        if cache is not None and cache.is_updated.get(self.number):
            layer = cache.cross.layers[self.number]
            keys, values = layer.keys, layer.values
        else:
            keys, values = self.k(memory), self.v(memory)
            if cache is not None:
                keys, values = cache.cross.update(keys, values, self.number)
                cache.is_updated[self.number] = True
        return F.scaled_dot_product_attention(self.q(x), keys, values)


class Stack(nn.Module):
    """Decoders that share a cache, which is given to them by the name of either release."""

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


def close(found: Tensor, exact: Tensor) -> bool:
    return bool(F.cosine_similarity(found, exact, dim=0) > 0.999)


CACHES: dict[str, tuple[Callable[[], Any], int]] = {
    "cache": (Cache, 0),
    "cache of an encoder-decoder": (CrossCache, 5),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("level", [SMALL, "keep"], ids=["int8", "exact"])
def test_a_cache_is_filled_once_and_the_gradient_is_right(
    name: str, level: str | Compression, packs: Packs
) -> None:
    make, tokens = CACHES[name]
    memory = torch.randn(2, tokens, WIDTH) if tokens else None
    model = Stack()
    expected = gradient(model, make(), memory)
    vramx.checkpoint_modules(model, where=Decoder, level=level)
    for _ in range(2):
        cache = make()
        found = gradient(model, cache, memory)
        assert close(found, expected) if level != "keep" else torch.equal(found, expected)
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
        assert prefix.grad is not None
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
    texts = [str(w.message) for w in seen if w.category is VramxWarning]
    assert len(texts) == 1
    assert "fills a Cache" in texts[0]
    assert "use_cache=False" in texts[0]


@pytest.mark.parametrize("kind", ["DynamicCache", "EncoderDecoderCache"])
def test_a_cache_of_transformers_is_filled_once(kind: str) -> None:
    library = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "vocab_size": 64}
    heads = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    torch.manual_seed(0)
    if kind == "DynamicCache":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        config = library.LlamaConfig(**sizes, num_attention_heads=2, vocab_size=64)
        model, layer = library.LlamaForCausalLM(config), "LlamaDecoderLayer"
    else:
        config = library.BartConfig(**sizes, **heads, dropout=0.0)
        model, layer = library.BartForConditionalGeneration(config), "BartDecoderLayer"
    ids = torch.randint(4, 60, (2, 12))

    def step() -> tuple[Tensor, Any]:
        model.train().zero_grad()
        output = model(input_ids=ids, use_cache=True)
        output.logits.square().mean().backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat(grads), output.past_key_values

    expected, _ = step()
    vramx.checkpoint_modules(
        model, where=lambda module: type(module).__name__ == layer, level=SMALL
    )
    found, cache = step()
    assert type(cache).__name__ == kind
    assert close(found, expected)
    assert cache.get_seq_length() == 12


# -- Other objects --------------------------------------------------------------------------------


def counted(x: Tensor, state: Any) -> Tensor:
    state.calls += 1
    state.losses.append(x.square().mean())
    state.by_name.setdefault("x", []).append(state.calls)
    state.link.state = state
    return x.sin() * state.calls


def test_counters_and_lists_of_an_argument_move_once() -> None:
    state = types.SimpleNamespace(
        calls=1, losses=[], by_name={}, link=types.SimpleNamespace(), lock=copy
    )
    x = torch.ones(4, 16, requires_grad=True)
    vramx.checkpoint(counted, x * 1.0, state, level="keep").sum().backward()
    assert (state.calls, len(state.losses), state.by_name) == (2, 1, {"x": [2]})
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def test_an_object_with_slots_is_as_it_was() -> None:
    class Slotted:
        __slots__ = ("scale",)

    def region(x: Tensor, slotted: Slotted) -> Tensor:
        slotted.scale *= 2
        return x.sin() * slotted.scale

    slotted, x = Slotted(), torch.ones(4, 16, requires_grad=True)
    slotted.scale = 1
    vramx.checkpoint(region, x * 1.0, slotted, level="keep").sum().backward()
    assert slotted.scale == 2
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def test_a_tensor_that_is_counted_up_in_an_argument_is_an_error() -> None:
    def region(x: Tensor, state: Any) -> Tensor:
        state.count += 1
        return x.sin()

    state = types.SimpleNamespace(count=torch.zeros(()))
    with pytest.raises(RecomputationError, match="writes into a tensor of its argument, a Simple"):
        vramx.checkpoint(region, activation(), state, level="keep")


def test_modules_and_generators_are_the_callers_own() -> None:
    seen: list[Any] = []

    def region(x: Tensor, module: nn.Module, generator: torch.Generator) -> Tensor:
        seen.extend((module, generator))
        return module(x).sin()

    layer, generator = nn.Linear(WIDTH, WIDTH), torch.Generator()
    vramx.checkpoint(region, activation(), layer, generator, level=SMALL).sum().backward()
    assert [id(each) for each in seen] == [id(layer), id(generator)] * 2


# -- Buffers --------------------------------------------------------------------------------------


class Average(nn.Module):
    """Takes off a running mean, which it moves."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
        return (x - self.mean).square()


class Counter(Average):
    """The same with a new tensor in each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + x.detach().mean(0) * 0.5
        return (x - self.mean).square()


MOVING: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm with a plain average": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (4, -1)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()
    ),
    "power iteration": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "average": Average,
    "average in a new tensor": Counter,
}


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("level", [SMALL, "keep"], ids=["int8", "exact"])
@pytest.mark.parametrize("way", ["modules", "function", "lambda"])
def test_buffers_move_once_a_step(name: str, level: str | Compression, way: str) -> None:
    ours = nn.Sequential(MOVING[name](), nn.Linear(WIDTH, WIDTH), nn.GELU())
    plain = copy.deepcopy(ours)
    run: Callable[[Tensor], Tensor] = ours
    if way == "modules":
        vramx.checkpoint_modules(ours, where=nn.Sequential, level=level)
    else:
        call = ours if way == "function" else lambda x: ours(x * 1.0)
        run = functools.partial(vramx.checkpoint, call, level=level)
    for step in range(3):
        pair = []
        for model, function in ((plain, plain), (ours, run)):
            torch.manual_seed(step)
            leaf = torch.randn(16, WIDTH, requires_grad=True)
            model.zero_grad()
            function(leaf * 1.0).square().sum().backward()
            assert leaf.grad is not None
            pair.append(leaf.grad)
        for (key, found), expected in zip(ours.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=f"{key} at {step}")
        cosine = F.cosine_similarity(pair[0].flatten(), pair[1].flatten(), dim=0)
        assert cosine > 0.999 if level != "keep" else torch.equal(*pair)


def test_buffers_are_the_modules_own_after_an_early_stop() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    before = {name: id(buffer) for name, buffer in norm.named_buffers()}
    y = vramx.checkpoint(norm, activation(), level=SMALL, early_stop=True)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert {name: id(buffer) for name, buffer in norm.named_buffers()} == before
    assert norm.num_batches_tracked == 1


GLOBAL_NORM = nn.BatchNorm1d(WIDTH)


def normed(x: Tensor) -> Tensor:
    return GLOBAL_NORM(x).sin()


def test_buffers_of_a_module_that_a_function_names_move_once() -> None:
    vramx.checkpoint(normed, activation(), level=SMALL).sum().backward()
    assert GLOBAL_NORM.num_batches_tracked == 1


def test_buffers_within_another_checkpoint_move_once() -> None:
    norm = nn.BatchNorm1d(WIDTH)

    def region(x: Tensor) -> Tensor:
        return vramx.checkpoint(norm, x.sin(), level=SMALL).sin()

    vramx.checkpoint(region, activation(), level=SMALL).sum().backward()
    assert norm.num_batches_tracked == 1
