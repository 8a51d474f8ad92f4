"""What all Python tests share: where the inputs are, a stand-in for the core, the GPU's rule."""

from __future__ import annotations

import gc
import importlib
import io
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from samples import SNAPSHOTS, recorded_snapshot, small_trace
from torchvision_operators import name_missing

from vramx.cli.main import main
from vramx.memory.trace import Trace, load_trace

TESTS = Path(__file__).resolve().parent
# Where two workers share the machine, torch's own threads would wait for each other's processor.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
name_missing()
# So much of a GPU for each of the tests that run beside others; those that need more are marked.
GPU_BYTES_PER_WORKER = 10 << 30
# The files that compile or train, the longest first, and those that mostly wait.
LONGEST = (
    *("test_native", "test_compile", "test_compression_training"),
    *("test_cpu_training", "test_autoload", "test_shim"),
    "test_layering",
)
WAITING = ("test_benchmarks_turns", "test_benchmarks_launch")


@pytest.fixture(autouse=True)
def _no_plans() -> None:
    """Have no test see what hooks have decided under the defects that another has planted."""
    plans = sys.modules.get("vramx.compression.policy.plans")
    if plans is not None:
        plans.plans_of.cache_clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail the tests marked gpu where there is no GPU, instead of skipping them",
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are there: what is imported is not garbage
    if not _gpus():  # whose memory garbage would hold: else none is collected after compilations
        os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
    # xdist would start the files with the most tests first, and those are not the longest.
    config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Answer `-n auto`: as many as the smallest GPU has room for, where there is one."""
    rooms = [device["total_bytes"] // GPU_BYTES_PER_WORKER for device in _gpus()]
    return max(1, min(*rooms, os.cpu_count() or 1)) if rooms else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Where files are run side by side, the last one to start should be a short one.
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONGEST)))
    # The second of two workers begins in the middle, while the first compiles on all processors.
    waiting = [item for item in items if item.path.stem in WAITING]
    others = [item for item in items if item.path.stem not in WAITING]
    middle = len(items) // 2
    items[:] = others[:middle] + waiting + others[middle:]


def pytest_collection_finish() -> None:
    _keep_no_stacks()
    _keep_what_is_there()
    gc.set_threshold(50_000)  # seldom: else a twentieth of the time of what compiles
    gc.enable()


def _keep_no_stacks() -> None:
    """Where there is no GPU, have torch not keep the text of the stack for each seed.

    It is to say where a seed came from, should starting CUDA fail; three texts take 0.6 ms.
    """
    if _gpus():
        return
    for name in ("torch.cuda", "torch.xpu", "torch.mtia"):
        module = sys.modules.get(name)
        if hasattr(module, "traceback"):
            vars(module)["traceback"] = SimpleNamespace(format_stack=list)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        _keep_what_is_there()


def _keep_what_is_there() -> None:
    """Let collections not look at what was imported or cached again.

    Tests of plans, of batches and of leaks collect after each step, and what compilers and
    libraries cache by then is millions of objects: that took a third of all tests' time.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    _time_no_guards()
    if item.get_closest_marker("gpu") is None or _gpus():
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail("no CUDA GPU, and --require-gpu was given")
    pytest.skip("no CUDA GPU")


def _time_no_guards() -> None:
    """Have torch not measure how long each compiled graph's guards take, for its own logs.

    It empties the processor's caches before: 20 ms a graph.
    """
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0


def _gpus() -> list[Any]:
    try:
        core = importlib.import_module("vramx._core")
    except ImportError:
        return []
    return list(core.probe_cuda()["devices"])


@pytest.fixture
def traces() -> Path:
    return TESTS / "traces"


@pytest.fixture(scope="session")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the snapshots that were recorded: train.pickle, and oom.pickle of a failure."""
    folder = tmp_path_factory.mktemp("snapshots")
    for name in SNAPSHOTS:
        (folder / f"{name}.pickle").write_bytes(recorded_snapshot(name))
    return folder


@pytest.fixture(params=["stand-in", "compiled"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on the stand-in for the core, and again on the compiled core where it is built."""
    if request.param == "compiled":
        pytest.importorskip("vramx._core", reason="the compiled core is not built")
    else:
        _stand_in(monkeypatch)
    return str(request.param)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> object:
    """Run a test on the stand-in alone, where it must do what the core never does."""
    return _stand_in(monkeypatch)


def _stand_in(monkeypatch: pytest.MonkeyPatch) -> object:
    import core_stand_in

    import vramx

    monkeypatch.setitem(sys.modules, "vramx._core", core_stand_in)
    monkeypatch.setattr(vramx, "_core", core_stand_in, raising=False)
    return core_stand_in


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process; return its exit code, stdout and stderr."""

    def run_vramx(*arguments: Any) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse's way to report wrong usage
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_vramx


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """Collect what vramx logs."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger = logging.getLogger("vramx")
    logger.addHandler(handler)
    yield text
    logger.removeHandler(handler)


@pytest.fixture
def seeded() -> None:
    """Begin with the same random numbers, torch's and those of packing."""
    import torch

    import vramx

    torch.manual_seed(0)
    vramx.manual_seed(0, rank=0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing by threads, which wait for each other on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    """What a benchmark hands its rows to; they are in the folder's rows.csv."""
    from program_stand_ins import make_writer

    return make_writer(tmp_path)


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        path = tmp_path / "small.npz"
        np.savez(path, **{**small_trace(), **changes})
        return path

    return write


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Trace]:
    """Write events and segments as a snapshot and read it back."""

    def read_snapshot(*events: Any, segments: Any = (), device: int | None = None) -> Trace:
        path = tmp_path / "snapshot.pickle"
        snapshot = {"segments": list(segments), "device_traces": [list(events)]}
        path.write_bytes(pickle.dumps(snapshot))
        return load_trace(path, device=device)

    return read_snapshot
