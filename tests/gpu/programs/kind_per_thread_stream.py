"""The handle 2 is another stream in every thread (NVIDIA/cub#373, rapidsai/cudf#5922).

kind_per_thread_stream.py native|vramx CASE

A worker uses its own default stream through ExternalStream, as programs do that share it with CuPy
or Numba. It queues a slow kernel and a copy, and the copy's source is freed. Whoever takes memory
then must not have that of the source before it was read.
"""

import threading
from collections.abc import Callable

import kind_tools
import torch
from kind_tools import MIB, Finding, block, holds, on

PER_THREAD = 2
SIZE = 256 * MIB
SLEEP_CYCLES = 2_000_000_000  # about a second; the other threads need some milliseconds
LIMIT_S = 20


class Worker(threading.Thread):
    """Copies ones, slowly; frees their source itself, or leaves that to another thread."""

    def __init__(self, frees: bool = True) -> None:
        super().__init__(daemon=True)
        self.queued, self.overwritten = threading.Event(), threading.Event()
        self.source: list[torch.Tensor] = []
        self.told = "the worker hangs"
        self.right = False
        self._frees = frees

    def run(self) -> None:
        try:
            with on(PER_THREAD) as stream:
                self._work(stream)
        except Exception as error:
            self.told = f"{type(error).__name__}: {str(error)[:160]}"
        finally:
            self.queued.set()

    def _work(self, stream: torch.cuda.Stream) -> None:
        self.source.append(block(SIZE, 1))
        result = block(SIZE, 0)
        stream.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        result.copy_(self.source[0])
        if self._frees:
            self.source.clear()
        self.queued.set()
        self.overwritten.wait(LIMIT_S)
        stream.synchronize()
        wrong = int((result != 1).sum())
        self.right = wrong == 0
        self.told = f"{wrong} of {SIZE} bytes were overwritten before they were read"


def while_it_works(workers: list[Worker], overwrite: Callable[[], None]) -> Finding:
    """Let the workers queue their copies, overwrite what is free, and hear what they read."""
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.queued.wait(LIMIT_S)
    overwrite()
    for worker in workers:
        worker.overwritten.set()
    for worker in workers:
        worker.join(LIMIT_S)
    return all(worker.right for worker in workers), "; ".join(worker.told for worker in workers)


def fill_on(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        taken = [block(SIZE, 2) for _ in range(3)]
        stream.synchronize()
        assert all(holds(each, 2) for each in taken)


def freed_there() -> Finding:
    return while_it_works([Worker()], lambda: fill_on(torch.cuda.Stream()))


def two_threads() -> Finding:
    """Two threads at once, each on its own stream of that handle."""
    return while_it_works([Worker(), Worker()], lambda: fill_on(torch.cuda.Stream()))


def freed_by_another_thread() -> Finding:
    """For the thread that frees, the handle is a stream on which nothing is queued."""
    worker = Worker(frees=False)

    def overwrite() -> None:
        worker.source.clear()
        fill_on(torch.cuda.Stream())

    return while_it_works([worker], overwrite)


def taken_under_the_handle() -> Finding:
    """Another thread takes memory for the same handle, which is its own stream there."""
    return while_it_works([Worker()], lambda: fill_on(torch.cuda.ExternalStream(PER_THREAD)))


if __name__ == "__main__":
    cases = (freed_there, two_threads, freed_by_another_thread, taken_under_the_handle)
    kind_tools.run({case.__name__: case for case in cases})
