"""install_allocator: what it accepts, when it refuses, and what it leaves behind. No GPU needed."""

from __future__ import annotations

import functools
import inspect
import io
import os
import re
from typing import Any

import pytest
import torch
from fake_cuda import GIB, FakeCuda, cuda, fail_to_build, fail_with, shim

# Here, as an import while the allocator is installed would keep what the installation wraps.
from torch.autograd import profiler_legacy

import vramx
from vramx.allocator import cuda_init, install, preconditions
from vramx.allocator.shim import Shim
from vramx.errors import InstallError, InvalidValueError, NotInstalledError, ShimError, VramxWarning

__all__ = ["cuda", "shim"]


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


# The first is what torch.profiler.profile starts.
@pytest.mark.parametrize("profile", [torch.autograd.profiler.profile, profiler_legacy.profile])
def test_the_shim_is_told_of_each_profiler_that_starts(cuda: FakeCuda, profile: Any) -> None:
    vramx.install_allocator()
    assert cuda.profilers() == 0
    with profile():
        pass
    assert cuda.profilers() == 1


def test_a_profiler_that_runs_already_is_announced_at_the_installation(cuda: FakeCuda) -> None:
    with torch.autograd.profiler.profile():
        vramx.install_allocator()
    assert cuda.profilers() == 1


def test_options_reach_the_core_and_cuda_is_not_initialised(cuda: FakeCuda) -> None:
    vramx.install_allocator(limit=0.5, devices=[1, 0], cross_stream="never", record=True)
    (opened,) = cuda.opened
    assert opened.options == {"devices": [0, 1], "cross_stream": "never", "trace_events": 65_536}
    assert not torch.cuda.is_initialized()
    assert cuda.initialised == 0


def test_the_same_options_again_give_the_same_object_and_others_are_refused(cuda: FakeCuda) -> None:
    first = vramx.install_allocator(limit="24GiB")
    assert vramx.install_allocator(limit=24 * GIB) is first
    assert len(cuda.opened) == 1
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


def test_another_allocator_set_later_takes_vramxs_place(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    vramx.install_allocator()
    monkeypatch.setattr(Shim, "is_installed", lambda shim: False)
    assert not vramx.allocator_installed()
    limit = functools.partial(vramx.set_limit, "4GiB")
    for ask in (vramx.install_allocator, vramx.allocator_stats, vramx.defragment, limit):
        with pytest.raises(NotInstalledError, match=r"change_current_allocator was called after"):
            ask()


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
    absent = "{}: cannot open shared object file".format
    monkeypatch.setattr(preconditions.ctypes, "CDLL", lambda name: fail_with(OSError(absent(name))))
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


@pytest.mark.parametrize("variables", [{REGISTRATIONS[0]: "0"}, {REGISTRATIONS[0]: "false"}, {}])
def test_a_registration_that_is_off_is_no_matter(
    cuda: FakeCuda, monkeypatch: Any, recwarn: pytest.WarningsRecorder, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    vramx.install_allocator()
    assert not [each for each in recwarn if each.category is VramxWarning]


def test_a_late_installation_is_refused_beside_a_group_that_registers_memory(
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
    error = RuntimeError("Found no NVIDIA driver")
    monkeypatch.setattr(torch._C, "_cuda_init", lambda: fail_with(error))
    cuda_init.watch()
    with pytest.raises(RuntimeError, match="Found no NVIDIA driver"):
        cuda.initialise()


def test_an_action_that_fails_does_not_stop_the_initialisation(
    cuda: FakeCuda, logged: io.StringIO
) -> None:
    seen = []
    cuda_init.run_before(lambda: fail_with(ValueError("boom")))
    cuda_init.run_before(lambda: seen.append(cuda.initialised))
    cuda.initialise()
    assert seen == [0]  # the second ran all the same, and before torch
    assert cuda.initialised == 1
    assert "boom" in logged.getvalue()
