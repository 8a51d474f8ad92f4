"""The marks `vram_limit` and `vram_leak`, in runs of pytest of their own on a GPU stand-in."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import block, segment
from simulated import MIB
from simulated_cuda import Cuda

from vramx.memory import track
from vramx.testing import plugin

pytest_plugins = ["pytester"]


class StandIn(Cuda):
    """torch.cuda's counters and snapshot, for a program that takes and gives."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch, 256 * MIB)
        self.live: dict[int, tuple[int, int]] = {}  # address: size, device
        self.backend = "native"
        self.frames: list[dict[str, Any]] = []
        self.workspace: int | None = None
        patch.setattr(track, "_regions", [])
        for name, value in {
            "fake": self,
            "is_available": lambda: True,
            "get_allocator_backend": lambda: self.backend,
            "device_count": lambda: len(self.devices),
            "memory_snapshot": self._segments,
        }.items():
            patch.setattr(torch.cuda, name, value, raising=False)
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self._clear, raising=False)

    def take(self, size: int, device: int | None = None) -> int:
        address = super().take(size, device)
        self.live[address] = (size, device or 0)
        return address

    def give(self, address: int) -> None:
        _, device = self.live.pop(address)
        self.devices[device].free(address)

    def matmul(self) -> None:
        """Make cuBLAS take its workspace."""
        self.workspace = self.workspace or self.take(8 * MIB)

    def _clear(self) -> None:
        if self.workspace is not None:
            self.give(self.workspace)
            self.workspace = None

    def _segments(self) -> list[dict[str, Any]]:
        return [
            segment({**block(address, size, size), "frames": self.frames}, device=device)
            for address, (size, device) in self.live.items()
        ]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


@pytest.fixture
def outcome(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run tests and return pytest's result."""
    # Where vramx is installed pytest would load the plugin a second time.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\naddopts = --strict-markers\n")

    def run(text: str, *options: str) -> pytest.RunResult:
        head = "import pytest, torch\nMIB = 1 << 20\nfake = getattr(torch.cuda, 'fake', None)\n"
        pytester.makepyfile(head + text)
        return pytester.runpytest_inprocess("-p", "vramx.testing.plugin", "-rs", *options)

    return run


def test_a_test_within_its_limit_passes_and_one_above_fails(outcome: Any, gpu: StandIn) -> None:
    gpu.take(100 * MIB)  # of other tests
    result = outcome("""
@pytest.mark.vram_limit("8MiB")
def test_within():
    fake.give(fake.take(8 * MIB))
@pytest.mark.vram_limit("8MiB")
def test_above():
    fake.give(fake.take(9 * MIB))
@pytest.mark.vram_limit(8 * MIB)
def test_above_on_the_second_gpu():
    fake.take(9 * MIB, 1)
def test_without_a_mark():
    fake.take(90 * MIB)
""")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        [
            "the test allocated 9.00 MiB on cuda:0 at its peak, more than the 8.00 MiB of vram_*",
            "the test allocated 9.00 MiB on cuda:1 at its peak, more than the 8.00 MiB of vram_*",
        ]
    )


