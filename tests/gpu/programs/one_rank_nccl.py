"""NCCL with one rank, which asks to be told of all memory. vramx switches that off, with a warning.

one_rank_nccl.py native|vramx      with TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as distributed

if sys.argv[1] == "vramx":
    import vramx

    vramx.install_allocator()

with tempfile.TemporaryDirectory() as folder:
    distributed.init_process_group(
        "nccl",
        init_method=f"file://{Path(folder) / 'store'}",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    totals = []
    for step in range(5):
        tensor = torch.full((1 << 20,), float(step), device="cuda")
        distributed.all_reduce(tensor)
        totals.append(tensor.sum().item() / (1 << 20))
        del tensor
        torch.cuda.empty_cache()
    distributed.destroy_process_group()
print(json.dumps({"totals": totals}))
