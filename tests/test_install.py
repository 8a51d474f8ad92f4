"""install_allocator: what it accepts, when it refuses, and what it leaves behind. No GPU needed."""

from __future__ import annotations

import functools
import inspect
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import GIB, FakeCuda, cuda, fail_to_build, shim

# Here, as an import while the allocator is installed would keep what the installation wraps.
from torch.autograd import profiler_legacy

import vramx
from vramx.allocator import cuda_init, install, plain, preconditions
from vramx.allocator.options import choose, device_index, parse_limit
from vramx.allocator.shim import Shim
from vramx.config import Config
from vramx.errors import (
    InstallError,
    InvalidValueError,
    NotInstalledError,
    ShimError,
    VramxWarning,
)

__all__ = ["cuda", "shim"]


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, None), ("24GiB", 24 * GIB), (1 << 30, GIB), (0.5, 0.5), ("0.5", 0.5), ("1.0", 1.0)],
)
def test_a_limit_is_bytes_or_a_fraction(limit: Any, expected: Any) -> None:
    parsed = parse_limit(limit)
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize("limit", [0.0, 1.5, -0.1, "24Gi", "x", True, [1], 1, "1", 0, float("nan")])
def test_a_limit_that_is_neither_is_refused(limit: Any) -> None:
    with pytest.raises(InvalidValueError, match="accepted are"):
        parse_limit(limit)


@pytest.mark.parametrize(
    ("devices", "cross_stream", "what"),
    [
        ("0", "never", "'0' is no list"),
        (1, "never", "1 is no list"),
        ([], "never", "empty"),
        ([0, -1], "never", "-1"),
        ([True], "never", "True"),
        ([0], "sometimes", "'never', 'under_pressure' and 'always'"),
    ],
)
def test_wrong_options_are_refused(devices: Any, cross_stream: str, what: str) -> None:
    with pytest.raises(InvalidValueError, match=re.escape(what)):
        choose(None, devices, cross_stream, False, Config())


@pytest.mark.parametrize("name", ["record", "strict", "late"])
@pytest.mark.parametrize("value", ["no", "0", 0, None])
def test_a_switch_is_true_or_false(cuda: FakeCuda, name: str, value: Any) -> None:
    switches: dict[str, Any] = {name: value}
    with pytest.raises(InvalidValueError, match=rf"{name} {value!r} is not .* True and False"):
        vramx.install_allocator(**switches)
    assert not vramx.allocator_installed()


@pytest.mark.parametrize("limit", ["50%", "1e9", "nan", "", -1, 1 << 70])
def test_a_limit_that_is_no_size_is_told_that_fractions_are_accepted(limit: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"^limit .* fraction of each device as in 0.9"):
        parse_limit(limit)


def test_the_environment_fills_in_what_a_call_leaves_open() -> None:
    settings = Config(limit="0.5", devices=(1,), cross_stream="always", record=True)
    filled = choose(None, None, "under_pressure", False, settings)
    assert (filled.limit, filled.devices, filled.cross_stream, filled.record) == (
        0.5, (1,), "always", True,
    )  # fmt: skip
    given = choose("4GiB", [0], "never", False, settings)
    assert (given.limit, given.devices, given.cross_stream) == (4 * GIB, (0,), "never")


@pytest.mark.parametrize(
    ("device", "index"), [(None, None), (3, 3), ("cuda:1", 1), (torch.device("cuda", 2), 2)]
)
def test_a_device_is_named_as_torch_names_it(device: Any, index: int | None) -> None:
    assert device_index(device) == index


@pytest.mark.parametrize("device", ["cpu", -1, True, 1.0, "cuda:x", torch.device("cpu")])
def test_what_names_no_cuda_device_is_refused(device: Any) -> None:
    with pytest.raises(InvalidValueError, match="no CUDA device"):
        device_index(device)


# --- installing -----------------------------------------------------------------------------------


def test_installing_puts_torchs_object_behind_memory_pools_in_hand(cuda: FakeCuda) -> None:
    allocator = vramx.install_allocator()
    assert isinstance(allocator, torch.cuda.memory.CUDAPluggableAllocator)
    assert allocator.allocator() == "the current allocator"
    assert vramx.allocator_installed()
    assert install.current().shim is not None
    assert install.current().shim.is_installed()


def _profile() -> None:
    with torch.autograd.profiler.profile():  # which torch.profiler.profile starts
        pass


def _profile_as_of_old() -> None:
    with profiler_legacy.profile():
        pass


