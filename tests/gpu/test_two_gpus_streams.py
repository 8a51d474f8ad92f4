"""record_stream with a stream of another GPU: memory of one is read by kernels of the other.

The reader is made slow on purpose, as in test_streams.py, and reads by a copy of the driver's,
because torch's own copies queue on the GPU of the source. The first test shows that the setting
catches the mistake.
"""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

from gpu.tools import LONG_SLEEP, MIB, holds, on, overwrite

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

SIZE = 64 * MIB


def let_in_gpu_1() -> None:
    """Have torch let GPU 1 into memory of GPU 0: its copies are made by the GPU of the source."""
    on(1, SIZE, 1).to("cuda:0")


def wait_for_both() -> None:
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)


def slow_read(source, result, stream) -> None:
    """Queue a slow kernel and a copy of `source` on a stream of the GPU that `result` is on."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_SLEEP)
        target, origin = (ctypes.c_uint64(each.data_ptr()) for each in (result, source))
        size, handle = ctypes.c_size_t(SIZE), ctypes.c_void_p(stream.cuda_stream)
        code = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync(target, origin, size, handle)
        assert code == 0, f"cuMemcpyAsync: CUDA error {code}"


def read_late(*, recorded: bool) -> bool:
    """Free a tensor of GPU 0 that GPU 1 still reads; say whether it read what was in it."""
    let_in_gpu_1()
    stream = torch.cuda.Stream(device=1)
    source, result = on(0, SIZE, 1), on(1, SIZE, 0)
    wait_for_both()
    slow_read(source, result, stream)
    if recorded:
        source.record_stream(stream)
    begin = source.data_ptr()
    del source
    overwriting = overwrite(begin, SIZE)
    wait_for_both()
    assert all(holds(each, 2) for each in overwriting)
    return holds(result, 1)


def test_without_record_stream_the_data_is_overwritten() -> None:
    assert not read_late(recorded=False)


def test_with_record_stream_it_is_not() -> None:
    assert read_late(recorded=True)


def test_memory_that_the_other_gpu_read_is_used_again_afterwards() -> None:
    read_late(recorded=True)
    before = torch.cuda.memory_reserved(0)
    for _ in range(6):
        assert read_late(recorded=True)
    # A round has ten blocks at most; what is left aside would add up.
    assert torch.cuda.memory_reserved(0) - before <= 10 * SIZE


def test_the_owner_does_not_wait_for_the_other_gpu() -> None:
    let_in_gpu_1()
    stream = torch.cuda.Stream(device=1)
    source, result = on(0, SIZE, 1), on(1, SIZE, 0)
    wait_for_both()
    slow_read(source, result, stream)
    source.record_stream(stream)
    del source
    start = time.perf_counter()
    taken = on(0, SIZE, 2)
    torch.cuda.current_stream(0).synchronize()
    waited_s, is_busy = time.perf_counter() - start, not stream.query()
    wait_for_both()
    assert is_busy, f"the reader was over after {waited_s:.3f} s: it shows nothing"
    assert holds(result, 1)
    assert holds(taken, 2)
