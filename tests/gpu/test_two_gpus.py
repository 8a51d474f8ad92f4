"""Two GPUs: copies between them, NCCL, and training in parallel as under torch's own allocator."""

from __future__ import annotations

import pytest
import torch

from gpu import runner
from gpu.runner import Outcome
from gpu.tools import LONG_SLEEP, MIB, holds, on, room, settle

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

SIZE = 64 * MIB


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [1, 1000, SIZE + 3])
@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_a_copy_arrives_whole(source: int, target: int, size_bytes: int) -> None:
    assert holds(on(source, size_bytes, 7).to(f"cuda:{target}"), 7)
    into = on(target, size_bytes, 0)
    into.copy_(on(source, size_bytes, 9))
    assert holds(into, 9)


def test_a_copy_between_strided_tensors_arrives_whole() -> None:
    """Not a plain copy of bytes: a kernel on one GPU reads or writes the other's memory."""
    source = torch.arange(1 << 20, device="cuda:0").reshape(1024, 1024)
    target = torch.zeros(1024, 1024, dtype=torch.int64, device="cuda:1")
    target.t().copy_(source)
    assert torch.equal(target.cpu(), source.cpu().t())


def test_the_source_may_be_freed_at_once() -> None:
    torch.cuda.synchronize(1)
    torch.cuda._sleep(LONG_SLEEP // 4)
    arrived = on(0, SIZE, 7).to("cuda:1", non_blocking=True)
    overwriting = [on(0, SIZE, 2) for _ in range(4)]
    assert holds(arrived, 7)
    del overwriting


def test_memory_that_grew_after_the_first_copy_is_reachable_too() -> None:
    held = []
    for value in range(1, 6):
        held.append(on(0, value * SIZE, value))
        assert holds(held[-1].to("cuda:1"), value)
    settle()
    assert all(holds(each.to("cuda:1"), value) for value, each in enumerate(held, 1))


def test_copies_to_memory_put_together_from_gaps() -> None:
    tensors = [on(1, SIZE, index) for index in range(16)]
    tensors[1::2] = [None] * 8
    large = on(0, 8 * SIZE, 7).to("cuda:1")
    assert holds(large, 7)
    assert holds(large.to("cuda:0"), 7)
    assert all(tensor is None or holds(tensor, index) for index, tensor in enumerate(tensors))


# --- each GPU by itself ---------------------------------------------------------------------------


def test_statistics_are_kept_by_device() -> None:
    before = [torch.cuda.memory_allocated(device) for device in (0, 1)]
    kept = on(1, SIZE, 0)
    after = [torch.cuda.memory_allocated(device) for device in (0, 1)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, SIZE]
    devices = {segment["device"] for segment in torch.cuda.memory_snapshot()}
    assert 1 in devices
    del kept


def test_a_tensor_is_freed_on_its_own_device_whichever_is_current() -> None:
    before = torch.cuda.memory_allocated(1)
    kept = on(1, SIZE, 0)
    with torch.cuda.device(0):
        del kept
    assert torch.cuda.memory_allocated(1) == before


def test_one_full_device_leaves_the_other_alone() -> None:
    with room(256 * MIB):
        with pytest.raises(torch.OutOfMemoryError, match="GPU 0"):
            on(0, 512 * MIB, 1)
        assert holds(on(1, 512 * MIB, 1), 1)


# --- programs on one ------------------------------------------------------------------------------


@pytest.mark.vramx_only
@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ((), {"VRAMX": "1"}),
        ((), {"VRAMX": "1", "VRAMX_LIMIT": "0.5"}),
        ((), {"VRAMX": "1", "VRAMX_LIMIT": "0.5", "VRAMX_ALLOCATOR": "torch"}),
        (("late",), {}),
    ],
    ids=["plain", "limit", "limit-of-torch", "late"],
)
def test_a_program_begins_on_the_first_gpu_and_leaves_the_second_alone(
    words: tuple[str, ...], settings: dict[str, str]
) -> None:
    command = runner.script("two_gpu_beginning", *words)
    facts = runner.run(command, runner.environment(settings, path=runner.importable())).facts()
    is_torchs = "VRAMX_ALLOCATOR" in settings
    assert facts["backend"] == ("native" if is_torchs else "vramx")
    assert (facts["device"], facts["current"], facts["after_a_graph"]) == (0, 0, 0)
    # torch makes one itself to be told of a limit, up to 2.9.
    assert not facts["second_has_context"] or is_torchs


# --- programs on both -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainings(allocator: str) -> dict[tuple[str, str], Outcome]:
    """Train in both ways under both allocators, one after another: each takes both GPUs."""
    return {
        (kind, each): runner.on_two_gpus("two_gpu_training", each, kind)
        for each in ("native", allocator)
        for kind in ("ddp", "fsdp")
    }


@pytest.mark.vramx_only
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_has_the_losses_of_torchs_own_allocator(
    trainings: dict[tuple[str, str], Outcome], kind: str
) -> None:
    ours, native = (trainings[kind, each].facts() for each in ("vramx", "native"))
    assert (ours["backend"], native["backend"]) == ("vramx", "native")
    assert ours["losses"] == native["losses"]
    assert len(set(native["losses"])) > 1


@pytest.mark.vramx_only
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_reserves_no_more_than_under_torchs_own_allocator(
    trainings: dict[tuple[str, str], Outcome], kind: str
) -> None:
    ours, native = (trainings[kind, each].facts()["peaks"] for each in ("vramx", "native"))
    assert all(mine <= theirs for mine, theirs in zip(ours, native, strict=True))


@pytest.fixture(scope="module")
def collectives(allocator: str) -> Outcome:
    return runner.on_two_gpus("two_gpu_collectives", allocator)


@pytest.mark.parametrize(
    "name", ["reduce_in_turn", "reduce_and_drop", "reduce_while_defragmenting"]
)
def test_collectives_are_right(collectives: Outcome, name: str) -> None:
    assert collectives.facts()[name] == 0
