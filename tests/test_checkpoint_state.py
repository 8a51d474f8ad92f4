"""A recomputation changes no cache, counter or list in arguments that the forward pass has changed.

The gradient is that without a checkpoint; what cannot be had so is one error. The caches are
stand-ins with the interface of those of transformers; one test has the library itself.
"""

from __future__ import annotations

import copy
import itertools
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_tools import SMALL, WIDTH, Packs, Seen, activation, packs, quiet, seeds
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import vramx
from vramx.compression.config import Compression
from vramx.errors import RecomputationError, VramxWarning
from vramx.recompute.objects import MOST_BYTES

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
    torch.manual_seed(0)
    if kind == "DynamicCache":
        config = library.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=64,
        )  # fmt: skip
        model, layer = library.LlamaForCausalLM(config), "LlamaDecoderLayer"
    else:
        config = library.BartConfig(
            d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, vocab_size=64, max_position_embeddings=16, dropout=0.0,
        )  # fmt: skip
        model, layer = library.BartForConditionalGeneration(config), "BartDecoderLayer"
    ids = torch.randint(4, 60, (2, 12))

    def step() -> tuple[Tensor, Any]:
        model.train().zero_grad()
        output = model(input_ids=ids, use_cache=True)
        output.logits.square().mean().backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat(grads), output.past_key_values

    expected, _ = step()
    vramx.checkpoint_modules(model, where=lambda m: type(m).__name__ == layer, level=SMALL)
    found, cache = step()
    assert type(cache).__name__ == kind
    assert close(found, expected)
    assert cache.get_seq_length() == 12


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


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: iter([2.0, 3.0]),
    "cycle": lambda: itertools.cycle([2.0, 3.0]),
    "map": lambda: map(float, iter("23")),
    "chain": lambda: itertools.chain(iter([2.0]), [3.0]),
    "dictionary": lambda: iter({2.0: 1, 3.0: 1}),
}


class Scaled(nn.Module):
    """Takes a scale from an iterator, and counts in an array; its own, or ones that are given."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source, self.counts = source, np.ones(2)

    def forward(self, x: Tensor, source: Any = None, counts: Any = None) -> Tensor:
        counts = self.counts if counts is None else counts
        counts += 1
        return x.sin() * next(self.source if source is None else source) * counts.sum()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("own", [True, False], ids=["attributes", "arguments"])
def test_iterators_and_arrays_are_taken_from_once(source: str, own: bool) -> None:
    module = Scaled(SOURCES[source]())
    given = () if own else (module.source, module.counts)
    for number in range(2):
        x = torch.ones(4, 16, requires_grad=True)
        vramx.checkpoint(module, x * 1.0, *given, level="keep").sum().backward()
        assert module.counts.tolist() == [number + 2.0] * 2
        torch.testing.assert_close(x.grad, (number + 2) ** 2 * 2 * x.detach().cos())


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
    seen = Seen()

    def region(x: Tensor, module: nn.Module, generator: torch.Generator) -> Tensor:
        seen.extend((module, generator))
        return module(x).sin()

    layer, generator = nn.Linear(WIDTH, WIDTH), torch.Generator()
    vramx.checkpoint(region, activation(), layer, generator, level=SMALL).sum().backward()
    assert [id(each) for each in seen] == [id(layer), id(generator)] * 2


class Handle:
    """Something that is closed when it goes, as a temporary file or a process is."""

    closed = 0

    def __init__(self) -> None:
        self.number = 7

    def __del__(self) -> None:
        type(self).closed += 1


@pytest.mark.parametrize("way", ["attribute", "argument", "closed over"])
def test_what_is_closed_when_it_goes_is_not_copied(way: str) -> None:
    Handle.closed = 0
    handle = types.SimpleNamespace(inner=Handle())
    module = Scaled(iter([2.0, 2.0]))
    module.handle = handle
    regions: dict[str, Callable[[Tensor], Tensor]] = {
        "attribute": lambda x: vramx.checkpoint(module, x, level="keep"),
        "argument": lambda x: vramx.checkpoint(lambda x, _: x.sin(), x, handle, level="keep"),
        "closed over": lambda x: vramx.checkpoint(
            lambda x: x.sin() * handle.inner.number, x, level="keep"
        ),
    }
    regions[way](activation()).sum().backward()
    assert Handle.closed == 0
    assert handle.inner.number == 7


def test_what_is_large_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped files of tokens, and tensors that are neither parameters nor buffers."""
    copied: list[int] = []
    clone = Tensor.clone
    monkeypatch.setattr(
        Tensor, "clone", lambda x, **how: copied.append(x.nbytes) or clone(x, **how)
    )
    monkeypatch.setattr(
        "vramx.recompute.wholes.another", lambda x: copied.append(getattr(x, "nbytes", 0)) or x
    )
    monkeypatch.setattr(
        "vramx.recompute.objects.another", lambda x: copied.append(getattr(x, "nbytes", 0)) or x
    )
    data = types.SimpleNamespace(tokens=np.zeros(MOST_BYTES + 1, np.uint8), batches=[])
    module = Scaled(iter([2.0]))
    module.data, module.table = data, torch.zeros(MOST_BYTES // 4 + 1)
    vramx.checkpoint(lambda x: module(x) * (data.tokens[0] + 1), activation(), level="keep")
    assert max(copied, default=0) <= MOST_BYTES
    # Together, too; and nothing in each call of what no note can be taken of.
    copied.clear()
    module = Scaled(iter([2.0, 2.0]))
    for i in range(3):
        setattr(module, f"table{i}", torch.zeros(MOST_BYTES // 8))
    few = types.SimpleNamespace(table=module.table0)
    vramx.checkpoint(lambda x: module(x) * few.table[0], activation(), level="keep")
    assert MOST_BYTES // 2 <= sum(copied) <= 1.1 * MOST_BYTES


class Program:
    """As a trainer: it holds its data, and counts."""

    def __init__(self, data: Any) -> None:
        self.data, self.number, self.kept = data, 0, [data]

    def block(self, x: Tensor) -> Tensor:
        self.number += 1
        self.kept.append(self.number)
        return x.sin() * self.number * len(self.kept)


@pytest.mark.parametrize(
    "data", [lambda: [[] for _ in range(10_001)], lambda: np.zeros(MOST_BYTES + 1)]
)
def test_a_whole_program_that_is_closed_over_is_shared(data: Callable[[], Any]) -> None:
    x, gradients = torch.ones(4, 16, requires_grad=True), []
    for checkpointed in (False, True):
        program, y = Program(data()), x * 1.0
        for i in range(2):
            block = lambda y: program.block(y) / (i + 1)  # noqa: B023, E731
            y = vramx.checkpoint(block, y, level="keep") if checkpointed else block(y)
        gradients.append(torch.autograd.grad(y.sum(), x)[0])
        assert (program.number, program.kept[1:]) == (2, [1, 2])
    torch.testing.assert_close(*gradients)
