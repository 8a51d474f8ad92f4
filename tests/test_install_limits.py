"""What an installed allocator is asked: limits, statistics, defragmentation. No GPU needed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import GIB, FakeCuda, cuda, shim

import vramx
from vramx.allocator import exit_stats
from vramx.allocator.options import NO_LIMIT
from vramx.errors import NotInstalledError

__all__ = ["cuda", "shim"]


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
