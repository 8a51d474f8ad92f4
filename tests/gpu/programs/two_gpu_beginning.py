"""Says what a program that begins finds: the current device, and which have a context.

two_gpu_beginning.py [late]
"""

import json
import sys

import torch

if "late" in sys.argv:
    import vramx

    torch.cuda.init()
    vramx.install_allocator(limit=0.5, late=True)

first = torch.ones(8, device="cuda")
facts = {
    "backend": torch.cuda.get_allocator_backend(),
    "device": first.device.index,
    "current": torch.cuda.current_device(),
    "second_has_context": torch._C._cuda_hasPrimaryContext(1),
}
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    first + first  # torch's own allocator, under the limit of both
facts["after_a_graph"] = torch.cuda.current_device()
print(json.dumps(facts))