@pytest.mark.parametrize("profile", [_profile, _profile_as_of_old])
def test_the_shim_is_told_of_each_profiler_that_starts(
    cuda: FakeCuda, profile: Callable[[], None]
) -> None:
    vramx.install_allocator()
    assert cuda.profilers() == 0
    profile()
    assert cuda.profilers() == 1


def test_a_profiler_that_runs_already_is_announced_at_the_installation(cuda: FakeCuda) -> None:
    with torch.autograd.profiler.profile():
        vramx.install_allocator()
    assert cuda.profilers() == 1


def test_installing_does_not_initialise_cuda(cuda: FakeCuda) -> None:
    vramx.install_allocator(limit=0.5)
    assert not torch.cuda.is_initialized()
    assert cuda.initialised == 0


def test_options_reach_the_core(cuda: FakeCuda) -> None:
    vramx.install_allocator(devices=[1, 0], cross_stream="never", record=True)
    assert cuda.opened[0].options == {
        "devices": [0, 1], "cross_stream": "never", "trace_events": 65_536,
    }  # fmt: skip


def test_the_same_options_again_give_the_same_object(cuda: FakeCuda) -> None:
    first = vramx.install_allocator(limit="24GiB")
    assert vramx.install_allocator(limit=24 * GIB) is first
    assert len(cuda.opened) == 1


def test_other_options_are_refused_with_both_named(cuda: FakeCuda) -> None:
    vramx.install_allocator(limit="24GiB")
    with pytest.raises(InstallError, match=r"limit=24\.00 GiB.*limit=none.*set_limit"):
        vramx.install_allocator()


