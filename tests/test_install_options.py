"""What install_allocator() accepts, its plain mode, and what it is asked later. No GPU needed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import GIB, FakeCuda, cuda, fail_to_build, shim

import vramx
from vramx.allocator import exit_stats, plain
from vramx.allocator.options import NO_LIMIT, choose, device_index, parse_limit
from vramx.config import Config
from vramx.errors import InstallError, InvalidValueError, NotInstalledError, ShimError, VramxWarning

__all__ = ["cuda", "shim"]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, None), ("24GiB", 24 * GIB), (1 << 30, GIB), (0.5, 0.5), ("0.5", 0.5), ("1.0", 1.0)],
)
def test_a_limit_is_bytes_or_a_fraction(limit: Any, expected: Any) -> None:
    parsed = parse_limit(limit)
    assert parsed == expected
    assert type(parsed) is type(expected)


NO_LIMITS = [0.0, 1.5, -0.1, "24Gi", "x", True, [1], 1, "1", 0, float("nan")]
NO_SIZES = ["50%", "1e9", "nan", "", -1, 1 << 70]


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        *((limit, "accepted are") for limit in NO_LIMITS),
        *((limit, r"^limit .* fraction of each device as in 0.9") for limit in NO_SIZES),
    ],
)
def test_a_limit_that_is_neither_is_refused(limit: Any, said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
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


def test_plain_mode_is_one_warning_that_lists_what_is_missing(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_build(monkeypatch, ShimError("no C++ compiler"))
    monkeypatch.setattr(plain, "install", lambda torch: "plain allocator")
    with pytest.warns(VramxWarning, match="plain mode, without .*CUDA graphs.*no C") as caught:
        assert vramx.install_allocator(strict=False) == "plain allocator"
    assert [warning.filename for warning in caught] == [__file__]
    assert vramx.allocator_installed()


def test_plain_mode_has_nothing_behind_it(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_build(monkeypatch, ShimError("no C++ compiler"))
    with pytest.raises(InstallError, match="all devices or none; no C"):
        vramx.install_allocator(strict=False, devices=[0])
    cuda.initialise()
    with pytest.raises(InstallError, match="cannot be installed late; no C"):
        vramx.install_allocator(strict=False, late=True)


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


# --- what an installed allocator is asked ---------------------------------------------------------


def test_a_limit_in_bytes_is_set_at_once(cuda: FakeCuda) -> None:
    vramx.install_allocator(limit="24GiB")
    assert cuda.limit_of(-1) == 24 * GIB
    vramx.set_limit(None)
    assert cuda.limit_of(-1) == NO_LIMIT
    vramx.set_limit("2GiB", device="cuda:1")
    assert cuda.limit_of(1) == 2 * GIB


def test_a_fraction_waits_for_cuda_and_keeps_its_place_among_the_limits(cuda: FakeCuda) -> None:
    vramx.install_allocator(limit=0.5)
    vramx.set_limit("2GiB", device=1)
    assert cuda.limit_of(0) == 0
    cuda.initialise()
    assert (cuda.limit_of(0), cuda.limit_of(1)) == (40 * GIB, 2 * GIB)


def test_a_fraction_is_set_at_once_after_cuda_is_initialised(cuda: FakeCuda) -> None:
    vramx.install_allocator()
    cuda.initialise()
    vramx.set_limit(0.25)
    assert (cuda.limit_of(0), cuda.limit_of(1)) == (20 * GIB, 20 * GIB)


def test_a_fraction_is_for_the_devices_that_are_served(cuda: FakeCuda) -> None:
    cuda.initialise()
    vramx.install_allocator(limit=0.5, devices=[1], late=True)
    assert (cuda.limit_of(0), cuda.limit_of(1)) == (0, 40 * GIB)


def test_statistics_are_the_cores_and_torchs_beyond_them(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    vramx.install_allocator()
    assert vramx.allocator_stats(0).native_reserved_bytes == 0  # asks nothing before CUDA is there
    cuda.initialise()
    sums = {"allocated_bytes.all.current": 250, "reserved_bytes.all.current": 2064}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: sums)
    stats = vramx.allocator_stats()
    assert (stats.device, stats.allocated_bytes, stats.reserved_bytes) == (1, 200, 2000)
    assert (stats.native_allocated_bytes, stats.native_reserved_bytes) == (50, 64)
    assert (stats.free_bytes, stats.driver_calls.time_us) == (1800, 6.5)
    assert stats.fragmentation == pytest.approx(1 - 201 / 2004)
    assert "15 calls, 0.0 ms" in str(stats)


def test_defragmentation_is_of_one_device_or_all(cuda: FakeCuda) -> None:
    vramx.install_allocator()
    assert vramx.defragment().released_bytes == 6
    vramx.defragment("cuda:0")
    assert cuda.opened[0].defragmented == [-1, 0]
    assert "given back in 5 chunks" in str(vramx.defragment(1))


@pytest.mark.parametrize("name", ["allocator_stats", "defragment"])
def test_without_an_allocator_there_is_nothing_to_ask(cuda: FakeCuda, name: str) -> None:
    with pytest.raises(NotInstalledError, match="install_allocator"):
        getattr(vramx, name)()
    with pytest.raises(NotInstalledError):
        vramx.set_limit("1GiB")


def test_statistics_are_written_whole_with_the_number_of_a_child(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[Any, ...]] = []
    monkeypatch.setattr(exit_stats.atexit, "register", lambda *call: written.append(call))
    cuda.configure(stats_file=tmp_path / "stats.json", root_pid=os.getpid() + 1)
    vramx.install_allocator()
    write, *arguments = written[0]
    write(*arguments)
    document = json.loads((tmp_path / f"stats.json.{os.getpid()}").read_text())
    assert document["mode"] == "full"
    assert [device["allocated_bytes"] for device in document["devices"]] == [100, 200]
