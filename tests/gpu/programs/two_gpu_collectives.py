"""NCCL on memory that is freed, used again and defragmented around the collectives.

    two_gpu_collectives.py native|vramx

Rank 0 prints how many elements were wrong, for each collective.
"""

import json
import sys

import torch
import torch.distributed as distributed
from two_gpu_tools import group

if sys.argv[1] == "vramx":
    import vramx

    vramx.install_allocator()

COUNT = 1 << 22
ROUNDS = 20


def wrong(tensor: torch.Tensor, value: float) -> int:
    return int((tensor != value).sum())


def reduce_in_turn(rank: int) -> int:
    """Blocking collectives on tensors of changing size, each freed at once."""
    errors = 0
    for step in range(ROUNDS):
        tensor = torch.full((COUNT + step * 100_000,), float(rank + step), device="cuda")
        distributed.all_reduce(tensor)
        errors += wrong(tensor, 1 + 2 * step)
    return errors


def reduce_and_drop(rank: int) -> int:
    """Asynchronous collectives whose input is dropped while they run, and overwritten if it may."""
    errors = 0
    for step in range(ROUNDS):
        source = torch.full((COUNT,), float(rank + step), device="cuda")
        gathered = torch.empty(2 * COUNT, device="cuda")
        work = distributed.all_gather_into_tensor(gathered, source, async_op=True)
        del source
        overwriting = [torch.full((COUNT,), -1.0, device="cuda") for _ in range(4)]
        work.wait()
        errors += wrong(gathered[:COUNT], step) + wrong(gathered[COUNT:], 1 + step)
        del overwriting
    return errors


def reduce_while_defragmenting(rank: int) -> int:
    """NCCL may have registered what it saw: its view must stay right after memory has moved on."""
    errors = 0
    kept = [torch.full((COUNT,), float(index), device="cuda") for index in range(16)]
    for step in range(ROUNDS):
        kept[step % 16] = torch.full((COUNT,), float(step), device="cuda")
        tensor = torch.full((3 * COUNT,), float(rank + step), device="cuda")
        distributed.all_reduce(tensor)
        if sys.argv[1] == "vramx":
            vramx.defragment()
        else:
            torch.cuda.empty_cache()
        errors += wrong(tensor, 1 + 2 * step)
    last = {step % 16: step for step in range(ROUNDS)}
    return errors + sum(wrong(tensor, last[index]) for index, tensor in enumerate(kept))


def main(rank: int) -> None:
    steps = (reduce_in_turn, reduce_and_drop, reduce_while_defragmenting)
    errors = torch.tensor([step(rank) for step in steps], device="cuda")
    distributed.all_reduce(errors)
    if rank == 0:
        names = [step.__name__ for step in steps]
        print(json.dumps(dict(zip(names, errors.tolist(), strict=True))), flush=True)


if __name__ == "__main__":
    with group() as rank:
        main(rank)
