"""Breaks the CUDA context on purpose, then goes on freeing and asking, and ends.

device_assert.py native|vramx
"""

import gc
import json
import sys

import torch

if sys.argv[1] == "vramx":
    import vramx

    vramx.install_allocator()

kept = [torch.ones(1 << 20, device="cuda") for _ in range(4)]
side = torch.cuda.Stream()
facts = {}
try:
    kept[0][torch.tensor([1 << 21], device="cuda")].sum().item()
    facts["first"] = "none"
except RuntimeError as error:
    facts["first"] = "device-side assert" in str(error)
kept[1].record_stream(side)
del kept
gc.collect()
try:
    torch.empty(1 << 28, device="cuda").fill_(1).sum().item()
    facts["second"] = "none"
except RuntimeError as error:
    facts["second"] = "CUDA" in str(error)
print(json.dumps(facts), flush=True)
