"""What else reaches the allocator: empty tensors, storages, raw memory, cuDNN, the profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.cuda._memory_viz import profile_plot

from gpu.tools import KIB, MIB, UNIT, block, holds, settle

pytestmark = pytest.mark.gpu

# --- tensors and their storages -------------------------------------------------------------------


def test_a_tensor_without_elements_has_no_memory_and_grows() -> None:
    before = torch.cuda.memory_allocated()
    empty = torch.empty(0, device="cuda")
    assert empty.data_ptr() == 0
    assert torch.cuda.memory_allocated() == before
    assert torch.cat([empty, torch.ones(3, device="cuda")]).tolist() == [1.0] * 3
    assert (empty + 1).sum().item() == 0
    assert holds(empty.resize_(MIB).fill_(3), 3)


def test_a_storage_gives_its_memory_up_and_takes_it_again() -> None:
    tensor = block(32 * MIB, 3)
    before = torch.cuda.memory_allocated()
    tensor.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == before - 32 * MIB
    tensor.untyped_storage().resize_(32 * MIB)
    assert torch.cuda.memory_allocated() == before
    tensor.fill_(4)
    assert holds(tensor, 4)


def test_a_storage_keeps_its_bytes_when_it_grows() -> None:
    tensor = block(MIB, 3)
    tensor.untyped_storage().resize_(64 * MIB)
    assert holds(tensor, 3)
    assert tensor.untyped_storage().nbytes() == 64 * MIB


def test_a_view_keeps_the_memory_of_the_whole() -> None:
    before = torch.cuda.memory_allocated()
    view = block(32 * MIB, 3)[16 * MIB :: 2]
    assert torch.cuda.memory_allocated() == before + 32 * MIB
    assert holds(view, 3)
    del view
    assert torch.cuda.memory_allocated() == before


def test_addresses_are_aligned_as_kernels_expect() -> None:
    tensors = [block(size) for size in (1, 100, UNIT + 1, 100 * KIB + 1, MIB + 1)]
    assert all(tensor.data_ptr() % UNIT == 0 for tensor in tensors)


# --- memory without a tensor ----------------------------------------------------------------------


class Raw:
    """Memory of caching_allocator_alloc, as torch.as_tensor takes it without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@pytest.mark.parametrize("on_side_stream", [False, True])
def test_raw_memory_is_usable_counted_and_given_back(on_side_stream: bool) -> None:
    stream = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()
    before = torch.cuda.memory_allocated()
    address = torch.cuda.caching_allocator_alloc(32 * MIB, stream=stream)
    assert torch.cuda.memory_allocated() == before + 32 * MIB
    with torch.cuda.stream(stream):
        tensor = torch.as_tensor(Raw(address, 32 * MIB), device="cuda")
        assert tensor.data_ptr() == address
        tensor.fill_(3)
        assert holds(tensor, 3)
    del tensor
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == before


def test_deleting_nothing_is_allowed() -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.caching_allocator_delete(0)
    assert torch.cuda.memory_allocated() == before


def test_caching_may_be_switched_off_for_a_while() -> None:
    if not hasattr(torch.cuda.memory, "caching_allocator_enable"):
        pytest.skip(f"torch {torch.__version__} has no caching_allocator_enable")
    before = block(MIB, 3)
    torch.cuda.memory.caching_allocator_enable(False)
    try:
        uncached, at_once = block(32 * MIB, 4), block(MIB, 5)
        del at_once
    finally:
        torch.cuda.memory.caching_allocator_enable(True)
    after = block(MIB, 6)
    assert [holds(*each) for each in ((before, 3), (uncached, 4), (after, 6))] == [True] * 3
    del uncached
    assert holds(block(32 * MIB, 7), 7)


# --- a whole model's memory at once ---------------------------------------------------------------


@pytest.mark.alone
def test_a_huge_warm_up_is_cheap_and_serves_the_model_afterwards() -> None:
    """transformers asks for a model's size once and frees it, so that loading needs no growth.

    Reading the model from a fast disk takes a second for 10 GB. The warm-up is there to save time,
    so it may take a tenth of that.
    """
    size_bytes = torch.cuda.mem_get_info()[0] // 2 // (128 * MIB) * (128 * MIB)
    torch.cuda.synchronize()
    start = time.perf_counter()
    block(size_bytes)
    elapsed_s = time.perf_counter() - start
    assert elapsed_s < 0.1 * size_bytes / 10e9
    held = torch.cuda.memory_reserved()
    layers = [block(size_bytes // 64) for _ in range(64)]
    assert torch.cuda.memory_reserved() == held
    del layers


# --- cuDNN ----------------------------------------------------------------------------------------


@pytest.fixture
def cudnn_benchmark() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    yield
    torch.backends.cudnn.benchmark = before


def rounded(tensor: Any) -> Any:
    return tensor.detach().double().cpu().round()


@pytest.mark.usefixtures("cudnn_benchmark")
def test_cudnn_benchmark_works_with_changing_shapes() -> None:
    """Every true result is an integer, so that one with an error below a half rounds to it,
    whichever algorithm the benchmark chooses."""
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).double()

    weight = integers(16, 8, 3, 3)
    for side in (16, 33, 64, 16):
        x = integers(2, 8, side, side)
        results = []
        for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
            image = x.detach().to(device, dtype).requires_grad_()
            kernel = weight.detach().to(device, dtype).requires_grad_()
            output = torch.nn.functional.conv2d(image, kernel, padding=1)
            output.sum().backward()
            results.append([rounded(each) for each in (output, image.grad, kernel.grad)])
        assert all(map(torch.equal, *results))


# --- the profiler ---------------------------------------------------------------------------------


def profiled(**options: bool) -> Any:
    """Return a profile of memory on the host, as a context."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, profile_memory=True, **options)


def memory_events(profile: Any) -> list[int]:
    """Return the bytes of each allocation and, negative, of each free on the GPU."""
    return [
        event.nbytes()
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CUDA
    ]


def test_the_profilers_memory_events_add_up() -> None:
    before = torch.cuda.memory_allocated()
    with profiled() as profile:
        kept, dropped = block(32 * MIB), block(64 * MIB)
        del dropped
    assert sorted(memory_events(profile)) == [-64 * MIB, 32 * MIB, 64 * MIB]
    assert sum(memory_events(profile)) == torch.cuda.memory_allocated() - before
    del kept


def test_the_profiler_sees_a_free_before_any_allocation() -> None:
    dropped = block(32 * MIB)
    with profiled() as profile:
        del dropped
    assert memory_events(profile) == [-32 * MIB]


def test_the_profilers_table_shows_memory_by_operator() -> None:
    with profiled() as profile:
        kept = block(32 * MIB)
    by_name = {each.key: each.self_device_memory_usage for each in profile.key_averages()}
    assert by_name["aten::empty"] == 32 * MIB
    del kept


def test_torchs_memory_viz_plots_a_profile() -> None:
    with profiled(record_shapes=True, with_stack=True) as profile:
        kept = block(32 * MIB, 3) + 1
    assert '"base64"' in profile_plot(profile)
    del kept


# --- everything given back ------------------------------------------------------------------------


def test_a_training_loop_gives_everything_back() -> None:
    def used() -> int:
        settle()
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    before = used()
    network = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU()),
        *(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(512, 10)),
    ).cuda()
    optimizer = torch.optim.AdamW(network.parameters())
    for batch in (8, 64, 24, 64):
        images = torch.randn(batch, 3, 64, 64, device="cuda")
        network(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    del network, optimizer, images
    assert used() == before
