"""The process that benchmarks/streams.py starts under each allocator: programs of several streams.

    python _streams.py CASE ROUNDS

A round is a step for which the process waits for its turn, at whose end it holds no memory but what
its case needs. In it the case runs in three ways: with buffers that come and go, as a program of a
user has them; with buffers that were there before, for which no allocator is asked; and with those
on one stream, so that all is in turn. Each round prints a line of JSON.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from benchmarks.programs import _turn
from benchmarks.programs._report import tell
from vramx.sizes import MIB

SIZE = 128 * MIB
ROUNDS = 16  # of copies or kernels in a run
SIDE = 4096  # of the matrices whose product is computing; of smaller ones the host is the limit
RUNS = 5  # timed, of each way and round
BUSY_MS = 100.0  # of the stream beside which a job is to be done; the job itself takes a tenth
JOB_MS = 10.0


class Buffers(Protocol):
    """Where a program's buffers come from."""

    def take(self) -> torch.Tensor: ...

    def give_back(self, buffer: torch.Tensor, stream: torch.cuda.Stream) -> None: ...


class Fresh:
    """Each buffer is allocated when it is needed and freed by its last reference."""

    def take(self) -> torch.Tensor:
        return torch.empty(SIZE, dtype=torch.uint8, device="cuda")

    def give_back(self, buffer: torch.Tensor, stream: torch.cuda.Stream) -> None:
        buffer.record_stream(stream)


