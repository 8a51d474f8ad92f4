"""Streams: memory is not handed on while a kernel of another stream may still touch it.

Each test makes one stream slow on purpose, so that memory handed on too early is overwritten before
it is read. The first two show that this setting catches the mistake: there the mistake is made.
"""

from __future__ import annotations

import threading

import pytest
import torch

from gpu.tools import LONG_SLEEP, MIB, block, holds, overwrite, room, settle

pytestmark = pytest.mark.gpu

SIZE = 64 * MIB


def read_late(*, recorded: bool) -> bool:
    """Free a tensor that a slow side stream still reads; say whether it read what was in it.

    Without record_stream this is the caller's mistake: the memory belongs to the main stream, which
    may use it again at once.
    """

    side = torch.cuda.Stream()
    source, result = block(SIZE, 1), block(SIZE, 0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_SLEEP)
        result.copy_(source)
    if recorded:
        source.record_stream(side)
    begin = source.data_ptr()
    del source
    overwriting = overwrite(begin, SIZE)
    torch.cuda.synchronize()
    assert all(holds(each, 2) for each in overwriting)
    return holds(result, 1)


def test_without_record_stream_the_data_is_overwritten() -> None:
    assert not read_late(recorded=False)


def test_with_record_stream_it_is_not() -> None:
    assert read_late(recorded=True)


def test_memory_that_was_recorded_is_used_again_afterwards() -> None:
    rounds, blocks = 16, 10  # each round has ten blocks at most; what is left aside would add up
    before = torch.cuda.memory_reserved()
    for _ in range(rounds):
        assert read_late(recorded=True)
    assert torch.cuda.memory_reserved() - before <= (blocks + 1) * SIZE


def test_record_stream_of_the_own_stream_changes_nothing() -> None:
    tensor = block(SIZE, 1)
    held = torch.cuda.memory_reserved()
    torch.cuda._sleep(LONG_SLEEP // 4)
    tensor.record_stream(torch.cuda.current_stream())
    del tensor
    tensor = block(SIZE)
    assert torch.cuda.memory_reserved() == held, "no reason to wait, so none to grow"
    del tensor


def test_record_stream_is_right_for_a_view_and_for_several_streams() -> None:
    sides = [torch.cuda.Stream() for _ in range(3)]
    source = block(SIZE, 1)
    results = [block(SIZE // 2, 0) for _ in sides]
    torch.cuda.synchronize()
    half = source[SIZE // 2 :]
    for side, result in zip(sides, results, strict=True):
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG_SLEEP // 4)
            result.copy_(half)
        half.record_stream(side)
    begin = source.data_ptr()
    del source, half
    overwriting = overwrite(begin, SIZE)
    torch.cuda.synchronize()
    assert all(holds(each, 1) for each in results)
    del overwriting


def test_memory_of_a_busy_stream_goes_to_another_one_only_in_order() -> None:
    """Under a cap the main stream can be served only from what the side stream has freed."""
    side = torch.cuda.Stream()
    count = torch.zeros((), dtype=torch.int64, device="cuda")
    with room(1000 * MIB):
        with torch.cuda.stream(side):
            first = block(640 * MIB, 1)
            torch.cuda._sleep(LONG_SLEEP)
            for piece in first.split(16 * MIB):
                count += piece.sum(dtype=torch.int64)
            del first, piece
        second = block(640 * MIB, 2)
        torch.cuda.synchronize()
        assert count.item() == 640 * MIB
        assert holds(second[: 64 * MIB], 2)
        assert holds(second[-64 * MIB :], 2)
        del second


def test_a_side_stream_reuses_its_own_memory_without_waiting() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = block(SIZE, 1)
        held = torch.cuda.memory_reserved()
        torch.cuda._sleep(LONG_SLEEP // 4)
        for value in range(10):
            del tensor
            tensor = block(SIZE, value)
    assert torch.cuda.memory_reserved() == held
    del tensor


def test_many_streams_that_come_and_go_do_not_mix_their_data() -> None:
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for round_ in range(8):
        streams = [torch.cuda.Stream() for _ in range(8)]
        for index, stream in enumerate(streams):
            value = 1 + (round_ * 8 + index) % 250
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                tensor = block(4 * MIB, value)
                torch.cuda._sleep(1_000_000)
                error = (tensor != value).sum()
                del tensor
            torch.cuda.current_stream().wait_stream(stream)
            wrong += error
            error.record_stream(torch.cuda.current_stream())
    assert wrong.item() == 0


# --- the host's memory ----------------------------------------------------------------------------


def test_a_pinned_copy_that_does_not_block_arrives_whole() -> None:
    side = torch.cuda.Stream()
    host = torch.full((SIZE,), 7, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(side):
        arrived = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(LONG_SLEEP // 4)
        arrived.copy_(host, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    arrived.record_stream(torch.cuda.current_stream())
    total = arrived.sum(dtype=torch.int64)
    begin = arrived.data_ptr()
    del arrived
    with torch.cuda.stream(side):
        overwriting = overwrite(begin, SIZE)
    assert total.item() == 7 * SIZE
    del overwriting


def test_a_copy_to_pinned_memory_is_right_when_the_source_is_freed_at_once() -> None:
    host = torch.zeros(SIZE, dtype=torch.uint8, pin_memory=True)
    torch.cuda._sleep(LONG_SLEEP // 4)
    host.copy_(block(SIZE, 9), non_blocking=True)
    overwriting = block(SIZE, 2)
    torch.cuda.synchronize()
    assert bool((host == 9).all())
    del overwriting


# --- threads --------------------------------------------------------------------------------------


def test_a_tensor_may_be_freed_on_another_thread() -> None:
    before = torch.cuda.memory_allocated()
    tensors = [block(SIZE)]
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert torch.cuda.memory_allocated() == before


def churn(value: int, failures: list[str]) -> None:
    """Allocate, fill, check and free on a stream of this thread's own."""
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(60):
                tensors = [block((1 + (value * step) % 37) * 100_000, value) for _ in range(3)]
                if not all(holds(tensor, value) for tensor in tensors):
                    failures.append(f"thread {value}: step {step} lost its data")
    except RuntimeError as error:
        failures.append(f"thread {value}: {error}")


def test_threads_do_not_get_each_others_memory() -> None:
    before = torch.cuda.memory_allocated()
    failures: list[str] = []
    threads = [threading.Thread(target=churn, args=(n, failures)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    settle()
    assert torch.cuda.memory_allocated() == before
