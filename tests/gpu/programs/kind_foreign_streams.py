"""Streams of another library, lent to torch and destroyed (pytorch#66936, cupy#5264).

kind_foreign_streams.py native|vramx CASE

Whatever becomes of a stream, data stay their owner's, and what was allocated on it comes back.
"""

import threading
from collections.abc import Callable

import kind_tools
import torch
from kind_tools import (
    MIB,
    NON_BLOCKING,
    Finding,
    block,
    close_stream,
    holds,
    on,
    open_stream,
    settle,
)

SIZE = 64 * MIB
STREAMS, ROUNDS = 4, 6
# About half a second; the host's part of what must happen meanwhile takes milliseconds.
SLEEP_CYCLES = 1_000_000_000
LEFT_MIB = 32  # of the tens of blocks that each case frees, half a block


def comes_back(case: Callable[[], bool]) -> Finding:
    """Run a case between two others on the default stream, and see what it leaves reserved."""
    right = work_on_default()
    settle()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    right &= case()
    right &= work_on_default()
    settle()
    left = (torch.cuda.memory_reserved() - before[0]) / MIB
    still = torch.cuda.memory_allocated() - before[1]
    right &= work_on_default()
    told = (
        f"data {'right' if right else 'WRONG'}; {left:.0f} MiB stay reserved after empty_cache "
        f"(at most {LEFT_MIB}), {still} bytes allocated"
    )
    return right and left <= LEFT_MIB and still == 0, told


def work_on_default() -> bool:
    held = [block(SIZE, value) for value in range(STREAMS * 6)]
    return all(holds(each, value) for value, each in enumerate(held))


def work_on(handle: int, value: int) -> bool:
    with on(handle) as stream:
        third = (block(SIZE, value) + 1) * 2
        stream.synchronize()
        return holds(third, (value + 1) * 2)


def destroyed() -> bool:
    right = True
    for value in range(ROUNDS):
        handles = [open_stream() for _ in range(STREAMS)]
        for handle in handles:
            right &= work_on(handle, value)
        for handle in handles:
            close_stream(handle)
    return right


def outlived() -> bool:
    """Tensors are read and freed after the stream that they were allocated on is gone."""
    handles = [open_stream(NON_BLOCKING) for _ in range(STREAMS)]
    kept = []
    for value, handle in enumerate(handles):
        with on(handle) as stream:
            kept += [block(SIZE, value), block(4096, value)]
            stream.synchronize()
        close_stream(handle)
    right = all(holds(each, index // 2) for index, each in enumerate(kept))
    kept.clear()
    return right


def read_late(handle: int) -> torch.Tensor:
    """Queue a slow kernel and a copy of ones, and free their source; return the copy."""
    with on(handle) as stream:
        source, result = block(SIZE, 1), block(SIZE, 0)
        stream.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        result.copy_(source)
        return result


def destroyed_while_busy() -> bool:
    """CUDA lets a destroyed stream finish what is queued; the memory is in use until then."""
    handle = open_stream(NON_BLOCKING)
    result = read_late(handle)
    close_stream(handle)
    overwriting = [block(SIZE, 2) for _ in range(4)]
    torch.cuda.synchronize()
    return holds(result, 1) and all(holds(each, 2) for each in overwriting)


def reused_handle() -> bool:
    """Streams that are made then may get the handle of the one that was destroyed while busy."""
    handle = open_stream(NON_BLOCKING)
    result = read_late(handle)
    close_stream(handle)
    handles = [open_stream(NON_BLOCKING) for _ in range(16)]
    overwriting = []
    for each in handles:
        with on(each):
            overwriting.append(block(SIZE, 2))
    torch.cuda.synchronize()
    right = holds(result, 1) and all(holds(each, 2) for each in overwriting)
    overwriting.clear()
    for each in handles:
        close_stream(each)
    return right


def in_another_thread() -> bool:
    """A thread works on a lent stream; the main thread frees its tensors and destroys it."""
    handle = open_stream(NON_BLOCKING)
    results: list[torch.Tensor] = []

    def work() -> None:
        with on(handle) as stream:
            for value in range(1, 17):
                results.append(block(SIZE // 4, value) + 1)
            stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    right = [holds(each, value) for value, each in enumerate(results, 2)] == [True] * 16
    results.clear()
    close_stream(handle)
    return right


if __name__ == "__main__":
    cases = (destroyed, outlived, destroyed_while_busy, reused_handle, in_another_thread)
    kind_tools.run({case.__name__: (lambda case=case: comes_back(case)) for case in cases})
