"""Pinned memory keeps to what the container and the other ranks of the host leave."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from vramx import config  # noqa: E402
from vramx.compression.offload.host_memory import bytes_of_a_rank, host_bytes  # noqa: E402
from vramx.compression.offload.pinned import HostPool  # noqa: E402
from vramx.sizes import MIB  # noqa: E402

PHYSICAL_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
SMALL, LARGE = 300 * MIB, 700 * MIB
NO_LIMIT_V1 = 0x7FFFFFFFFFFFF000


def files(root: Path, group: str, limits: dict[str, object]) -> Path:
    """Make the files of a host: the groups of this process, and limits by path."""
    for name, text in {"proc/self/cgroup": group, **limits}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


V1 = "12:cpu,cpuacct:/job\n4:hugetlb,memory:/job/step\n1:name=systemd:/job\n0::/"
HOSTS = {
    "v2, in a namespace": ("0::/", {"sys/fs/cgroup/memory.max": SMALL}),
    "v2, the group's own": ("0::/job/step", {"sys/fs/cgroup/job/step/memory.max": SMALL}),
    "v2, a group around it": (
        "0::/job/step",
        {
            "sys/fs/cgroup/job/step/memory.max": "max",
            "sys/fs/cgroup/job/memory.max": SMALL,
            "sys/fs/cgroup/memory.max": LARGE,
        },
    ),
    "v2, throttled": (
        "0::/",
        {"sys/fs/cgroup/memory.max": LARGE, "sys/fs/cgroup/memory.high": SMALL},
    ),
    "v2, outside of the namespace": ("0::/../..", {"sys/fs/cgroup/memory.max": SMALL}),
    "v1, the group's own": (
        V1,
        {
            "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": SMALL,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
        },
    ),
    "v1, mounted as the root": (V1, {"sys/fs/cgroup/memory/memory.limit_in_bytes": SMALL}),
    "both, the memory in v1": (
        V1,
        {
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": SMALL,
            "sys/fs/cgroup/unified/cgroup.procs": "",
        },
    ),
}


@pytest.mark.parametrize("name", HOSTS)
def test_the_smallest_limit_of_the_container_holds(name: str, tmp_path: Path) -> None:
    group, limits = HOSTS[name]
    assert host_bytes(files(tmp_path, group, limits)) == SMALL


@pytest.mark.parametrize(
    ("group", "limits"),
    [
        ("0::/", {"sys/fs/cgroup/memory.max": "max"}),
        (V1, {"sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1}),
        (V1, {"sys/fs/cgroup/cpu,cpuacct/memory.limit_in_bytes": SMALL}),
        ("no such line", {}),
        ("0::/", {"sys/fs/cgroup/memory.max": "a lot"}),
    ],
)
def test_without_a_limit_the_machine_is_the_limit(
    group: str, limits: dict[str, object], tmp_path: Path
) -> None:
    assert host_bytes(files(tmp_path, group, limits)) == PHYSICAL_BYTES


def test_a_host_without_control_groups_is_the_machine(tmp_path: Path) -> None:
    assert host_bytes(tmp_path) == PHYSICAL_BYTES


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "many"}, 1),
    ],
)
def test_ranks_of_a_host_share_it_evenly(
    variables: dict[str, str], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    root = files(tmp_path, "0::/", {"sys/fs/cgroup/memory.max": SMALL})
    assert config.local_ranks() == ranks
    assert bytes_of_a_rank(root) == SMALL // ranks


def pin(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_pools_of_one_process_share_a_limit() -> None:
    pools: list[HostPool] = []
    for _ in range(2):
        pools.append(HostPool(pin, 8 * MIB, pools))
    first, second = pools
    slots = [first.take(MIB) for _ in range(8)]
    assert [slot is not None for slot in slots] == [True] * 4 + [False] * 4
    assert second.take(4 * MIB) is not None


def test_a_pool_that_was_there_first_leaves_no_more_than_the_limit() -> None:
    pools: list[HostPool] = []
    pools.append(HostPool(pin, 8 * MIB, pools))
    assert pools[0].take(8 * MIB) is not None
    pools.append(HostPool(pin, 8 * MIB, pools))
    assert pools[1].take(MIB) is None
