"""Puts vramx behind torch once for the session, or leaves torch as it is: the control run.

    pytest -m gpu                                   under vramx
    pytest -m gpu tests/gpu --allocator native      the very same tests under torch's own allocator,
                                                    of which those in *_gpu.py, which are about
                                                    kernels, say nothing new

Nothing here touches CUDA at import or at collection. A test marked `vramx_only` has no meaning
without vramx and is left out of the control run; one marked `two_gpus` is skipped on a machine with
one, under --require-gpu too, which asks for a GPU and not for two. After each test the core's own
invariants are recomputed, and a sticky CUDA error would show here, with the test that left it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import vramx
from gpu.tools import core_violation, settle


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allocator",
        choices=["vramx", "native"],
        default="vramx",
        help="the allocator under which tests/gpu runs",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vramx_only: about vramx itself; not in the control run")
    config.addinivalue_line("markers", "two_gpus: needs a second GPU; skipped without one")


def chosen(config: pytest.Config) -> str:
    # A run of the whole suite reads this file after it has parsed its options.
    return str(config.getoption("allocator", default="vramx"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if chosen(config) == "vramx":
        return
    dropped = [item for item in items if item.get_closest_marker("vramx_only")]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("two_gpus") is None:
        return
    core = pytest.importorskip("vramx._core", reason="the compiled core is not built")
    if len(core.probe_cuda()["devices"]) == 1:
        pytest.skip("needs a second GPU")


@pytest.fixture(scope="session")
def allocator(request: pytest.FixtureRequest) -> str:
    """Install the chosen allocator before anything in this process uses CUDA; return its name."""
    name = chosen(request.config)
    if name == "vramx":
        vramx.install_allocator()
    return name


@pytest.fixture(autouse=True)
def settled(allocator: str) -> Iterator[None]:
    """Start a test with nothing cached and fresh peaks; end it with the core intact."""
    settle()
    torch.cuda.reset_peak_memory_stats()
    yield
    settle()
    assert core_violation() == ""
