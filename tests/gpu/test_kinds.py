"""Kinds of faults that users reported of other allocators, each in several programs of its own.

A case is one program in a process of its own: a crash or a hang takes only its case. The programs
say what is right and why; here is which there are, and which of them torch's own allocator fails.
Those that measure time, or take more than a few GiB, have the GPU for themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from gpu import runner
from gpu.runner import script

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Kind:
    """A program and its cases.

    Attributes:
        alone: the cases that no other test may run beside.
        fails_natively: why torch's own allocator fails a case, which it then must.
        vramx_only: what torch's own allocator may fail or not, depending on what CUDA does.
    """

    program: str
    cases: tuple[str, ...]
    alone: tuple[str, ...] = ()
    fails_natively: tuple[tuple[str, str], ...] = ()
    vramx_only: tuple[str, ...] = ()


def tells_of_failed_captures() -> bool:
    """Say whether this torch tells its allocator of a capture that failed to end."""
    major, minor, *_ = torch.__version__.split(".")
    return (int(major), int(minor)) >= (2, 13)


ORDER = ("four_streams", "job_beside_busy", "prefetch", "offload")
CAPTURES = (
    *("once", "several_then_one_that_works", "in_another_thread", "dropped"),
    *("in_a_pool", "in_a_graphed_callable", "in_a_compiled_function"),
)
AFTER_A_CAPTURE = "the capture counts as under way for ever: pytorch#180395, #190308"
AFTER_CAPTURES = tuple((case, AFTER_A_CAPTURE) for case in CAPTURES)
BY_HANDLE = "the cache is keyed by the stream's handle, as that of NVIDIA/cub#373 was"
KINDS = (
    Kind(
        "kind_streams_order",
        (*ORDER, "awaited_value", "early_receive", "several_receives"),
        alone=ORDER,
    ),
    Kind(
        "kind_foreign_streams",
        ("destroyed", "outlived", "destroyed_while_busy", "reused_handle", "in_another_thread"),
        # Whether a new stream gets the old one's handle is up to CUDA; where it does, torch gives
        # it the old one's memory at once.
        vramx_only=("reused_handle",),
    ),
    Kind(
        "kind_per_thread_stream",
        ("freed_there", "two_threads", "freed_by_another_thread", "taken_under_the_handle"),
        fails_natively=(("taken_under_the_handle", BY_HANDLE),),
        vramx_only=("two_threads",),  # torch fails it where one frees before the other takes
    ),
    Kind(
        "kind_failed_capture",
        (*CAPTURES, "refused"),
        fails_natively=() if tells_of_failed_captures() else AFTER_CAPTURES,
        vramx_only=("refused",),
    ),
    Kind(
        "kind_random_users",
        ("roomy", "crowded", "unordered"),
        # They work on streams that are destroyed, whose handles come again.
        vramx_only=("roomy", "crowded"),
    ),
    Kind(
        "kind_tiny_survivors",
        ("statistics", "metrics", "optimizer_state", "replay_buffer"),
        alone=("statistics",),
    ),
)


def parameters() -> list:
    found = []
    for kind in KINDS:
        for case in kind.cases:
            marks = [pytest.mark.alone] if case in kind.alone else []
            marks += [pytest.mark.vramx_only] if case in kind.vramx_only else []
            name = kind.program.removeprefix("kind_")
            found.append(pytest.param(kind, case, marks=marks, id=f"{name}-{case}"))
    return found


@pytest.mark.parametrize(("kind", "case"), parameters())
def test_the_program_is_right(
    kind: Kind, case: str, allocator: str, request: pytest.FixtureRequest
) -> None:
    fails = dict(kind.fails_natively)
    if allocator == "native" and case in fails:
        request.applymarker(pytest.mark.xfail(reason=fails[case], strict=True))
    facts = runner.run(script(kind.program, allocator, case), runner.environment({})).facts()
    assert facts["backend"] == ("native" if allocator == "native" else "vramx"), facts
    assert facts["violation"] == ""
    assert facts["right"], facts["told"]
