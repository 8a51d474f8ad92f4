"""Forks in two ways, then ends with tensors alive wherever a program may leave them.

live_at_exit.py native|vramx
"""

import builtins
import gc
import json
import os
import sys
import threading

import torch

if sys.argv[1] == "vramx":
    import vramx

    vramx.install_allocator()


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1000,), index, dtype=torch.float32)


def load() -> float:
    """Feed the GPU from forked workers, while memory of the GPU is held that they inherit."""
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=8, num_workers=2, pin_memory=True, multiprocessing_context="fork"
    )
    total = torch.zeros((), device="cuda")
    for batch in loader:
        total += batch.to("cuda", non_blocking=True).sum()
    return total.item()


def fork_and_free() -> int:
    """Return how a forked child ends that frees what it inherited."""
    tensors = [torch.ones(1 << 20, device="cuda") for _ in range(4)]
    child = os.fork()
    if child == 0:
        del tensors
        gc.collect()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    # Still the parent's, whatever the child did.
    assert all(tensor.sum().item() == 1 << 20 for tensor in tensors)
    return os.waitstatus_to_exitcode(status)


class Cycle:
    """Freed by the garbage collector alone, at the very end."""

    def __init__(self) -> None:
        self.itself = self
        self.tensor = torch.ones(1 << 20, device="cuda")

    def __del__(self) -> None:
        self.tensor = None


def hold_forever(tensor: torch.Tensor) -> None:
    threading.Event().wait()
    del tensor


facts = {"loaded": load(), "childs_exit_code": fork_and_free(), "loaded_again": load()}

builtins.left_over = torch.ones(1 << 20, device="cuda")
in_globals = [torch.ones(1 << 20, device="cuda") for _ in range(10)]
with_a_graph = (torch.ones(1 << 20, device="cuda", requires_grad=True) * 2).sum()
Cycle()
threading.Thread(target=hold_forever, args=(in_globals[0] * 2,), daemon=True).start()
torch.cuda.synchronize()
print(json.dumps(facts), flush=True)