def test_a_failed_installation_may_be_tried_again(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        fail_to_build(broken, ShimError("no compiler"))
        with pytest.raises(ShimError, match="no compiler"):
            vramx.install_allocator()
    assert not vramx.allocator_installed()
    assert vramx.install_allocator() is not None


def test_a_refusal_of_the_shim_is_passed_on(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fake_cuda.FakeDevices.handle_address", None)
    with pytest.raises(ShimError, match="no core, late 1"):
        vramx.install_allocator(late=True)
    assert not vramx.allocator_installed()


# --- what stands in the way -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "value", "what"),
    [
        ("torch.version.cuda", None, "built without CUDA"),
        ("torch.version.hip", "6.2", "ROCm"),
        ("torch.cuda.device_count", lambda: 0, "torch sees no GPU"),
        ("torch.cuda.get_allocator_backend", lambda: "cudaMallocAsync", "'cudaMallocAsync'"),
        ("torch.cuda.get_allocator_backend", lambda: "vramx", "by another copy of it"),
    ],
)
def test_an_obstacle_is_one_line(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, target: str, value: Any, what: str
) -> None:
    monkeypatch.setattr(target, value)
    with pytest.raises(InstallError, match=re.escape(what)) as caught:
        vramx.install_allocator()
    assert "\n" not in str(caught.value)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(preconditions.ctypes, "CDLL", absent)
    with pytest.raises(InstallError, match=r"driver is missing: libcuda\.so\.1"):
        preconditions._check_driver()


def test_a_device_that_is_not_there_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(InvalidValueError, match="devices holds 2; torch sees 2"):
        vramx.install_allocator(devices=[0, 2])


def test_cuda_initialised_too_early_is_refused_with_the_line_that_did_it(cuda: FakeCuda) -> None:
    cuda_init.watch()
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    torch.cuda.init()
    with pytest.raises(InstallError, match=rf"{re.escape(__file__)}:{line} \(test_cuda_init"):
        vramx.install_allocator()


def test_a_late_installation_is_possible_on_request(cuda: FakeCuda) -> None:
    torch.cuda.init()
    with pytest.raises(InstallError, match=r"was not there to see it.*late=True"):
        vramx.install_allocator()
    vramx.install_allocator(late=True)
    assert vramx.allocator_installed()


# --- the watch over CUDA's initialisation ---------------------------------------------------------


def test_a_late_installation_says_that_an_older_history_lacks_its_memory(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.initialise()
    monkeypatch.setattr(Shim, "torch_keeps_history", lambda self: True)
    with pytest.warns(VramxWarning, match="history was switched on before"):
        vramx.install_allocator(late=True)


# --- memory that NCCL knows by address ------------------------------------------------------------

REGISTRATIONS = (
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)


@pytest.mark.parametrize("name", REGISTRATIONS)
@pytest.mark.parametrize("value", ["1", "True"])
def test_nccl_keeps_no_address_of_memory_that_may_be_mapped_anew(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.warns(VramxWarning, match=rf"^{name} is switched off.*register_mem_pool"):
        vramx.install_allocator()
    assert os.environ[name] == "0"


@pytest.mark.parametrize("value", ["0", "false", None])
def test_a_registration_that_is_off_is_no_matter(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, value: Any
) -> None:
    if value is not None:
        monkeypatch.setenv(REGISTRATIONS[0], value)
    vramx.install_allocator()
    assert not [each for each in recwarn if each.category is VramxWarning]


def test_beside_a_group_that_registers_memory_a_late_installation_is_refused(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REGISTRATIONS[0], "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    cuda.initialise()
    with pytest.raises(InstallError, match="registered with NCCL"):
        vramx.install_allocator(late=True)
    assert os.environ[REGISTRATIONS[0]] == "1"


def test_the_watch_sees_copies_of_lazy_init_too(cuda: FakeCuda) -> None:
    cuda_init.watch()
    torch.cuda.random._lazy_init()  # torch.cuda.random imported it by name
    assert "test_install.py" in str(cuda_init.first_site())


def test_the_watch_removes_itself_and_calls_torchs_own_once(cuda: FakeCuda) -> None:
    original = torch._C._cuda_init
    cuda_init.watch()
    assert torch._C._cuda_init is not original
    cuda.initialise()
    cuda.initialise()
    assert torch._C._cuda_init == original
    assert cuda.initialised == 1


def test_the_watch_passes_on_what_torch_raises(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(torch._C, "_cuda_init", refuse)
    cuda_init.watch()
    with pytest.raises(RuntimeError, match="Found no NVIDIA driver"):
        cuda.initialise()


def test_an_action_that_fails_does_not_stop_the_initialisation(
    cuda: FakeCuda, logged: io.StringIO
) -> None:
    seen = []

    def boom() -> None:
        raise ValueError("boom")

    cuda_init.run_before(boom)
    cuda_init.run_before(lambda: seen.append(cuda.initialised))
    cuda.initialise()
    assert seen == [0]  # the second ran all the same, and before torch
    assert cuda.initialised == 1
    assert "boom" in logged.getvalue()


# --- plain mode -----------------------------------------------------------------------------------


def test_plain_mode_is_one_warning_that_lists_what_is_missing(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_build(monkeypatch, ShimError("no C++ compiler"))
    monkeypatch.setattr(plain, "install", lambda torch: "plain allocator")
    with pytest.warns(VramxWarning, match="plain mode, without .*CUDA graphs.*no C") as caught:
        assert vramx.install_allocator(strict=False) == "plain allocator"
    assert [Path(warning.filename).name for warning in caught] == ["test_install.py"]
    assert vramx.allocator_installed()


def test_plain_mode_has_nothing_behind_it(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_build(monkeypatch, ShimError("no C++ compiler"))
    with pytest.raises(InstallError, match="all devices or none; no C"):
        vramx.install_allocator(strict=False, devices=[0])
    cuda.initialise()
    with pytest.raises(InstallError, match="cannot be installed late; no C"):
        vramx.install_allocator(strict=False, late=True)


def test_another_allocator_set_later_takes_vramxs_place(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    vramx.install_allocator()
    monkeypatch.setattr(Shim, "is_installed", lambda shim: False)
    assert not vramx.allocator_installed()
    asked: list[Callable[[], object]] = [
        vramx.install_allocator,
        vramx.allocator_stats,
        vramx.defragment,
        functools.partial(vramx.set_limit, "4GiB"),
    ]
    for ask in asked:
        with pytest.raises(NotInstalledError, match=r"change_current_allocator was called after"):
            ask()


def test_plain_mode_hands_torch_the_cores_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("vramx._core")
    if not hasattr(core, "open_gpus"):
        pytest.skip("the compiled core is older than plain mode")
    taken: dict[str, int] = {}

    class Inner:
        def __getattr__(self, name: str) -> Any:
            return lambda address: taken.update({name: address})

    memory = torch.cuda.memory
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda *pair: Inner(), raising=False)
    monkeypatch.setattr(memory, "change_current_allocator", lambda allocator: None)
    assert isinstance(plain.install(torch), memory.CUDAPluggableAllocator)
    assert set(taken) == set(plain._SETTERS)
    assert all(taken.values())
