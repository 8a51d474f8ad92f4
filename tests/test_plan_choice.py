"""What is chosen for blocks: of all arrangements, and of several that were timed in turns.

The choice is optimal for the model of a step, which the tests enumerate. Times are those of a
machine that others disturb.
"""

from __future__ import annotations

import itertools
import random

import pytest

from vramx.planning.choice import fastest, near, smallest
from vramx.planning.timeline import Cost, Place, Timeline
from vramx.planning.turns import Turns

WORDS = ("left", "int8", "again")
MOST_MS = 8


def random_timeline(seed: int, *, calls_a_block: int = 1, hosts_share: float = 1.0) -> Timeline:
    """Draw a small step, of numbers so small that sums meet often."""
    draw = random.Random(seed)

    def cost() -> Cost:
        kept, forward, backward = draw.randrange(8), draw.randrange(9), draw.randrange(9)
        holds = draw.random() < 0.4, draw.random() < 0.4
        host_ms, device_ms = (float(draw.randint(1, MOST_MS)) for _ in range(2))
        times = hosts_share * host_ms, (1 - hosts_share) * device_ms
        return Cost(kept, *holds, forward, backward, *times)

    kinds = [{word: cost() for word in WORDS} for _ in range(2)]
    count = draw.randrange(1, 6)
    places = [
        Place(
            block=i // calls_a_block,
            costs=kinds[(i // calls_a_block) % 2],
            input_bytes=draw.randrange(4),
            output_bytes=draw.randrange(4),
            linked=i > 0 and draw.random() < 0.7,
            forward_level=draw.randrange(4),
            backward_level=draw.randrange(4),
        )
        for i in range(count)
    ]
    return Timeline(places, [draw.randrange(10) for _ in range(count + 1)])


def all_arrangements(timeline: Timeline) -> list[tuple[int, float]]:
    """Return peak and time of every arrangement that gives a block one word."""
    found = []
    for words in itertools.product(WORDS, repeat=len(timeline.places)):
        of_block = {place.block: word for place, word in zip(timeline.places, words, strict=True)}
        if all(of_block[p.block] == w for p, w in zip(timeline.places, words, strict=True)):
            found.append((timeline.peak_bytes(words), timeline.step_ms(words)))
    return found


@pytest.mark.parametrize("hosts_share", [1.0, 0.125])  # the device is the busier one, too
@pytest.mark.parametrize("seed", range(60))
def test_the_choice_is_the_best_of_all_arrangements(seed: int, hosts_share: float) -> None:
    timeline = random_timeline(seed, hosts_share=hosts_share)
    arrangements = all_arrangements(timeline)
    times = []
    for limit in range(max(peak for peak, _ in arrangements) + 1):
        best = min((ms for peak, ms in arrangements if peak <= limit), default=None)
        found = fastest(timeline, limit)
        assert (None if found is None else found.step_ms) == best
        assert found is None or timeline.peak_bytes(found.words) == found.peak_bytes <= limit
        times += [] if found is None else [found.step_ms]
    assert times == sorted(times, reverse=True)  # more bytes never take longer
    assert smallest(timeline).peak_bytes == min(peak for peak, _ in arrangements)


@pytest.mark.parametrize("seed", range(40))
def test_neither_a_host_nor_a_device_that_is_as_busy_is_left_out(seed: int) -> None:
    timeline = random_timeline(seed, hosts_share=0.5)
    arrangements = all_arrangements(timeline)
    for limit in {peak for peak, _ in arrangements}:
        best = min(ms for peak, ms in arrangements if peak <= limit)
        found = fastest(timeline, limit)
        assert found is not None
        assert found.peak_bytes <= limit
        most = MOST_MS / 2  # what another word for one call would change
        assert found.step_ms == max(found.host_ms, found.device_ms) <= best + most


@pytest.mark.parametrize("seed", range(10))
def test_a_block_that_is_called_twice_has_one_word(seed: int) -> None:
    timeline = random_timeline(seed, calls_a_block=8)
    arrangements = all_arrangements(timeline)
    for limit in range(max(peak for peak, _ in arrangements) + 1):
        found = fastest(timeline, limit)
        best = min((ms for peak, ms in arrangements if peak <= limit), default=None)
        assert (None if found is None else found.step_ms) == best


@pytest.mark.parametrize("seed", range(20))
def test_near_the_fastest_are_those_of_two_words_that_fit(seed: int) -> None:
    timeline = random_timeline(seed)
    for limit in {peak for peak, _ in all_arrangements(timeline)}:
        best = fastest(timeline, limit)
        assert best is not None
        found = near(timeline, limit, 1.5 * best.step_ms)
        times = [each.step_ms for each in found]
        assert times == sorted(times)
        assert all(each.peak_bytes <= limit for each in found)
        assert all(best.step_ms <= each.step_ms <= 1.5 * best.step_ms for each in found)
        pairs = {words for each in found if len(words := frozenset(each.words)) <= 2}
        assert len(pairs) == len({frozenset(each.words) for each in found})
        assert (len(set(best.words)) > 2) or times[0] == best.step_ms
    assert near(timeline, -1, 1e9) == []


def test_a_tensor_between_two_blocks_that_both_hold_counts_once() -> None:
    costs = {"left": Cost(0, True, True, 0, 0, 1.0, 0.0)}
    places = [Place(i, costs, input_bytes=5, output_bytes=5, linked=i > 0) for i in range(3)]
    assert Timeline(places, [0] * 4).peak_bytes(("left",) * 3) == 20


@pytest.mark.slow
@pytest.mark.parametrize("host", [0.0, 1.0])
def test_eighty_blocks_of_eight_words_are_chosen_in_a_moment(host: float) -> None:
    draw = random.Random(1)
    costs = {
        f"word{i}": Cost(
            10**8 * (9 - i) + draw.randrange(10**7),
            i < 2,
            False,
            2 * 10**9,
            10**9,
            host_ms=host * (25.0 - i),
            device_ms=20.0 + i * 1.3,
        )
        for i in range(8)
    }
    places = [Place(i, costs, input_bytes=10**8, linked=i > 0) for i in range(80)]
    timeline = Timeline(places, [10**9] * 81)
    most = timeline.peak_bytes(("word0",) * 80)
    chosen = [fastest(timeline, most * part // 10) for part in (5, 6, 7, 8, 9, 10)]
    times = [found.step_ms for found in chosen if found is not None]
    a_word_ms = host * 1.3  # where host and device are as busy, more bytes may not be faster
    assert all(after <= before + a_word_ms for before, after in itertools.pairwise(times))
    assert len(set(times)) >= 5


# --- times that were taken in turns ---------------------------------------------------------------


MOST_TURNS = 12


class Machine:
    """Slower by some share for some seconds, and now and then for one step more."""

    def __init__(self, seed: int, slower: float, disturbed: float) -> None:
        self.random = random.Random(seed)
        self.slower, self.disturbed = slower, disturbed
        self.now_ms, self.until_ms, self.level = 0.0, 0.0, 1.0

    def step_ms(self, undisturbed_ms: float) -> float:
        if self.now_ms >= self.until_ms:
            self.until_ms = self.now_ms + self.random.expovariate(1 / 2000)
            self.level = 1 + abs(self.random.gauss(0, self.slower))
        found = undisturbed_ms * self.level
        if self.random.random() < self.disturbed:
            found *= 1.2 + 0.6 * self.random.random()
        self.now_ms += found
        return found


def chosen(machine: Machine, steps_ms: list[float]) -> tuple[int, int]:
    """Return which of them is chosen, and how many steps that took."""
    turns, taken = Turns(range(len(steps_ms))), 0
    for _ in range(MOST_TURNS):
        if len(turns.left) == 1:
            break
        taken += 2 * len(turns.left)
        turns.add(
            {each: min(machine.step_ms(steps_ms[each]) for _ in range(2)) for each in turns.order}
        )
    return turns.best(), taken


def chosen_alone(machine: Machine, steps_ms: list[float]) -> int:
    """Return which is chosen by the lower quartile of seven steps of each, one after another."""
    times = [sorted(machine.step_ms(each) for _ in range(7))[1] for each in steps_ms]
    return times.index(min(times))


@pytest.mark.parametrize(("slower", "disturbed"), [(0.0, 0.0), (0.04, 0.06), (0.12, 0.1)])
def test_the_fastest_is_found_on_a_busy_machine(slower: float, disturbed: float) -> None:
    """What is slower by more than a hundredth is chosen at most half as often as without turns."""
    wrong = alone = 0
    for seed in range(1000):
        draw = random.Random(seed + 10_000)
        steps_ms = [70 * (1 + draw.expovariate(1 / 0.03)) for _ in range(draw.randint(2, 6))]
        most_ms = 1.01 * min(steps_ms)
        best, _ = chosen(Machine(seed, slower, disturbed), steps_ms)
        wrong += steps_ms[best] > most_ms
        alone += steps_ms[chosen_alone(Machine(seed, slower, disturbed), steps_ms)] > most_ms
    assert wrong <= alone / 2


def test_what_is_slower_has_no_more_turns() -> None:
    best, taken = chosen(Machine(0, 0.0, 0.0), [70.0, 71.0, 80.0, 90.0])
    assert best == 0
    assert taken == 2 * (2 * 4 + (MOST_TURNS - 2) * 2)  # the slowest two have two turns


def test_turns_go_backwards_every_other_time() -> None:
    turns = Turns(["a", "b", "c"])
    orders = []
    for _ in range(3):
        orders.append("".join(turns.order))
        turns.add(dict.fromkeys("abc", 1.0))
    assert orders == ["abc", "cba", "abc"]
    assert turns.best() == "a"


def test_before_the_first_turn_all_are_alike() -> None:
    turns = Turns(["a", "b"])
    assert turns.best() == "a"
    assert turns.ratio("a", "b") == 1.0
