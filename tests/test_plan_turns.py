"""What is chosen of several whose times were taken in turns, on a machine that others disturb."""

from __future__ import annotations

import random

import pytest

from vramx.planning.turns import Turns

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
