"""The rules by which an allocation has its category, one by one, on logs written by hand."""

from __future__ import annotations

import math

import pytest

from vramx.memory.categories import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    OUTSIDE_MODULES,
    PACKED,
    PARAMETERS,
    TEMPORARIES,
    UNKNOWN,
    WORKSPACES,
    Allocation,
    Found,
    Log,
    Seen,
    categorize,
)
from vramx.memory.history import TICK_BYTES, Tick, clock_of
from vramx.memory.spans import BACKWARD, FORWARD, STEP, Mark

ADDRESS, SIZE = 4096, 1000
WORKSPACE, SMALL_WORKSPACE = 32 << 20, 1 << 20
MAIN, ENGINE = 1, 2


def begin(time: float, kind: str, label: str = "", thread: int = MAIN, flag: bool = True) -> Mark:
    return Mark(time, kind, True, thread, label, flag)


def end(time: float, kind: str, thread: int = MAIN, flag: bool = True) -> Mark:
    return Mark(time, kind, False, thread, "", flag)


# A step: a model with one layer in it, backward on a thread of autograd's, an optimizer.
STEP_OF_TRAINING = [
    begin(10, FORWARD, "model"),
    begin(20, FORWARD, "layer"),
    end(30, FORWARD),
    end(40, FORWARD),
    begin(50, BACKWARD),
    begin(60, FORWARD, "layer", ENGINE),
    end(70, FORWARD, ENGINE),
    end(80, BACKWARD),
    begin(90, STEP),
    end(100, STEP),
]


def found(
    born: float, died: float, marks: list[Mark] = STEP_OF_TRAINING, *seen: Seen, size: int = SIZE
) -> Found:
    sizes = [WORKSPACE, SMALL_WORKSPACE]
    (only,) = categorize([Allocation(ADDRESS, size, born, died)], Log(marks, seen), sizes)
    return only


def seen(time: float, category: str, label: str = "", size: int = SIZE) -> Seen:
    return Seen(time, ADDRESS, size, category, label)


@pytest.mark.parametrize(
    ("born", "died", "expected"),
    [
        (25, 45, Found(ACTIVATIONS, "layer")),
        (25, 55, Found(ACTIVATIONS, "layer")),
        (25, math.inf, Found(ACTIVATIONS, "layer")),
        (25, 28, Found(TEMPORARIES, "layer")),
        (25, 35, Found(TEMPORARIES, "layer")),
        (35, 55, Found(ACTIVATIONS, "model")),
        (15, 35, Found(TEMPORARIES, "model")),
        (45, 55, Found(ACTIVATIONS, OUTSIDE_MODULES)),
        (45, 47, Found(TEMPORARIES, OUTSIDE_MODULES)),
        (55, 75, Found(TEMPORARIES, "(backward)")),
        (55, math.inf, Found(TEMPORARIES, "(backward)")),
        (65, 75, Found(ACTIVATIONS, "layer")),
        (65, 68, Found(TEMPORARIES, "layer")),
        (75, 78, Found(TEMPORARIES, "(backward)")),
        (95, 98, Found(TEMPORARIES, "(optimizer step)")),
        (5, 45, Found(UNKNOWN)),
        (85, 88, Found(UNKNOWN)),
        (105, 108, Found(UNKNOWN)),
        (-math.inf, math.inf, Found(UNKNOWN)),
    ],
)
def test_the_moment_of_birth_and_the_end_decide(born: float, died: float, expected: Found) -> None:
    assert found(born, died) == expected


@pytest.mark.parametrize("category", [PARAMETERS, GRADIENTS, OPTIMIZER, PACKED])
@pytest.mark.parametrize("born", [-math.inf, 5, 25, 55, 95])
def test_what_memory_was_seen_to_be_goes_first(category: str, born: float) -> None:
    named = seen(110, category, "name")
    assert found(born, 200, STEP_OF_TRAINING, named) == Found(category, "name")


def test_the_first_category_seen_goes_first_with_its_name_or_else_its_module() -> None:
    both = seen(110, OPTIMIZER, "b"), seen(111, PARAMETERS, "a")
    assert found(5, 200, STEP_OF_TRAINING, *both) == Found(PARAMETERS, "a")
    assert found(25, 60, STEP_OF_TRAINING, seen(26, PACKED)) == Found(PACKED, "layer")
    # An argument is an input unless a forward made it.
    assert found(5, 200, STEP_OF_TRAINING, seen(40, INPUTS)).category == INPUTS
    assert found(25, 200, STEP_OF_TRAINING, seen(40, INPUTS)).category == ACTIVATIONS


