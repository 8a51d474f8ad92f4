"""offload_optimizer(keep=): the first states stay, and what is computed is what it was."""

from __future__ import annotations

import pytest
import torch
from optimizer_tools import LEAST_BYTES, OPTIMIZERS, LateLink, Pair, expect_alike, link

import vramx
from vramx.errors import InvalidValueError
from vramx.optimizers.stream import StateStream

__all__ = ["link"]

# The two states of AdamW for the first layer: 16 x 32 and 32 elements, each from a byte that
# 512 divides.
FIRST_LAYER_BYTES = 2 * (2048 + 512)


class Kept(Pair):
    """A pair of which one has some states on the device."""

    def __init__(self, keep: int, make: str = "adamw") -> None:
        self.keep = keep
        super().__init__(make)

    def offload(self) -> None:
        options = {"bucket": 2200, "least": LEAST_BYTES, "keep": self.keep}
        vramx.offload_optimizer(self.offloaded, **options)  # type: ignore[arg-type]

    @property
    def stream(self) -> StateStream:
        (found,) = vars(self.offloaded)["_vramx_rounds"]._streams.values()
        return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "keep"), [*((name, 2 * FIRST_LAYER_BYTES) for name in OPTIMIZERS), ("adamw", 1 << 20)]
)
def test_states_that_stay_are_the_same_to_the_bit(link: LateLink, name: str, keep: int) -> None:
    pair = Kept(keep, name)
    for seed in range(5):
        pair.step(seed, without=4 if seed % 2 else None)
    pair.expect_alike()
    assert 0 < pair.stream.kept_bytes <= keep


def test_the_first_parameters_states_stay_and_no_more_than_there_is_room_for(
    link: LateLink,
) -> None:
    pair = Kept(FIRST_LAYER_BYTES)
    pair.step(0)
    on_host = [link.has(state["exp_avg"]) for state in pair.offloaded.state.values()]
    large = [p.numel() * 4 >= LEAST_BYTES for p in pair.streamed]
    assert on_host == [is_large and i >= 2 for i, is_large in enumerate(large)]
    assert pair.stream.kept_bytes == FIRST_LAYER_BYTES
    copies = link.copies
    pair.step(1)
    assert link.copies - copies == 2 * sum(
        rest.slot is not None for rest in pair.stream._rests.values()
    )
    assert "on a GPU" in str(vars(pair.offloaded)["_vramx_rounds"])


def test_what_stays_can_be_changed_while_training(link: LateLink) -> None:
    pair = Kept(0)
    pair.step(0, 1)
    before = link.pool.used_bytes
    for keep in (FIRST_LAYER_BYTES, 1 << 20, 0, FIRST_LAYER_BYTES):
        assert vramx.offload_optimizer(pair.offloaded, keep=keep) is pair.offloaded
        assert pair.stream.kept_bytes <= keep
        link.pool.collect()
        assert (pair.stream.kept_bytes > 0) == (keep > 0) == (link.pool.used_bytes < before)
        pair.step(keep, 3)
    vramx.offload_optimizer(pair.offloaded)  # says nothing of it
    assert pair.stream.kept_bytes == FIRST_LAYER_BYTES
    pair.expect_alike()
    vramx.restore(pair.offloaded)
    pair.step(5)
    pair.expect_alike()


def test_loaded_states_stay_where_there_is_room(link: LateLink) -> None:
    pair, other = Kept(FIRST_LAYER_BYTES), Kept(FIRST_LAYER_BYTES)
    pair.step(0, 1)
    other.load(pair.offloaded.state_dict(), pair.plain)
    assert other.stream.kept_bytes == FIRST_LAYER_BYTES
    other.step(2, 3)
    pair.step(2, 3)
    other.expect_alike()
    expect_alike(pair.streamed, other.streamed)


def test_a_size_that_is_none_is_named(link: LateLink) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))])
    with pytest.raises(InvalidValueError, match="keep: size 'much'"):
        vramx.offload_optimizer(optimizer, keep="much")
