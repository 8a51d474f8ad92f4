"""Random programs of several threads and streams, in which every tensor has a number of its own.

A tensor is filled with its number and compared with it when it is read, on whatever stream, behind
work that takes milliseconds, and often after its owner has dropped it: memory that is handed out
before the last work on it is over, or to two owners, has another number by then. The users do what
programs do: they lend tensors to other streams, hand them to other threads, copy them to the host,
work on streams of other libraries that are destroyed, capture graphs, use pools, ask for
statistics, give memory back in the middle of everything and run out of it.

`unordered` is the check of the check: its users lend without telling the allocator, which is a
fault of theirs, and must find wrong numbers.
"""

import itertools
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from kind_tools import MIB, Finding, close_stream, cycles_per_ms, on, open_stream, run, settle

USERS = 4
STREAMS = 3  # of each user, beside the default one, which is everybody's
LIVE_BYTES = 768 * MIB
SECONDS = 8.0
MOST_BUSY_MS = 3.0
NUMBERS = itertools.count(1)
# torch ends the process where a pool is dropped while another thread fills one, or captures a graph
# (an assertion in synchronize_and_free_events, torch 2.11), whatever the allocator.
POOLS = threading.Lock()


@dataclass
class Held:
    """A tensor, the number that it is full of, and the stream that has to come before a reader."""

    tensor: torch.Tensor
    number: int
    stream: torch.cuda.Stream


