"""The process that benchmarks/seeing.py starts to add up a recorded step: is every byte in a sum.

    python _seeing_sums.py MODEL

Prints a line of JSON for each figure: what the categories have at the peak beside what torch counts
there, requested and in blocks, and what the GPU says is in use beside what the file says of it. The
file is what vramx.record wrote of the first steps, as a user reads it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import vramx
from benchmarks.programs._report import SEED, Recorder, allocator_name, report, report_status
from benchmarks.programs._seeing_models import SUMMED
from vramx.memory.holders import holders
from vramx.memory.snapshot import Snapshot
from vramx.sizes import MIB

STEPS = 3


def main(name: str) -> None:
    recorder = Recorder(deterministic=False)
    import torchvision  # noqa: F401  ahead of the turn: they take seconds
    import transformers  # noqa: F401

    recorder.begin()
    torch.manual_seed(SEED)
    training = SUMMED[name]()
    case = f"sums {name} {allocator_name()}"
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pickle"
        with vramx.record(path, training.model, training.optimizer):
            for _ in range(STEPS):
                training.step()
            torch.cuda.synchronize()
            stats, device_bytes = torch.cuda.memory_stats(), used_bytes()
        snapshot = Snapshot.load(path)
    add_up(case, snapshot, stats)
    compare_device(case, snapshot, device_bytes)


def add_up(case: str, snapshot: Snapshot, stats: dict[str, int]) -> None:
    """Report the sums at the peak, and what torch's own counters have beyond them."""
    categories = holders(snapshot, snapshot.peak_event, "category")
    for each in categories:
        report(case, f"{each.name}_bytes", "B", [each.bytes])
    requested, blocks = sum(each.bytes for each in categories), snapshot.peak_block_bytes
    report(case, "categories_bytes", "B", [requested])
    report(case, "blocks_bytes", "B", [blocks])
    report(case, "requested_left_bytes", "B", [stats["requested_bytes.all.peak"] - requested])
    report(case, "allocated_left_bytes", "B", [stats["allocated_bytes.all.peak"] - blocks])


def compare_device(case: str, snapshot: Snapshot, device_bytes: int | None) -> None:
    """Report what the whole GPU has in use beside what is held and outside of torch."""
    if device_bytes is None or snapshot.outside_bytes is None:
        report_status(f"{case} device", "skipped: nothing says what the GPU has in use")
        return
    held = int(snapshot.reserved_bytes_at(snapshot.end_event))
    said = held + snapshot.outside_bytes
    report(case, "device_bytes", "B", [device_bytes])
    report(case, "device_said_bytes", "B", [said])
    report(case, "device_off", "1", [said / device_bytes - 1])


def used_bytes() -> int | None:
    """Return what a GPU has in use, by the driver's own tool and not by the runtime."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return int(done.stdout.split()[0]) * MIB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


if __name__ == "__main__":
    main(sys.argv[1])
