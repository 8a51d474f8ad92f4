"""Trains models twice, each in one process: on torch's own memory, then through the core, alike.

    python -m cpu_torch.program FOLDER STEPS MODEL-core|MODEL-early_free|MODEL-shared_address...

FOLDER/MODEL-MODE.npz gets the losses and every final tensor of the model of both trainings, as
plain/... and core/..., and MODEL-MODE.json what the allocator did. `core` trains through the core
while it is disturbed; the others plant a defect in the allocator, disturb nothing else, and leave
the plain training out. What that made is freed after the core took over. Each run is a fork of this
process, which does nothing but import torch, because that takes longer than a training.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cpu_torch.churn import KIB, MIB, Churn
from cpu_torch.harness import DEFECTS, CpuAllocator
from cpu_torch.models import Trained, train
from vramx import _core

CAPACITY_BYTES = 256 * MIB
GRANULARITY_BYTES = 64 * KIB
DEFECT_PERIOD = 97  # of the blocks that a defect may hit


def arrays(name: str, trained: Trained) -> dict[str, Any]:
    tensors = {f"{name}/{i}": tensor.numpy() for i, tensor in enumerate(trained.tensors)}
    return {f"{name}/losses": np.array(trained.losses), **tensors}


def train_disturbed(
    model: str, steps: int, devices: _core.Devices
) -> tuple[Trained, dict[str, Any]]:
    ooms = 0

    def between(step: int) -> None:
        nonlocal ooms
        churn.between_steps(step)
        if step == steps // 2:
            ooms = out_of_memory()

    with Churn(devices) as churn:
        trained = train(model, steps, between)
    return trained, {"disturbances": churn.calls, "ooms": ooms, "broken": churn.broken}


def out_of_memory() -> int:
    """Ask for more than the device has; say how often that was torch's own error."""
    try:
        torch.empty(2 * CAPACITY_BYTES, dtype=torch.uint8)
    except torch.OutOfMemoryError:
        return 1
    return 0


def train_both(model: str, mode: str, steps: int, folder: Path) -> None:
    has_defect = mode in DEFECTS
    plain = Trained([], []) if has_defect else train(model, steps)
    devices = _core.open_simulated(1, CAPACITY_BYTES, GRANULARITY_BYTES)
    allocator = CpuAllocator(devices.handle_address)
    report: dict[str, Any] = {}
    if has_defect:
        allocator.plant(mode, DEFECT_PERIOD)
        trained = train(model, steps)
    else:
        trained, report = train_disturbed(model, steps, devices)
    np.savez(folder / f"{model}-{mode}.npz", **arrays("plain", plain), **arrays("core", trained))
    del plain, trained
    gc.collect()
    allocator.leave()
    report |= {"counts": allocator.counts(), "stats": devices.stats(0)}
    devices.trim(0)
    report |= {"check": devices.check(0), "held_bytes": devices.held(0)}
    (folder / f"{model}-{mode}.json").write_text(json.dumps(report))


def fork_and_train(run: str, steps: int, folder: Path) -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        model, mode = run.split("-")
        train_both(model, mode, steps, folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)  # a run that failed left no report


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")
    # Fresh memory stays as the allocator left it.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.optim.AdamW([torch.zeros(1)])  # imports what every run would
    for run in sys.argv[3:]:
        fork_and_train(run, int(sys.argv[2]), Path(sys.argv[1]))
