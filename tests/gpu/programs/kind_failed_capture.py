"""A CUDA graph capture fails, and the program goes on in eager mode (pytorch#180395, #190308).

kind_failed_capture.py native|vramx CASE

Inside a capture the program waits for its stream, as reading a value on the host does, which spoils
the capture; it catches the error, as those do that fall back to eager execution. Cached memory is
then still to serve larger requests under a limit, and empty_cache() is to give it back.
"""

import contextlib
import gc
import threading
from collections.abc import Callable

import kind_tools
import torch
from kind_tools import MIB, Finding, block, holds, settle

KEPT_MIB = 64  # of 2560 that were cached
EXPECTED = 1023 * 1024  # twice the sum of the numbers below 1024


def fail_a_capture(x: torch.Tensor, mode: str = "global") -> torch.cuda.CUDAGraph:
    """Return the graph that came to nothing: what the allocator was told of it refers to it."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (x * 2).sum().item()
    torch.cuda.current_stream().wait_stream(side)
    try:
        with torch.cuda.graph(graph, stream=side, capture_error_mode=mode):
            (x * 2).sum()
            side.synchronize()
    except RuntimeError:
        pass
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())
    try:
        graph.pool()
    except RuntimeError:
        return graph  # it never came to its end
    raise AssertionError("the capture did not fail")


def goes_on(x: torch.Tensor) -> Finding:
    """Work in eager mode, use the cache under a limit, and give it back."""
    torch.cuda.synchronize()
    right = (x * 2).sum().item() == EXPECTED
    served = serves_from_cache()
    settle()
    kept = (torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / MIB
    told = (
        f"eager result {'right' if right else 'WRONG'}; 2.75 GiB out of 2.5 GiB of cache under a "
        f"limit of 3 GiB: {'served' if served else 'OUT OF MEMORY'}; empty_cache leaves {kept:.0f} "
        f"MiB unused (at most {KEPT_MIB})"
    )
    return right and served and kept <= KEPT_MIB, told


def serves_from_cache() -> bool:
    total = torch.cuda.mem_get_info()[1]
    limit = torch.cuda.memory_reserved() + 3072 * MIB
    torch.cuda.set_per_process_memory_fraction(limit / total)
    parts = [block(512 * MIB) for _ in range(5)]
    del parts
    try:
        return holds(block(2816 * MIB, 7)[:: 1 << 12], 7)
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def numbers() -> torch.Tensor:
    return torch.arange(1024, device="cuda", dtype=torch.float32)


def once() -> Finding:
    x = numbers()
    graph = fail_a_capture(x)
    good, told = goes_on(x)
    del graph
    return good, told


def several_then_one_that_works() -> Finding:
    """A program tries each of its shapes; the last one can be captured."""
    x = numbers()
    failed = [fail_a_capture(x) for _ in range(4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = (x * 2).sum()
    graph.replay()
    replayed = total.item() == EXPECTED
    good, told = goes_on(x)
    graph.replay()
    replayed &= total.item() == EXPECTED
    del failed
    return good and replayed, f"replay {'right' if replayed else 'WRONG'}; {told}"


def in_another_thread() -> Finding:
    """A worker's capture fails; the main thread never captured anything."""
    x, failed = numbers(), []
    torch.cuda.synchronize()
    worker = threading.Thread(target=lambda: failed.append(fail_a_capture(x, "thread_local")))
    worker.start()
    worker.join(60)
    good, told = goes_on(x)
    return good and len(failed) == 1, told


def dropped() -> Finding:
    """Of the graph that came to nothing, nothing is kept either."""
    x = numbers()
    fail_a_capture(x)
    return goes_on(x)


# --- captures that torch makes, or that the program itself gives up -------------------------------

kept_graph = torch.cuda.CUDAGraph()  # what the allocator was told of it may refer to it


def captured(
    work: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, graph: torch.cuda.CUDAGraph
) -> torch.Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side):
        return work(x)


def wait_if_captured() -> None:
    """Do what a capture does not survive, where there is one."""
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()


def goes_on_after(fails: Callable[[torch.Tensor], object]) -> Finding:
    """Let something that captures fail, go on, and capture something that works."""
    x = numbers()
    try:
        fails(x)
    except RuntimeError:
        pass
    else:
        return False, "the capture did not fail"
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())
    gc.collect()
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    good, told = goes_on(x)
    graph = torch.cuda.CUDAGraph()
    output = captured(lambda x: x * 3, x, graph)
    graph.replay()
    replayed = bool((output == x * 3).all())
    return good and replayed, f"next capture {'right' if replayed else 'WRONG'}; {told}"


def refused() -> Finding:
    """The program raises in a capture that is left without a fault of its own."""

    def work(x: torch.Tensor) -> torch.Tensor:
        _ = x * 2
        raise RuntimeError("the program's own")

    return goes_on_after(lambda x: captured(work, x, torch.cuda.CUDAGraph()))


def in_a_pool() -> Finding:
    def work(x: torch.Tensor) -> torch.Tensor:
        outer, inner = torch.cuda.MemPool(), torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(outer), torch.cuda.use_mem_pool(inner):
            doubled = x * 2
            wait_if_captured()
        return doubled

    return goes_on_after(lambda x: captured(work, x, kept_graph))


def in_a_graphed_callable() -> Finding:
    class Waiting(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wait_if_captured()
            return x * 2

    return goes_on_after(
        lambda x: torch.cuda.make_graphed_callables(Waiting(), (x.clone().requires_grad_(),))
    )


@torch.library.custom_op("vramx_tests::doubled_and_waited", mutates_args=())
def doubled_and_waited(x: torch.Tensor) -> torch.Tensor:
    wait_if_captured()
    return x * 2


@doubled_and_waited.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def in_a_compiled_function() -> Finding:
    def work(x: torch.Tensor) -> None:
        compiled = torch.compile(lambda x: doubled_and_waited(x + 1) + 1, mode="reduce-overhead")
        with torch.no_grad():
            for _ in range(4):  # the first calls only warm up
                torch.compiler.cudagraph_mark_step_begin()
                compiled(x)

    return goes_on_after(work)


if __name__ == "__main__":
    by_hand = (once, several_then_one_that_works, in_another_thread, dropped)
    others = (refused, in_a_pool, in_a_graphed_callable, in_a_compiled_function)
    kind_tools.run({case.__name__: case for case in (*by_hand, *others)})