@pytest.mark.parametrize("born", [-math.inf, 25, 55])
def test_what_has_a_workspaces_size_and_stays_is_one(born: float) -> None:
    assert found(born, math.inf, size=WORKSPACE).category == WORKSPACES
    assert found(born, 500, size=WORKSPACE).category != WORKSPACES
    assert found(born, math.inf).category != WORKSPACES


@pytest.mark.parametrize("size", [WORKSPACE, SMALL_WORKSPACE])
def test_what_a_program_makes_between_calls_is_no_workspace(size: int) -> None:
    assert found(5, math.inf, size=size).category == UNKNOWN


def test_a_size_that_tensors_have_is_a_workspaces_once_backward_has_left_it() -> None:
    for born in (25, 55):
        assert found(born, math.inf, size=SMALL_WORKSPACE) == Found(WORKSPACES)
        assert found(born, 500, size=SMALL_WORKSPACE) != Found(WORKSPACES)
    cut = STEP_OF_TRAINING[:7]  # in the middle of backward
    assert found(25, math.inf, cut, size=SMALL_WORKSPACE) == Found(ACTIVATIONS, "layer")
    assert found(-math.inf, math.inf, size=SMALL_WORKSPACE) == Found(UNKNOWN)
    state = seen(110, OPTIMIZER, "a", SMALL_WORKSPACE)
    named = found(25, math.inf, STEP_OF_TRAINING, state, size=SMALL_WORKSPACE)
    assert named == Found(OPTIMIZER, "a")


def test_one_of_forward_and_one_of_backward_are_workspaces_among_tensors_of_their_size() -> None:
    born = [26, 25, 27, 56, 55]
    kept = [Allocation(4096 * i, SMALL_WORKSPACE, born[i], math.inf) for i in range(5)]
    found_ = categorize(kept, Log(STEP_OF_TRAINING), [SMALL_WORKSPACE])
    assert [each.category for each in found_] == [
        *(ACTIVATIONS, WORKSPACES, ACTIVATIONS, TEMPORARIES, WORKSPACES)
    ]


MODEL = begin(10, FORWARD, "model")
MODEL_ENDED = [MODEL, end(20, FORWARD)]
OUTSIDE = Found(ACTIVATIONS, OUTSIDE_MODULES)
# What is called, and when what was born and died: what it is.
CALLS: dict[str, tuple[list[Mark], dict[tuple[float, float], Found]]] = {
    "without a graph nothing is an activation": (
        [
            *(begin(10, FORWARD, "model", flag=False), begin(12, FORWARD, "layer")),
            *(end(20, FORWARD), end(30, FORWARD)),
        ],
        {(15, 100): Found(TEMPORARIES, "layer"), (35, 100): Found(UNKNOWN)},
    ),
    "a region without a graph in a call with one keeps its result": (
        [MODEL, begin(12, FORWARD, "layer", flag=False), end(20, FORWARD), end(30, FORWARD)],
        {(15, 100): Found(ACTIVATIONS, "layer")},
    ),
    "a call that failed has activations of the calls that ended": (
        [
            *(MODEL, begin(12, FORWARD, "first"), end(20, FORWARD)),
            *(begin(22, FORWARD, "second"), end(30, FORWARD, flag=False)),
            end(31, FORWARD, flag=False),
        ],
        {
            (15, 40): Found(ACTIVATIONS, "first"),
            (15, 25): Found(TEMPORARIES, "first"),
            (25, 40): Found(TEMPORARIES, "second"),
            (35, 40): Found(UNKNOWN),
        },
    ),
    "a recording that ends in a call has activations too": (
        [MODEL, begin(12, FORWARD, "first"), end(20, FORWARD)],
        {(15, math.inf): Found(ACTIVATIONS, "first"), (15, 18): Found(TEMPORARIES, "first")},
    ),
    "a recording that ends before backward has activations outside of modules": (
        MODEL_ENDED,
        {(25, math.inf): OUTSIDE, (25, 30): Found(TEMPORARIES, OUTSIDE_MODULES)},
    ),
    "a metric without a graph does not hide the forward before it": (
        [
            *(*MODEL_ENDED, begin(22, FORWARD, "metric", flag=False), end(24, FORWARD)),
            *(begin(30, BACKWARD), end(40, BACKWARD)),
        ],
        {(26, 35): OUTSIDE},
    ),
    "a forward without a backward leaves what follows unknown": (
        [*MODEL_ENDED, begin(30, STEP), end(40, STEP)],
        {(25, 35): Found(UNKNOWN)},
    ),
    "ends whose beginning was lost are passed over": (
        [end(2, FORWARD), end(4, BACKWARD), *STEP_OF_TRAINING],
        {(25, 55): Found(ACTIVATIONS, "layer")},
    ),
    "a module that calls backward itself has activations": (
        [
            *(begin(10, FORWARD, "trainer"), begin(12, FORWARD, "model"), end(20, FORWARD)),
            *(begin(30, BACKWARD), end(40, BACKWARD), end(50, FORWARD)),
        ],
        {
            (15, 35): Found(ACTIVATIONS, "model"),
            (25, 35): Found(ACTIVATIONS, "trainer"),
            (15, 18): Found(TEMPORARIES, "model"),
            (35, 38): Found(TEMPORARIES, "(backward)"),
            (45, 48): Found(TEMPORARIES, "trainer"),
        },
    ),
}


