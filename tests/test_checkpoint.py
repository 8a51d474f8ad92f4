"""vramx.checkpoint: what it keeps of the inputs, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_tools import (
    SMALL,
    WIDTH,
    Block,
    Packs,
    Seen,
    activation,
    bent,
    cosine,
    gradients,
    packs,
    seeds,
)
from torch import nn

import vramx
from vramx.compression.codec import codec
from vramx.compression.config import Compression
from vramx.errors import InvalidValueError
from vramx.recompute import inputs

__all__ = ["packs", "seeds"]
pytestmark = pytest.mark.usefixtures("seeds")


def test_input_is_kept_in_at_most_0_525_of_its_bytes(packs: Packs) -> None:
    x = activation(256, WIDTH).bfloat16()
    nbytes = x.numel() * x.element_size()
    storage = weakref.ref(x.untyped_storage())
    y = vramx.checkpoint(bent, x, level=SMALL)
    del x
    assert storage() is None, "the input itself is still alive"
    assert packs.bytes <= 0.525 * nbytes  # 8 bits, and 6 bytes for 128 elements: 0.523
    assert y.grad_fn is not None


def test_gradient_direction_survives_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block()
    exact = gradients(block, block)
    checkpointed = functools.partial(vramx.checkpoint, block, level=SMALL)
    packed = gradients(checkpointed, block)
    assert cosine(exact, packed) > 0.999
    assert not torch.equal(exact[0], packed[0]), "nothing was compressed"
    # And a defect that this measure finds.
    unpack = codec.unpack
    monkeypatch.setattr(inputs, "unpack", lambda packed: unpack(packed).roll(1))
    assert cosine(exact, gradients(checkpointed, block)) < 0.999


def test_keyword_and_nested_tensors_are_packed(packs: Packs) -> None:
    def region(x: torch.Tensor, *, pair: dict[str, Any]) -> torch.Tensor:
        return x @ pair["a"][0].t() @ pair["b"]

    pair = {"a": [activation(8, 16)], "b": activation(8, 16)}
    vramx.checkpoint(region, activation(8, 16), pair=pair, level=SMALL).sum().backward()
    assert packs.sizes == [128, 128, 128]


@dataclasses.dataclass(frozen=True)
class Arguments:
    x: torch.Tensor
    name: str
    rest: tuple[Any, ...] = ()


def test_tensors_in_a_dataclass_are_packed_and_given_back(packs: Packs) -> None:
    seen = Seen()

    def region(arguments: Arguments) -> torch.Tensor:
        seen.append(arguments)
        return bent(arguments.x) * arguments.rest[0].x

    inner = Arguments(activation(8, 16), "inner")
    vramx.checkpoint(
        region, Arguments(activation(8, 16), "outer", (inner,)), level=SMALL
    ).sum().backward()
    assert packs.sizes == [128, 128]
    assert [a.name for a in seen] == ["outer", "outer"]
    assert seen[1].rest[0].name == "inner"
    assert seen[1].x.shape == (8, 16)


def test_integers_masks_parameters_and_small_tensors_pass(packs: Packs) -> None:
    weight = nn.Parameter(torch.randn(16, 16))
    index, mask = torch.arange(8), torch.ones(8, 16, dtype=torch.bool)

    def region(*tensors: torch.Tensor) -> torch.Tensor:
        x, w, i, m = tensors
        return (x[i] @ w).masked_fill(m, 0.0)

    x = activation(8, 16)  # 512 bytes
    options = Compression(min_bytes=513)
    vramx.checkpoint(region, x, weight, index, mask, level=options).sum().backward()
    vramx.checkpoint(region, x.detach(), weight, index, mask, level=SMALL).sum().backward()
    assert packs.sizes == []


def test_one_tensor_as_two_arguments_is_packed_once(packs: Packs) -> None:
    x = activation(8, 16)
    vramx.checkpoint(torch.add, x, x, level=SMALL).sum().backward()
    assert packs.sizes == [128]


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda h: torch.cat([h, h], -1)[..., :16],
    "every other column": lambda h: torch.cat([h, h], -1)[..., ::2],
    "rows": lambda h: torch.cat([h, h], 1)[:, ::2],
    "expanded columns": lambda h: torch.cat([h, h], -1)[:, :1, :16].expand(4, 8, 16),
    "windows": lambda h: torch.cat([h, h], -1)[..., ::2].unfold(-1, 4, 2)[..., :3],
}


@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}, {"level": "keep", "offload": "cpu"}])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_tensor_is_recomputed_the_same_way(name: str, options: dict[str, Any]) -> None:
    """By the strides of its input a layer with a bias chooses what it saves."""
    h = PARTS[name](activation(4, 8, 16) * 1.0)
    layer = nn.Linear(h.shape[-1], 16)
    options = {"level": SMALL, **options}
    vramx.checkpoint(layer, h, **options).sum().backward()
    assert layer.weight.grad is not None


def test_one_tensor_as_two_arguments_is_one_in_the_recomputation() -> None:
    """Attention makes one product of a tensor that is its own key, and two of others."""
    block = nn.MultiheadAttention(WIDTH, 4)

    def attend(x: torch.Tensor, memory: dict[str, torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = block(x, memory["of"], memory["of"], need_weights=False)[0]
        return y

    def run(x: torch.Tensor, function: Any) -> torch.Tensor:
        x = x.view(4, 8, WIDTH)
        y: torch.Tensor = function(x, {"of": x})
        return y

    exact = gradients(lambda x: run(x, attend), block)
    checkpointed = functools.partial(vramx.checkpoint, attend, level=SMALL)
    assert cosine(exact, gradients(lambda x: run(x, checkpointed), block)) > 0.999


def test_one_object_as_two_arguments_is_one_in_the_recomputation() -> None:
    seen = Seen()

    def region(x: torch.Tensor, one: Any, other: Any) -> torch.Tensor:
        seen.append(one is other)
        return x * x * one.scale

    options = types.SimpleNamespace(scale=2.0)
    vramx.checkpoint(region, activation(8, 16), options, options, level=SMALL).sum().backward()
    assert seen == [True, True]


def test_nothing_is_left_once_the_graph_is_gone(packs: Packs) -> None:
    gc.collect()
    gc.disable()  # a cycle would be collected otherwise, sooner or later
    try:
        x = activation()
        vramx.checkpoint(Block(), x, level=SMALL).sum().backward()
        dropped = vramx.checkpoint(Block(), x, level=SMALL)
        del dropped
        assert packs.bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_reentrant": True}, "use_reentrant=True is not accepted: reentrant"),
        *(({"level": each}, "accepted are 'keep', 'int8'") for each in (True, 8, "int3", None)),
        ({"level": "recompute_all"}, "accepted are 'keep', 'int8'"),
        *(({"offload": each}, "offload") for each in ("gpu", 1.5, -0.1)),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        vramx.checkpoint(torch.sin, activation(), **options)


def test_an_error_of_the_region_leaves_no_hooks_behind(packs: Packs) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        vramx.checkpoint(region, activation(), level=SMALL)
    count = len(packs.sizes)
    activation().sin().sum().backward()
    assert len(packs.sizes) == count


def test_no_value_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = Block(), activation()

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("waits for the device")

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    vramx.checkpoint(block, x, level=SMALL).sum().backward()