def test_a_test_that_fails_by_itself_says_why_it_did(outcome: Any, gpu: StandIn) -> None:
    result = outcome("""
@pytest.mark.vram_limit("8MiB")
@pytest.mark.vram_leak
def test_wrong():
    fake.take(9 * MIB)
    assert 1 == 2
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert 1 == 2"])
    result.stdout.no_fnmatch_line("*at its peak*")


def test_what_is_left_is_an_error_and_what_a_fixture_frees_is_not(
    outcome: Any, gpu: StandIn
) -> None:
    result = outcome("""
@pytest.fixture
def model():
    made = {"weight": fake.take(MIB)}
    yield made
    for address in made.values():
        fake.give(address)
@pytest.mark.vram_leak
def test_clean(model):
    model["gradient"] = fake.take(MIB)
    fake.give(fake.take(5 * MIB))
    fake.matmul()
@pytest.mark.vram_leak()
def test_leaks(model):
    fake.take(3 * MIB)
@pytest.mark.vram_leak("4MiB")
def test_leaves_what_is_allowed():
    fake.take(4 * MIB)
@pytest.mark.vram_leak("4MiB")
def test_leaves_more():
    fake.take(4 * MIB)
    fake.take(1)
""")
    result.assert_outcomes(passed=4, errors=2)
    result.stdout.fnmatch_lines(
        [
            "3.00 MiB in 1 tensors are left of the test",
            "*known with torch.cuda.memory._record_memory_history()",
            "4.00 MiB in 2 tensors are left of the test, more than the 4.00 MiB allowed",
        ]
    )


def test_memory_that_a_fixture_returned_is_looked_at_after_it_is_gone(
    outcome: Any, gpu: StandIn
) -> None:
    result = outcome("""
import weakref
class Model:
    def __init__(self):
        weakref.finalize(self, self.free, owned := [])
        self.owned = owned
    @staticmethod
    def free(owned):
        for address in owned:
            fake.give(address)
@pytest.fixture
def model():
    return Model()
@pytest.mark.vram_leak
def test_trains(model):
    model.owned.append(fake.take(MIB))
""")
    result.assert_outcomes(passed=1)


def test_stacks_are_told_where_history_is_on(outcome: Any, gpu: StandIn) -> None:
    gpu.frames = [{"name": "keep", "filename": "train.py", "line": 12}]
    result = outcome("""
@pytest.mark.vram_leak
def test_leaks():
    fake.take(3 * MIB)
    fake.take(2 * MIB)
""")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["  5.00 MiB in 2 at train.py:12 keep"])


def test_without_cuda_it_is_a_skip_that_says_so(
    outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = outcome("""
@pytest.mark.vram_limit("8MiB")
@pytest.mark.vram_leak
def test_on_a_gpu():
    raise AssertionError
@pytest.fixture
def expensive():
    raise AssertionError
@pytest.mark.vram_leak
def test_with_a_fixture(expensive):
    pass
def test_without_a_mark():
    pass
""")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(
        ["SKIPPED*vram_limit and vram_leak cannot be checked: there is no CUDA device"]
    )


def test_an_allocator_that_does_not_tell_is_a_skip_that_says_so(outcome: Any, gpu: StandIn) -> None:
    test = """
@pytest.mark.vram_leak
def test_leaks():
    fake.take(1)
@pytest.mark.vram_limit("8MiB")
def test_above():
    fake.take(9 * MIB)
"""
    gpu.backend = "cudaMallocAsync"  # has peaks, and no blocks
    result = outcome(test)
    result.assert_outcomes(skipped=1, failed=1)
    says = "SKIPPED*vram_leak cannot be checked: torch's allocator is '{}', which does not tell"
    result.stdout.fnmatch_lines([says.format("cudaMallocAsync")])
    gpu.backend = "pluggable"
    result = outcome(test)
    result.assert_outcomes(skipped=2)


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ('vram_limit("2 apples")', "*test_x: vram_limit: size '2 apples' is not understood*"),
        ("vram_limit(-1)", "*test_x: vram_limit: size -1 is out of range*"),
        ("vram_limit(2.5)", "*test_x: vram_limit: size 2.5 is of type float*"),
        ("vram_limit", '*test_x: vram_limit takes one size, as in vram_limit("2GiB")'),
        ('vram_limit(size="1GiB")', "*test_x: vram_limit takes one size*"),
        ("vram_leak(1, 2)", "*test_x: vram_leak takes one size*"),
    ],
)
def test_a_wrong_argument_ends_the_run_before_it_begins(outcome: Any, mark: str, says: str) -> None:
    result = outcome(f"@pytest.mark.{mark}\ndef test_x():\n    pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([says])


def test_an_older_pytest_is_told(outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest, "version_tuple", (7, 4, 0))
    result = outcome("@pytest.mark.vram_leak\ndef test_x():\n    pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*vram_leak needs pytest 8 or newer*"])
    assert outcome("def test_y():\n    pass\n").ret == 0


def test_the_package_names_the_plugin() -> None:
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
    section = text[text.index("[project.entry-points.pytest11]") :]
    value = section.splitlines()[1].partition("= ")[2].strip('"')
    point = importlib.metadata.EntryPoint("vramx", value, "pytest11")
    assert point.load() is plugin
