"""What a block's code does and reads that a record of its forward does not show."""

from __future__ import annotations

import copy
import enum
import functools
import gc
import math
import pickle
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimize_tools import ROUNDING
from plain_tools import far, fused_blocks
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import vramx

WIDTH, HEADS, TOKENS = 32, 4, 7
NUMBER = 0.25
SETTINGS = types.SimpleNamespace(scale=0.25)
TABLE = {"scale": 0.25}
LOG: list[int] = []


class Mode(enum.Enum):
    """A setting."""

    NEAR = 1
    FAR = 2


class Config:
    """Settings that no instance is made of."""

    scale = 0.25


def times(x: float, scale: float = 0.25) -> float:
    return x * scale


class Attention(nn.Module):
    """Attention by its parts, whose factor is told by `how`."""

    rank = 0.25

    def __init__(self, how: Callable[[Any], float], given: Any = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.how = how
        self.given = given
        self.register_buffer("earlier", torch.ones(16, 16).tril())

    def factor(self) -> float:
        return self.how(self)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores: Tensor = q @ k.transpose(-2, -1) * self.factor()
        return scores

    def heads(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        y = self.heads(self.qkv(x)).reshape(rows, tokens, 3, HEADS, width // HEADS)
        q, k, v = y.permute(2, 0, 3, 1, 4).unbind(0)
        attended = self.scores(q, k).softmax(-1) @ v
        result: Tensor = self.proj(attended.transpose(1, 2).reshape(rows, tokens, width))
        return result


class Block(nn.Module):
    """A block that may do with its result what it was given to."""

    def __init__(self, attention: nn.Module | None = None, after: Any = None) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(lambda _: 0.25) if attention is None else attention
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.path = nn.Identity()
        self.after = after
        self.register_module("last", None)
        self.register_buffer("weights", None)
        self.register_parameter("gain", None)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.attn(self.first(x))
        y = y + self.mlp(self.second(y))
        if not isinstance(self.path, nn.Identity):
            y = self.path(y)
        if self.last is not None:
            y = self.last(y)
        if self.weights is not None:
            y = y * self.weights
        if self.gain is not None:
            y = y * self.gain
        return y if self.after is None else self.after(self, x, y)


def results(model: nn.Module) -> list[Tensor]:
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    found = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    return [y.detach(), *(g.clone() for g in found if g is not None)]


def model_of(block: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    for p in block.parameters():
        nn.init.normal_(p, std=0.3)
    return nn.Sequential(block).train()


# -- What changes after a block was read -----------------------------------------------------------


def _given(given: Any, how: Callable[[Any], float]) -> Callable[[], nn.Module]:
    return lambda: Attention(how, given)


def _set(name: str, value: Any) -> Callable[[Any], object]:
    return lambda block: setattr(block, name, value)


def _write_global(_: Any) -> None:
    globals()["NUMBER"] = 0.9


# A block's attention, and what is changed of a block of it: each is seen, and computed.
SEEN: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "nested config": (
        _given(types.SimpleNamespace(a=types.SimpleNamespace(b=0.25)), lambda s: s.given.a.b),
        lambda block: setattr(block.attn.given.a, "b", 0.9),
    ),
    "dictionary": (
        _given({"scale": 0.25}, lambda s: s.given["scale"]),
        lambda block: block.attn.given.update(scale=0.9),
    ),
    "list in list": (
        _given([[0.25]], lambda s: s.given[0][0]),
        lambda block: block.attn.given[0].__setitem__(0, 0.9),
    ),
    "enum": (
        _given(Mode.NEAR, lambda s: 0.25 if s.given is Mode.NEAR else 0.9),
        lambda block: setattr(block.attn, "given", Mode.FAR),
    ),
    "function": (
        _given(lambda: 0.25, lambda s: s.given()),
        lambda block: setattr(block.attn, "given", lambda: 0.9),
    ),
    "partial": (
        _given(functools.partial(float, 0.25), lambda s: s.given()),
        lambda block: setattr(block.attn, "given", functools.partial(float, 0.9)),
    ),
    "config that is a class": (
        _given(Config, lambda s: s.given.scale),
        lambda _: setattr(Config, "scale", 0.9),
    ),
    "attribute of a class": (
        _given(None, lambda s: s.rank),
        lambda _: setattr(Attention, "rank", 0.9),
    ),
    "method of an instance": (
        _given(None, lambda _: 0.25),
        lambda block: setattr(block.attn, "factor", lambda: 0.9),
    ),
    "global": (_given(None, lambda _: NUMBER), _write_global),
    "default": (
        _given(None, lambda _: times(1.0)),
        lambda _: setattr(times, "__defaults__", (0.9,)),
    ),
    "appended": (_given(None, lambda _: 0.25), lambda block: block.mlp.append(nn.Tanh())),
    "inserted": (_given(None, lambda _: 0.25), lambda block: block.mlp.insert(2, nn.Tanh())),
    "module": (_given(None, lambda _: 0.25), _set("last", nn.Tanh())),
    "buffer": (_given(None, lambda _: 0.25), _set("weights", torch.full((WIDTH,), 3.0))),
    "parameter": (_given(None, lambda _: 0.25), _set("gain", nn.Parameter(torch.ones(WIDTH) * 3))),
    "class of a part": (_given(None, lambda _: 0.25), _set("path", nn.Tanh())),
    "attribute of a part": (
        _given(None, lambda s: 0.25 if s.qkv.out_features > WIDTH else 0.9),
        lambda block: setattr(block.attn.qkv, "out_features", 1),
    ),
    "mode of a part": (
        _given(None, lambda s: 0.25 if s.proj.training else 0.9),
        lambda block: block.attn.proj.eval(),
    ),
    "no such attribute": (
        _given(None, lambda s: s.other if hasattr(s, "other") else 0.25),
        lambda block: setattr(block.attn, "other", 0.9),
    ),
}


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:
    yield
    globals()["NUMBER"] = Attention.rank = Config.scale = 0.25
    times.__defaults__ = (0.25,)
    LOG.clear()


@pytest.mark.parametrize("change", SEEN)
def test_what_changes_after_it_was_read_is_seen(change: str) -> None:
    make, done = SEEN[change]
    model = model_of(Block(make()))
    assert fused_blocks(vramx.optimize(model, "keep")) == 1
    before = results(model)
    done(model[0])
    found = results(model)
    vramx.restore(model)
    assert far(found, results(model)) == 0
    assert far(found[:1], before[:1]) > 1e-3


def test_a_closure_is_seen() -> None:
    factor = 0.25
    model = model_of(Block(Attention(lambda _: factor)))
    assert fused_blocks(vramx.optimize(model, "keep")) == 1
    factor = 0.9
    found = results(model)
    vramx.restore(model)
    assert far(found, results(model)) == 0


def test_a_method_of_a_base_class_is_seen() -> None:
    class Base(Attention):
        """Has the method."""

        def factor(self) -> float:
            return 0.25

    class Derived(Base):
        """Inherits it."""

    model = model_of(Block(Derived(lambda _: 0.0)))
    assert fused_blocks(vramx.optimize(model, "keep")) == 1
    Base.factor = lambda self: 0.9  # type: ignore[method-assign]
    found = results(model)
    vramx.restore(model)
    assert far(found, results(model)) == 0


def test_a_module_that_a_function_closes_over_is_that_one() -> None:
    """As minGPT's are; a copy of the block has the function, and so the other block's module."""
    model = model_of(_Closing())
    assert fused_blocks(vramx.optimize(model, "keep")) == 1
    twin = copy.deepcopy(model)
    twin[0].mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    assert far(results(twin)[:1], results(model)[:1]) < ROUNDING


class _Closing(nn.Module):
    """A block whose feed-forward part is a function that closes over its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(lambda _: 0.25)
        self.mlp = nn.ModuleDict(
            {"a": nn.Linear(WIDTH, 2 * WIDTH), "b": nn.GELU(), "c": nn.Linear(2 * WIDTH, WIDTH)}
        )
        parts: Any = self.mlp
        self.through = lambda x: parts.c(parts.b(parts.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.first(x))
        result: Tensor = x + self.through(self.second(x))
        return result


def test_what_a_block_closes_over_goes_with_it() -> None:
    model = model_of(_Closing())
    assert fused_blocks(vramx.optimize(model, "keep")) == 1
    closed_over = weakref.ref(model[0].mlp)
    del model
    gc.collect()
    assert closed_over() is None


def _picklable_factor(_: Any) -> float:
    return NUMBER


def test_a_pickle_of_a_block_finds_what_it_read() -> None:
    model = model_of(Block(Attention(_picklable_factor)))
    vramx.optimize(model, "keep")
    expected = results(model)
    data = pickle.dumps(model)
    assert far(results(pickle.loads(data)), expected) == 0
    _write_global(None)  # as in another program, which has another number
    copied = pickle.loads(data)
    found = results(copied)
    vramx.restore(copied)
    assert far(found, results(copied)) == 0
    assert far(found[:1], expected[:1]) > 1e-3


# -- What is not read ------------------------------------------------------------------------------


class Keeper:
    """An object that counts what it is given."""

    def __init__(self) -> None:
        self.count = 0

    def save(self, _: Any) -> float:
        self.count += 1
        return 0.25


class Probe(nn.Module):
    """Counts its calls, whatever becomes of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def _caught(_: Any, x: Tensor, y: Tensor) -> Tensor:
    try:
        return y * 3 if x.shape[1] > 2 else y
    except Exception:
        return y


class _Masked(Attention):
    """Attention whose mask and factor are in another order, or of another kind."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores: Tensor = self.given(self, q @ k.transpose(-2, -1), q.shape[2])
        return scores


def _filled(self: Any, scores: Tensor, tokens: int, fill: float) -> Tensor:
    return scores.masked_fill(self.earlier[:tokens, :tokens] == 0, fill)


def _dropped(self: Any, scores: Tensor, tokens: int) -> Tensor:
    mask = F.dropout(self.earlier, 0.02, True)
    return scores.masked_fill(mask[:tokens, :tokens] == 0, -torch.inf)


def _after(function: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Block(after=function)


def _masked(function: Callable[[Any, Tensor, int], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Block(_Masked(lambda _: 1.0, function))


def _of(given: Callable[[], Any], how: Callable[[Any], float]) -> Callable[[], nn.Module]:
    return lambda: Block(Attention(how, given()))


def _shared() -> nn.Module:
    block = Block()
    block.second = block.first
    return block


def _probed() -> nn.Module:
    block = Block(after=lambda self, _, y: (self.probe(y), y)[1])
    block.probe = Probe()
    return block


LEFT: dict[str, Callable[[], nn.Module]] = {
    "attribute of a global": _of(lambda: None, lambda _: SETTINGS.scale),
    "global dictionary": _of(lambda: None, lambda _: TABLE["scale"]),
    "global list": _of(lambda: None, lambda _: (LOG.append(1), 0.25)[1]),
    "ordered dictionary": _of(lambda: OrderedDict(scale=0.25), lambda s: s.given["scale"]),
    "counter": _of(Counter, lambda s: (s.given.update(a=1), 0.25)[1]),
    "object": _of(Keeper, lambda s: s.given.save(1)),
    "method of an object": _of(lambda: Keeper().save, lambda s: s.given(1)),
    "nested list": _of(lambda: {"a": []}, lambda s: (s.given["a"].append(1), 0.25)[1]),
    "number in a tensor": _of(lambda: torch.tensor(0.25), lambda s: s.given.item()),
    "in two places": _shared,
    "unused": _probed,
    "isinstance": _after(lambda _, x, y: y * 3 if isinstance(x, Tensor) else y),
    "is_tensor": _after(lambda _, x, y: y * 3 if torch.is_tensor(x) else y),
    "type": _after(lambda _, x, y: y * 3 if type(x) is Tensor else y),
    "hasattr": _after(lambda _, x, y: y if hasattr(x, "mask") else y * 3),
    "gradient": _after(lambda _, x, y: y if x.grad_fn is not None else y * 3),
    "caught": _after(_caught),
    "small fill": _masked(lambda s, a, n: _filled(s, a, n, -1e9) * 1e-9),
    "negative after a mask": _masked(lambda s, a, n: _filled(s, a, n, -1e9) * -0.25),
    "negative": _masked(lambda s, a, n: _filled(s, a * -0.25, n, -torch.inf)),
    "random mask": _masked(_dropped),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_a_record_does_not_show_is_computed_as_it_was(what: str) -> None:
    model = model_of(LEFT[what]())
    twin = copy.deepcopy(model)
    torch.manual_seed(0)
    report = vramx.optimize(model, "keep")
    assert fused_blocks(report) == 0
    assert _states(model) == _states(twin)
    torch.manual_seed(0)
    found = results(model)
    torch.manual_seed(0)
    assert far(found, results(twin)) == 0


def _states(model: nn.Module) -> str:
    given = [getattr(part, "given", None) for part in model.modules()]
    kept = [vars(each) if isinstance(each, Keeper) else each for each in given]
    buffers = {name: float(buffer.sum()) for name, buffer in model.named_buffers()}
    return str([each for each in kept if not callable(each)]) + str(buffers)


def test_a_part_of_a_projection_is_not_the_whole() -> None:
    """The first elements of a larger result, in its own order."""

    def attended(self: Any, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        y: Tensor = Attention.forward(self, x)
        wide: Tensor = self.qkv(y)
        return wide.view(-1)[: rows * tokens * width].view(rows, tokens, width)

    cut = type("Cut", (Attention,), {"forward": attended, "__module__": __name__})
    model = model_of(Block(cut(lambda _: math.sqrt(0.0625))))
    twin = copy.deepcopy(model)
    assert fused_blocks(vramx.optimize(model, "keep")) == 0
    assert far(results(model), results(twin)) == 0
