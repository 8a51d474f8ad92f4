"""Streams that nothing in the program makes wait for each other run side by side (pytorch#48279).

kind_streams_order.py native|vramx CASE

Each case does with fresh buffers what it does with buffers that are there from the beginning, for
which no allocator is asked; or it has a stream that cannot go on before another one has.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import kind_tools
import torch
from kind_tools import MIB, Finding, Word, block, cycles_per_ms, finishes, holds

SIZE = 128 * MIB
ROUNDS = 12
# From side by side (0) to in turn (1). An allocation takes microseconds of a round of milliseconds,
# so that all of this third is the machine's; one round of two in turn would be a half.
LATE = 1 / 3
# Nothing in the programs that it bounds takes more than some milliseconds.
HANGS_S = 3.0
BUSY_MS = 1500


def seconds(work: Callable[[], None]) -> float:
    """Return the shortest of three times, after one that warms up: others only make it longer."""
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


# --- copies beside computing ----------------------------------------------------------------------


@dataclass
class Copies:
    """Buffers, and computing that takes as long as a copy of one."""

    host: torch.Tensor = field(init=False)
    cycles: int = field(init=False)

    def __post_init__(self) -> None:
        self.host = torch.ones(SIZE, dtype=torch.uint8, pin_memory=True)
        self.slots = [block(SIZE), block(SIZE)]
        self.free = [torch.cuda.current_stream().record_event() for _ in self.slots]
        copy_s = seconds(lambda: self.slots[0].copy_(self.host, non_blocking=True))
        self.cycles = int(cycles_per_ms() * copy_s * 1000)

    def buffer(self, index: int, fresh: bool) -> torch.Tensor:
        """Return a fresh buffer, or the next of two once its last use is over."""
        if fresh:
            return block(SIZE)
        torch.cuda.current_stream().wait_event(self.free[index % 2])
        return self.slots[index % 2]

    def prefetch(self, side: torch.cuda.Stream, fresh: bool) -> None:
        main = torch.cuda.current_stream()
        for index in range(ROUNDS):
            with torch.cuda.stream(side):
                batch = self.buffer(index, fresh)
                batch.copy_(self.host, non_blocking=True)
            main.wait_stream(side)
            batch.record_stream(main)
            torch.cuda._sleep(self.cycles)
            batch[:1024].add_(1)
            self.free[index % 2] = main.record_event()
            del batch

    def offload(self, side: torch.cuda.Stream, fresh: bool) -> None:
        main = torch.cuda.current_stream()
        for index in range(ROUNDS):
            activation = self.buffer(index, fresh)
            torch.cuda._sleep(self.cycles)
            activation[:1024].fill_(1)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                self.host.copy_(activation, non_blocking=True)
            activation.record_stream(side)
            self.free[index % 2] = side.record_event()
            del activation


def overlap(program: Callable[[torch.cuda.Stream, bool], None]) -> Finding:
    side = torch.cuda.Stream()
    together = seconds(lambda: program(side, False))
    in_turn = seconds(lambda: program(torch.cuda.current_stream(), False))
    fresh = seconds(lambda: program(side, True))
    late = (fresh - together) / (in_turn - together)
    told = (
        f"fresh buffers {fresh * 1e3:.1f} ms, buffers that are there {together * 1e3:.1f}, in turn "
        f"{in_turn * 1e3:.1f}: {late:.2f} of the way (at most {LATE:.2f})"
    )
    return in_turn >= 1.5 * together and late <= LATE, told


# --- kernels of several streams -------------------------------------------------------------------


def four_streams() -> Finding:
    streams = [torch.cuda.Stream() for _ in range(4)]
    cycles = int(5 * cycles_per_ms())

    def jobs(chosen: list[torch.cuda.Stream]) -> None:
        for _ in range(10):
            for stream in chosen:
                with torch.cuda.stream(stream):
                    work = block(96 * MIB)
                    torch.cuda._sleep(cycles)
                    work[:1024].fill_(1)
                    del work

    single, several = seconds(lambda: jobs(streams[:1] * 4)), seconds(lambda: jobs(streams))
    told = f"four streams {single / several:.2f} times as fast as one (at least 2, ideally 4)"
    return single >= 2 * several, told


def job_beside_busy() -> Finding:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    cycles = int(BUSY_MS * cycles_per_ms())
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        held = block(512 * MIB)
        torch.cuda._sleep(cycles)
        held[:1024].fill_(1)
        still = one.record_event()
        del held
    start = time.perf_counter()
    with torch.cuda.stream(other):
        mine = block(512 * MIB, 2)
        done = other.record_event()
    finishes(done, 4)
    waited_s, was_busy = time.perf_counter() - start, not still.query()
    told = f"{waited_s * 1e3:.0f} ms beside a stream busy for {BUSY_MS} (at most 500)"
    return waited_s < 0.5 and was_busy and holds(mine, 2), told


# --- streams that wait for others -----------------------------------------------------------------


def goes_on(*words: Word) -> bool:
    """Set the words when the main stream comes to it; say whether it does."""
    main = torch.cuda.current_stream()
    for word in words:
        word.set_by(main)
    arrives = finishes(main.record_event(), HANGS_S)
    arrives &= not any(word.was_rescued for word in words)
    for word in words:
        word.set_now()
    torch.cuda.synchronize()
    return arrives


def awaited_value() -> Finding:
    """A side stream begins with a wait for what the main stream writes later."""
    side, word = torch.cuda.Stream(), Word()
    word.await_by(side)
    with torch.cuda.stream(side):
        held = block(512 * MIB)
        held[:1024].fill_(1)
        del held
    mine = block(512 * MIB, 2)
    arrives = goes_on(word)
    return arrives and holds(mine, 2), "the main stream goes on" if arrives else "it hangs"


def early_receive() -> Finding:
    """A receive is posted before the work that leads to its sender, as a pipeline's are."""
    main, side, word = torch.cuda.current_stream(), torch.cuda.Stream(), Word()
    received, bucket = block(256 * MIB, 0), block(256 * MIB, 1)
    side.wait_stream(main)
    word.await_by(side)
    with torch.cuda.stream(side):
        received.copy_(bucket)
    received.record_stream(side)
    bucket.record_stream(side)
    del bucket
    for layer in range(8):
        block(256 * MIB, layer)
    outputs = [block(256 * MIB, 2) for _ in range(4)]
    arrives = goes_on(word)
    right = holds(received, 1) and all(holds(each, 2) for each in outputs)
    told = f"{'arrives' if arrives else 'hangs'}, data {'right' if right else 'WRONG'}"
    return arrives and right, told


def several_receives() -> Finding:
    """Receives on streams of their own; the main stream takes as much as all of them freed."""
    words = [Word() for _ in range(4)]
    for word in words:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            held = block(128 * MIB, 1)
            word.await_by(side)
            held.add_(1)
            del held
    taken = [block(128 * MIB, value) for value in range(2 * len(words))]
    arrives = goes_on(*words)
    right = all(holds(each, value) for value, each in enumerate(taken))
    told = f"{'arrives' if arrives else 'hangs'}, data {'right' if right else 'WRONG'}"
    return arrives and right, told


if __name__ == "__main__":
    kind_tools.run(
        {
            "four_streams": four_streams,
            "job_beside_busy": job_beside_busy,
            "prefetch": lambda: overlap(Copies().prefetch),
            "offload": lambda: overlap(Copies().offload),
            "awaited_value": awaited_value,
            "early_receive": early_receive,
            "several_receives": several_receives,
        }
    )
