"""A CUDA graph capture fails, and the program goes on in eager mode (pytorch#180395, #190308).

kind_failed_capture.py native|vramx CASE

Inside a capture the program waits for its stream, as reading a value on the host does, which spoils
the capture; it catches the error, as those do that fall back to eager execution. Cached memory is
then still to serve larger requests under a limit, and empty_cache() is to give it back.
"""

import threading

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


if __name__ == "__main__":
    cases = (once, several_then_one_that_works, in_another_thread, dropped)
    kind_tools.run({case.__name__: case for case in cases})
