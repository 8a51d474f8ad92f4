"""Two processes of this host in one group of torch.distributed, and what each of them found.

The processes import the file of the function that they run: it imports nothing that takes long.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
import torch.multiprocessing as processes
from torch.torch_version import TorchVersion

TESTS = Path(__file__).resolve().parent
PRELOADED = ["distributed_tools", "torch.distributed.fsdp", "vramx.nn.optimize"]
# Before torch 2.9 sharded gradients of hosts are added up and not averaged; 2.6 shards none there.
SHARDS_ON_HOSTS = TorchVersion(torch.__version__) >= (2, 9)
# A process that waits for another one that died fails, and so does the test that waits for both.
_LIMIT_S = 60


@cache
def start_server() -> None:
    """Start the process that both are forked from, which has imported what takes long.

    Else each imports torch anew: two seconds of a processor, which is most of what a test takes.
    """
    paths = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths)  # the server has no other path before it has forked
        patch.setenv("OMP_NUM_THREADS", "1")  # threads of its own would not be forked
        multiprocessing.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


def run_on_two(
    function: Callable[[int], dict[str, Any]], folder: Path, patience_s: float = _LIMIT_S / 2
) -> list[dict[str, Any]]:
    """Call a function with the rank on two processes; return what each call returned.

    A process that waits for the other for longer than `patience_s` fails.
    """
    start_server()
    context = processes.start_processes(
        _run, (str(folder), patience_s, function), nprocs=2, join=False, start_method="forkserver"
    )
    try:
        deadline = time.monotonic() + _LIMIT_S
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the processes are still running"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def _run(
    rank: int, folder: str, patience_s: float, function: Callable[[int], dict[str, Any]]
) -> None:
    gc.freeze()  # what the server has imported, for collections not to look at it again
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=patience_s),
    )
    _leave(rank, folder, function(rank))


def _leave(rank: int, folder: str, result: dict[str, Any]) -> None:
    """Save the results and end, when the other process has ended its work too.

    Without destructors: torch's, of the group and of what uses it, join threads that may wait for
    the interpreter lock, which they hold (torch 2.13, one run in five on two cores).
    """
    torch.save(result, f"{folder}/{rank}.part")
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")
    deadline = time.monotonic() + _LIMIT_S / 2
    while not os.path.exists(f"{folder}/{1 - rank}.pt") and time.monotonic() < deadline:
        time.sleep(0.01)
    os._exit(0)
