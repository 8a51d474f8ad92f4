"""Uses CUDA first and installs vramx afterwards: refused, until it is said that this is meant."""

import json

import torch

import vramx

facts = {}
old = torch.full((1 << 20,), 3.0, device="cuda")  # the line that initialises CUDA
try:
    vramx.install_allocator()
except vramx.VramxError as error:
    facts["refusal"] = str(error)
facts["installed_after_refusal"] = vramx.allocator_installed()
facts["backend_after_refusal"] = torch.cuda.get_allocator_backend()

old_bytes = torch.cuda.memory_allocated()
vramx.install_allocator(late=True)
facts["backend"] = torch.cuda.get_allocator_backend()
facts["old_is_counted"] = torch.cuda.memory_allocated() == old_bytes
new = torch.full((1 << 20,), 4.0, device="cuda")
facts["both_are_counted"] = torch.cuda.memory_allocated() == old_bytes + (4 << 20)
facts["new_is_the_cores"] = vramx.allocator_stats().allocated_bytes == 4 << 20
facts["sum"] = (old + new).sum().item()

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    doubled = old * 2
old.record_stream(side)
del old
torch.cuda.synchronize()
facts["doubled"] = doubled.sum().item()
del doubled, new
torch.cuda.empty_cache()
facts["allocated_at_the_end"] = torch.cuda.memory_allocated()
facts["accelerator_agrees"] = torch.accelerator.memory_allocated() == 0

weights = torch.randn(64, 64, device="cuda", requires_grad=True)
(weights @ weights).sum().backward()
facts["gradient_is_finite"] = bool(weights.grad.isfinite().all())
print(json.dumps(facts))
