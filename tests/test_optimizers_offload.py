"""offload_optimizer: what is computed and kept is what it was, to the bit."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_tools import (
    LEAST_BYTES,
    OPTIMIZERS,
    HasObjects,
    HasSlots,
    LateLink,
    Pair,
    expect_alike,
    give_gradients,
    link,
    parameters,
    use,
    values_of,
)
from torch import nn

import vramx
from vramx.errors import VramxWarning
from vramx.optimizers.slots import SLOTS
from vramx.optimizers.states import plain_tensors

__all__ = ["link"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_streamed_states_are_the_unstreamed_ones_to_the_bit(link: LateLink, name: str) -> None:
    pair = Pair(name, offload=False)
    pair.step(0)  # it may have states already
    pair.offload()
    for seed in range(1, 6):
        # Every other time a parameter has no gradient, and its bucket may have none at all.
        pair.step(seed, without=4 if seed % 2 else None)
    pair.expect_alike()
    assert link.copies > 0
    assert all(p.grad is not None for p in pair.streamed[:4])


@pytest.mark.parametrize(
    "forgotten", ["main after to the device", "to the device after to the host"]
)
def test_each_wait_is_needed(monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    use(LateLink(forgotten), monkeypatch)
    pair = Pair(steps=5)
    with pytest.raises(AssertionError):
        pair.expect_alike()


def test_the_tensors_of_objects_are_on_the_host(link: LateLink) -> None:
    pair = Pair(HasObjects, steps=1)
    means = [state["mean"] for state in pair.offloaded.state.values()]
    large = [each.value for each in means if each.value.nbytes >= LEAST_BYTES]
    assert large
    assert all(link.has(t) for t in large)
    before = [id(mean) for mean in means]
    vramx.restore(pair.offloaded)
    assert [id(state["mean"]) for state in pair.offloaded.state.values()] == before
    pair.step(1)
    expect_alike(*([state["mean"].value for state in o.state.values()] for o, _ in pair.sides))


def test_tensors_that_are_not_reached_stay_and_are_told_of_once(link: LateLink) -> None:
    pair = Pair(HasSlots)
    with pytest.warns(VramxWarning, match="inside of InSlots are not reached") as told:
        pair.step(0)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", VramxWarning)
        pair.step(1)
    expect_alike(pair.plain, pair.streamed)


def test_the_host_has_the_states_and_the_device_three_slots(link: LateLink) -> None:
    pair = Pair(steps=1)
    for state in pair.offloaded.state.values():
        for tensor in plain_tensors(state):
            assert link.has(tensor) is (tensor.nbytes >= LEAST_BYTES)
    held = link.pool.used_bytes
    link.allocated.clear()
    pair.step(1)
    assert link.pool.used_bytes == held
    buckets = pair.offloaded._vramx_rounds._streams  # type: ignore[attr-defined]
    largest = max(bucket.nbytes for s in buckets.values() for bucket in s.buckets)
    assert [nbytes for nbytes, _ in link.allocated] == [largest] * SLOTS


def test_an_error_in_a_step_loses_nothing(link: LateLink) -> None:
    pair = Pair("adamw_one_by_one", steps=2)
    give_gradients(pair.streamed, 2)
    good = pair.streamed[4].grad
    pair.streamed[4].grad = good.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        pair.offloaded.step()
    assert all(p.grad is not None for p in pair.streamed)

    def step_plain(without: slice) -> None:
        give_gradients(pair.plain, 2)
        for p in pair.plain[without]:
            p.grad = None
        pair.optimizer.step()
        pair.expect_alike()

    # The two buckets before it were stepped, its own was not.
    step_plain(without=slice(3, None))
    for p in pair.streamed[:3]:
        p.grad = None
    pair.streamed[4].grad = good
    pair.offloaded.step()
    step_plain(without=slice(3))
    assert link.copies


def test_state_dict_resumes_on_both_sides(link: LateLink) -> None:
    pair, other = Pair(steps=1), Pair()
    buffer = io.BytesIO()
    torch.save(pair.offloaded.state_dict(), buffer)
    buffer.seek(0)
    other.load(torch.load(buffer), pair.plain)
    assert link.pool.used_bytes > 0
    other.step(1, 2, 3)
    pair.step(1, 2, 3)
    other.expect_alike()
    expect_alike(other.plain, pair.plain)


def training_of_types(**options: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Have a bucket's states be of three types."""
    own = parameters()
    own[0].data, own[2].data = own[0].data.double(), own[2].data.bfloat16()
    optimizer = torch.optim.AdamW(own, lr=0.01)
    return own, vramx.offload_optimizer(optimizer, least=LEAST_BYTES, **options)


