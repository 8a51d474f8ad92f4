"""What is measured around a test with a mark: its own peak, and what is left of it.

The peak is counted from the call of the test's function, because what fixtures of a wider scope
hold would be the first test's alone. What is left is looked for after teardown, because fixtures
hold memory until then: blocks that are alive and were not when the function was called. That is
reported as an error of the teardown. cuBLAS keeps workspaces, which are given back before each
look. A test that failed is not looked at: its traceback holds its tensors. Waits for no GPU.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from collections.abc import Generator
from typing import Any

import pytest

from vramx.sizes import format_size
from vramx.testing.plugin import LEAK, LIMIT, size_of

Blocks = dict[tuple[int, int, int], dict[str, Any]]  # by device, address and size
Step = Generator[None, Any, Any]  # around what pytest does
_MOST_STACKS = 5
# torch's allocators that have peaks, and blocks.
_TELLING = {LIMIT: ("native", "vramx", "cudaMallocAsync"), LEAK: ("native", "vramx")}
_BEFORE = pytest.StashKey[Blocks]()


class MemoryHooks:
    """The hooks; registered as a plugin of their own."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test whose marks cannot be checked here."""
        names = [name for name in (LIMIT, LEAK) if item.get_closest_marker(name) is not None]
        if names and (reason := _missing(names)):
            pytest.skip(f"{' and '.join(names)} cannot be checked: {reason}")

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Step:
        """Measure the call."""
        limit = size_of(item, LIMIT)
        if size_of(item, LEAK) is not None:
            item.stash[_BEFORE] = _live_blocks()
        try:
            result = yield from _within(limit) if limit is not None else _plainly()
        except BaseException:
            if _BEFORE in item.stash:
                del item.stash[_BEFORE]
            raise
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Step:
        """Look for what is left."""
        result = yield
        if _BEFORE in item.stash:
            before = item.stash[_BEFORE]
            del item.stash[_BEFORE]
            # pytest lets go of what fixtures returned only after this.
            getattr(item, "funcargs", {}).clear()
            _check_left(before, size_of(item, LEAK) or 0)
        return result


def _missing(names: list[str]) -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "there is no CUDA device"
    backend = torch.cuda.get_allocator_backend()
    tells = all(backend in _TELLING[name] for name in names)
    return "" if tells else f"torch's allocator is {backend!r}, which does not tell"


def _plainly() -> Step:
    return (yield)


def _within(limit_bytes: int) -> Step:
    """Run what is waited for, and fail where it allocates more on a device."""
    import torch

    from vramx.memory.track import track

    with contextlib.ExitStack() as stack:
        regions = [
            stack.enter_context(track(f"cuda:{device}", device=device))
            for device in range(torch.cuda.device_count())
        ]
        result = yield
    for region in regions:
        own_bytes = region.peak_bytes - region.start_bytes
        if own_bytes > limit_bytes:
            pytest.fail(
                f"the test allocated {format_size(own_bytes)} on {region.tag} at its peak, more "
                f"than the {format_size(limit_bytes)} of {LIMIT}",
                pytrace=False,
            )
    return result


def _live_blocks() -> Blocks:
    """Return every block that is in use, without what a library keeps for itself."""
    import torch

    gc.collect()
    if not torch.cuda.is_initialized():
        return {}
    with contextlib.suppress(AttributeError):  # a torch that has no such function
        torch._C._cuda_clearCublasWorkspaces()
    return {
        (segment["device"], block["address"], block["size"]): block
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def _check_left(before: Blocks, allowed_bytes: int) -> None:
    left = [block for key, block in _live_blocks().items() if key not in before]
    left_bytes = sum(map(_requested, left))
    if left_bytes <= allowed_bytes:
        return
    allowed = f", more than the {format_size(allowed_bytes)} allowed" if allowed_bytes else ""
    lines = [f"{format_size(left_bytes)} in {len(left):,} tensors are left of the test{allowed}"]
    by_stack: dict[str, list[int]] = {}
    for block in left:
        by_stack.setdefault(_place(block), []).append(_requested(block))
    largest = sorted(by_stack.items(), key=lambda each: -sum(each[1]))
    lines += [
        f"  {format_size(sum(sizes))} in {len(sizes):,} at {place}"
        for place, sizes in largest[:_MOST_STACKS]
        if place
    ]
    if "" in by_stack:
        lines.append(
            "  where they were allocated is known with torch.cuda.memory._record_memory_history()"
        )
    pytest.fail("\n".join(lines), pytrace=False)


def _requested(block: dict[str, Any]) -> int:
    return int(block.get("requested_size") or block["size"])


def _place(block: dict[str, Any]) -> str:
    """Return the lines that allocated a block; empty where no history has them."""
    from vramx.memory.stacks import Frame, describe

    frames = block.get("frames") or ()
    if not frames:
        return ""
    return describe(tuple(Frame(each["name"], each["filename"], each["line"]) for each in frames))
