"""Watches memory as torch's CUDA sanitizer does, through the callbacks of its GPU trace.

gpu_trace.py native|vramx
"""

import json
import sys

import torch
from torch.cuda import _gpu_trace

if sys.argv[1] == "vramx":
    import vramx

    vramx.install_allocator()

allocated, freed = [], []
_gpu_trace.register_callback_for_memory_allocation(allocated.append)
_gpu_trace.register_callback_for_memory_deallocation(freed.append)
torch._C._activate_gpu_trace()

tensor = torch.ones(1 << 20, device="cuda")
address = tensor.data_ptr()
del tensor
facts = {"allocated": allocated.count(address), "freed": freed.count(address)}
print(json.dumps(facts))
