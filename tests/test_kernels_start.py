"""How kernels are started: by Triton's own call first, then by what that compiled.

Stand-ins take the place of a kernel and of Triton's streams, so no GPU is needed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vramx.kernels import start as module
from vramx.kernels.start import Ready, start

pytest.importorskip("triton")

STREAM = 77
ALIGNED = torch.zeros(64, dtype=torch.uint8)
UNALIGNED = ALIGNED[1:]


class Kernel:
    """A kernel of two tensors, two numbers and two constants, which records how it is called."""

    arg_names = ("x", "y", "numel", "stream", "GROUP", "KIND")

    def __init__(self) -> None:
        self.pre_run_hooks: list[Any] = []
        self.own: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **constants: Any) -> Any:
            self.own.append((grid, args, constants))
            return SimpleNamespace(
                run=lambda *args: self.compiled.append(args), function=1, packed_metadata=2
            )

        return call


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "_is_known_version", lambda: True)
    monkeypatch.setattr(module, "_streams", lambda: lambda index: STREAM + index)
    return Kernel()


def run(kernel: Kernel, *tensors: Any, numel: int = 5, kind: str = "gelu", **options: Any) -> None:
    start(kernel, (3,), tensors, (numel, 0.5), KIND=kind, num_warps=4, GROUP=128, **options)


def test_the_next_one_gives_what_was_compiled_addresses_and_parameters_in_order(
    kernel: Kernel,
) -> None:
    run(kernel, ALIGNED, None)
    run(kernel, ALIGNED[16:], None, numel=7)
    (call,) = kernel.compiled
    assert call[:6] == (3, 1, 1, STREAM - 1, 1, 2)  # the index of a CPU is -1
    assert call[6:9] == (None, None, None)  # no hooks, and nothing for them
    assert call[9:] == (ALIGNED[16:].data_ptr(), 0, 7, 0.5, 128, "gelu")
    assert len(kernel.own) == 1


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        ((ALIGNED.view(torch.int8), None), {}),
        ((ALIGNED, ALIGNED), {}),
        ((UNALIGNED, None), {}),
        ((ALIGNED, None), {"numel": 1}),
        ((ALIGNED, None), {"numel": 32}),
        ((ALIGNED, None), {"numel": 1 << 31}),
        ((ALIGNED, None), {"kind": "silu"}),
        ((ALIGNED, None), {"num_stages": 2}),
    ],
)
def test_what_triton_may_compile_anew_is_its_own_call(
    kernel: Kernel, tensors: tuple[Any, ...], options: dict[str, Any]
) -> None:
    run(kernel, ALIGNED, None)
    run(kernel, *tensors, **options)
    assert len(kernel.own) == 2
    assert not kernel.compiled


def test_hooks_see_every_launch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    run(kernel, ALIGNED, None)
    kernel.pre_run_hooks.append(print)
    run(kernel, ALIGNED, None)
    kernel.pre_run_hooks.clear()
    monkeypatch.setattr(module._hooks(), "launch_enter_hook", lambda metadata: None)
    run(kernel, ALIGNED, None)
    assert len(kernel.own) == 3
    assert not kernel.compiled


def test_other_versions_of_triton_are_called_as_they_want(kernel: Kernel, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_is_known_version", lambda: False)
    run(kernel, ALIGNED, None)
    run(kernel, ALIGNED, None)
    assert len(kernel.own) == 2


def test_constants_that_are_equal_are_compiled_once(kernel: Kernel) -> None:
    """Plans of other sizes have them in another dictionary, and sizes may never return."""
    kinds = ("gelu", "silu", "gelu", "silu")
    made = [{"KIND": kind, "num_warps": 4, "GROUP": 128} for kind in kinds]
    for constants in made:
        Ready(constants, kernel, (3,), -1).start((ALIGNED, None), 5, 0.5)
    assert [constants for _, _, constants in kernel.own] == made[:2]
    assert [call[-1] for call in kernel.compiled] == ["gelu", "silu"]
    assert len(module._compiled) == 2


def test_what_is_ready_gives_what_was_compiled_addresses_and_numbers(kernel: Kernel) -> None:
    ready = Ready({"KIND": "gelu", "num_warps": 4, "GROUP": 128}, kernel, (3,), -1)
    for tensor, stream in ((ALIGNED, 1), (ALIGNED[16:], 16), (UNALIGNED, 7), (ALIGNED, 1 << 31)):
        ready.start((tensor, None), 5, stream)
    assert [args[1:] for _, args, _ in kernel.own] == [(None, 5, 1), (None, 5, 7)]
    assert [args[0].data_ptr() % 16 for _, args, _ in kernel.own] == [0, 1]
    calls = [(ALIGNED[16:], 16), (ALIGNED, 1 << 31)]
    expected = [(tensor.data_ptr(), 0, 5, stream, 128, "gelu") for tensor, stream in calls]
    assert [call[9:] for call in kernel.compiled] == expected
    assert {call[:4] for call in kernel.compiled} == {(3, 1, 1, STREAM - 1)}


def test_what_is_ready_is_tritons_own_call_where_somebody_watches(kernel: Kernel) -> None:
    ready = Ready({"KIND": "gelu", "num_warps": 4, "GROUP": 128}, kernel, (3,), -1)
    for hooks in ([], [], [print], []):
        kernel.pre_run_hooks = hooks
        ready.start((ALIGNED, None), 5, 1)
    assert (len(kernel.own), len(kernel.compiled)) == (2, 2)  # the first compiles


def test_what_is_ready_launches_nothing_while_a_step_is_predicted(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_launches", False)
    Ready({"KIND": "gelu", "GROUP": 128}, kernel, (3,), -1).start((ALIGNED, None), 5, 1)
    assert not kernel.own
