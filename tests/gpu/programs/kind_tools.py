"""What the programs of test_kinds.py share: how a case is run, and what it needs beside torch.

A program of a kind is started as PROGRAM.py native|vramx CASE. A case is a function that returns
whether all went right, and what it measured, in words. Its facts are the last line printed.
"""

import contextlib
import ctypes
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

MIB = 1 << 20
Finding = tuple[bool, str]
RESCUE_S = 10.0
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the legacy default stream does not wait for it


def run(cases: dict[str, Callable[[], Finding]]) -> None:
    """Run the case that the command line names, under the allocator that it names."""
    allocator, name = sys.argv[1:]
    core = None
    if allocator == "vramx":
        import vramx
        from vramx.allocator.install import current

        vramx.install_allocator()
        core = current().devices
    torch.cuda.init()
    load_kernels()
    right, told = cases[name]()
    torch.cuda.synchronize()
    violation = core.check(0) if core else ""
    facts = {"right": right, "told": told, "violation": violation}
    print(json.dumps({**facts, "backend": torch.cuda.get_allocator_backend()}), flush=True)


def load_kernels() -> None:
    """Run each kernel that the cases use: loading one later waits for the whole device."""
    warm = block(1024, 1)
    (warm != 1).sum().item()
    (warm + 1).mul_(2).copy_(warm)
    torch.zeros(1024, dtype=torch.uint8, device="cuda").add_(1)
    torch.cuda._sleep(1000)
    settle()


def block(size_bytes: int, value: int | None = None) -> torch.Tensor:
    """Return a tensor of so many bytes, each of them `value`, or as they come."""
    if value is None:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    return torch.full((size_bytes,), value, dtype=torch.uint8, device="cuda")


def holds(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor == value).all())


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def cycles_per_ms() -> float:
    """Return how many cycles of torch.cuda._sleep take a millisecond."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000_000)  # an idle GPU runs at a lower clock for a while
    torch.cuda.synchronize()
    start.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / start.elapsed_time(end)


def finishes(event: torch.cuda.Event, limit_s: float) -> bool:
    """Say whether what an event stands for is over in time, without waiting for ever."""
    deadline = time.perf_counter() + limit_s
    while not event.query():
        if time.perf_counter() > deadline:
            return False
        time.sleep(0.0005)
    return True


# --- the driver, as another library uses it -------------------------------------------------------


def _driver(name: str, *arguments: object) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code:
        raise RuntimeError(f"{name}: CUDA error {code}")


def open_stream(flags: int = 0) -> int:
    handle = ctypes.c_void_p()
    _driver("cuStreamCreate", ctypes.byref(handle), ctypes.c_uint(flags))
    assert handle.value
    return handle.value


def close_stream(handle: int) -> None:
    _driver("cuStreamDestroy_v2", ctypes.c_void_p(handle))


@contextlib.contextmanager
def on(handle: int) -> Iterator[torch.cuda.Stream]:
    """Work on a stream that is not torch's."""
    stream = torch.cuda.ExternalStream(handle)
    with torch.cuda.stream(stream):
        yield stream


class Word:
    """Four bytes of the host's memory that streams wait for and write, as NCCL's flags are.

    The host sets it itself after `RESCUE_S`: a program in which a call hangs can then say so.
    """

    def __init__(self) -> None:
        self._memory = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.was_rescued = False
        self._rescue = threading.Timer(RESCUE_S, self._set_late)
        self._rescue.daemon = True
        self._rescue.start()

    def await_by(self, stream: torch.cuda.Stream) -> None:
        """Let nothing that is queued on the stream from here on begin before the word is set."""
        self._queue("cuStreamWaitValue32_v2", stream)  # with flags 0: until it is at least 1

    def set_by(self, stream: torch.cuda.Stream) -> None:
        self._queue("cuStreamWriteValue32_v2", stream)

    def set_now(self) -> None:
        self._rescue.cancel()
        ctypes.c_int32.from_address(self._memory.data_ptr()).value = 1

    def _set_late(self) -> None:
        self.was_rescued = True
        self.set_now()

    def _queue(self, name: str, stream: torch.cuda.Stream) -> None:
        address = ctypes.c_uint64(self._memory.data_ptr())
        value, flags = ctypes.c_uint32(1), ctypes.c_uint(0)
        _driver(name, ctypes.c_void_p(stream.cuda_stream), address, value, flags)