class User:
    """One thread's program."""

    def __init__(self, seed: int, bazaar: "queue.Queue[Held]", cycles: float, tells: bool) -> None:
        self._draw = random.Random(seed)
        self._bazaar = bazaar
        self._tells = tells
        self._cycles = cycles
        self._streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        self._streams.append(torch.cuda.default_stream())
        self._wrong = {
            each: torch.zeros((), dtype=torch.int64, device="cuda") for each in self._streams
        }
        self._held: list[Held] = []
        self._landed: list[tuple[torch.Tensor, int, torch.cuda.Event]] = []
        self._wrong_on_host = 0
        self.deeds = 0
        self.refused = 0
        self.fault: BaseException | None = None
        self._deeds: list[tuple[int, Callable[[], None]]] = [
            (30, self.make), (24, self.drop), (12, self.lend), (6, self.move), (6, self.write),
            (8, self.be_busy), (4, self.copy_out), (4, self.give), (4, self.take),
            (2, self.work_elsewhere), (1, self.ask), (1, self.give_back), (1, self.ask_too_much),
            (1, self.use_pool),
        ]  # fmt: skip
        if not tells:  # memory that is given back while it is read would end the process
            self._deeds = [(3, self.make), (1, self.drop), (2, self.lend), (1, self.be_busy)]

    def live(self, seconds: float) -> None:
        """Do something at random until the time is over; then drop everything."""
        torch.zeros(1, device="cuda")  # makes the device's context this thread's
        deeds = [deed for _, deed in self._deeds]
        weights = [weight for weight, _ in self._deeds]
        deadline = time.perf_counter() + seconds
        try:
            while time.perf_counter() < deadline:
                try:
                    self._draw.choices(deeds, weights)[0]()
                except torch.OutOfMemoryError:
                    self.refused += 1
                    for _ in range(len(self._held) // 2):
                        self.drop()
                self.deeds += 1
            self._held.clear()
            self._land()
        except BaseException as error:
            self.fault = error

    def wrong(self) -> int:
        """Return how many numbers were wrong; the device is done."""
        return self._wrong_on_host + sum(int(each) for each in self._wrong.values())

    # --- what a user does -------------------------------------------------------------------------

    def make(self) -> None:
        stream = self._draw.choice(self._streams)
        words = int(2 ** self._draw.uniform(7, 24))  # 512 bytes to 64 MiB
        number = next(NUMBERS) % (1 << 30)
        with torch.cuda.stream(stream):
            tensor = torch.empty(words, dtype=torch.int32, device="cuda").fill_(number)
        self._held.append(Held(tensor, number, stream))
        while sum(each.tensor.nbytes for each in self._held) > LIVE_BYTES // USERS:
            self.drop()

    def drop(self) -> None:
        if not self._held:
            return
        held = self._held.pop(self._draw.randrange(len(self._held)))
        self._read(held, held.stream)

    def lend(self) -> None:
        """Have another stream read a tensor late, and drop it at once."""
        if not self._held:
            return
        held = self._held.pop(self._draw.randrange(len(self._held)))
        reader = self._draw.choice(self._streams)
        self._hand_to(held, reader)
        with torch.cuda.stream(reader):
            self._sleep()
        self._read(held, reader)

    def move(self) -> None:
        if not self._held:
            return
        held = self._draw.choice(self._held)
        self._hand_to(held, self._draw.choice(self._streams))

    def write(self) -> None:
        if not self._held:
            return
        held = self._draw.choice(self._held)
        self._read(held, held.stream)
        held.number = next(NUMBERS) % (1 << 30)
        with torch.cuda.stream(held.stream):
            held.tensor.fill_(held.number)

    def be_busy(self) -> None:
        with torch.cuda.stream(self._draw.choice(self._streams)):
            self._sleep()

    def copy_out(self) -> None:
        """Copy a tensor to pinned memory without waiting, and drop it."""
        if not self._held:
            return
        held = self._held.pop(self._draw.randrange(len(self._held)))
        with torch.cuda.stream(held.stream):
            there = torch.empty(held.tensor.shape, dtype=torch.int32, pin_memory=True)
            there.copy_(held.tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._landed.append((there, held.number, event))
        if len(self._landed) > 4:
            self._land()

    def give(self) -> None:
        if self._held:
            self._bazaar.put(self._held.pop(self._draw.randrange(len(self._held))))

    def take(self) -> None:
        """Read and drop what another thread had."""
        try:
            held = self._bazaar.get_nowait()
        except queue.Empty:
            return
        reader = self._draw.choice(self._streams)
        self._hand_to(held, reader)
        self._read(held, reader)

    def work_elsewhere(self) -> None:
        """Work on another library's stream, which is destroyed while its work is under way."""
        handle = open_stream(self._draw.choice((0, 1)))
        number = next(NUMBERS) % (1 << 30)
        with on(handle) as stream:
            wrong = torch.zeros((), dtype=torch.int64, device="cuda")
            tensor = torch.empty(self._draw.randrange(1, 4 * MIB), dtype=torch.int32, device="cuda")
            tensor.fill_(number)
            self._sleep()
            wrong.add_((tensor != number).sum())
            del tensor
        home = self._draw.choice(self._streams)
        home.wait_stream(stream)
        wrong.record_stream(home)
        with torch.cuda.stream(home):
            self._wrong[home].add_(wrong)
        del wrong
        close_stream(handle)

    def ask(self) -> None:
        torch.cuda.memory_stats()
        torch.cuda.memory_snapshot()
        torch.cuda.mem_get_info()

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def ask_too_much(self) -> None:
        try:
            torch.empty(1 << 43, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            return
        raise AssertionError("eight terabytes were there")

    def use_pool(self) -> None:
        stream = self._draw.choice(self._streams)
        number = next(NUMBERS) % (1 << 30)
        with POOLS:
            pool = torch.cuda.MemPool()
            with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
                tensor = torch.empty(MIB, dtype=torch.int32, device="cuda").fill_(number)
                self._sleep()
            self._read(Held(tensor, number, stream), stream)
            del tensor, pool

    # --- how --------------------------------------------------------------------------------------

    def _hand_to(self, held: Held, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(held.stream)
        held.stream = stream
        if self._tells:
            held.tensor.record_stream(stream)

    def _read(self, held: Held, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            self._wrong[stream].add_((held.tensor != held.number).sum())

    def _sleep(self) -> None:
        torch.cuda._sleep(int(self._cycles * self._draw.uniform(0, MOST_BUSY_MS)))

    def _land(self) -> None:
        for there, number, event in self._landed:
            event.synchronize()
            self._wrong_on_host += int((there != number).sum())
        self._landed.clear()


class Capturer:
    """A thread that captures graphs over and over, replays each some times, and drops it."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.deeds = 0
        self.refused = 0
        self.fault: BaseException | None = None

    def live(self, seconds: float) -> None:
        deadline = time.perf_counter() + seconds
        stream = torch.cuda.Stream()
        try:
            while time.perf_counter() < deadline:
                try:
                    with POOLS, torch.cuda.stream(stream):
                        self._capture(stream)
                    time.sleep(0.01)
                except torch.OutOfMemoryError:
                    self.refused += 1
        except BaseException as error:
            self.fault = error

    def wrong(self) -> int:
        return int(self._wrong)

    def _capture(self, stream: torch.cuda.Stream) -> None:
        number = next(NUMBERS) % (1 << 29)
        words = int(2 ** self._draw.uniform(7, 22))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            given = torch.empty(words, dtype=torch.int32, device="cuda").fill_(number)
            torch.cuda._sleep(10_000)
            found = given + given
            del given
            scratch = torch.empty(words, dtype=torch.int32, device="cuda").fill_(-1)
            del scratch
        finally:
            graph.capture_end()
        for _ in range(self._draw.randrange(1, 5)):
            graph.replay()
            self._wrong.add_((found != 2 * number).sum())
            self.deeds += 1
        stream.synchronize()


def crowd(tells: bool = True, limit_bytes: int | None = None, captures: bool = True) -> Finding:
    """Let all users live beside each other; nobody may read a number that is not the tensor's."""
    settle()
    if limit_bytes:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
    bazaar: queue.Queue[Held] = queue.Queue()
    cycles = cycles_per_ms()
    seed = random.SystemRandom().randrange(1 << 30)
    users: list[User | Capturer] = [User(seed + i, bazaar, cycles, tells) for i in range(USERS)]
    if captures:
        users.append(Capturer(seed + USERS))
    threads = [threading.Thread(target=user.live, args=(SECONDS,)) for user in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    faults = [user.fault for user in users if user.fault]
    if faults:
        raise faults[0]
    wrong = sum(user.wrong() for user in users)
    deeds, refused = (sum(getattr(user, what) for user in users) for what in ("deeds", "refused"))
    users.clear()
    while not bazaar.empty():
        bazaar.get()
    settle()
    left = torch.cuda.memory_reserved()
    told = f"seed {seed}: {deeds} deeds, {refused} refused, {wrong} wrong, {left} bytes left"
    is_right = not wrong and not left
    return (is_right if tells else wrong > 0), told


if __name__ == "__main__":
    run(
        {
            "roomy": crowd,
            "crowded": lambda: crowd(limit_bytes=LIVE_BYTES * 5 // 4),
            "unordered": lambda: crowd(tells=False, captures=False),
        }
    )
