"""Offloading to host memory: activations, and the optimizer's states.

python offload.py [--variant NAME] [--small]
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from common import (
    Figures,
    Place,
    UnavailableError,
    adamw,
    batches,
    language_model,
    main,
    measure,
    train,
)
from torch import Tensor

import vramx


def nothing(place: Place) -> Figures:
    model = language_model(place)
    return train(place, model, adamw(model))


def save_on_cpu(place: Place) -> Figures:
    model = language_model(place)
    optimizer = adamw(model)
    data = batches(place)

    def step(_index: int) -> Tensor:
        batch = next(data)
        with torch.autograd.graph.save_on_cpu(pin_memory=place.is_gpu), place.autocast():
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return measure(place, step)


def int8_on_the_host(place: Place) -> Figures:
    model = vramx.compressed_activations(language_model(place), offload="cpu")
    return train(place, model, adamw(model))


def states_fsdp2(place: Place) -> Figures:
    """FSDP2 with its weights, gradients and states on the host, on one GPU."""
    place.needs_gpu("CPUOffloadPolicy")
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    with one_process():
        model = language_model(place)
        policy = CPUOffloadPolicy()
        for block in model.model.layers:
            fully_shard(block, offload_policy=policy)
        fully_shard(model, offload_policy=policy)
        return train(place, model, adamw(model))


def states_torchao(place: Place) -> Figures:
    place.needs_gpu("CPUOffloadOptimizer")
    from torchao.optim import CPUOffloadOptimizer

    model = language_model(place)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return train(place, model, optimizer)


def states_vramx(place: Place) -> Figures:
    model = language_model(place)
    optimizer = vramx.offload_optimizer(adamw(model))
    return train(place, model, optimizer)


def states_vramx_in_backward(place: Place) -> Figures:
    """The step of each parameter is taken as soon as its gradient is there."""
    model = language_model(place)
    optimizer = vramx.offload_optimizer(adamw(model), in_backward=True)
    return train(place, model, optimizer)


@contextmanager
def one_process() -> Iterator[None]:
    """A group of torch.distributed with this process alone."""
    if not dist.is_available():
        raise UnavailableError("this torch has no torch.distributed")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{os.path.join(folder, 'rendezvous')}"
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=where, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


VARIANTS = {
    "nothing": nothing,
    "save_on_cpu": save_on_cpu,
    "int8_on_the_host": int8_on_the_host,
    "states_fsdp2": states_fsdp2,
    "states_torchao": states_torchao,
    "states_vramx": states_vramx,
    "states_vramx_in_backward": states_vramx_in_backward,
}

if __name__ == "__main__":
    main(VARIANTS, __doc__)
