"""Several GPUs: DDP has everything on each, FSDP2 a share of it.

    python several_gpus.py [--variant NAME] [--small]

Starts a process for each GPU, or two on a CPU. Under torchrun the lines are the same, with
init_process_group() alone.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from common import Figures, Place, UnavailableError, adamw, batch_of, language_model, main, measure
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import vramx

Wrap = Callable[[Any], Any]


def ddp(place: Place) -> Figures:
    return on_each(place, "wrap_ddp")


def ddp_bucket_view(place: Place) -> Figures:
    return on_each(place, "wrap_ddp_bucket_view")


def fsdp2(place: Place) -> Figures:
    return on_each(place, "wrap_fsdp2")


def fsdp2_int8(place: Place) -> Figures:
    return on_each(place, "wrap_fsdp2_int8")


def all_reduce(place: Place) -> Figures:
    """How fast the GPUs add up a gradient: it says whether NVLink is used."""
    return on_each(place, "add_up")


def wrap_ddp(model: Any) -> Any:
    return DistributedDataParallel(model)


def wrap_ddp_bucket_view(model: Any) -> Any:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def wrap_fsdp2(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.model.layers:
        fully_shard(block)  # its weights are gathered for its forward and backward alone
    return fully_shard(model)


def wrap_fsdp2_int8(model: Any) -> Any:
    return wrap_fsdp2(vramx.compressed_activations(model))


def trained(place: Place, wrap: Wrap) -> Figures:
    model = wrap(language_model(place))
    optimizer = adamw(model)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def step(index: int) -> Tensor:
        rows, length = place.sized((8, 1024), (4, 32))
        batch = batch_of(place, rows, length, index * ranks + rank)
        with place.autocast():
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        return mean

    return measure(place, step)


def add_up(place: Place) -> Figures:
    gradient = torch.ones(place.sized(1 << 28, 1 << 12), device=place.device)

    def step(_index: int) -> float:
        dist.all_reduce(gradient)
        gradient.fill_(1.0)
        return 0.0

    figures = measure(place, step)
    ranks = dist.get_world_size()
    moved = 2 * (ranks - 1) / ranks * gradient.nbytes  # by each GPU, as a ring does it
    return figures | {"bytes_per_s": moved / (min(figures["step_ms"]) / 1000)}


# --- the processes --------------------------------------------------------------------------------


def on_each(place: Place, what: str) -> Figures:
    """Run a function of this file in a process for each GPU; return rank 0's figures.

    Its peaks are the largest of all ranks.
    """
    count = torch.cuda.device_count() if place.is_gpu else 2
    if count < 2:
        raise UnavailableError("several GPUs are needed, and there is one")
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(one_of, args=(what, folder, count, place.small), nprocs=count)
        each = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]
    largest = {name: max(one[name] for one in each) for name in each[0] if name.startswith("peak")}
    return each[0] | largest | {"ranks": count}


def one_of(rank: int, what: str, folder: str, count: int, small: bool) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend, device = "nccl", torch.device("cuda", rank)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend, device = "gloo", torch.device("cpu")
    where = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=count)
    place = Place(device, small)
    figures = add_up(place) if what == "add_up" else trained(place, globals()[what])
    write(Path(folder, f"{rank}.json"), figures)
    leave(folder, count)


def write(path: Path, figures: Figures) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(figures))
    part.rename(path)


def leave(folder: str, count: int) -> None:
    """End when all have ended their work, without destructors: torch's may wait for each other."""
    deadline_s = time.monotonic() + 30
    while len(list(Path(folder).glob("*.json"))) < count and time.monotonic() < deadline_s:
        time.sleep(0.01)
    os._exit(0)


VARIANTS = {
    "ddp": ddp,
    "ddp_bucket_view": ddp_bucket_view,
    "fsdp2": fsdp2,
    "fsdp2_int8": fsdp2_int8,
    "all_reduce": all_reduce,
}

if __name__ == "__main__":
    main(VARIANTS, __doc__)