@pytest.mark.parametrize("claim", CALLS)
def test_calls_of_any_kind(claim: str) -> None:
    marks, lives = CALLS[claim]
    assert {life: found(*life, marks) for life in lives} == lives


def test_calls_of_several_threads_end_each_by_itself() -> None:
    marks = [begin(10, FORWARD, "a", MAIN), begin(12, FORWARD, "b", ENGINE)]
    marks += [end(20, FORWARD, MAIN), end(30, FORWARD, ENGINE)]
    assert found(25, 28, marks).label == "b"


# --- addresses that are used again ----------------------------------------------------------------


TENS = [Allocation(ADDRESS, SIZE, start, start + 10) for start in (0, 10, 20)]
TWO_SIZES = [TENS[0], Allocation(ADDRESS, 512, 11, 20)]
LATE, DOUBLE = Allocation(ADDRESS, SIZE, 100, 200), Allocation(ADDRESS, 2 * SIZE, 0, 10)


@pytest.mark.parametrize(
    ("lives", "at", "size", "expected"),
    [
        (TENS, 15, SIZE, [UNKNOWN, GRADIENTS, UNKNOWN]),
        ([LATE], 50, SIZE, [UNKNOWN]),  # no event is left of what was alive
        (TWO_SIZES, 12, SIZE, [GRADIENTS, UNKNOWN]),  # clocks are a little off
        ([DOUBLE], 5, SIZE, [GRADIENTS]),  # a block may be larger than its storage
        ([DOUBLE], 5, 3 * SIZE, [UNKNOWN]),
    ],
)
def test_memory_is_what_was_alive_when_it_was_seen(
    lives: list[Allocation], at: float, size: int, expected: list[str]
) -> None:
    log = Log((), [seen(at, GRADIENTS, size=size)], clock_error=3)
    assert [each.category for each in categorize(lives, log)] == expected


# --- clocks ---------------------------------------------------------------------------------------


def tick(at_us: float, width_us: float = 2.0, address: int = ADDRESS) -> Tick:
    begin_ns = int((at_us - width_us / 2) * 1000)
    return Tick(begin_ns, begin_ns + int(width_us * 1000), 10**15 + int(at_us * 1000), address)


def test_ticks_tell_one_clock_by_the_other() -> None:
    ticks = [tick(at) for at in (0, 1000, 3000)]
    entries = [(ADDRESS, 10**12 + at) for at in (0, 1010, 3040)]
    clock = clock_of(ticks, entries)
    assert clock.to_us(2_000_000) == pytest.approx(10**12 + 2025.5)
    assert clock.to_us(4_000_000) == pytest.approx(10**12 + 4040.5)
    assert clock.to_us(-1_000_000) == pytest.approx(10**12 - 999.5)
    assert clock.error_us == 2.0


def test_a_tick_that_was_interrupted_is_left_out() -> None:
    ticks = [tick(0), tick(1000, width_us=900), tick(3000)]
    entries = [(ADDRESS, 10**12 + at) for at in (0, 700, 3000)]
    assert clock_of(ticks, entries).to_us(1_000_000) == pytest.approx(10**12 + 1000.5)


def test_the_programs_own_allocations_of_that_size_are_no_ticks() -> None:
    entries = [(ADDRESS + 512, 10**12 - 5000.0), (ADDRESS, 10**12 + 0.0)]
    assert clock_of([tick(0)], entries).to_us(0) == pytest.approx(10**12 + 0.5)


def test_without_a_tick_in_the_history_the_days_time_is_what_is_known() -> None:
    clock = clock_of([tick(0)], [])
    assert clock.to_us(1000) == pytest.approx(10**12)
    assert clock.error_us > 100
    assert clock_of([], []).error_us > 100
    assert TICK_BYTES % 8
