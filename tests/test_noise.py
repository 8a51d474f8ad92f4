"""The noise of stochastic rounding: seeds, ranks, streams and epochs.

That its numbers are Philox's, test_codec_reference.py tests word by word; that they are centred,
test_codec_statistics.py over all that there are.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vramx.compression.codec import random
from vramx.compression.codec.codec import pack
from vramx.compression.config import Format
from vramx.errors import InvalidValueError, VramxError


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    random.manual_seed(0, rank=0)
    yield
    random.manual_seed(0, rank=0)


def buffers(count: int = 3, streams: random.Streams | None = None) -> list[Tensor]:
    x = torch.linspace(-1, 1, 1000)
    return [pack(x, Format(), streams).buffer for _ in range(count)]


def same(first: list[Tensor], second: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("seed", [7, 8])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_seed_repeats_the_noise_and_another_or_another_rank_draws_other(
    seed: int, rank: int
) -> None:
    random.manual_seed(7)
    first = buffers()
    random.manual_seed(seed, rank=rank)
    assert same(first, buffers()) == [seed == 7 and rank != 1] * 3


def test_every_rank_has_its_own_key() -> None:
    assert len({random._key(seed, rank) for seed in range(64) for rank in range(64)}) == 4096


def test_every_tensor_has_its_own_stream() -> None:
    first, second, third = buffers()
    assert same([first, first, second], [second, third, third]) == [False] * 3


def test_nearest_rounding_takes_no_stream() -> None:
    first = random.next_stream()
    pack(torch.randn(100), Format(rounding="nearest"))
    assert random.next_stream() == first + 1


def test_a_new_epoch_draws_new_noise_for_the_same_streams() -> None:
    streams = random.Streams()
    first = buffers(streams=streams)
    streams.restart()
    random.advance_epoch("cpu")
    assert same(first, buffers(streams=streams)) == [False] * 3


def test_the_epoch_advances_when_the_streams_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    before = random.state("cpu").clone()
    monkeypatch.setattr(random._noise, "counter", itertools.count(2**31 - 1))
    assert [random.next_stream(), random.next_stream()] == [2**31 - 1, 0]
    assert (random.state("cpu") - before).tolist() == [0, 1]


def test_a_restarted_step_repeats_its_noise_whatever_came_between() -> None:
    streams = random.Streams()
    streams.restart(step=3)
    first = buffers(streams=streams)
    streams.restart(step=4)
    other = buffers(5, streams=streams)
    streams.restart(step=3)
    assert same(first, buffers(streams=streams)) == [True] * 3
    assert same(first, other[:3]) == [False] * 3


def test_streams_and_the_process_never_share_a_number() -> None:
    streams = random.Streams()
    streams._next = 2**31 - 2
    assert [streams.next() for _ in range(3)] == [2**32 - 2, 2**32 - 1, 2**31]
    assert random.next_stream() < 2**31


def test_torchs_generator_is_neither_read_nor_advanced() -> None:
    before = torch.get_rng_state()
    first = buffers()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    random.manual_seed(0, rank=0)
    assert same(first, buffers()) == [True] * 3


def test_threads_never_get_the_same_stream() -> None:
    found: list[list[int]] = [[] for _ in range(4)]

    def draw(into: list[int]) -> None:
        into.extend(random.next_stream() for _ in range(5000))

    threads = [threading.Thread(target=draw, args=(into,)) for into in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({number for numbers in found for number in numbers}) == 20_000


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode], ids=["inference", "fake"])
def test_a_state_made_inside_a_mode_outlives_it(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random._noise, "states", {})
    with mode():
        random.state("cpu")
    random.advance_epoch("cpu")
    assert random.state("cpu").tolist()[1] == 1


def test_a_state_is_not_set_up_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(VramxError, match="inside a CUDA graph capture"):
        random.state(torch.device("cuda", 0))


@pytest.mark.parametrize(
    "options", [{"seed": 1.5}, {"seed": True}, {"seed": 2**64}, {"seed": 0, "rank": -1}], ids=str
)
def test_a_bad_seed_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=r"(seed|rank) .* is not accepted"):
        random.manual_seed(**options)
