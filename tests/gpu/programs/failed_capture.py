"""Lets a graph capture fail in one of the ways of KINDS, goes on in eager mode, and tells how.

failed_capture.py native|vramx KIND

Nothing here draws random numbers on the default generator, which torch leaves in a capture.
"""

import contextlib
import gc
import json
import sys

import torch

if sys.argv[1] == "vramx":
    import vramx

    vramx.install_allocator()

MIB = 1 << 20
COUNT = 1024


def block(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def wait_if_captured() -> None:
    """Do what a capture does not survive, where there is one."""
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()


def captured(work, x: torch.Tensor, graph: torch.cuda.CUDAGraph) -> torch.Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side):
        return work(x)


def wait(x: torch.Tensor) -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        wait_if_captured()
        return doubled

    captured(work, x, kept_graph)


def refuse(x: torch.Tensor) -> None:
    """Raise in a capture that is left without a fault of its own."""

    def work(x: torch.Tensor) -> torch.Tensor:
        _ = x * 2
        raise RuntimeError("the program's own")

    captured(work, x, torch.cuda.CUDAGraph())


def wait_in_a_pool(x: torch.Tensor) -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        outer, inner = torch.cuda.MemPool(), torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(outer), torch.cuda.use_mem_pool(inner):
            doubled = x * 2
            wait_if_captured()
        return doubled

    captured(work, x, kept_graph)


def wait_in_a_graphed_callable(x: torch.Tensor) -> None:
    class Waiting(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wait_if_captured()
            return x * 2

    torch.cuda.make_graphed_callables(Waiting(), (x.clone().requires_grad_(),))


@torch.library.custom_op("vramx_tests::doubled_and_waited", mutates_args=())
def doubled_and_waited(x: torch.Tensor) -> torch.Tensor:
    wait_if_captured()
    return x * 2


@doubled_and_waited.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def wait_in_a_compiled_function(x: torch.Tensor) -> None:
    compiled = torch.compile(lambda x: doubled_and_waited(x + 1) + 1, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):  # the first calls only warm up
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x)


KINDS = {
    "wait": wait,
    "refuse": refuse,
    "pool": wait_in_a_pool,
    "graphed_callable": wait_in_a_graphed_callable,
    "compiled": wait_in_a_compiled_function,
}


def has_failed(kind: str, x: torch.Tensor) -> bool:
    try:
        KINDS[kind](x)
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())
    return False


def is_larger_block_served() -> bool:
    """Say whether cached pieces make room for one block that fits under a limit without them."""
    total = torch.cuda.mem_get_info()[1]
    limit = torch.cuda.memory_reserved() + 1536 * MIB
    torch.cuda.set_per_process_memory_fraction(limit / total)
    parts = [block(256) for _ in range(5)]
    del parts
    try:
        large = block(1408).fill_(7)
        return bool((large[:: 1 << 12] == 7).all())
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def unused_mib_after_empty_cache() -> float:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return (torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / MIB


def is_next_capture_right(x: torch.Tensor) -> bool:
    graph = torch.cuda.CUDAGraph()
    output = captured(lambda x: x * 3, x, graph)
    graph.replay()
    return bool((output == x * 3).all())


kept_graph = torch.cuda.CUDAGraph()  # what the allocator was told of it may refer to it
x = torch.arange(COUNT, device="cuda", dtype=torch.float32)
facts = {"failed": has_failed(sys.argv[2], x)}
gc.collect()
with contextlib.suppress(RuntimeError):
    torch.cuda.synchronize()
facts["eager"] = (x * 2).sum().item() == COUNT * (COUNT - 1)
facts["served"] = is_larger_block_served()
block(512)
facts["unused_mib"] = unused_mib_after_empty_cache()
facts["recaptured"] = is_next_capture_right(x)
print(json.dumps(facts))