def step_types(own: list[nn.Parameter], optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in own:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("where", ["on the host", "kept", "restored"])
def test_states_of_several_types_are_saved_and_take_no_more_than_they_are(
    link: LateLink, where: str
) -> None:
    own, optimizer = training_of_types(keep="1MiB" if where == "kept" else None)
    step_types(own, optimizer, 0, 1)
    if where == "restored":
        vramx.restore(optimizer)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    assert buffer.tell() < 1.5 * sum(2 * p.nbytes for p in own) + 16384
    other, resumed = training_of_types()
    for p, q in zip(other, own, strict=True):
        p.data.copy_(q.data)
    buffer.seek(0)
    resumed.load_state_dict(torch.load(buffer))
    step_types(own, optimizer, 2, 3)
    step_types(other, resumed, 2, 3)
    expect_alike(own, other)
    expect_alike(values_of(optimizer), values_of(resumed))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_trains_on_and_is_of_its_own(link: LateLink, copied: Callable[[Any], Any]) -> None:
    pair = Pair(steps=1)
    other = copied(pair.offloaded)
    of_other = [p for group in other.param_groups for p in group["params"]]
    give_gradients(of_other, 1)
    other.step()
    pair.step(1)
    expect_alike(of_other, pair.plain)
    expect_alike(values_of(other), values_of(pair.optimizer))
    assert type(other) is type(pair.offloaded)
    assert link.copies


@pytest.mark.parametrize("name", ["adamw", "has_objects"])
def test_a_pickle_has_the_states_and_no_more_of_the_host(link: LateLink, name: str) -> None:
    pair = Pair(name, steps=1)
    plain, offloaded = (len(pickle.dumps(o)) for o in (pair.optimizer, pair.offloaded))
    assert offloaded < plain + 4096 < 1 << 16  # bytes of the least slab
    pair.step(1)
    pair.expect_alike()


@pytest.mark.parametrize("is_made_before", [False, True])
def test_schedulers_and_hooks_see_one_step(link: LateLink, is_made_before: bool) -> None:
    pair = Pair(offload=not is_made_before)
    optimizer, seen = pair.offloaded, list[str]()
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if is_made_before:
        pair.offload()
    pair.step(0)
    scheduler.step()  # warns, which is an error in tests, if it saw no step
    assert seen == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == 0.005
    counts = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    vramx.restore(optimizer)
    assert counts
    assert hasattr(optimizer.step, "_wrapped_by_lr_sched") == is_made_before
    assert link.copies


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_what_is_not_finite(link: LateLink, fused: bool) -> None:
    pair = Pair(lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused))
    for optimizer, own in pair.sides:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for seed in range(4):
            give_gradients(own, seed)
            if seed == 2:
                own[4].grad = torch.full_like(own[4], torch.inf)
            scaler.scale(torch.ones(()))  # what tells it its scale
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
    pair.expect_alike()
    assert link.copies


def test_a_closure_is_called_once(link: LateLink) -> None:
    pair, calls = Pair(), list[bool]()

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        give_gradients(pair.streamed, 0)
        return 3.0

    assert pair.offloaded.step(closure) == 3.0
    assert calls == [True]
    assert link.copies


def test_restore_brings_the_states_back(link: LateLink) -> None:
    pair = Pair(steps=1)
    row = vramx.report(pair.offloaded).rows[0]
    assert row.done == "states wait on the host"
    assert "on the host" in row.effect
    assert len(vramx.restore(pair.offloaded)) == 1
    assert len(vramx.restore(pair.offloaded)) == len(vramx.report(pair.offloaded)) == 0
    assert type(pair.offloaded) is torch.optim.AdamW
    link.pool.collect()
    assert link.pool.used_bytes == 0
    copies = link.copies
    pair.step(1)
    pair.expect_alike()
    assert link.copies == copies


def test_a_full_host_leaves_states_where_they_are(link: LateLink) -> None:
    pair = Pair()
    link.host_is_full = True
    with pytest.warns(VramxWarning, match="more to pin for an optimizer's states") as told:
        pair.step(0)
    assert len(told) == 1
    pair.step(1)
    pair.expect_alike()


def test_the_slots_go_with_the_step_and_wait_for_no_collection_of_garbage(link: LateLink) -> None:
    gc.disable()
    try:
        Pair(steps=2).offloaded.state_dict()  # all copies are done
        assert len(link.allocated) == SLOTS
        assert [slot() for _, slot in link.allocated] == [None] * SLOTS
    finally:
        gc.enable()


def test_on_a_host_alone_nothing_moves() -> None:
    Pair(steps=3).expect_alike()


def test_parameters_without_elements_are_stepped_beside_the_others(link: LateLink) -> None:
    own = [nn.Parameter(torch.empty(0)), *parameters()]
    optimizer = vramx.offload_optimizer(torch.optim.AdamW(own), least=LEAST_BYTES)
    give_gradients(own, 0)
    optimizer.step()
    assert len(optimizer.state) == len(own)


def test_a_program_may_have_another_default_device(link: LateLink) -> None:
    pair = Pair("counts_in_the_group", offload=False)
    with torch.device("meta"):
        pair.offload()
    pair.step(0, 1)
    pair.expect_alike()


def test_a_step_in_inference_mode_leaves_memory_that_others_can_write(link: LateLink) -> None:
    with torch.inference_mode():
        Pair(steps=2)
    Pair(steps=2).expect_alike()  # in the same slab


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_in_a_group_twice_is_stepped_twice(link: LateLink) -> None:
    pair = Pair(lambda p: torch.optim.AdamW([*p, p[0]], lr=0.01, foreach=False), steps=3)
    expect_alike(pair.plain, pair.streamed)