class Kept:
    """A ring of buffers; each is taken again once what was queued at its return is over."""

    def __init__(self, count: int) -> None:
        fresh, now = Fresh(), torch.cuda.current_stream().record_event()
        self._ring = deque((fresh.take(), now) for _ in range(count))

    def take(self) -> torch.Tensor:
        buffer, is_free = self._ring.popleft()
        torch.cuda.current_stream().wait_event(is_free)
        return buffer

    def give_back(self, buffer: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self._ring.append((buffer, stream.record_event()))


# --- the cases ------------------------------------------------------------------------------------


class Case:
    """A program, and what it needs beside its buffers.

    Attributes:
        streams: how many it uses beside the main one.
        buffers: how many a ring of them must hold.
        copies: how many buffers of pinned memory it has on the host.
    """

    streams = 1
    buffers = 3
    copies = 1

    def __init__(self) -> None:
        self.hosts = [
            torch.ones(SIZE, dtype=torch.uint8, pin_memory=True) for _ in range(self.copies)
        ]
        self._left, self._right, self._product = (
            torch.ones(SIDE, SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(3)
        )
        self._multiply(500)  # an idle GPU runs at a lower clock for a while
        self.product_s = fastest_s(lambda: self._multiply(32)) / 32
        self.products = max(1, round(self._copy_s() / self.product_s))

    def run(self, buffers: Buffers, side: Sequence[torch.cuda.Stream]) -> torch.cuda.Stream | None:
        """Queue the program; return the stream whose end is its end, None if that is all of it."""
        raise NotImplementedError

    def compute(self, buffer: torch.Tensor, products: int | None = None) -> None:
        """Compute for as long as a copy takes, and change the buffer."""
        self._multiply(self.products if products is None else products)
        buffer[:4096].add_(1)

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._left, self._right, out=self._product)

    def _copy_s(self) -> float:
        target = Fresh().take()
        return fastest_s(lambda: target.copy_(self.hosts[0], non_blocking=True))


class Pace:
    """Keeps the host no more than so many rounds before a stream, as a loop that logs its loss is.

    How much is in flight at a time is otherwise how far the host comes, and no merit of memory.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._queued: deque[torch.cuda.Event] = deque()

    def round_is_queued(self, stream: torch.cuda.Stream) -> None:
        self._queued.append(stream.record_event())
        if len(self._queued) > self._ahead:
            self._queued.popleft().synchronize()


class Prefetch(Case):
    """The next batches arrive while the main stream computes with this one, somewhat longer."""

    ahead = 2

    def __init__(self) -> None:
        super().__init__()
        self.products += self.products // 4  # or copies are what is waited for, and few in flight

    def run(self, buffers: Buffers, side: Sequence[torch.cuda.Stream]) -> torch.cuda.Stream | None:
        main, pace = torch.cuda.current_stream(), Pace(self.ahead)
        for _ in range(ROUNDS):
            with torch.cuda.stream(side[0]):
                batch = buffers.take()
                batch.copy_(self.hosts[0], non_blocking=True)
            main.wait_stream(side[0])
            self.compute(batch)
            buffers.give_back(batch, main)
            del batch
            pace.round_is_queued(main)
        return None


class Runaway(Prefetch):
    """The same with a host that waits for nothing: only its time is judged."""

    ahead = ROUNDS


class Offload(Case):
    """Activations leave while the next layer computes, and are there again in time."""

    streams = 2
    copies = ROUNDS // 2

    def run(self, buffers: Buffers, side: Sequence[torch.cuda.Stream]) -> torch.cuda.Stream | None:
        main, (out, back) = torch.cuda.current_stream(), side
        for host in self.hosts:
            activation = buffers.take()
            self.compute(activation)
            out.wait_stream(main)
            with torch.cuda.stream(out):
                host.copy_(activation, non_blocking=True)
            buffers.give_back(activation, out)
            del activation
        back.wait_stream(out)
        for host in reversed(self.hosts):
            with torch.cuda.stream(back):
                fetched = buffers.take()
                fetched.copy_(host, non_blocking=True)
            main.wait_stream(back)
            self.compute(fetched)
            buffers.give_back(fetched, main)
            del fetched
        return None


class OptimizerStates(Case):
    """States come from the host and go back, in both directions at once, beside the update."""

    streams = 2
    buffers = 4
    copies = ROUNDS // 2
    ahead = 3  # one on its way in each direction, one at work

    def run(self, buffers: Buffers, side: Sequence[torch.cuda.Stream]) -> torch.cuda.Stream | None:
        main, (bring, send) = torch.cuda.current_stream(), side
        pace = Pace(self.ahead)
        for host in self.hosts:
            with torch.cuda.stream(bring):
                state = buffers.take()
                state.copy_(host, non_blocking=True)
            main.wait_stream(bring)
            self.compute(state)
            send.wait_stream(main)
            with torch.cuda.stream(send):
                host.copy_(state, non_blocking=True)
            buffers.give_back(state, send)
            del state
            pace.round_is_queued(send)
        return None


class FourStreams(Case):
    """Kernels that leave the GPU room for others, on streams that have nothing in common."""

    streams = 4
    buffers = 8  # two for each stream, which finds its own again

    def run(self, buffers: Buffers, side: Sequence[torch.cuda.Stream]) -> torch.cuda.Stream | None:
        for _ in range(ROUNDS):
            for stream in side:
                with torch.cuda.stream(stream):
                    work = buffers.take()
                    torch.cuda._sleep(2_000_000)  # about a millisecond
                    work[:4096].fill_(1)
                    buffers.give_back(work, stream)
                    del work
        return None


class SmallJob(Case):
    """A job is done beside a stream that is busy for ten times as long, on little of the GPU."""

    streams = 2

    def __init__(self) -> None:
        super().__init__()
        self._products = max(1, round(JOB_MS / 1e3 / self.product_s))
        sleep_s = fastest_s(lambda: torch.cuda._sleep(20_000_000))
        self._cycles = int(20_000_000 * BUSY_MS / 1e3 / sleep_s)

    def run(self, buffers: Buffers, side: Sequence[torch.cuda.Stream]) -> torch.cuda.Stream | None:
        busy, other = side
        with torch.cuda.stream(busy):
            held = buffers.take()
            torch.cuda._sleep(self._cycles)
            held[:4096].fill_(1)
            buffers.give_back(held, busy)
            del held
        with torch.cuda.stream(other):
            mine = buffers.take()
            self.compute(mine, self._products)
            buffers.give_back(mine, other)
            del mine
        return other


CASES: dict[str, Callable[[], Case]] = {
    "prefetch": Prefetch,
    "runaway": Runaway,
    "offload": Offload,
    "optimizer_states": OptimizerStates,
    "four_streams": FourStreams,
    "small_job": SmallJob,
}


# --- measuring ------------------------------------------------------------------------------------


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds from the call of `work` to the end of all of it or of its stream."""
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    last = work()
    if isinstance(last, torch.cuda.Stream):
        last.synchronize()
    else:
        torch.cuda.synchronize()
    taken_s = time.perf_counter() - start_s
    torch.cuda.synchronize()
    return taken_s


def fastest_s(work: Callable[[], Any]) -> float:
    """Return the least of several times: how much is queued must be the same in each process."""
    return min(timed(work) for _ in range(RUNS))


def measure(case: Case) -> dict[str, float]:
    """Run a case in the three ways; return seconds, and the peaks of the first way."""
    apart = [torch.cuda.Stream() for _ in range(case.streams)]
    in_turn = [torch.cuda.current_stream()] * case.streams

    def median_s(buffers: Buffers, side: Sequence[torch.cuda.Stream]) -> float:
        timed(lambda: case.run(buffers, side))  # the allocator finds its size, the GPU its clocks
        return statistics.median(timed(lambda: case.run(buffers, side)) for _ in range(RUNS))

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds = {"fresh": median_s(Fresh(), apart)}
    peaks = {
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "peak_allocated": torch.cuda.max_memory_allocated(),
    }
    kept = Kept(case.buffers)
    seconds["kept"] = median_s(kept, apart)
    seconds["in_turn"] = median_s(kept, in_turn)
    del kept
    torch.cuda.empty_cache()
    return {**seconds, **peaks}


def main(arguments: list[str]) -> None:
    name, rounds = arguments[0], int(arguments[1])
    _turn.wait()
    torch.cuda.init()
    case = CASES[name]()
    for _ in range(rounds):
        _turn.wait_for_step()
        tell(case=name, **measure(case))


if __name__ == "__main__":
    main(sys.argv[1:])
